"""Shared by the comparisons with TRL: a separate process for each side, and a callback that times TRL's steps."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from typing import Any


def in_own_process(script: str, side: str, given: list[str]) -> dict[str, Any]:
    """Return the last line that one side of a benchmark prints; the process has its own peak memory."""
    done = subprocess.run([sys.executable, script, "--side", side, *given], capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def clock(stamps: list[float]) -> Any:
    """Return a callback that records when the first step starts and when each one ends."""
    from transformers import TrainerCallback

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: object, **__: object) -> None:
            if not stamps:
                stamps.append(time.monotonic())

        def on_step_end(self, *_: object, **__: object) -> None:
            stamps.append(time.monotonic())

    return Clock()
