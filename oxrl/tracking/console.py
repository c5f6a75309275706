"""The metrics of a run on a screen: one live line that fits its width on a terminal, plain lines otherwise."""

from __future__ import annotations

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

from oxrl.tracking.activity import Activity, time_left
from oxrl.tracking.catalogue import EVAL, headlines
from oxrl.tracking.metrics import short_number

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live

LONG = 600.0  # seconds; the expected time of a longer run is printed after its first step
SILENT = 60.0  # seconds without a line in a log, after which progress inside a step is printed
CURVE = 16  # characters
_BARS = "▁▂▃▄▅▆▇█"


class LiveConsole:
    """Step, time left, progress inside the step and the most informative metrics, as far as they fit.

    `activity` is what the step does at the moment; samplers, evaluations and backends report to it.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        first_step: int = 0,
        plain_every: int = 10,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        from rich.console import Console

        self.console = console or Console(stderr=True)
        self.total, self.first, self.plain_every, self.clock = total_steps, first_step, plain_every, clock
        self.activity = Activity(self._changed, clock=clock)
        self.pace = Pace(first_step, total_steps, clock)
        self.step, self.shown, self.curve = first_step, dict[str, float](), list[float]()
        self.printed = clock()
        self._stack = ExitStack()
        self._live: Live | None = None
        self._announced = False

    def __enter__(self) -> LiveConsole:
        if self.console.is_terminal:
            from rich.live import Live

            self._live = Live(get_renderable=self._renderable, console=self.console, refresh_per_second=4)
            self._stack.enter_context(self._live)
            self._stack.enter_context(_handlers_follow())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.activity.end()
        self._stack.close()
        self._live = None

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        self.activity.end()
        self.step, self.shown = step, headlines(metrics)
        self.pace.reached(step, seconds_of(metrics))
        evaluated = any(name.startswith(EVAL) for name in metrics)
        if "loss" in metrics:
            self.curve.append(metrics.get("reward", metrics["loss"]))
        if self._live is not None:
            if evaluated:  # stays above the live line
                self._print(self._line(), None)
            self._live.refresh()
        elif evaluated or step % self.plain_every == 0 or step in (self.first + 1, self.total):
            self._print(self._line(), None)
        if self.pace.known and not self._announced:
            self._announce(step)

    log = __call__

    def _announce(self, step: int) -> None:
        self._announced = True
        if (expected := self.pace.left()) > LONG:
            self.print_line(
                f"about {time_left(expected)} for {self.total - step} steps: an estimate from the first "
                f"{step - self.first}, often too high, as the first step is slower than the others"
            )

    def print_line(self, line: str) -> None:
        """Print a line above the live line."""
        self._print(line, "dim")

    def _print(self, line: str, style: str | None) -> None:
        self.printed = self.clock()
        self.console.print(line, highlight=False, markup=False, style=style, soft_wrap=True)

    def _changed(self) -> None:
        """In a log, a step that takes long prints its progress; a live line is redrawn anyway."""
        if self._live is None and str(self.activity) and self.clock() - self.printed >= SILENT:
            self._print(f"step {self.step + 1}/{self.total}: {self.activity}", None)

    def _line(self) -> str:
        metrics = [f"{name} {short_number(value)}" for name, value in self.shown.items()]
        left = [self._left()] if self.pace.known else []
        return "  ".join([f"step {self.step}/{self.total}", *metrics, *left])

    def _left(self) -> str:
        return time_left(self.pace.left()) if self.pace.known else "? left"

    def _renderable(self) -> Any:
        from rich.text import Text

        return Text(self.live_line(self.console.width), no_wrap=True, overflow="crop")

    def live_line(self, width: int) -> str:
        """As much as fits into `width` characters; step and time left always come first, evaluations last.

        The latter are printed above it.
        """
        pieces = [f"{self.step}/{self.total}", self._left(), str(self.activity), sparkline(self.curve, CURVE)]
        shown = sorted(self.shown, key=lambda name: name.startswith(EVAL))
        pieces += [f"{name} {short_number(self.shown[name])}" for name in shown]
        line = ""
        for piece in filter(None, pieces):
            longer = f"{line}  {piece}" if line else piece
            if len(longer) > width:
                break
            line = longer
        return line


class Pace:
    """Seconds per step, from what was measured so far; the first step counts only until there is another.

    Before it, models are loaded and memory is tested: its own `seconds` are used if they are known.
    """

    def __init__(self, first_step: int, total: int, clock: Callable[[], float]) -> None:
        self.total, self.clock = total, clock
        self.origin = self.last = (first_step, clock())
        self.known, self._first = False, True

    def reached(self, step: int, seconds: float = 0.0) -> None:
        now = (step, self.clock())
        if step <= self.origin[0]:  # an evaluation before the first step
            self.origin = self.last = now
            return
        if not self.known and seconds:
            self.origin = (step - 1, now[1] - seconds)
        if self.known and self._first:
            self.origin, self._first = self.last, False
        self.last, self.known = now, True

    def left(self) -> float:
        (step, since), (at, then) = self.origin, self.last
        per_step = (then - since) / max(1, at - step)
        return max(0.0, per_step * (self.total - at) - (self.clock() - then))


def seconds_of(metrics: Mapping[str, float]) -> float:
    """Of the step itself, as far as it was measured."""
    return metrics.get("step_seconds", metrics.get("generate_seconds", 0.0) + metrics.get("train_seconds", 0.0))


@contextmanager
def _handlers_follow() -> Iterator[None]:
    """Let log handlers that hold the terminal's streams write above the live line, as rich's `sys.stderr` does."""
    loggers = [logging.getLogger(), *map(logging.getLogger, list(logging.root.manager.loggerDict))]
    handlers = {id(handler): handler for each in loggers for handler in each.handlers}.values()
    moved: list[tuple[Any, Any]] = []
    for handler in handlers:
        stream = getattr(handler, "stream", None)
        target = next((now for was, now in _streams() if stream is not None and stream in was), None)
        if isinstance(handler, logging.StreamHandler) and target is not None:
            moved.append((handler, handler.setStream(target)))
    try:
        yield
    finally:
        for handler, stream in moved:
            handler.setStream(stream)


def _streams() -> list[tuple[tuple[Any, ...], Any]]:
    """Each stream that a handler may hold, and the one that rich has put in its place."""
    return [
        ((sys.__stderr__, getattr(sys.stderr, "rich_proxied_file", None)), sys.stderr),
        ((sys.__stdout__, getattr(sys.stdout, "rich_proxied_file", None)), sys.stdout),
    ]


def sparkline(values: Sequence[float], width: int = 32) -> str:
    """`sparkline([0, 1, 2]) == "▁▅█"`: the last values as a small curve, scaled from minimum to maximum."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    return "".join(_BARS[round((value - low) / span * (len(_BARS) - 1)) if span else 0] for value in shown)
