"""A run that is killed at random moments and resumed is the same run, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rows import sums, write_jsonl

# Imports cost seconds and a run costs two: one process imports, and forks a child for every life of the run.
LIVES = """
import os, random, signal, sys, time
from pathlib import Path
from oxrl.config import check_config
from oxrl.wiring import train_run
import oxrl.backends.local, oxrl.loops.offline, oxrl.checkpoint, safetensors.torch, peft, anyio

data, val, folder, lora, seed = Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4] == "lora", int(sys.argv[5])
kills = int(sys.argv[6])
config = check_config({
    "model": {"name": "tiny"},
    "data": {"train_files_path": str(data), "val_files_path": val},
    "lora": {"enabled": lora, "dropout": 0.1 if lora else 0.0},
    "train": {"lr": 1e-3, "total_number_of_epochs": 1, "train_steps_per_epoch": 24, "checkpoint_every": 1,
              "eval_every": 5},
})

def live(resume):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            train_run(config, folder, resume=resume)
            code = 0
        finally:
            os._exit(code)
    return child

def killed_at(child, moment):
    # moment: seconds of wall-clock time, or None for "while a checkpoint is being written"
    started = time.monotonic()
    while time.monotonic() - started < (moment or 60):
        if moment is None and any(folder.glob("checkpoints/.unfinished-*")):
            break
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.0005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True

chance = random.Random(seed)
lives = killed_writing = 0
for attempt in range(kills):
    child = live(resume=(folder / "config.yaml").exists())
    if not killed_at(child, None if attempt % 2 else chance.uniform(0.3, 2.5)):
        break
    lives += 1
    killed_writing += any(folder.glob("checkpoints/.unfinished-*"))
_, status = os.waitpid(live(resume=(folder / "config.yaml").exists()), 0)
assert status == 0, status
print(lives, killed_writing)
"""


def run_lives(tmp_path: Path, name: str, lora: str, seed: int, kills: int) -> tuple[Path, int, int]:
    data, val = tmp_path / "rows.jsonl", tmp_path / "val.jsonl"
    folder = tmp_path / name
    arguments = [str(data), str(val), str(folder), lora, str(seed), str(kills)]
    done = subprocess.run([sys.executable, "-c", LIVES, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lives, killed_writing = map(int, done.stdout.split()[-2:])
    return folder, lives, killed_writing


def facts(folder: Path) -> tuple[dict[str, bytes], list[dict]]:
    last = folder / "checkpoints" / "step_0024"
    files = {path.name: path.read_bytes() for path in last.glob("*.safetensors")}
    timings = {"tokens_per_second", "step_seconds", "memory_gib"}
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return files, [{key: value for key, value in line.items() if key not in timings} for line in lines]


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_a_killed_run_ends_with_the_same_bits_as_an_uninterrupted_one(tmp_path, mode):
    write_jsonl(tmp_path / "rows.jsonl", sums(50))
    write_jsonl(tmp_path / "val.jsonl", sums(6, first=50))
    whole, _, _ = run_lives(tmp_path, "whole", mode, seed=0, kills=0)
    broken, lives, killed_writing = run_lives(tmp_path, "broken", mode, seed=1, kills=6)
    assert lives >= 3
    assert killed_writing >= 1, "no kill fell into the writing of a checkpoint"
    expected_files, expected_lines = facts(whole)
    files, lines = facts(broken)
    assert len(files) == 3, "weights, optimizer and random states"
    assert files == expected_files
    assert lines == expected_lines
    assert [line["step"] for line in lines] == list(range(1, 25))
    assert not list(broken.glob("checkpoints/.unfinished-*"))
