"""Write the metrics of a step to the console and to a JSONL file.

A sink is any callable of (step, metrics). Metrics are written as measured: nothing is averaged here.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias

from oxrl.parsing import parse_json
from oxrl.tracking.files import write_atomically

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

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
    return "  ".join([f"step {step}", *(f"{name} {_short(value)}" for name, value in metrics.items())])


def _short(value: float) -> str:
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


class LiveConsole:
    """Progress bar with loss, speed, memory and remaining time on a terminal; plain lines otherwise."""

    def __init__(self, total_steps: int, *, first_step: int = 0, plain_every: int = 10) -> None:
        from rich.console import Console

        self.console = Console(stderr=True)
        self.total, self.first, self.plain_every = total_steps, first_step, plain_every
        self.started = time.monotonic()
        self.curve: list[float] = []
        self.progress: Progress | None = None
        self.task: TaskID | None = None

    def __enter__(self) -> LiveConsole:
        if self.console.is_terminal:
            self.progress = _progress(self.console)
            self.progress.start()
            self.task = self.progress.add_task("training", total=self.total, completed=self.first, numbers="")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.progress is not None:
            self.progress.stop()

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = {name: metrics[name] for name in _HEADLINES if name in metrics}
        evaluated = {name: value for name, value in metrics.items() if name.startswith("eval_")}
        shown |= evaluated
        self.curve.append(metrics.get("reward", metrics.get("loss", math.nan)))
        if self.progress is not None and self.task is not None:
            self.progress.update(self.task, completed=step, numbers=f"{sparkline(self.curve)}  {_line(step, shown)}")
            if evaluated:  # stays above the bar
                self.progress.console.print(_line(step, shown), highlight=False)
        elif step % self.plain_every == 0 or step in (self.first + 1, self.total) or evaluated:
            done = max(1, step - self.first)
            left = (time.monotonic() - self.started) / done * (self.total - step)
            log_to_console(step, {**shown, "seconds_left": round(left)})

    log = __call__

    def print_line(self, line: str) -> None:
        """Print a line above the progress bar."""
        self.console.print(line, highlight=False, markup=False, style="dim")


_HEADLINES = (
    "reward",
    "loss",
    "length",
    "entropy",
    "lr",
    "tokens_per_second",
    "generated_per_second",
    "memory_gib",
)
_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """`sparkline([0, 1, 2]) == "▁▅█"`: the last values as a small curve, scaled from minimum to maximum."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in shown)


def _progress(console: Any) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[numbers]}"),
        console=console,
    )


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
