"""The memory that `oxrl plan` estimates, compared with what the run uses; each run is a separate process.

    python benchmarks/plan.py [--models tiny smollm2-135m] [--kinds sft grpo] [--tokens 512 1024]

Runs are short (two steps of two full micro-batches) and real: config, data, loading, training, checkpoint. Measured is
the largest resident memory of the process (VmHWM). The run fails if an estimate is off by more than a fifth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

ALLOWED = 0.2
KINDS = ("sft", "lora", "dpo", "grpo", "ppo")
SENTENCE = "the ox pulls a cart over hills of red clay while rain falls on old stone roads"
WORDS = SENTENCE.split()
WORDS_PER_ROW = {"tiny": 8, "smollm2-135m": 40}  # bytes against words: about as many tokens


def make_config(folder: Path, model: str, kind: str, budget: int, checkpointing: bool) -> dict[str, Any]:
    """A run whose steps fill two micro-batches."""
    count, online = WORDS_PER_ROW[model], kind in ("grpo", "ppo")

    def text(number: int) -> str:
        return " ".join([str(number % 10), *(WORDS[(number + index) % len(WORDS)] for index in range(count))])

    numbers = range(64)
    if kind == "dpo":
        rows = [{"prompt": text(n), "chosen": text(n + 1), "rejected": text(n + 2)} for n in numbers]
    else:
        rows = [{"prompt": text(n), "response": text(n + 1)} for n in numbers]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    per_item = 8 * 48 if online else 180 if kind == "dpo" else 110
    return {
        "model": {"name": model, "gradient_checkpointing": checkpointing, "device": "cpu"},
        "data": {"train_files_path": str(data)},
        "train": {
            "alg_name": "sft" if kind == "lora" else kind,
            "train_steps_per_epoch": 2,
            "train_batch_size_per_gpu": max(2, 2 * budget // per_item),
            "micro_batch_tokens": budget,
        },
        "lora": {"enabled": kind == "lora"},
        "reward": {"reward_func": "number_match"} if online else {},
        "rollout": {"n_samples": 8, "max_tokens": 48, "slots": 16},
    }


def estimate(config: dict[str, Any], folder: Path) -> dict[str, float]:
    from oxrl.config import check_config
    from oxrl.diagnose.plan import plan_run

    plan = plan_run(check_config(config), folder / "run")
    return {"peak": plan.memory.peak}


def measure(config: dict[str, Any], folder: Path) -> dict[str, float]:
    from oxrl.config import check_config
    from oxrl.run.train import train_run

    train_run(check_config(config), folder / "run")
    status = Path("/proc/self/status").read_text().splitlines()
    peak = next(line for line in status if line.startswith("VmHWM"))
    return {"peak": int(peak.split()[1]) * 1024}


def in_own_process(what: str, case: tuple[str, str, int, bool]) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, __file__, "--alone", what, *map(str, case)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{what} of {case} failed:\n{done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def alone(what: str, model: str, kind: str, budget: str, checkpointing: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        config = make_config(Path(folder), model, kind, int(budget), checkpointing == "True")
        print(json.dumps({"estimate": estimate, "measure": measure}[what](config, Path(folder))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(WORDS_PER_ROW))
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--tokens", nargs="+", type=int, default=[512, 1024])
    parser.add_argument("--alone", nargs=5, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.alone:
        alone(*chosen.alone)
        return
    print("| model | run | micro-batch tokens | checkpointing | estimated GiB | measured GiB | error |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for case in product(chosen.models, chosen.kinds, chosen.tokens, (False, True)):
        model, kind, budget, checkpointing = case
        estimated, measured = in_own_process("estimate", case), in_own_process("measure", case)
        error = estimated["peak"] / measured["peak"] - 1
        worst = max(worst, abs(error))
        figures = f"{estimated['peak'] / 2**30:.2f} | {measured['peak'] / 2**30:.2f} | {error:+.0%}"
        print(f"| {model} | {kind} | {budget} | {'yes' if checkpointing else 'no'} | {figures} |", flush=True)
    print(f"largest error {worst:.0%}")
    raise SystemExit(worst > ALLOWED)


if __name__ == "__main__":
    main()
