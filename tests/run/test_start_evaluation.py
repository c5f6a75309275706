"""The evaluation before the first step: a baseline for every curve that changes nothing else."""

import json

import pytest

from oxrl.config import load_config
from oxrl.run.train import train_run
from tests.rows import sums, write_jsonl

pytestmark = pytest.mark.trains
COMMON = ("model.name=tiny", "train.train_steps_per_epoch=2", "train.train_batch_size_per_gpu=2", "train.lr=1e-3")
KINDS = {
    "sft": ("train.alg_name=sft",),
    "grpo": (
        "train.alg_name=grpo", "rollout.n_samples=2", "rollout.max_tokens=6",
        "reward.reward_func=oxrl.diagnose.verify_model:any_difference",
    ),
}  # fmt: skip


@pytest.fixture
def config(tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", sums(8)), write_jsonl(tmp_path / "val.jsonl", sums(3, first=8))
    files = [f"data.train_files_path={data[0]}", f"data.val_files_path={data[1]}"]
    return lambda kind, *more: load_config(None, [*COMMON, *files, *KINDS[kind], *more])


def _weights(result):
    return {path.name: path.read_bytes() for path in sorted(result.checkpoint.glob("*.safetensors"))}


def _without_time(line):
    return {name: value for name, value in line.items() if "second" not in name and name != "memory_gib"}


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_logged_as_step_0_and_changes_no_bit_of_the_run(config, tmp_path, kind):
    with_baseline = train_run(config(kind), tmp_path / "with")
    without = train_run(config(kind, "train.eval_at_start=false"), tmp_path / "without")
    baseline, *rest = with_baseline.history
    assert baseline["step"] == 0 and all(name.startswith("eval_") for name in baseline if name != "step")
    assert [*map(_without_time, rest)] == [*map(_without_time, without.history)]
    assert baseline.keys() - {"step"} == {name for name in rest[-1] if name.startswith("eval_")}
    assert _weights(with_baseline) == _weights(without)
    measured = "eval_loss" if kind == "sft" else "eval_reward"
    zero = train_run(config(kind, "train.lr=1e-30", "train.eval_every=1"), tmp_path / "still").history
    assert {line[measured] for line in zero} == {baseline[measured]}, "the model before training"


def test_a_run_that_was_killed_before_its_first_checkpoint_has_one_baseline_when_it_is_resumed(config, tmp_path):
    folder, built = tmp_path / "run", config("sft")
    whole = train_run(built, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    for path in sorted((folder / "checkpoints").rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    (folder / "metrics.jsonl").write_text(f"{lines[0]}\n{lines[1]}\n")
    resumed = train_run(built, folder, resume=True)
    steps = [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert steps == [0, 1, 2] == [line["step"] for line in resumed.history]
    assert whole.history[0] == resumed.history[0]
