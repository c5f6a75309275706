import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.local import NonFiniteError, PyTorchTrainingBackend, create_pytorch_backend, set_training_mode
from oxrl.backends.optimizer import (
    SCHEDULES,
    create_adamw_optimizer,
    create_warmup_cosine_scheduler,
    schedule,
)
from oxrl.concurrency import task_group
from oxrl.data.pack import collate, count_units
from oxrl.models.load import load_model
from oxrl.models.lora import LoraSettings, attach_lora, attach_reference, save_adapter
from oxrl.types import ImmediateTrainFuture, Losses, ModelConfig, Row, Term, TrainFuture

pytestmark = pytest.mark.anyio
SFT = algorithm("sft")


@pytest.fixture
def anyio_backend():
    return "asyncio"


def some_items(lengths=(30, 7, 19, 4), seed=0):
    random = np.random.default_rng(seed)
    return [(Row(f"row{i}", random.integers(0, 256, n), np.arange(n) > n // 3),) for i, n in enumerate(lengths)]


def plain_loop(model, steps, *, lr, warmup, clip):
    """Supervised fine-tuning as anyone would write it: one row at a time, full logits, cross-entropy, AdamW."""
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step, rows in enumerate(steps):
        if step < warmup:
            rate = lr * (step + 1) / (warmup + 1)
        else:
            rate = lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / (len(steps) - warmup)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        tokens_in_step = sum(int(row.mask.sum()) for row in rows)
        total = 0.0
        for row in rows:
            tokens, mask = torch.tensor(row.tokens), torch.tensor(row.mask)
            logits = model(input_ids=tokens[None]).logits[0]
            labels = torch.where(mask, tokens, -100)[1:]
            loss = torch.nn.functional.cross_entropy(logits[:-1], labels, reduction="sum") / tokens_in_step
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


@pytest.mark.trains
async def test_loss_curves_agree_with_a_plain_pytorch_loop():
    steps = [some_items((30, 7, 19, 4, 25, 12), seed=step % 3) for step in range(24)]
    rows = [[item[0] for item in items] for items in steps]
    expected = plain_loop(load_model("tiny"), rows, lr=2e-3, warmup=4, clip=1.0)
    backend = create_pytorch_backend(
        load_model("tiny"), lr=2e-3, lr_scheduler="cosine", num_steps=24, warmup_steps=4, max_grad_norm=1.0
    )
    losses = []
    for items in steps:
        batches = [collate(items[:4]), collate(items[4:])]
        losses.append((await backend.forward_backward(batches, SFT, count_units(items)))["loss"])
        await backend.optim_step()
    assert losses == pytest.approx(expected, abs=1e-4)
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_warms_up_peaks_and_counts_optimizer_steps(name):
    factor = schedule(name, total_steps=100, warmup_steps=9)
    rates = [factor(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1), "the first step must already move"
    assert rates[9] == pytest.approx(1.0)
    assert max(rates) == pytest.approx(1.0)
    if name == "constant":
        assert rates[-1] == 1.0
    else:
        assert 0 < rates[-1] < 0.06, "the last step must still move, but little"


def test_cosine_is_half_way_down_in_the_middle_and_wsd_stays_up_until_its_last_fifth():
    assert create_warmup_cosine_scheduler(0, 100)(50) == pytest.approx(0.5)
    wsd = schedule("wsd", 100)
    assert (wsd(79), wsd(90), wsd(100)) == (1.0, pytest.approx(0.5), 0.0)


async def test_the_reported_learning_rate_is_the_one_that_was_used():
    """SGD-like check: with one parameter moved by AdamW's first step, the move is lr itself."""
    model = load_model("tiny")
    before = model.model.norm.weight.detach().clone()
    backend = create_pytorch_backend(model, lr=1e-2, lr_scheduler="linear", num_steps=10, warmup_steps=4)
    items = some_items()
    await backend.forward_backward([collate(items)], SFT, count_units(items))
    metrics = await backend.optim_step()
    assert metrics["lr"] == pytest.approx(1e-2 / 5)
    assert (model.model.norm.weight - before).abs().median().item() == pytest.approx(metrics["lr"], rel=1e-3)


@pytest.mark.trains
async def test_small_updates_reach_bf16_weights_through_their_masters():
    """An update of 1e-4 is below the resolution of bf16 around 1; sixty of them are not."""

    def gain(model):
        return model.model.norm.weight.detach().float().mean().item()

    model = load_model(ModelConfig("tiny", dtype="bfloat16"))
    backend = create_pytorch_backend(model, lr=1e-4)
    items = some_items()
    start = gain(model)
    moves = []
    for _ in range(60):
        await backend.forward_backward([collate(items)], SFT, count_units(items))
        await backend.optim_step()
        moves.append(abs(gain(model) - start))
    assert model.dtype == torch.bfloat16
    assert moves[0] < 1e-3
    assert moves[-1] > 1e-3


async def test_bf16_gradients_accumulate_in_float32():
    model = load_model(ModelConfig("tiny", dtype="bfloat16"))
    backend = create_pytorch_backend(model)
    items = some_items()
    await backend.forward_backward([collate([item]) for item in items], SFT, count_units(items))
    assert all(p.grad is None for p in model.parameters())
    assert {m.grad.dtype for m in backend.optimizer.masters.values()} == {torch.float32}


async def test_a_resumed_bf16_run_keeps_what_bf16_cannot_hold(tmp_path):
    def make():
        return create_pytorch_backend(load_model(ModelConfig("tiny", dtype="bfloat16")), lr=1e-3)

    items = some_items()

    async def steps(backend, n):
        for _ in range(n):
            await backend.forward_backward([collate(items)], SFT, count_units(items))
            await backend.optim_step()

    through, first, second = make(), make(), make()
    await steps(through, 6)
    await steps(first, 3)
    await first.save(tmp_path)
    await second.load(tmp_path)
    await steps(second, 3)
    for name, master in second.optimizer.masters.items():
        assert torch.equal(master, through.optimizer.masters[name]), name


async def test_gradients_are_clipped_to_max_grad_norm():
    items = some_items()
    norms = []
    for limit in (1e-3, float("inf")):
        model = load_model("tiny")
        backend = PyTorchTrainingBackend(model, create_adamw_optimizer(model, 1e-3), max_grad_norm=limit)
        await backend.forward_backward([collate(items)], SFT, count_units(items))
        reported = (await _norm_before_step(backend))["grad_norm"]
        norms.append(reported)
    assert norms[0] == pytest.approx(norms[1]), "what is reported is the norm before clipping"
    assert norms[0] > 1e-3


async def _norm_before_step(backend):
    seen = {}
    step = backend.optimizer.step

    def watch(*args):
        seen["clipped"] = torch.stack([m.grad.norm() for m in backend.optimizer.masters.values()]).norm().item()
        return step(*args)

    backend.optimizer.step = watch
    metrics = await backend.optim_step()
    assert seen["clipped"] <= backend.max_grad_norm * 1.001
    return metrics


async def test_a_non_finite_loss_names_its_rows():
    def loss(outputs, batch):
        factor = float("nan") if "row2" in batch.ids else 1.0
        return Losses({"nll": Term(outputs.logprob.sum() * factor, "token")})

    backend = create_pytorch_backend(load_model("tiny"))
    items = some_items()
    with pytest.raises(NonFiniteError, match="row2") as caught:
        await backend.forward_backward([collate([item]) for item in items], replace(SFT, loss=loss), count_units(items))
    assert [id for batch in caught.value.batches for id in batch.ids] == ["row2"]


async def test_a_non_finite_gradient_raises_before_the_weights_change():
    model = load_model("tiny")
    backend = create_pytorch_backend(model)
    items = some_items()
    await backend.forward_backward([collate(items)], SFT, count_units(items))
    model.model.norm.weight.grad[0] = float("inf")
    before = model.lm_head.weight.detach().clone()
    with pytest.raises(NonFiniteError, match="gradient"):
        await backend.optim_step()
    assert torch.equal(model.lm_head.weight, before)


async def test_checkpointing_stays_active_when_dropout_is_off():
    model = load_model(ModelConfig("tiny", gradient_checkpointing=True))
    backend = create_pytorch_backend(model)
    calls = []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    set_training_mode(model, dropout=False)
    backend.module(collate(some_items())).logprob.sum().backward()
    assert len(calls) == 2, "once forward, once recomputed in backward"


async def test_a_future_can_be_awaited_either_way():
    future = ImmediateTrainFuture(3)
    assert await future == 3
    assert await future.result() == 3


async def test_a_future_is_awaited_until_another_thread_or_task_completes_it():
    by_thread, by_task, failed = TrainFuture(), TrainFuture(), TrainFuture()
    thread = threading.Thread(target=by_thread.set_result, args=({"loss": 1.0},))

    async def complete():
        thread.start()
        by_task.set_result(2)
        failed.set_exception(LookupError("of the worker"))

    async with task_group() as tasks:
        tasks.start_soon(complete)
        assert await by_task == 2 and await by_thread.result() == {"loss": 1.0}
    assert by_task.done() and await by_task == 2
    with pytest.raises(LookupError, match="of the worker"):
        await failed


def test_a_model_without_trainable_parameters_is_refused():
    with pytest.raises(ValueError, match="nothing to train"):
        create_adamw_optimizer(load_model("tiny").requires_grad_(False))


def test_a_reference_that_follows_is_part_of_the_checkpoint(tmp_path):
    model, reference = load_model("tiny"), load_model("tiny")
    backend = create_pytorch_backend(model, others={"ref": reference})
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(1.0)
    backend.update_reference(0.75)  # ref <- 0.75 ref + 0.25 policy
    moved = {name: weight.clone() for name, weight in reference.named_parameters()}
    start = dict(load_model("tiny").named_parameters())
    for name, weight in moved.items():
        torch.testing.assert_close(weight, start[name] + 0.25)
    backend.save(tmp_path)
    other = create_pytorch_backend(load_model("tiny"), others={"ref": load_model("tiny")})
    other.load(tmp_path)
    for name, weight in other.others["ref"].model.named_parameters():
        assert weight.equal(moved[name])
    with pytest.raises(ValueError, match="no reference model"):
        create_pytorch_backend(load_model("tiny")).update_reference(0.5)
    with pytest.raises(ValueError, match="does not have the architecture of the policy"):
        create_pytorch_backend(with_adapter(), others={"ref": reference}).update_reference(0.5)


def with_adapter():
    return attach_lora(load_model("tiny"), LoraSettings(r=4), seed=1)


def with_follower():
    return attach_reference(with_adapter())


def adapter_of(model):
    return {name: weight.detach().clone() for name, weight in model.named_parameters() if "default" in name}


async def steps(backend, number):
    for _ in range(number):
        await backend.forward_backward([collate(some_items())], SFT, count_units(some_items()))
        await backend.optim_step()


async def logprob(backend, which):
    (outputs,) = await backend.logprobs([collate(some_items())], which)
    return outputs.logprob


@pytest.mark.parametrize("decay", [0.7, 0.0])
async def test_the_reference_of_an_adapter_is_the_average_of_what_the_policy_was(decay):
    """Compared with a separate model, whose adapter is averaged here in float64."""
    backend = create_pytorch_backend(with_follower(), lr=1e-2)
    base = create_pytorch_backend(load_model("tiny"))
    torch.testing.assert_close(await logprob(backend, "ref"), await logprob(base, "policy"), atol=1e-6, rtol=0)
    average = {name: weight.double() for name, weight in adapter_of(backend.model).items()}
    for _ in range(5):
        await steps(backend, 1)
        await backend.update_reference(decay)
        policy = adapter_of(backend.model)
        average = {name: decay * old + (1 - decay) * policy[name].double() for name, old in average.items()}
    expected = create_pytorch_backend(with_adapter())
    await expected.load_weights(average)
    found = await logprob(backend, "ref")
    torch.testing.assert_close(found, await logprob(expected, "policy"), atol=1e-5, rtol=0)
    far = (await logprob(backend, "policy") - found).abs().max()
    assert far > 0.1 if decay else far == 0
    assert (await logprob(base, "policy") - found).abs().max() > 0.1


async def test_an_adapter_is_trained_to_the_bit_as_if_no_reference_followed_it(tmp_path):
    """Log-probs of the reference are computed in between, which switches the layers to it and back."""
    backends = {"alone": create_pytorch_backend(with_adapter(), lr=1e-2, write_model=save_adapter)}
    backends["beside"] = create_pytorch_backend(with_follower(), lr=1e-2, write_model=save_adapter)
    for name, backend in backends.items():
        for _ in range(2):
            await steps(backend, 1)
            if name == "beside":
                await backend.update_reference(0.5)
                await logprob(backend, "ref")
        await backend.save(tmp_path / name)
    one, two = backends.values()
    assert torch.equal(await logprob(one, "policy"), await logprob(two, "policy"))
    files = {name: {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()} for name in backends}
    assert files["beside"].pop("reference.safetensors")
    assert files["alone"] == files["beside"]


async def test_an_adapter_that_follows_is_part_of_the_checkpoint(tmp_path):
    through = create_pytorch_backend(with_follower(), lr=1e-2, write_model=save_adapter)
    await steps(through, 2)
    await through.update_reference(0.5)
    await through.save(tmp_path)
    resumed = create_pytorch_backend(with_follower(), lr=1e-2, write_model=save_adapter)
    await resumed.load(tmp_path)
    for backend in (through, resumed):
        await steps(backend, 1)
        await backend.update_reference(0.5)
    for name, weight in through.model.named_parameters():
        assert torch.equal(weight, resumed.model.get_parameter(name)), name
    with pytest.raises(ValueError, match="the reference in .* is not the one of this run"):
        await create_pytorch_backend(with_adapter()).load(tmp_path)


HALF = ModelConfig("tiny", dtype="bfloat16")


async def test_a_reference_in_half_precision_warns(caplog):
    """In bfloat16 a step of 1 % of a 10 % gap is rounded away; an adapter is in float32 whatever its base is in."""
    model, reference = load_model(HALF), load_model(HALF)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.1)
    create_pytorch_backend(model, others={"ref": reference}).update_reference(0.99)
    assert all(weight.equal(load_model(HALF).get_parameter(name)) for name, weight in reference.named_parameters())
    assert "the reference is kept in bfloat16" in caplog.text and "within 39% of the policy's" in caplog.text
    caplog.clear()
    adapted = attach_reference(attach_lora(load_model(HALF), LoraSettings(r=4)))
    backend = create_pytorch_backend(adapted, lr=1e-3)
    await steps(backend, 1)
    await backend.update_reference(0.99)
    assert {weight.dtype for weight in backend.reference_weights().values()} == {torch.float32}
    assert "is kept in" not in caplog.text


async def test_the_policy_adapter_is_active_again_after_an_error_in_a_pass_of_the_reference():
    backend = create_pytorch_backend(with_follower(), lr=1e-2)
    await steps(backend, 1)
    before = await logprob(backend, "policy")
    with pytest.raises(KeyError), backend._model_for("ref"):
        raise KeyError
    assert torch.equal(await logprob(backend, "policy"), before)
    assert not torch.equal(await logprob(backend, "ref"), before)
    trained = {name for name, weight in backend.model.named_parameters() if weight.requires_grad}
    assert trained == adapter_of(backend.model).keys()


async def test_a_step_reports_each_of_its_micro_batches():
    backend = create_pytorch_backend(load_model("tiny"), lr=1e-3)
    seen = []
    backend.micro_batches_started = lambda total: seen.append(f"of {total}")
    backend.micro_batch_done = lambda: seen.append("done")
    items = some_items((4, 5, 6))
    await backend.forward_backward([collate([item]) for item in items], SFT, count_units(items))
    assert seen == ["of 3", "done", "done", "done"]
