"""What the record of a step costs, on `tiny`: CPU time of the recorder as a share of the step, and bytes per token.

    python benchmarks/record.py                 # grpo, sft and dpo with `groups` and `full`
    python benchmarks/record.py --only grpo --steps 30

One thread. Times are of the thread that trains, so that other processes do not count; the first four steps, in which
caches are filled, are left out.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oxrl.config import check_config
from oxrl.loops.step_record import StepRecorder
from oxrl.run.train import train_run
from oxrl.tracking.step_files import read_index, read_step, recorded_steps

SKIPPED = 4
COLUMNS = {"grpo": ("prompt", "answer"), "sft": ("prompt", "response"), "dpo": ("prompt", "chosen", "rejected")}
spent = 0.0


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    def measured(*values: Any) -> Any:
        global spent
        started = time.thread_time()
        try:
            return method(*values)
        finally:
            spent += time.thread_time() - started

    return measured


def config_of(algorithm: str, mode: str, steps: int, folder: Path) -> dict[str, Any]:
    rows = [
        {"prompt": f"What is {i} + 1?", "answer": f"{i + 1}", "response": f"It is {i + 1}.", "chosen": f"It is {i + 1}"}
        | {"rejected": "No, I do not know it at all"}
        for i in range(64)
    ]
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps({key: row[key] for key in COLUMNS[algorithm]}) + "\n" for row in rows))
    config: dict[str, Any] = {
        "model": {"name": "tiny", "device": "cpu"},
        "data": {"train_files_path": str(data)},
        "train": {"alg_name": algorithm, "lr": 1e-3, "train_steps_per_epoch": steps, "train_batch_size_per_gpu": 8},
        "rollout": {"record": mode},
        "run": {"checks": {"all": "off"}},
    }
    if algorithm == "grpo":
        config["rollout"] |= {"n_samples": 8, "max_tokens": 64}
        config["reward"] = {"reward_func": "oxrl.diagnose.verify_model:any_difference"}
    return config


def measure(algorithm: str, mode: str, steps: int, folder: Path) -> str:
    clocks: list[tuple[float, float]] = []

    def on_step(_step: int, _metrics: dict[str, float]) -> None:
        clocks.append((time.process_time(), spent))

    run = train_run(check_config(config_of(algorithm, mode, steps, folder)), folder / "run", callbacks=[on_step]).folder
    (began, before), (ended, after) = clocks[SKIPPED - 1], clocks[-1]
    counted = len(clocks) - SKIPPED
    step, record = 1000 * (ended - began) / counted, 1000 * (after - before) / counted
    tokens = [answer["tokens"] for number in recorded_steps(run) for answer in read_step(run, number).answers]
    size = sum(line["bytes"] for line in read_index(run))
    known, trained = sum(len(each["ids"]) for each in tokens), sum(sum(each["mask"]) for each in tokens)
    return (
        f"{algorithm:5} {mode:7} record {record:.1f} ms of {step:.0f} ms ({100 * record / step:.1f}%), "
        f"{size / known:.0f} bytes per token, {size / trained:.0f} per trained token, "
        f"{size / steps / 1024:.0f} KiB a step"
    )


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(COLUMNS))
    parser.add_argument("--steps", type=int, default=16)
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    for name in ("begin", "credited", "passed", "record"):
        setattr(StepRecorder, name, timed(getattr(StepRecorder, name)))
    for algorithm in given.only.split(","):
        for mode in ("groups", "full"):
            with tempfile.TemporaryDirectory() as folder:
                sys.stdout.write(measure(algorithm, mode, given.steps, Path(folder)) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main()
