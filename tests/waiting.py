"""How tests wait: for an event, never for a time. A limit only ends a hang, and grows with the slowness of the machine.

The slowness is measured once per run, by the first process that imports this module; workers, ranks, servers and
scripts that it starts inherit the number.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import anyio
import pytest

VARIABLE = "OXRL_TEST_SLOWNESS"
IDLE = 0.06  # seconds for `_fixed_work` on an idle core


def _fixed_work() -> float:
    """Seconds for a fresh interpreter that counts: the processor, its caches and the scheduler in one number."""
    started = time.perf_counter()
    subprocess.run([sys.executable, "-S", "-E", "-c", "sum(range(3_000_000))"], check=True)
    return time.perf_counter() - started


def slowness() -> float:
    """How many times slower than an idle machine this one was when the run began, at least 1."""
    if VARIABLE not in os.environ:
        os.environ[VARIABLE] = f"{max(1.0, median(_fixed_work() for _ in range(9)) / IDLE):.2f}"
    return float(os.environ[VARIABLE])


HANG = 900.0 * slowness()  # seconds after which anything at all counts as hung; the slowest test takes a tenth of it
EXPIRES = 1.0 * slowness()  # a time limit under test: what it ends is blocked forever, everything else takes no time


def wait_until(condition: Callable[[], Any], what: str, process: subprocess.Popen[Any] | None = None) -> Any:
    """The first true value of `condition`; fails if `process` ends first."""
    deadline = time.monotonic() + HANG
    while not (value := condition()):
        ended = process is not None and process.poll() is not None
        if ended and not (value := condition()):
            pytest.fail(f"the process ended with {process.returncode} before {what}: {_output(process)}")
        if value:
            break
        if time.monotonic() > deadline:
            pytest.fail(f"after {HANG:g} s still waiting: {what}")
        time.sleep(0.01)
    return value


async def wait_until_async(condition: Callable[[], Any], what: str) -> Any:
    """As `wait_until`, while other tasks run."""
    deadline = time.monotonic() + HANG
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"after {HANG:g} s still waiting: {what}")
        await anyio.sleep(0.005)
    return value


def _output(process: subprocess.Popen[Any]) -> str:
    text = process.stdout.read() if process.stdout else ""
    return (text if isinstance(text, str) else text.decode(errors="replace"))[-3000:]
