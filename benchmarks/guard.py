"""False alarms and cost of the checks of a run: twenty healthy runs of ten algorithms and two seeds, on `tiny`.

    python benchmarks/guard.py                    # all of them
    python benchmarks/guard.py --only grpo,ppo --steps 30 --seeds 1

Every run goes through `train_run` with the checks as they are by default. Runs that sample start from a model that was
fine-tuned on the same sums, so that it ends its answers and some of them are right, as before real RL. A finding is a
false alarm, and the script then exits with 1. The cost is `check_seconds` as a share of the step, the median over
steps, apart for the first two steps, in which the model is run for checks, and for all later ones.
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oxrl.config import check_config
from oxrl.guard.findings import states_of
from oxrl.run.train import train_run

OFFLINE = ("sft", "dpo", "kto", "rm", "orpo")
ONLINE = ("grpo", "ppo", "rloo", "dapo", "gspo")
ROWS = 48


def rows_for(algorithm: str) -> list[dict[str, Any]]:
    sums = [(f"{i} + {i % 7}?", str(i + i % 7)) for i in range(ROWS)]
    if algorithm in ("dpo", "rm", "orpo"):
        return [{"prompt": prompt, "chosen": right, "rejected": "I do not know."} for prompt, right in sums]
    if algorithm == "kto":
        pairs = [(prompt, right, True) for prompt, right in sums] + [(prompt, "No.", False) for prompt, _ in sums]
        return [{"prompt": prompt, "completion": text, "label": label} for prompt, text, label in pairs]
    return [{"prompt": prompt, "response": right} for prompt, right in sums]


def config_of(algorithm: str, seed: int, steps: int, folder: Path, model: str) -> dict[str, Any]:
    data = folder / f"{algorithm}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows_for(algorithm)))
    samples = algorithm in ONLINE
    sampling: Mapping[str, Any] = {
        "reward": {"reward_func": "number_match"},
        "rollout": {"n_samples": 8, "max_tokens": 12},
    }
    return {
        "model": {"name": model if samples else "tiny", "device": "cpu"},
        "data": {"train_files_path": str(data), "val_files_path": str(data)},
        "train": {
            "alg_name": algorithm,
            "lr": 3e-4 if samples else 1e-3,
            "train_batch_size_per_gpu": 8,
            "train_steps_per_epoch": steps,
        },
        "run": {"seed": seed},
        **(sampling if samples else {}),
    }


def warm_start(folder: Path) -> str:
    """A model that answers the sums in their format, and some of them right."""
    config = config_of("sft", 0, 240, folder, "tiny")
    config["train"] |= {"lr": 3e-3}
    del config["data"]["val_files_path"]
    return str(train_run(check_config(config), folder / "warm").checkpoint)


def shares(history: list[dict[str, float]]) -> list[float]:
    """The share of the checks in the seconds of each step: of sampling, training and the checks themselves."""
    found = []
    for row in history:
        if "check_seconds" not in row:  # an evaluation alone
            continue
        step = row.get("step_seconds") or row["generate_seconds"] + row["train_seconds"]
        found.append(row["check_seconds"] / step)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join((*OFFLINE, *ONLINE)))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    given = parser.parse_args()
    logging.disable(logging.INFO)
    alarms = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = warm_start(folder) if set(given.only.split(",")) & set(ONLINE) else "tiny"
        for algorithm in given.only.split(","):
            for seed in range(given.seeds):
                config = check_config(config_of(algorithm, seed, given.steps, folder, model))
                result = train_run(config, folder / f"{algorithm}-{seed}")
                states = states_of(result.folder)
                faults = [f"{each.check} ({each.message})" for each in states if each.is_fault]
                passed = sum(each.state == "passed" for each in states)
                alarms += len(faults)
                cost = shares(result.history)
                milliseconds = [1000 * row["check_seconds"] for row in result.history if "check_seconds" in row]
                sys.stdout.write(
                    f"{algorithm:6} seed {seed}: {passed} passed, {len(faults)} alarms {'; '.join(faults)}  "
                    f"first steps {100 * statistics.median(cost[:2]):.1f}% "
                    f"({statistics.median(milliseconds[:2]):.0f} ms), later {100 * statistics.median(cost[2:]):.2f}% "
                    f"({statistics.median(milliseconds[2:]):.2f} ms)\n"
                )
                sys.stdout.flush()
    sys.stdout.write(f"{alarms} alarms\n")
    sys.exit(int(alarms > 0))


if __name__ == "__main__":
    main()
