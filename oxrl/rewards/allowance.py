"""The time that a reward may take: it stops while the reward waits for something that all rewards share.

`grade` cancels a reward when its allowance is used up; a reward that runs in a thread finds its own by
`current_allowance`, and passes what is left of it on to the process that works for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import anyio

T = TypeVar("T")
DEFAULT_SECONDS = 30.0
_SHORTEST_CHECK = 0.01  # seconds between two looks at a reward that waits


class Allowance:
    """`Allowance(30.0)`: seconds that begin now; the thread of the reward stops them by `stopped`."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._began = time.monotonic()
        self._waited, self._waits_since = 0.0, None  # type: float, float | None

    @property
    def waited(self) -> float:
        since = self._waits_since
        return self._waited + (0.0 if since is None else time.monotonic() - since)

    @property
    def left(self) -> float:
        return self.seconds + self.waited - (time.monotonic() - self._began)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Time in this block does not count."""
        self._waits_since = time.monotonic()
        try:
            yield
        finally:
            self._waited, self._waits_since = self.waited, None

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function that finds this allowance by `current_allowance`."""
        token = _CURRENT.set(self)
        try:
            return function(*args)
        finally:
            _CURRENT.reset(token)

    async def cancel_at_end(self, scope: anyio.CancelScope) -> None:
        began = anyio.current_time()
        while (left := self.seconds + self.waited - (anyio.current_time() - began)) > 0:
            await anyio.sleep(max(left, _SHORTEST_CHECK))
        scope.cancel()


_CURRENT: ContextVar[Allowance | None] = ContextVar("allowance", default=None)


def current_allowance() -> Allowance:
    """The allowance of the reward that this thread grades; a new one of 30 s outside of `grade`."""
    return _CURRENT.get() or Allowance(DEFAULT_SECONDS)
