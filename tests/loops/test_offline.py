import json
from dataclasses import replace

import anyio
import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.assemble import assemble
from oxrl.data.buffer import DataBuffer
from oxrl.data.render import Renderer
from oxrl.data.sources import load_samples
from oxrl.loops.evaluate import evaluate_offline
from oxrl.loops.offline import OfflineConfig, SFTTrainingConfig, run_offline
from oxrl.loops.progress import scheduled
from oxrl.loops.step import train_step
from oxrl.models.load import load_model, load_tokenizer
from oxrl.run.checkpoint import best_checkpoint, checkpoints, latest_checkpoint, load_checkpoint, save_checkpoint
from oxrl.run.loops import run_sft_training
from oxrl.types import Row, TrainingState
from tests.rows import sums

pytestmark = pytest.mark.anyio
SFT = algorithm("sft")


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


@pytest.fixture
def backend():
    return create_pytorch_backend(load_model("tiny"), lr=2e-3)


@pytest.fixture(scope="module")
def items():
    samples = load_samples(sums(40)).samples
    return assemble(samples, SFT, Renderer(load_tokenizer("tiny"))).items


@pytest.mark.trains
async def test_supervised_training_learns_its_rows(backend):
    samples = load_samples(sums(8)).samples
    logged = []
    config = SFTTrainingConfig(num_steps=20, batch_size=4, log_every=5)
    history = await run_sft_training(
        backend, samples, config, lambda step, metrics: logged.append(step), tokenizer=load_tokenizer("tiny")
    )
    assert logged == [5, 10, 15, 20]
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]


async def test_samples_without_a_tokenizer_are_refused_and_the_keyword_is_named(backend):
    with pytest.raises(ValueError, match="tokenizer="):
        await run_sft_training(backend, load_samples(sums(2)).samples, SFTTrainingConfig(1, 1))


async def test_evaluation_is_a_mean_over_tokens_whatever_the_batches(backend, items):
    whole = await evaluate_offline(backend, SFT, items, budget=100_000)
    parts = await evaluate_offline(backend, SFT, items, budget=50)
    assert parts == pytest.approx(whole, rel=1e-5)
    assert whole["eval_perplexity"] == pytest.approx(torch.tensor(whole["eval_loss"]).exp().item(), rel=1e-5)
    assert 0 <= whole["eval_token_accuracy"] <= 1


async def test_evaluation_does_not_train(backend, items):
    before = await evaluate_offline(backend, SFT, items, 500)
    assert await evaluate_offline(backend, SFT, items, 500) == before
    assert backend.version == 0


async def test_a_step_with_an_empty_loss_mask_stops(backend):
    nothing = (Row("r", [1, 2, 3], [False] * 3),)
    with pytest.raises(ValueError, match="loss mask is empty"):
        await train_step(backend, SFT, [nothing], 100)


def worsening(losses):
    values = iter(losses)

    async def evaluate(memory):
        return {"eval_loss": next(values)}

    return evaluate


async def run(backend, items, tmp_path, evaluate, **config):
    async def save(state, best_step):
        await save_checkpoint(tmp_path, backend, state, keep_last=1, keep=best_step)

    return await run_offline(
        backend,
        SFT,
        DataBuffer(items),
        OfflineConfig(**{"num_steps": 10, "batch_size": 2, "eval_every": 1, **config}),
        evaluate=evaluate,
        log=lambda step, metrics: None,
        save=save,
    )


@pytest.mark.trains
async def test_early_stopping_waits_for_its_patience_and_keeps_the_best(backend, items, tmp_path):
    evaluate = worsening([3.0, 2.0, 2.5, 2.1, 2.2, 0.1])
    history = await run(backend, items, tmp_path, evaluate, patience=3)
    assert [line["step"] for line in history] == [1, 2, 3, 4, 5]
    assert best_checkpoint(tmp_path).name == "step_0002"
    assert latest_checkpoint(tmp_path).name == "step_0005"
    assert len(checkpoints(tmp_path)) == 2, "the last one and the best one"


async def test_patience_survives_a_resume(items, tmp_path):
    first = create_pytorch_backend(load_model("tiny"))
    await run(first, items, tmp_path, worsening([2.0, 2.5]), num_steps=2, patience=2)
    second = create_pytorch_backend(load_model("tiny"))
    state = await load_checkpoint(latest_checkpoint(tmp_path), second)
    history = await run_offline(
        second,
        SFT,
        DataBuffer(items),
        OfflineConfig(num_steps=9, batch_size=2, eval_every=1, patience=2),
        state=state,
        evaluate=worsening([2.4, 1.0]),
        log=lambda step, metrics: None,
    )
    assert [line["step"] for line in history] == [3]


async def test_a_resumed_loop_draws_the_next_rows(items):
    class Recorded(DataBuffer):
        def get_prompts(self, count):
            drawn.append(super().get_prompts(count))
            return drawn[-1]

    async def save(state, best_step):
        reached.append(state)

    drawn, reached, rates = [], [], {"batch_size": 2, "checkpoint_every": 1}
    fresh = create_pytorch_backend(load_model("tiny"), lr=1e-3)
    await run_offline(fresh, SFT, Recorded(items), OfflineConfig(num_steps=4, **rates), save=save)
    await run_offline(fresh, SFT, Recorded(items), OfflineConfig(num_steps=4, **rates), state=reached[1])
    assert [[row.id for (row,) in rows] for rows in drawn[4:]] == [[row.id for (row,) in rows] for rows in drawn[2:4]]


