"""A run that runs out of memory continues with less, as if it had started so, and remembers it.

The devices are small by hooks: torch's error is raised inside the forward or the backward pass of the real model.
"""

import gc
import json
import resource
import sys
import weakref
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.distributed.queued import QueuedBackend
from oxrl.backends.local import create_pytorch_backend
from oxrl.config import check_config
from oxrl.data.buffer import DataBuffer
from oxrl.loops.evaluate import evaluate_offline
from oxrl.loops.memory_limits import MemoryLimits
from oxrl.loops.memory_warmup import warm_up_memory
from oxrl.loops.offline import OfflineConfig, run_offline
from oxrl.loops.step import train_step
from oxrl.models.load import load_model
from oxrl.models.lora import LoraSettings, attach_lora
from oxrl.run.checkpoint import load_checkpoint, save_checkpoint
from oxrl.run.train import train_run
from oxrl.types import ModelConfig, TrainingState
from tests.loops.test_memory_warmup import random_rows
from tests.loops.test_online import Setting
from tests.rows import write_jsonl

SFT, DPO = algorithm("sft"), algorithm("dpo")
ROWS = random_rows([20, 9, 31, 14, 8, 25, 11, 17])
anyio_test = [pytest.mark.anyio, pytest.mark.parametrize("anyio_backend", ["asyncio"])]


def on_asyncio(test):
    for mark in anyio_test:
        test = mark(test)
    return test


def pairs():
    rows = iter(ROWS)
    return [(*chosen, *rejected) for chosen, rejected in zip(rows, rows, strict=True)]


class SmallDevice:
    """Raises torch's error for a micro-batch of more than `tokens`, where `fails` names; with checkpointing never."""

    def __init__(self, backend, tokens, fails, *, unless_checkpointed=False):
        self.module, self.tokens, self.fails = backend.module, tokens, fails
        self.unless_checkpointed = unless_checkpointed
        self.failures = 0
        if fails == "backward":  # in the first layer, when those after it have accumulated their gradients
            layer = self.module.inner.get_decoder().layers[0]
            layer.register_full_backward_pre_hook(lambda _, gradients: self.check(gradients[0].shape[1]))
        else:
            for module in (self.module, *backend.others.values()):
                module.register_forward_hook(self.after_forward)

    def after_forward(self, module, arguments, outputs):
        if torch.is_grad_enabled() == (self.fails == "forward"):
            self.check(arguments[0].num_tokens)

    def check(self, tokens):
        checkpointed = self.unless_checkpointed and self.module.inner.is_gradient_checkpointing
        if tokens > self.tokens and not checkpointed:
            self.failures += 1
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {tokens} tokens")


def backend_for(name, **model):
    torch.manual_seed(3)
    loaded = load_model(ModelConfig("tiny", **model))
    if name == "lora":  # dropout draws random numbers
        loaded = attach_lora(loaded, LoraSettings(r=4, dropout=0.5))
    return create_pytorch_backend(loaded, lr=1e-2, others={"ref": load_model("tiny")} if name == "dpo" else {})


