"""Prompts drawn by their solve rates against uniform draws: completions until the same held-out accuracy.

    python benchmarks/solve_rate.py               # three seeds of both
    python benchmarks/solve_rate.py --seeds 1 --steps 40
    python benchmarks/solve_rate.py --rightly 0.3   # prompts that teach are answered rightly less often at first

A prompt names one of sixteen subjects, and the answer is the letter of the subject. `tiny` is fine-tuned first, so that
half of the subjects are solved, and a quarter is answered rightly about half of the time; those of the last quarter
cannot be solved: their answer is a word, and a completion has one token. Uniform draws therefore waste three groups of
four. From these weights `tiny` is trained by GRPO with both samplers, with the same rows, seeds and settings. Held-out
rows have other numbers in their prompts. Accuracy is `eval_reward` of completions that are sampled at temperature 1, at
most 75%, and completions are those that were sampled for training.
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

SOLVED, TEACH, IMPOSSIBLE = 8, 4, 4  # subjects
ANSWERS = "ABCDEFGHIJKLMNOP"
UNREACHABLE = "none"  # longer than a completion
HELD_OUT = 24  # of each subject
PROMPTS, SAMPLES = 4, 8  # of a step
ACCURACIES = (0.70, 0.72, 0.73)


def names_the_letter(rollout: Rollout) -> float:
    return float(rollout.response == rollout.sample.answer)


def rows(first: int, count: int) -> list[dict[str, Any]]:
    """Prompts of every subject, with the letter that is asked for."""
    return [
        {
            "prompt": f"{4 * ANSWERS[subject].lower()} {first + number}?",
            "answer": ANSWERS[(5 * subject + 3) % len(ANSWERS)] if subject < SOLVED + TEACH else UNREACHABLE,
        }
        for number in range(count)
        for subject in range(len(ANSWERS))
    ]


def answered(seed: int, count: int, rightly: float) -> list[dict[str, str]]:
    """Rows of the first fine-tuning: the right letter for the share of each subject, else one of all."""
    random = np.random.default_rng(seed)
    shares = [1.0] * SOLVED + [rightly] * TEACH + [0.0] * IMPOSSIBLE
    return [
        {
            "prompt": row["prompt"],
            "response": row["answer"] if random.random() < share else str(random.choice(list(ANSWERS))),
        }
        for row, share in zip(rows(400, count), shares * count, strict=True)
    ]


def write(file: Path, lines: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(file)


MODEL = {"dtype": "float32", "device": "cpu"}
BASE: dict[str, Any] = {"lr_scheduler": "constant", "warmup_steps_ratio": 0, "weight_decay": 0}
FIRST = {"lr": 3e-3, "lr_scheduler": "cosine", "warmup_steps_ratio": 0.1, "weight_decay": 0}


def first_weights(seed: int, folder: Path, rightly: float) -> str:
    train = {"alg_name": "sft", **FIRST, "train_batch_size_per_gpu": 32, "total_number_of_epochs": 3}
    config = {
        "model": {"name": "tiny", **MODEL},
        "data": {"train_files_path": write(folder / "first.jsonl", answered(seed, 150, rightly))},
        "train": train,
        "run": {"seed": seed},
    }
    return str(train_run(check_config(config), folder / "first").checkpoint)


def curve(model: str, sampler: str, seed: int, given: argparse.Namespace, folder: Path) -> list[tuple[int, float]]:
    """(completions, held-out accuracy) of one run."""
    config = {
        "model": {"name": model, **MODEL},
        "data": {
            "train_files_path": write(folder / "train.jsonl", rows(200, given.rows)),
            "val_files_path": write(folder / "val.jsonl", rows(300, HELD_OUT)),
        },
        "train": {
            "alg_name": "grpo", "lr": 3e-4, **BASE, "train_batch_size_per_gpu": PROMPTS,
            "train_steps_per_epoch": given.steps, "eval_every": given.every,
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
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=5, help="steps between evaluations")
    parser.add_argument("--rows", type=int, default=4, help="prompts of each subject")
    parser.add_argument("--rightly", type=float, default=0.5, help="right answers to prompts that teach, at first")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    found: dict[tuple[str, float], list[int | None]] = {}
    for seed in range(given.seeds):
        with tempfile.TemporaryDirectory() as name:
            model = first_weights(seed, Path(name), given.rightly)
            for sampler in ("uniform", "solve_rate"):
                points = curve(model, sampler, seed, given, Path(name))
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
