"""What bounds an episode: an error that leaves it ungraded, and a clock that is paused while the model generates."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import anyio


class EpisodeError(RuntimeError):
    """The environment failed: the rollout is ungraded, with this message as its error."""


class EpisodeTime:
    """`with EpisodeTime(60.0) as time:` cancels a block after so many seconds, those in `time.paused()` left out."""

    def __init__(self, seconds: float = inf) -> None:
        self.seconds = self._left = seconds
        self._paused = 0
        self._scope: anyio.CancelScope | None = None  # while the block runs

    def __enter__(self) -> EpisodeTime:
        self._scope = anyio.CancelScope(deadline=anyio.current_time() + self.seconds)
        self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> bool | None:
        assert self._scope is not None, "entered before"
        return self._scope.__exit__(*error)

    @property
    def expired(self) -> bool:
        return self._scope is not None and self._scope.cancelled_caught

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self._scope is None:  # outside of the block there is no limit
            yield
            return
        if not self._paused:
            self._left = self._scope.deadline - anyio.current_time()
            self._scope.deadline = inf
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1
            if not self._paused:
                self._scope.deadline = anyio.current_time() + self._left
