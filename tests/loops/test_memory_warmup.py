"""The memory warm-up runs the longest rows first and changes no state."""

import numpy as np
import pytest
import torch

from oxrl.algorithms import ALGORITHMS, algorithm
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.buffer import DataBuffer
from oxrl.data.render import Renderer
from oxrl.loops.memory_warmup import advice_on_memory, longest_answers, ran_out_of_memory, warm_up_memory
from oxrl.loops.offline import OfflineConfig, run_offline
from oxrl.models.load import load_model, load_tokenizer
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.types import Message, Row, Sample

pytestmark = pytest.mark.anyio
SFT = algorithm("sft")


@pytest.fixture
def anyio_backend():
    return "asyncio"


def random_rows(lengths):
    rng = np.random.default_rng(1)
    rows = [Row(f"row {i}", rng.integers(0, 256, n), np.arange(n) > n // 2) for i, n in enumerate(lengths)]
    return [(row,) for row in rows]


def adapted_backend():
    model = attach_lora(load_model("tiny"), LoraSettings(r=4, dropout=0.5))  # dropout draws random numbers
    return create_pytorch_backend(model, lr=1e-3, others={"ref": load_model("tiny")})


async def trained(first):
    torch.manual_seed(3)
    backend, items = adapted_backend(), random_rows([20, 9, 31, 14, 8, 25])
    if first:
        assert await warm_up_memory(backend, SFT, items, 50)
    await run_offline(backend, SFT, DataBuffer(items), OfflineConfig(3, 2), log=lambda *_: None)
    return torch.cat([weight.detach().flatten() for weight in backend.model.parameters()])


async def test_a_run_after_a_warm_up_is_bit_identical():
    assert torch.equal(await trained(first=True), await trained(first=False))


async def test_it_leaves_weights_gradients_optimizer_and_random_state_unchanged():
    backend = adapted_backend()
    before = {name: weight.clone() for name, weight in backend.model.named_parameters()}
    states = torch.random.get_rng_state()
    await warm_up_memory(backend, SFT, random_rows([30, 12]), 64)
    assert torch.equal(torch.random.get_rng_state(), states)
    assert backend.version == 0
    assert not backend.optimizer.state
    assert all(weight.grad is None for weight in backend.model.parameters())
    assert all(torch.equal(weight, before[name]) for name, weight in backend.model.named_parameters())


@pytest.mark.parametrize(("budget", "expected"), [(50, [40]), (75, [40, 30]), (10, [40]), (1000, [40, 30, 20, 10])])
async def test_it_runs_the_longest_rows_that_fit_into_a_micro_batch(budget, expected):
    part = await warm_up_memory(adapted_backend(), SFT, random_rows([10, 40, 20, 30]), budget)
    assert sorted((len(row) for item in part for row in item), reverse=True) == expected


async def test_inside_gradients_and_optimizer_state_are_as_large_as_in_later_steps():
    backend = create_pytorch_backend(load_model("tiny"))
    with backend.memory_warm_up():
        assert all(weight.grad is not None for weight in backend.model.parameters())
    assert all(weight.grad is None for weight in backend.model.parameters())


@pytest.mark.parametrize("name", [name for name in ALGORITHMS if algorithm(name).online is not None])
async def test_artificial_answers_are_built_for_every_online_algorithm(name):
    chosen = algorithm(name)
    backend = create_pytorch_backend(
        load_model("tiny"), others={role: load_model("tiny") for role in chosen.others}, heads=chosen.heads
    )
    samples = [Sample(f"s{n}", (Message("user", "x" * n),), answer="yes") for n in (3, 40, 12)]
    render = Renderer(load_tokenizer("tiny"))
    items = longest_answers(samples, render, chosen, prompts=2, answers=4, max_tokens=24, vocabulary=256, enough=10_000)
    part = await warm_up_memory(backend, chosen, items, 100)
    prompt = len(render.prompt(samples[1].messages))
    assert max(len(row) for item in part for row in item) == prompt + 24


def test_as_many_answers_are_built_as_a_micro_batch_holds_or_a_step_has():
    samples = [Sample(f"s{n}", (Message("user", "x" * n),)) for n in (3, 40, 12)]
    render, chosen = Renderer(load_tokenizer("tiny")), algorithm("grpo")

    def groups(**sizes):
        return longest_answers(samples, render, chosen, answers=2, max_tokens=24, vocabulary=256, **sizes)

    longest = [max(map(len, item)) - 24 for item in groups(prompts=2, enough=10_000)]
    lengths = sorted((len(render.prompt(sample.messages)) for sample in samples), reverse=True)
    assert longest == lengths[:2]
    assert len(groups(prompts=2, enough=10)) == 1
    assert len(groups(prompts=5, enough=10_000)) == 5, "rows repeat where a step has more than there are"


async def test_items_without_a_training_signal_are_no_failure():
    pairs = algorithm("online_dpo")
    flat = [tuple(Row(f"{i}", np.arange(9), np.arange(9) > 4, scalars={"reward": 1.0}) for i in range(3))]
    backend = create_pytorch_backend(load_model("tiny"), others={"ref": load_model("tiny")})
    assert await warm_up_memory(backend, pairs, flat, 100) == []


def test_an_out_of_memory_error_contains_advice():
    with pytest.raises(RuntimeError, match="memory ran out: lower it"), advice_on_memory("lower it"):
        torch.empty(2**62, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="lower it"), advice_on_memory("lower it"):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert not ran_out_of_memory(RuntimeError("shapes differ"))
    with pytest.raises(RuntimeError, match="shapes differ"), advice_on_memory("lower it"):
        raise RuntimeError("shapes differ")
