"""Prompts drawn by their solve rates against uniform draws: completions until the same held-out accuracy.

    python benchmarks/solve_rate.py               # three seeds of both
    python benchmarks/solve_rate.py --seeds 1 --steps 40

A prompt names one of twelve subjects, and the answer is the letter of the subject. `tiny` is fine-tuned first, on
answers of which only a share is right: half of the subjects are solved then, a quarter is answered rightly half of the
time, and a quarter rarely. From these weights it is trained by GRPO with both samplers, with the same rows, seeds and
settings. Held-out rows have other numbers in their prompts. Accuracy is `eval_reward` of answers that are sampled at
temperature 1, and completions are those that were sampled for training.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from oxrl.config import check_config
from oxrl.run.train import train_run
from oxrl.types import Rollout

RIGHT = (1.0,) * 6 + (0.5,) * 3 + (0.2,) * 3  # share of right answers of each subject in the first fine-tuning
ANSWERS = "ABCDEFGHIJKL"
ROWS, HELD_OUT = 8, 8  # of each subject
PROMPTS, SAMPLES = 8, 8  # of a step
ACCURACIES = (0.75, 0.85, 0.95)


def names_the_letter(rollout: Rollout) -> float:
    return float(rollout.response.startswith(str(rollout.sample.answer)))


def rows(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {
            "prompt": f"{4 * ANSWERS[subject].lower()} {first + number}?",
            "answer": ANSWERS[(5 * subject + 3) % len(RIGHT)],
        }
        for number in range(count)
        for subject in range(len(RIGHT))
    ]


def answered(seed: int, count: int) -> list[dict[str, str]]:
    """Rows of the first fine-tuning: the right letter for the share of each subject, else one of all."""
    random = np.random.default_rng(seed)
    return [
        {
            "prompt": row["prompt"],
            "response": row["answer"] if random.random() < share else str(random.choice(list(ANSWERS))),
        }
        for row, share in zip(rows(400, count), RIGHT * count, strict=True)
    ]


def write(file: Path, lines: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


BASE: dict[str, Any] = {"lr_scheduler": "constant", "warmup_steps_ratio": 0, "weight_decay": 0}


def first_weights(seed: int, folder: Path) -> str:
    config = {
        "model": {"name": "tiny", "dtype": "float32", "device": "cpu"},
        "data": {"train_files_path": write(folder / "first.jsonl", answered(seed, 400))},
        "train": {"alg_name": "sft", "lr": 5e-3, "train_batch_size_per_gpu": 16, **BASE, "total_number_of_epochs": 2},
        "run": {"seed": seed},
    }
    return str(train_run(check_config(config), folder / "first").checkpoint)


def curve(model: str, sampler: str, seed: int, steps: int, every: int, folder: Path) -> list[tuple[int, float]]:
    """(completions, held-out accuracy) of one run."""
    config = {
        "model": {"name": model, "dtype": "float32", "device": "cpu"},
        "data": {
            "train_files_path": write(folder / "train.jsonl", rows(200, ROWS)),
            "val_files_path": write(folder / "val.jsonl", rows(300, HELD_OUT)),
        },
        "train": {
            "alg_name": "grpo", "lr": 3e-4, **BASE, "train_batch_size_per_gpu": PROMPTS,
            "train_steps_per_epoch": steps, "eval_every": every,
        },
        "reward": {"reward_func": f"{__file__}:names_the_letter"},
        "rollout": {
            "n_samples": SAMPLES, "max_tokens": 1, "eval_temperature": 1.0, "sampler": sampler, "record": "off"
        },
        "run": {"seed": seed},
    }  # fmt: skip
    result = train_run(check_config(config), folder / sampler)
    return [
        (int(row["step"]) * PROMPTS * SAMPLES, row["eval_reward"]) for row in result.history if "eval_reward" in row
    ]


def needed(points: list[tuple[int, float]], accuracy: float) -> int | None:
    """Completions until the first evaluation of at least this accuracy."""
    return next((completions for completions, value in points if value >= accuracy), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=320)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[tuple[str, float], list[int | None]] = {}
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as name:
            model = first_weights(seed, Path(name))
            for sampler in ("uniform", "solve_rate"):
                points = curve(model, sampler, seed, given.steps, given.every, Path(name))
                for accuracy in ACCURACIES:
                    found.setdefault((sampler, accuracy), []).append(needed(points, accuracy))
                marks = "  ".join(f"{each:.0%}: {found[sampler, each][-1]}" for each in ACCURACIES)
                sys.stdout.write(
                    f"seed {seed} {sampler:10}  start {points[0][1]:.1%}  {marks}  end {points[-1][1]:.1%}\n"
                )
                sys.stdout.flush()
    for (sampler, accuracy), counts in sorted(found.items()):
        known = [count for count in counts if count is not None]
        mean = f"{statistics.mean(known):.0f}" if len(known) == len(counts) else "not reached by all"
        sys.stdout.write(f"{sampler:10} {accuracy:.0%}: mean {mean} of {counts}\n")


if __name__ == "__main__":
    main()
