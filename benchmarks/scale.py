"""GRPO on a real model over Ray: two DeepSpeed ZeRO-3 ranks train, a real vLLM replica samples, on one machine.

    python benchmarks/scale.py [--steps 20] [--backend ray] [--engine vllm]

Price lists as in `examples/demo.py`. Prints the reward, the check after each sync (the largest difference between the
engine's and the trainer's log-probs), and where the seconds of a step go.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml

from oxrl.tracking.console import sparkline
from oxrl.tracking.metrics import read_metrics

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from demo import SEEN, make_lists

REWARD = '''
from oxrl.rewards.numbers import numbers_in
from oxrl.types import Status


def earned(rollout):
    """1 if the last number is right, half as much if the answer was cut off."""
    numbers = numbers_in(rollout.response)
    right = bool(numbers) and numbers[-1] == int(str(rollout.sample.answer))
    return right * (1.0 if rollout.status is Status.COMPLETED else 0.5)
'''
PARTS = ("generate_seconds", "train_seconds", "sync_seconds", "wait_seconds")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--backend", default="ray")
    parser.add_argument("--engine", default="vllm")
    parser.add_argument("--set", action="append", default=[])
    given = parser.parse_args()
    with TemporaryDirectory() as home:
        folder = Path(home)
        write(folder, given.steps, given.model)
        command = ["train", str(folder / "config.yaml"), "--output", str(folder / "run")]
        command += ["--backend", given.backend, "--engine", given.engine]
        command += [argument for each in given.set for argument in ("--set", each)]
        subprocess.run([sys.executable, "-m", "oxrl", *command], check=True)
        report(read_metrics(folder / "run" / "metrics.jsonl"))


def write(folder: Path, steps: int, model: str) -> None:
    lists = make_lists(SEEN, 64, random.Random(0), set())
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lists))
    (folder / "reward.py").write_text(REWARD)
    config = {
        "model": {"name": model},
        "data": {"train_files_path": str(folder / "prompts.jsonl"), "max_seq_len": 128},
        "reward": {"reward_func": f"{folder / 'reward.py'}:earned"},
        "train": {
            "alg_name": "grpo",
            "lr": 4e-5,
            "train_batch_size_per_gpu": 4,
            "train_steps_per_epoch": steps,
            "lr_scheduler": "constant",
        },
        "rollout": {"n_samples": 8, "max_tokens": 16, "slots": 16},
        "run": {"training_gpus": 2, "sharding": "deepspeed"},
        "deepspeed": {"zero_optimization": {"stage": 3}},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))


def report(history: list[dict[str, float]]) -> None:
    rewards = [line["reward"] for line in history]
    quarter = max(1, len(rewards) // 4)
    first, last = rewards[:quarter], rewards[-quarter:]
    print(f"reward {sparkline(rewards)}  first quarter {sum(first) / len(first):.2f}, last {sum(last) / len(last):.2f}")
    print(f"engine_gap after each sync: at most {max(line.get('engine_gap', 0.0) for line in history):.1e}")
    for name in PARTS:
        seconds = [line[name] for line in history[1:] if name in line]
        if seconds:
            print(f"{name:18} {sum(seconds) / len(seconds):6.1f} s a step")


if __name__ == "__main__":
    main()
