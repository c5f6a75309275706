"""Progress inside a step: how many of its answers, prompts or micro-batches are done."""

from __future__ import annotations

import time
from collections.abc import Callable


def time_left(seconds: float) -> str:
    """`time_left(39009) == "10:50 h left"`, `time_left(41) == "41 s left"`."""
    if seconds < 60:
        return f"{max(0, round(seconds))} s left"
    minutes = round(seconds / 60)
    return f"{minutes // 60}:{minutes % 60:02d} h left"


def no_listener() -> None:
    """For work that is not displayed."""


class Activity:
    """`activity.start("answers", 64)`, then `activity.advance()` for each; `str(activity)` is what a console shows.

    `listener` is called after each change. Without a start, `advance` does nothing.
    """

    def __init__(
        self, listener: Callable[[], None] = no_listener, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.listener, self.clock = listener, clock
        self.what, self.done, self.total, self.started = "", 0, 0, 0.0

    def start(self, what: str, total: int) -> None:
        self.what, self.done, self.total, self.started = what, 0, total, self.clock()
        self.listener()

    def advance(self) -> None:
        self.done += 1
        self.listener()

    def end(self) -> None:
        self.total = 0

    def __str__(self) -> str:
        if self.done >= self.total:
            return ""
        text = f"{self.done} of {self.total} {self.what}"
        if not self.done:
            return text
        elapsed = self.clock() - self.started
        return f"{text}, {time_left(elapsed / self.done * (self.total - self.done))}"
