"""A run that is killed at random moments and resumed is the same run, bit for bit."""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forks import end_with_parent
from tests.rows import sums, write_jsonl

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir"}
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


def before_each_change(folder: Path, function: Callable[[str], None]) -> None:
    """Call `function` before this process opens a file in a folder for writing, or moves, makes or removes one.

    A killed run leaves what is on the disk: all moments between the same two changes are equivalent.
    """

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        changes = event in CHANGES or (event == "open" and (arguments[2] or 0) & WRITES)
        if changes and str(arguments[0]).startswith(f"{folder}/"):
            function(str(arguments[1] if event == "os.rename" else arguments[0]))

    sys.addaudithook(hook)


def train_in_fork(config: Any, folder: Path, before_change: Callable[[str], None]) -> int:
    """Return the exit code of a child process that trains, or resumes."""
    if (child := os.fork()) == 0:
        code = 1
        try:
            end_with_parent()
            before_each_change(folder, before_change)
            from oxrl.run.train import train_run

            train_run(config, folder, resume=(folder / "config.yaml").exists())
            code = 0
        except Exception:  # noqa: BLE001 - printed to standard error
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def run_with_and_without_kills(home: Path, sections: dict[str, Any], attempts: int) -> tuple[list[int], int]:
    """Train in `home/whole` without interruption, and in `home/broken` with repeated kills.

    Return the exit codes of its attempts, and how many of them ended while a checkpoint was being written.
    """
    from oxrl.config import check_config

    files = {"train_files_path": str(home / "rows.jsonl"), "val_files_path": str(home / "val.jsonl")}
    config = check_config({"model": {"name": "tiny"}, "data": files, **sections})
    counted, whole, broken = home / "changes", home / "whole", home / "broken"
    with counted.open("ab", buffering=0) as log:
        assert train_in_fork(config, whole, lambda _path: log.write(b".")) == 0
    most = counted.stat().st_size // (attempts + 2)  # changes per attempt, so that the last one has some left to do
    rng, codes, killed_writing = random.Random(1), [], 0
    for number in range(attempts):
        left = rng.randint(1, most)

        def kill_at_last(_path: str, writing: bool = number % 2 == 1) -> None:
            nonlocal left
            left -= 1
            if left <= 0 and (not writing or any(broken.glob("checkpoints/.unfinished-*"))):
                os.kill(os.getpid(), signal.SIGKILL)

        codes.append(train_in_fork(config, broken, kill_at_last))
        killed_writing += any(broken.glob("checkpoints/.unfinished-*"))
    return [*codes, train_in_fork(config, broken, lambda _path: None)], killed_writing


TRAIN = {"alg_name": "sft", "lr": 1e-3, "checkpoint_every": 1, "eval_every": 3}
MODES = {
    "full": ({"train": {**TRAIN, "train_steps_per_epoch": 16}}, 6),
    "lora": ({"lora": {"enabled": True, "dropout": 0.1}, "train": {**TRAIN, "train_steps_per_epoch": 12}}, 4),
    "online": (
        {
            "train": {**TRAIN, "train_steps_per_epoch": 10, "alg_name": "grpo", "train_batch_size_per_gpu": 4},
            "reward": {"reward_func": "length_target", "params": {"target": 6}},
            "rollout": {"n_samples": 4, "max_tokens": 12, "over_sampling_factor": 1.5, "partial_rollouts": True},
        },
        4,
    ),
    "lora, followed": (
        {
            "model": {"name": "tiny", "ref_update": "ema", "ref_decay": 0.5},
            "lora": {"enabled": True},
            "train": {
                **TRAIN,
                "alg_name": "grpo",
                "alg_params": {"kl_coef": 0.5},
                "train_steps_per_epoch": 6,
                "train_batch_size_per_gpu": 2,
            },
            "reward": {"reward_func": "length_target", "params": {"target": 6}},
            "rollout": {"n_samples": 4, "max_tokens": 12},
        },
        2,
    ),
}


def facts(folder: Path, last: int) -> tuple[dict[str, bytes], list[dict], list[str]]:
    files = {
        path.name: path.read_bytes() for path in (folder / "checkpoints" / f"step_{last:04d}").glob("*.safetensors")
    }
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timeless = [{key: line[key] for key in line if "second" not in key and key != "memory_gib"} for line in lines]
    rollouts = folder / "rollouts.jsonl"
    return files, timeless, rollouts.read_text().splitlines() if rollouts.exists() else []


def timeless(step: dict) -> dict:
    return {
        key: timeless(value) if isinstance(value, dict) else value
        for key, value in step.items()
        if "second" not in key and key not in ("memory_gib", "bytes")
    }


def records(folder: Path) -> tuple[list[dict], list[tuple[dict, list[dict]]]]:
    from oxrl.tracking.step_files import read_index, read_step, recorded_steps

    steps = [read_step(folder, step) for step in recorded_steps(folder)]
    return list(map(timeless, read_index(folder))), [(timeless(each.step), each.answers) for each in steps]


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_ends_with_the_same_bits_as_an_uninterrupted_one(tmp_path, forks, mode):
    config, attempts = MODES[mode]
    write_jsonl(tmp_path / "rows.jsonl", sums(50))
    write_jsonl(tmp_path / "val.jsonl", sums(6, first=50))
    codes, killed_writing = forks.run(run_with_and_without_kills, tmp_path, config, attempts)
    assert codes == [-signal.SIGKILL] * attempts + [0]
    assert killed_writing >= attempts // 2
    last = config["train"]["train_steps_per_epoch"]
    expected_files, expected_lines, expected_rollouts = facts(tmp_path / "whole", last)
    files, lines, rollouts = facts(tmp_path / "broken", last)
    assert len(files) == 3 + ("model" in config), "weights, optimizer and random states; a reference that has moved"
    assert files == expected_files
    assert lines == expected_lines
    assert [line["step"] for line in lines] == list(range(last + 1)), "step 0 is the evaluation before training"
    assert rollouts == expected_rollouts and len(rollouts) == (last if "rollout" in config else 0)
    index, steps = records(tmp_path / "broken")
    assert (index, steps) == records(tmp_path / "whole")
    assert [line["step"] for line in index] == [step["step"] for step, _ in steps] == list(range(1, last + 1))
    assert all(answers and step["digests"]["weights"] for step, answers in steps)
    assert not list((tmp_path / "broken").glob("checkpoints/.unfinished-*"))
    assert not list((tmp_path / "broken").glob("record/.*"))
    if mode == "online":
        assert any(line.get("carried") for line in lines), "nothing was carried over: the test proves too little"
