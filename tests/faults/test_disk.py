"""A full disk: what was there stays readable, and the message says what to do."""

import os
import resource
import sys
from contextlib import contextmanager
from pathlib import Path

import anyio
import pytest
import torch
from typer.testing import CliRunner

from oxrl.cli import app, main
from oxrl.config import ConfigError, load_config, load_stages
from oxrl.loops.memory_warmup import advice_on_memory
from oxrl.run.checkpoint import _all_or_nothing, save_checkpoint
from oxrl.run.folder import check_resumable, record_config, record_stages, recorded_stages
from oxrl.types import TrainingState
from tests.rows import sums, write_jsonl

OVERRIDES = ["model.name=tiny", "data.train_files_path=rows.jsonl", "train.alg_name=sft"]


@contextmanager
def room_for(size):
    """No file of this process can become larger than `size` bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("stages", [False, True])
def test_a_config_that_cannot_be_written_completely_leaves_the_one_before(tmp_path, stages):
    raw = ["rl.train.lr=1", *OVERRIDES[:2]] if stages else OVERRIDES

    def record(*more):
        loaded = load_stages(None, [*raw, *more])
        if stages:
            record_stages(loaded, tmp_path)
        else:
            record_config(loaded[""], tmp_path / "config.yaml", resuming=False)

    record()
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    with room_for(100), pytest.raises(OSError, match="File too large"):
        record("train.weight_decay=0.5")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before and len(before) == 1


@pytest.mark.parametrize("content", ["", "model:\n  na", "5", "model: 5\n", "model: {name: tiny}\n", "a: [", "\x00"])
def test_a_damaged_config_of_a_run_is_reported(tmp_path, content):
    file = tmp_path / "config.yaml"
    file.write_text(content)
    with pytest.raises(ConfigError):
        recorded_stages(tmp_path)
    with pytest.raises(ConfigError, match="config.yaml is damaged: remove it, then resume the run"):
        check_resumable(load_config(None, OVERRIDES), file)


def test_a_run_whose_model_is_a_folder_is_resumed_by_any_spelling_of_its_path(tmp_path, monkeypatch):
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    relative, absolute = (
        load_config(None, [*OVERRIDES, f"model.name={name}"]) for name in ("model", f"{tmp_path}/model")
    )
    record_config(relative, tmp_path / "config.yaml", resuming=False)
    check_resumable(absolute, tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match="cannot be resumed with"):
        check_resumable(load_config(None, [*OVERRIDES, f"model.name={tmp_path}"]), tmp_path / "config.yaml")


def test_an_export_without_room_leaves_nothing_behind(tmp_path):
    with room_for(2**18):
        done = CliRunner().invoke(app, ["export", "tiny", "--output", str(tmp_path / "model")])
    assert done.exit_code == 1, done.output
    assert "could not be written" in done.output and "free disk space, then export again" in done.output
    assert not list(tmp_path.iterdir())


def train(folder, steps=3):
    data = write_jsonl(folder / "rows.jsonl", sums(16))
    return ["train", "--model", "tiny", "--algorithm", "sft", "--data", str(data), "--output", str(folder / "out"),
            "--steps", str(steps), "--batch-size", "2", "--set", "train.checkpoint_every=1"]  # fmt: skip


def exit_code_of(arguments: list[str]) -> int:
    sys.argv = ["oxrl", *arguments]
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


def metrics_do_not_fit(folder: Path) -> int:
    """Train until a line of metrics.jsonl can only be written in part; the exit code."""
    from tests.run.test_resume import before_each_change

    out = os.open(folder / "log", os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)

    def fill(path: str) -> None:
        file = Path(path)
        full = file.name == "metrics.jsonl" and file.exists() and file.read_bytes().count(b"\n") == 2
        limit = file.stat().st_size + 5 if full else resource.RLIM_INFINITY
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))

    before_each_change(folder / "out", fill)
    return exit_code_of(train(folder))


def test_metrics_that_cannot_be_written_end_the_run_with_advice(tmp_path, forks):
    code, log = forks.run(metrics_do_not_fit, tmp_path), (tmp_path / "log").read_text()
    assert code == 1 and "Traceback" not in log, log
    assert "could not be written: [Errno 27] File too large; step_0002 is intact. Free disk space, then resume" in log
    resumed = CliRunner().invoke(app, ["train", "--output", str(tmp_path / "out"), "--resume"])
    assert resumed.exit_code == 0, resumed.output
    assert [line.partition(",")[0] for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines()] == [
        f'{{"step": {step}' for step in (1, 2, 3)
    ]


def test_a_run_does_not_need_a_console(tmp_path, forks):
    """Standard output and error are on a full disk."""
    assert forks.command(Path("/dev/full"), *train(tmp_path)).end() == [0]
    assert (tmp_path / "out/checkpoints/step_0003").is_dir()
    wrong = forks.command(Path("/dev/full"), "train", "--model", "tinyy")
    assert wrong.end() == [2]


def without_standard_streams(folder: Path) -> int:
    """As a program that was started with `>&- 2>&-`."""
    os.close(1)
    os.close(2)
    sys.stdout = sys.stderr = None
    return exit_code_of(train(folder, steps=1))


def test_a_run_does_not_need_standard_streams(tmp_path, forks):
    assert forks.run(without_standard_streams, tmp_path) == 0
    assert (tmp_path / "out/checkpoints/step_0001").is_dir()


def prints_to_full_disk(log: str) -> int:
    os.dup2(os.open("/dev/full", os.O_WRONLY), 1)
    os.dup2(os.open(log, os.O_WRONLY), 2)
    return exit_code_of(["algorithms"])


def test_other_commands_report_that_their_output_is_lost(tmp_path, forks):
    with (tmp_path / "log").open("w") as log:
        code = forks.run(prints_to_full_disk, log.name)
    assert code == 1
    assert "No space left on device: free disk space" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("error", "advised"), [(OSError("libx.so: cannot open"), False), (OSError(28, "full"), True)])
def test_only_an_error_of_the_disk_advises_to_free_space(tmp_path, error, advised):
    with (
        pytest.raises(RuntimeError, match="could not be written") as raised,
        _all_or_nothing(tmp_path / "draft", tmp_path / "step_0001"),
    ):
        raise error
    assert ("Free disk space" in str(raised.value)) == advised


@pytest.mark.parametrize("error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(12, "none")])
def test_memory_that_runs_out_in_a_checkpoint_is_not_that_of_a_micro_batch(tmp_path, error):
    class FullMemory:
        def save(self, path):
            raise error

    wanted = r"while the checkpoint .*step_0002 was written.*raise the memory limit"
    with pytest.raises(RuntimeError, match=wanted) as raised, advice_on_memory("lower train.micro_batch_tokens"):
        anyio.run(save_checkpoint, tmp_path, FullMemory(), TrainingState(step=2))
    assert "lower train.micro_batch_tokens" not in str(raised.value) and "disk" not in str(raised.value)
    assert not list(tmp_path.iterdir())