def weights_of(backend):
    state = {**dict(backend.module.named_parameters()), **backend.optimizer.tensors()}
    return {name: value.detach().clone() for name, value in state.items()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


async def run_steps(backend, name, budget, steps=3, **rest):
    chosen, items = (DPO, pairs()) if name == "dpo" else (SFT, ROWS)
    source, rest = DataBuffer(items), {"log": lambda *_: None} | rest
    return await run_offline(backend, chosen, source, OfflineConfig(steps, 4, micro_batch_tokens=budget), **rest)


@on_asyncio
@pytest.mark.parametrize(
    ("name", "fails"),
    [("full", "backward"), ("lora", "forward"), ("lora", "backward"), ("dpo", "logprobs"), ("dpo", "backward")],
)
async def test_a_run_that_runs_out_of_memory_equals_one_that_starts_with_smaller_micro_batches(
    name, fails, anyio_backend, caplog
):
    backend = backend_for(name)
    device = SmallDevice(backend, 56 if name == "dpo" else 40, fails)
    history = await run_steps(backend, name, 512)
    assert device.failures
    lowered = int(history[-1]["micro_batch_tokens"])
    assert lowered < 512
    assert f"set train.micro_batch_tokens: {lowered} for the next run" in caplog.text
    expected = backend_for(name)
    plain = await run_steps(expected, name, lowered)
    assert [line["loss"] for line in history] == [line["loss"] for line in plain]
    assert "micro_batch_tokens" not in plain[-1]
    assert_same(weights_of(backend), weights_of(expected))


@on_asyncio
async def test_a_limit_that_no_micro_batch_reaches_is_halved_until_one_does(anyio_backend):
    backend, limits = backend_for("full"), MemoryLimits(100_000)
    device = SmallDevice(backend, 100, "forward")
    await train_step(backend, SFT, ROWS, limits)
    assert (device.failures, limits.micro_batch_tokens) == (1, 97)  # 135 tokens in all


@on_asyncio
@pytest.mark.parametrize("fails", ["forward", "backward"])
@pytest.mark.parametrize("name", ["full", "lora"])
async def test_if_a_single_row_does_not_fit_gradients_are_checkpointed(name, fails, anyio_backend, caplog):
    backend = backend_for(name)
    device = SmallDevice(backend, 28, fails, unless_checkpointed=True)  # the longest row has 31
    history = await run_steps(backend, name, 60)
    assert device.failures == 2
    assert (history[-1]["micro_batch_tokens"], history[-1]["gradient_checkpointing"]) == (30, 1.0)
    assert "set model.gradient_checkpointing: true for the next run" in caplog.text
    expected = backend_for(name, gradient_checkpointing=True)
    await run_steps(expected, name, 30)
    assert_same(weights_of(backend), weights_of(expected))


@on_asyncio
async def test_if_nothing_helps_the_error_is_raised_and_no_weight_has_changed(anyio_backend):
    backend = backend_for("lora")
    before = weights_of(backend)
    SmallDevice(backend, 5, "backward")
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 31 tokens"):
        await run_steps(backend, "lora", 60)
    assert_same(weights_of(backend), before)


@on_asyncio
async def test_an_optimizer_step_that_runs_out_of_memory_is_not_repeated(anyio_backend):
    backend, calls = backend_for("full"), []

    def fail(*_):
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    backend.optimizer.register_step_pre_hook(fail)
    limits = MemoryLimits(512)
    with pytest.raises(torch.OutOfMemoryError):
        await train_step(backend, SFT, ROWS, limits)
    assert (len(calls), limits.lowered) == (1, {})


@on_asyncio
async def test_gradients_that_a_user_accumulated_before_are_not_dropped(anyio_backend):
    from oxrl.data.pack import collate, count_units

    backend = backend_for("full")
    await backend.forward_backward([collate(ROWS[:1])], SFT, count_units(ROWS[:1]))
    before = [weight.grad.clone() for weight in backend.model.parameters()]
    SmallDevice(backend, 40, "forward")
    with pytest.raises(torch.OutOfMemoryError):
        await train_step(backend, SFT, ROWS, 512)
    assert all(torch.equal(weight.grad, old) for weight, old in zip(backend.model.parameters(), before, strict=True))


@on_asyncio
@pytest.mark.parametrize("queued", [False, True])
async def test_tensors_of_a_failed_attempt_are_freed_before_the_next(queued, anyio_backend):
    backend, kept = backend_for("full"), []

    def watch(module, arguments, outputs):
        assert [each() for each in kept] == [None] * len(kept)
        if arguments[0].num_tokens > 40:
            kept.append(weakref.ref(outputs.logprob))
            raise torch.OutOfMemoryError("CUDA out of memory")

    backend.module.register_forward_hook(watch)
    wrapped = QueuedBackend(backend) if queued else backend
    gc.disable()  # a collection by chance would free them too
    try:
        await train_step(wrapped, SFT, ROWS, 512)
    finally:
        gc.enable()
    assert len(kept) > 1


@on_asyncio
async def test_running_means_are_updated_once_by_a_step_that_is_repeated(anyio_backend):
    def count(items, memory):
        memory["steps"] = memory.get("steps", 0.0) + 1.0
        return items

    backend, memory = backend_for("full"), {"steps": 6.0}
    device = SmallDevice(backend, 40, "forward")
    await train_step(backend, replace(SFT, credit=count), ROWS, 512, memory)
    assert device.failures
    assert memory == {"steps": 7.0}


@on_asyncio
async def test_a_queued_backend_repeats_the_step_too(anyio_backend):
    backend, expected = backend_for("lora"), backend_for("lora")
    device, limits = SmallDevice(backend, 40, "backward"), MemoryLimits(512)
    queued = QueuedBackend(backend)
    torch.manual_seed(5)
    await train_step(queued, SFT, ROWS, limits)
    queued.close()
    assert device.failures
    torch.manual_seed(5)
    await train_step(expected, SFT, ROWS, limits.micro_batch_tokens)
    assert_same(weights_of(backend), weights_of(expected))


@on_asyncio
async def test_a_memory_warm_up_lowers_the_limit_before_the_first_step(anyio_backend):
    async def trained(budget, tokens):
        backend, limits = backend_for("lora"), MemoryLimits(budget)
        device = SmallDevice(backend, tokens, "backward")
        assert await warm_up_memory(backend, SFT, ROWS, limits)
        warmed_up = device.failures
        history = await run_steps(backend, "lora", budget, limits=limits)
        assert device.failures == warmed_up
        return history, weights_of(backend)

    history, weights = await trained(120, 70)
    assert history[0]["micro_batch_tokens"] == 60
    assert_same(weights, (await trained(60, 10_000))[1])


@on_asyncio
async def test_an_evaluation_lowers_the_limit_and_has_the_same_result(anyio_backend):
    backend, limits = backend_for("full"), MemoryLimits(512)
    expected = await evaluate_offline(backend, SFT, ROWS, 64)
    SmallDevice(backend, 100, "logprobs")
    assert await evaluate_offline(backend, SFT, ROWS, limits) == pytest.approx(expected, rel=1e-6)
    assert limits.metrics == {"micro_batch_tokens": 64.0}


@on_asyncio
async def test_a_resumed_run_starts_with_what_was_lowered_and_is_the_same_run(anyio_backend, tmp_path, caplog):
    async def save(backend, state, best_step):
        await save_checkpoint(tmp_path, backend, state, keep_last=9)

    whole = backend_for("lora")
    SmallDevice(whole, 28, "backward", unless_checkpointed=True)
    config = OfflineConfig(4, 4, checkpoint_every=2, micro_batch_tokens=60)
    quiet = {"log": lambda *_: None}
    await run_offline(whole, SFT, DataBuffer(ROWS), config, save=partial(save, whole), **quiet)
    resumed = backend_for("lora")
    state = await load_checkpoint(tmp_path / "step_0002", resumed)
    assert state.cursor["memory_limits"] == {
        "train.micro_batch_tokens": [60, 30],
        "model.gradient_checkpointing": [False, True],
    }
    device = SmallDevice(resumed, 28, "backward", unless_checkpointed=True)
    caplog.clear()
    await run_offline(resumed, SFT, DataBuffer(ROWS), config, state=state, **quiet)
    assert device.failures == 0
    assert "resuming with train.micro_batch_tokens: 30 instead of 60, because memory ran out before" in caplog.text
    assert_same(weights_of(resumed), weights_of(whole))


def test_a_setting_that_was_changed_since_the_checkpoint_is_used():
    state = TrainingState(cursor={"memory_limits": {"train.micro_batch_tokens": [512, 64]}})
    limits = MemoryLimits(256)
    limits.restore(state, backend_for("full"))
    assert (limits.micro_batch_tokens, limits.lowered) == (256, {})


def trained_online(name, budget, tokens, fails, **repeats):
    setting = Setting(name, lr=1e-3)
    device = SmallDevice(setting.backend, tokens, fails)
    manager = setting.manager(batch_size=2, n_samples_per_prompt=4)
    history = setting.run(2, manager, config={"micro_batch_tokens": budget, **repeats})
    timed = ("seconds", "per_second", "memory_gib", "micro_batch_tokens")
    lines = [{key: line[key] for key in line if not key.endswith(timed)} for line in history]
    return device.failures, history[-1], lines, weights_of(setting.backend)


@pytest.mark.parametrize(
    ("name", "fails", "tokens", "repeats"),
    [
        ("grpo", "forward", 60, {}),
        ("grpo", "backward", 60, {}),
        ("ppo", "logprobs", 150, {"mini_batches": 2}),
        ("ppo", "backward", 30, {"iterations": 2, "mini_batches": 2}),
    ],
)
def test_an_online_run_that_runs_out_of_memory_equals_one_that_starts_with_smaller_micro_batches(
    name, fails, tokens, repeats
):
    failures, last, lines, weights = trained_online(name, 512, tokens, fails, **repeats)
    assert failures
    _, _, plain, expected = trained_online(name, int(last["micro_batch_tokens"]), 10_000, fails, **repeats)
    assert lines == plain
    assert_same(weights, expected)


def test_log_probs_of_a_group_that_does_not_fit_are_computed_row_by_row():
    failures, last, _, weights = trained_online("ppo", 512, 60, "logprobs")
    assert failures
    assert last["by_row"] == 1.0
    assert "gradient_checkpointing" not in last, "it saves nothing in a pass without gradients"
    for name, value in trained_online("ppo", 512, 10_000, "logprobs")[3].items():
        torch.testing.assert_close(weights[name], value, rtol=1e-3, atol=1e-4)


def test_an_update_after_the_first_of_a_batch_is_repeated_alone():
    setting = Setting("ppo", lr=1e-3)
    device = SmallDevice(setting.backend, 10_000, "backward")

    def shrink(*_):  # after the first of four optimizer steps
        device.tokens = 30

    setting.backend.optimizer.register_step_post_hook(shrink)
    manager = setting.manager(batch_size=2, n_samples_per_prompt=4)
    config = {"iterations": 2, "mini_batches": 2, "micro_batch_tokens": 512}
    (line,) = setting.run(1, manager, config=config)
    assert device.failures
    assert line["micro_batch_tokens"] < 512
    assert setting.backend.version == 4


def limit_slots(model, most):
    """The device holds `most` sequences."""

    def check(_, arguments):
        if arguments[0].shape[0] > most:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate a cache")

    model.get_input_embeddings().register_forward_pre_hook(check)


def test_an_online_run_keeps_the_slots_of_its_engine_in_its_checkpoint():
    def sampled(most, state=None, slots=8):
        setting, seen, states = Setting("grpo"), [], []
        setting.generator.slots = slots
        limit_slots(setting.model, most)

        async def save(reached, best_step):
            states.append(reached)

        rest = {"save": save, "observe": lambda step, groups: seen.append(groups)}
        manager = setting.manager(batch_size=2, n_samples_per_prompt=4)
        history = setting.run(1 if state is None else 2, manager, **rest, **({"state": state} if state else {}))
        tokens = [rollout.generation.token_ids for group in seen[0] for rollout in group]
        return tokens, history, states[-1], setting.generator.slots

    tokens, history, state, slots = sampled(3)
    assert (slots, history[0]["slots"]) == (2, 2.0)
    assert state.cursor["memory_limits"] == {"rollout.slots": [8, 2]}
    assert tokens == sampled(8)[0]
    assert sampled(8, state)[3] == 2, "a resumed run starts with the lowered number"
    assert sampled(8, state, slots=4)[3] == 4, "unless the setting was changed"


def train_in_little_memory(tokens, mebibytes):
    """In a fork: a step whose address space may grow by so much; return the tokens per micro-batch after it."""
    import anyio

    items, limits, backend = random_rows([128] * 16), MemoryLimits(tokens), backend_for("lora")
    anyio.run(train_step, backend, SFT, items[:1], limits)  # what is allocated once
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + mebibytes * 2**20, before[1]))
    anyio.run(train_step, backend, SFT, items, limits)
    resource.setrlimit(resource.RLIMIT_AS, before)
    expected = backend_for("lora")
    anyio.run(train_step, expected, SFT, items[:1], tokens)
    anyio.run(train_step, expected, SFT, items, limits.micro_batch_tokens)
    assert_same(weights_of(backend), weights_of(expected))
    return limits.micro_batch_tokens


