"""Write the metrics of a step as a plain line and to a JSONL file; the live display is in `console`.

A sink is any callable of (step, metrics). Metrics are written as measured: nothing is averaged here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from oxrl.parsing import parse_json
from oxrl.tracking.files import write_atomically

logger = logging.getLogger(__name__)

Sink: TypeAlias = Callable[[int, Mapping[str, float]], None]


class JSONLLogger:
    """Append one line per step to `path`. On a resumed run, `keep_until` drops the lines of steps that are repeated."""

    def __init__(self, path: str | Path, *, keep_until: int | None = None) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if keep_until is not None and self.path.exists():
            drop_lines_after(self.path, keep_until)

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        line = json.dumps({"step": step, **{name: _readable(value) for name, value in metrics.items()}})
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    log = __call__


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the lines of a metrics file, without an incomplete last line of a killed run.

    Damaged lines before it are left out with a warning.
    """
    return [row for _, row in _read_lines(Path(path))]


def drop_lines_after(path: Path, step: int) -> None:
    write_atomically(path, "".join(f"{line}\n" for line, row in _read_lines(path) if row["step"] <= step))


def _read_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The readable lines of a JSONL file, as text and parsed."""
    lines = path.read_bytes().split(b"\n")  # the last one is empty, or incomplete
    rows = [_parsed(line) for line in lines]
    damaged = [number for number, row in enumerate(rows[:-1], 1) if row is None and lines[number - 1]]
    if damaged:
        logger.warning("%s: %d damaged lines are left out, the first is line %d", path, len(damaged), damaged[0])
    return [(line.decode(), row) for line, row in zip(lines, rows, strict=True) if row is not None]


def _parsed(line: bytes) -> dict[str, Any] | None:
    """One line of a metrics file; None if it is damaged."""
    try:
        row = parse_json(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


def _readable(value: float) -> float | None:
    return value if math.isfinite(value) else None  # JSON has no NaN


def log_to_console(step: int, metrics: Mapping[str, float]) -> None:
    """Print one plain line: `step 12  loss 1.302  tokens/s 512`."""
    sys.stderr.write(_line(step, metrics) + "\n")


def _line(step: int, metrics: Mapping[str, float]) -> str:
    return "  ".join([f"step {step}", *(f"{name} {short_number(value)}" for name, value in metrics.items())])


def short_number(value: float) -> str:
    """`short_number(0.00012) == "1.20e-04"`: at most four digits."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.2e}" if abs(value) < 1e-3 or abs(value) >= 1e6 else f"{value:.4g}"


def no_log(step: int, metrics: Mapping[str, float]) -> None:
    """Log nothing."""


def as_sink(logger: Any) -> Sink:
    """A sink, the `log` method of an object that is not callable, or for None a sink that logs nothing."""
    if logger is None:
        return no_log
    if not callable(logger) and not hasattr(logger, "log"):
        raise ValueError(f"{logger!r} is no logger: pass a function of (step, metrics), or an object with such a `log`")
    sink: Sink = logger if callable(logger) else logger.log
    return sink


def all_of(*sinks: Sink) -> Sink:
    """Return a sink that forwards to several sinks."""

    def log(step: int, metrics: Mapping[str, float]) -> None:
        for sink in sinks:
            sink(step, metrics)

    return log


def memory_gib() -> float:
    """Return the memory in use by this process: of the GPU if there is one, else resident memory."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        return float(torch.cuda.memory_allocated() / 2**30)
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except FileNotFoundError:  # not Linux
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**30
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30
