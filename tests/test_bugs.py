"""Known bugs of comparable implementations, one test each."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from oxrl.algorithms import algorithm
from oxrl.backends.local import create_pytorch_backend
from oxrl.config import Config, check_config
from oxrl.data.buffer import DataBuffer
from oxrl.data.fit import fit
from oxrl.data.pack import collate, count_units
from oxrl.data.render import Renderer
from oxrl.loops.evaluate import evaluate_offline
from oxrl.loops.offline import OfflineConfig, run_offline
from oxrl.models.load import load_model, load_tokenizer
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.tensors import Head, logprob, project
from oxrl.types import Message, Row

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[1]
SFT = algorithm("sft")


@pytest.fixture
def anyio_backend():
    return "asyncio"


def items_of(*lengths):
    random = np.random.default_rng(0)
    return [(Row(f"row{i}", random.integers(0, 256, n), np.arange(n) >= n - 3),) for i, n in enumerate(lengths)]


def test_log_probs_are_not_taken_in_bf16():
    torch.manual_seed(0)
    hidden, weight = torch.randn(64, 32).bfloat16(), (3 * torch.randn(50, 32)).bfloat16()
    targets = torch.randint(0, 50, (64,))
    (values,) = project(hidden, Head(weight), targets, [logprob])
    exact = (hidden.double() @ weight.double().T).log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (values - exact).abs().max() < 1e-3
    rounded = (hidden @ weight.T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    assert (rounded - exact).abs().max() > 1e-2, "the naive way would pass too, so this test proves nothing"


async def test_a_loss_is_divided_by_trained_tokens_and_never_by_padding_or_prompts():
    """A long row beside a short one, or a longer prompt, must not dilute the others' gradient."""
    backend = create_pytorch_backend(load_model("tiny"))
    alone = [await backend.forward_backward([collate([item])], SFT, count_units([item])) for item in items_of(5, 60)]
    together = await backend.forward_backward([collate(items_of(5, 60))], SFT, count_units(items_of(5, 60)))
    assert together["loss"] == pytest.approx((alone[0]["loss"] + alone[1]["loss"]) / 2, rel=1e-5)


async def test_lora_dropout_is_off_while_log_probs_are_compared():
    model = attach_lora(load_model("tiny"), LoraSettings(dropout=0.5))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_()
    backend = create_pytorch_backend(model)
    items = items_of(12, 20)
    (sampled,) = await backend.logprobs([collate(items)])
    counts = count_units(items)
    without = -float(sampled.logprob.sum()) / counts["token"]
    supervised = await backend.forward_backward([collate(items)], SFT, counts)
    assert supervised["loss"] != pytest.approx(without, rel=1e-3), "supervised training does use dropout"
    compared = await backend.forward_backward([collate(items)], replace(SFT, needs=("ref",)), counts)
    assert compared["loss"] == pytest.approx(without, rel=1e-5)


def test_truncation_counts_a_removed_end_of_turn_and_keeps_no_row_without_trained_tokens():
    chat = [Message("user", "hello there"), Message("assistant", "a long answer")]
    (row,) = Renderer(load_tokenizer("tiny")).conversation(chat, id="r")
    cut = fit([(row,)], len(row) - 4, "truncate")
    assert (cut.truncated, cut.unended) == (1, 1)
    with pytest.raises(ValueError, match="none of"):
        fit([(row,)], int(row.mask.argmax()), "truncate")


async def test_schedules_count_optimizer_steps_and_not_micro_batches():
    backend = create_pytorch_backend(load_model("tiny"), lr=1.0, lr_scheduler="linear", num_steps=4)
    rates = []
    for _ in range(4):
        items = items_of(8, 9, 10, 11)
        await backend.forward_backward([collate([item]) for item in items], SFT, count_units(items))
        rates.append((await backend.optim_step())["lr"])
    assert rates == pytest.approx([1.0, 0.75, 0.5, 0.25])


async def test_evaluation_changes_no_weight():
    backend = create_pytorch_backend(load_model("tiny"))
    before = {name: p.detach().clone() for name, p in backend.model.named_parameters()}
    await evaluate_offline(backend, SFT, items_of(8, 20), 100)
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in backend.model.named_parameters())


async def test_a_saved_adapter_is_not_empty(tmp_path):
    """Activation-checkpoint wrappers around PEFT layers save an adapter without a single tensor."""
    from safetensors.torch import load_file

    model = attach_lora(load_model("tiny"), LoraSettings(r=4))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    backend = create_pytorch_backend(model, lr=1e-2)
    source = DataBuffer(items_of(8, 20))
    await run_offline(backend, SFT, source, OfflineConfig(2, 2), log=lambda step, metrics: None)
    await backend.save(tmp_path)
    saved = load_file(tmp_path / "adapter_model.safetensors")
    assert len(saved) == sum("lora" in name for name, _ in model.named_parameters()) > 0
    assert all(tensor.any() for tensor in saved.values()), "both halves of every adapter were trained"


def test_every_config_key_is_read_by_the_code():
    source = "".join(path.read_text() for path in (ROOT / "oxrl").rglob("*.py"))
    for name, section in Config.model_fields.items():
        for key in section.annotation.model_fields:
            assert re.search(
                rf"\b(config|model|train|data|lora|reward|rollout|section|run|engine|self)\.({name}\.)?{key}\b", source
            ), f"{name}.{key}"


def test_example_configs_load():
    blocks = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert blocks
    for block in blocks:
        raw = yaml.safe_load(block)
        raw["train"]["lr"] = float(raw["train"]["lr"])  # plain YAML 1.1 reads 1e-4 as text; our loader does not
        assert check_config(raw).model.name
