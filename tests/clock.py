"""A clock that a test advances itself, and a CPU time limit for computations."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import anyio
import pytest
import trio
from sniffio import current_async_library

from tests.waiting import HANG


async def expire(seconds: float) -> None:
    """Advance the clock by `seconds`, once every other task waits for something that has not happened yet."""
    await anyio.sleep(0)  # what other threads have handed to the loop becomes a task first
    await anyio.wait_all_tasks_blocked()
    if current_async_library() == "trio":
        clock = trio.lowlevel.current_clock()
        object.__setattr__(clock, "offset", clock.offset + seconds)  # its fields are frozen
    else:
        loop = asyncio.get_running_loop()
        now = loop.time
        loop.time = lambda: now() + seconds


@contextmanager
def no_hang() -> Iterator[None]:
    """Fail a computation that needs minutes of this process's CPU time where less than a second is enough."""

    def give_up(*_: Any) -> None:
        pytest.fail(f"still running after {HANG / 30:g} s of CPU time")

    before = signal.signal(signal.SIGVTALRM, give_up)
    signal.setitimer(signal.ITIMER_VIRTUAL, HANG / 30)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
