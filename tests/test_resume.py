"""A run that is killed at random moments and resumed is the same run, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rows import sums, write_jsonl

# Imports cost seconds and a run costs two: one process imports, and forks a child for every life of a run.
LIVES = """
import os, random, signal, sys, time
from pathlib import Path
from oxrl.config import check_config
from oxrl.wiring import train_run
import oxrl.backends.local, oxrl.loops.offline, oxrl.checkpoint, safetensors.torch, peft, anyio

home, mode, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
config = check_config({
    "model": {"name": "tiny"},
    "data": {"train_files_path": str(home / "rows.jsonl"), "val_files_path": str(home / "val.jsonl")},
    "lora": {"enabled": mode == "lora", "dropout": 0.1 if mode == "lora" else 0.0},
    "train": {"lr": 1e-3, "train_steps_per_epoch": 40, "checkpoint_every": 1, "eval_every": 5},
})

def live(folder):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train_run(config, folder, resume=(folder / "config.yaml").exists())
            code = 0
        finally:
            os._exit(code)
    return child

def steps_done(folder):
    return max([int(path.name[5:]) for path in folder.glob("checkpoints/step_*")], default=0)

def kill(child, folder, after, at_most, writing):
    # After some seconds of wall-clock time, but before the run gets too far to be killed again.
    deadline = time.monotonic() + after
    while time.monotonic() < deadline and steps_done(folder) < at_most:
        time.sleep(0.001)
    while writing and not any(folder.glob("checkpoints/.unfinished-*")):
        time.sleep(0.0002)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), "the run was over before it was killed"

def finished(child):
    _, status = os.waitpid(child, 0)
    assert status == 0, status

started = time.monotonic()
finished(live(home / "whole"))
whole_seconds = time.monotonic() - started

chance, broken = random.Random(seed), home / "broken"
kills = killed_writing = 0
for life in range(6):
    kill(live(broken), broken, chance.uniform(0.1, 0.5) * whole_seconds, 6 * life + 4, writing=life % 2 == 1)
    kills += 1
    killed_writing += any(broken.glob("checkpoints/.unfinished-*"))
finished(live(broken))
print(kills, killed_writing)
"""


def facts(folder: Path) -> tuple[dict[str, bytes], list[dict]]:
    files = {path.name: path.read_bytes() for path in (folder / "checkpoints" / "step_0040").glob("*.safetensors")}
    timings = {"tokens_per_second", "step_seconds", "memory_gib"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return files, [{key: value for key, value in line.items() if key not in timings} for line in lines]


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_killed_run_ends_with_the_same_bits_as_an_uninterrupted_one(tmp_path, mode):
    write_jsonl(tmp_path / "rows.jsonl", sums(50))
    write_jsonl(tmp_path / "val.jsonl", sums(6, first=50))
    done = subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path), mode, "1"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kills, killed_writing = map(int, done.stdout.split()[-2:])
    assert kills == 6
    assert killed_writing >= 2, "too few kills fell into the writing of a checkpoint"
    expected_files, expected_lines = facts(tmp_path / "whole")
    files, lines = facts(tmp_path / "broken")
    assert len(files) == 3, "weights, optimizer and random states"
    assert files == expected_files
    assert lines == expected_lines
    assert [line["step"] for line in lines] == list(range(1, 41))
    assert not list((tmp_path / "broken").glob("checkpoints/.unfinished-*"))