async def test_an_interrupt_between_steps_saves_what_is_done(backend, items):
    saved = []

    async def save(state, best_step):
        saved.append((state.step, backend.version))

    with anyio.CancelScope() as scope:

        def log(step, metrics):
            if step == 2:
                scope.cancel()

        await run_offline(backend, SFT, DataBuffer(items), OfflineConfig(50, batch_size=2), log=log, save=save)
    assert saved == [(2, 2)]


async def test_the_best_checkpoint_is_the_one_that_was_evaluated_best(items, tmp_path):
    """Not the one after it: its weights must be those of its step."""
    backend = create_pytorch_backend(load_model("tiny"), lr=1e-2)
    seen = {}

    async def evaluate(memory):
        seen[backend.version] = (await backend.get_weights()).module.lm_head.weight.detach().clone()
        return {"eval_loss": abs(backend.version - 3.0)}

    await run(backend, items, tmp_path, evaluate, num_steps=5)
    best = best_checkpoint(tmp_path)
    assert best.name == "step_0003"
    assert torch.equal(load_model(str(best)).lm_head.weight, seen[3])


async def test_a_checkpoint_stores_step_version_seed_and_data_position(backend, items, tmp_path):
    source = DataBuffer(items, seed=5)
    source.get_prompts(7)
    state = TrainingState(step=7, version=7, seed=5, cursor={"data": source.state(), "memory": {"mean": 0.5}})
    folder = await save_checkpoint(tmp_path, backend, state)
    restored = await load_checkpoint(folder, backend)
    assert restored == state
    other = DataBuffer(items, seed=5)
    other.restore(restored.cursor["data"])
    assert [item[0].id for item in other.get_prompts(9)] == [item[0].id for item in source.get_prompts(9)]


async def test_random_number_generators_are_restored(backend, tmp_path):
    import random

    import numpy as np

    def draw():
        return torch.rand(2).tolist(), random.random(), random.gauss(0, 1), np.random.rand(), np.random.normal()

    draw()
    folder = await save_checkpoint(tmp_path, backend, TrainingState())
    expected = draw()
    await load_checkpoint(folder, backend)
    assert draw() == expected


async def test_old_checkpoints_are_removed_but_the_best_is_kept(backend, tmp_path):
    for step in range(1, 6):
        await save_checkpoint(tmp_path, backend, TrainingState(step=step), keep_last=2, keep=1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_0001", "step_0004", "step_0005"]
    assert not list(tmp_path.glob(".unfinished*"))


async def test_what_a_killed_save_left_is_not_part_of_the_next_one(backend, tmp_path):
    left = tmp_path / ".unfinished-step_0001"
    left.mkdir()
    (left / "half.safetensors").write_text("half")
    saved = await save_checkpoint(tmp_path, backend, TrainingState(step=1))
    assert not (saved / "half.safetensors").exists() and not left.exists()


async def test_steps_beyond_9999_sort_by_number(backend, tmp_path):
    for step in (9999, 10000):
        await save_checkpoint(tmp_path, backend, TrainingState(step=step))
    assert latest_checkpoint(tmp_path).name == "step_10000"


async def test_a_resume_on_another_thread_count_warns(backend, tmp_path, caplog):
    folder = await save_checkpoint(tmp_path, backend, TrainingState())
    record = json.loads((folder / "training_state.json").read_text())
    record["environment"]["threads"] = 96
    (folder / "training_state.json").write_text(json.dumps(record))
    await load_checkpoint(folder, backend)
    assert "threads was 96" in caplog.text


async def test_a_folder_without_state_is_not_a_checkpoint(backend, tmp_path):
    with pytest.raises(ValueError, match="not a checkpoint"):
        await load_checkpoint(tmp_path, backend)


@pytest.mark.trains
async def test_training_on_plain_text_learns_it(backend):
    cpt = algorithm("cpt")
    samples = load_samples([{"text": "the ox pulls the cart, " * 4}]).samples
    items = assemble(samples, cpt, Renderer(load_tokenizer("tiny"), max_len=64), max_len=64).items
    assert len(items) == 2
    history = await run_offline(backend, cpt, DataBuffer(items), OfflineConfig(30, 2), log=lambda step, metrics: None)
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]


async def test_a_schedule_switches_algorithms_and_logs_it(backend, items, caplog):
    caplog.set_level("INFO", logger="oxrl")
    scheduled_items = [tuple(item) for item in items]
    plan = scheduled({1: SFT, 4: replace(SFT, name="other", parameters={"beta": 0.2})})
    history = await run_offline(
        backend, plan, DataBuffer(scheduled_items), OfflineConfig(5, 2, log_every=100), log=lambda step, metrics: None
    )
    assert [line["step"] for line in history if "algorithm_switched" in line] == [4]
    assert "step 4: switching to other {'beta': 0.2}" in caplog.text


def test_a_schedule_cannot_change_the_kind_of_rows():
    with pytest.raises(ValueError, match="different kinds of rows"):
        scheduled({1: SFT, 5: algorithm("dpo")})
    with pytest.raises(ValueError, match="step 1"):
        scheduled({5: SFT})
