"""Log a run to TensorBoard event files in `tensorboard/` of the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from oxrl.tracking.logs import rank
from oxrl.tracking.trackers import Outcome, RunInfo, Tracker

FOLDER = "tensorboard"


def open_tracker(run_info: RunInfo) -> Tracker:
    writer = _writer(str(run_info.folder / FOLDER))
    if run_info.id is None:
        writer.add_text("config", f"```json\n{json.dumps(run_info.parameters, indent=1)}\n```")

    def end(outcome: Outcome) -> None:  # noqa: ARG001 - same signature for all trackers
        writer.close()

    return Tracker(lambda step, metrics: _write(writer, step, metrics), end, FOLDER)


def log_to_tensorboard(step: int, metrics: Mapping[str, float]) -> None:
    """Log to a new folder below `runs/`, one per process."""
    if rank() == 0:
        _write(_writer_of_this_process(), step, metrics)


@cache
def _writer_of_this_process() -> Any:
    return _writer(None)


def _writer(folder: str | None) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


def _write(writer: Any, step: int, metrics: Mapping[str, float]) -> None:
    for name, value in metrics.items():
        writer.add_scalar(name, value, step)
    writer.flush()  # so that a killed run has logged all its steps