@pytest.mark.skipif(sys.platform != "linux", reason="the limit of the address space is Linux's")
def test_a_failed_allocation_on_a_cpu_is_recovered_from(forks):
    assert forks.run(train_in_little_memory, 2048, 16) < 2048


SMALL_DEVICE = """
import torch
from pathlib import Path
from oxrl.algorithms.preference import Pairs

def planted(pairs: Pairs):
    if len(pairs.chosen) > 2:
        with (Path(__file__).parent / "failures").open("a") as file:
            file.write("failed\\n")
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return -torch.nn.functional.logsigmoid(pairs.chosen - pairs.rejected)
"""


@pytest.mark.trains
def test_a_run_shows_and_saves_what_was_lowered_and_resumes_with_it(tmp_path):
    own, rows, failures = tmp_path / "own.py", tmp_path / "rows.jsonl", tmp_path / "failures"
    own.write_text(SMALL_DEVICE)
    write_jsonl(rows, [{"prompt": f"{i}?", "chosen": f"{i}", "rejected": f"{i + 1}!"} for i in range(16)])
    train = {"alg_name": f"{own}:planted", "train_batch_size_per_gpu": 8, "checkpoint_every": 1}

    def trained(steps, resume):
        sections = {"data": {"train_files_path": str(rows)}, "train": {**train, "train_steps_per_epoch": steps}}
        config = check_config({"model": {"name": "tiny"}, **sections})
        failures.write_text("")
        done = train_run(config, tmp_path / "run", resume=resume)
        return done.history[-1]["micro_batch_tokens"], len(failures.read_text().splitlines())

    tokens, failed = trained(1, resume=False)
    assert tokens < 1024 and failed
    (line,) = (json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines())
    assert line["micro_batch_tokens"] == tokens
    saved = json.loads((tmp_path / "run/checkpoints/step_0001/training_state.json").read_text())
    assert saved["cursor"]["memory_limits"] == {"train.micro_batch_tokens": [1024, tokens]}
    assert trained(2, resume=True) == (tokens, 0)
