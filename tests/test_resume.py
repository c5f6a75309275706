"""A run that is killed at random moments and resumed is the same run, bit for bit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rows import sums, write_jsonl

# Imports cost seconds and a run costs two: one process imports, and forks a child for every life of a run.
LIVES = """
import json, os, random, signal, sys, time
from pathlib import Path
from oxrl.config import check_config
from oxrl.wiring import train_run
import oxrl.backends.local, oxrl.loops.online, oxrl.generators.embedded, safetensors.torch, peft, anyio

home, lives, seed = Path(sys.argv[1]), int(sys.argv[3]), 1
config = check_config({
    "model": {"name": "tiny"},
    "data": {"train_files_path": str(home / "rows.jsonl"), "val_files_path": str(home / "val.jsonl")},
    **json.loads(sys.argv[2]),
})
total = config.train.train_steps_per_epoch

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
for life in range(lives):
    at_most = total * (life + 1) // (lives + 1)
    kill(live(broken), broken, chance.uniform(0.1, 0.5) * whole_seconds, at_most, writing=life % 2 == 1)
    kills += 1
    killed_writing += any(broken.glob("checkpoints/.unfinished-*"))
finished(live(broken))
print(kills, killed_writing)
"""


TRAIN = {"alg_name": "sft", "lr": 1e-3, "checkpoint_every": 1, "eval_every": 5}
MODES = {
    "full": ({"train": {**TRAIN, "train_steps_per_epoch": 40}}, 6),
    "lora": ({"lora": {"enabled": True, "dropout": 0.1}, "train": {**TRAIN, "train_steps_per_epoch": 40}}, 6),
    "online": (
        {
            "train": {**TRAIN, "train_steps_per_epoch": 16, "alg_name": "grpo", "train_batch_size_per_gpu": 4},
            "reward": {"reward_func": "length_target", "params": {"target": 6}},
            "rollout": {"n_samples": 4, "max_tokens": 12, "over_sampling_factor": 1.5, "partial_rollouts": True},
        },
        3,
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
    said = folder / "rollouts.jsonl"
    return files, timeless, said.read_text().splitlines() if said.exists() else []


@pytest.mark.parametrize("mode", MODES)
def test_a_killed_run_ends_with_the_same_bits_as_an_uninterrupted_one(tmp_path, mode):
    config, lives = MODES[mode]
    write_jsonl(tmp_path / "rows.jsonl", sums(50))
    write_jsonl(tmp_path / "val.jsonl", sums(6, first=50))
    done = subprocess.run(
        [sys.executable, "-c", LIVES, str(tmp_path), json.dumps(config), str(lives)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    kills, killed_writing = map(int, done.stdout.split()[-2:])
    assert kills == lives
    assert killed_writing >= lives // 3, "too few kills fell into the writing of a checkpoint"
    last = config["train"]["train_steps_per_epoch"]
    expected_files, expected_lines, expected_said = facts(tmp_path / "whole", last)
    files, lines, said = facts(tmp_path / "broken", last)
    assert len(files) == 3 + ("model" in config), "weights, optimizer and random states; a reference that has moved"
    assert files == expected_files
    assert lines == expected_lines
    assert [line["step"] for line in lines] == list(range(1, last + 1))
    assert said == expected_said and len(said) == (last if "rollout" in config else 0)
    assert not list((tmp_path / "broken").glob("checkpoints/.unfinished-*"))
    if mode == "online":
        assert any(line["carried"] for line in lines), "nothing was carried over: the test proves too little"
