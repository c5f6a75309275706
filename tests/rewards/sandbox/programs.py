"""One program in one sandbox, with its output and how it ended: what tests of the isolation look at."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import Literal, NamedTuple

from oxrl.rewards.sandbox.isolation import Isolation
from oxrl.rewards.sandbox.process import MAX_STATUS_BYTES, Job, Limits, read_all, sandboxed
from tests.waiting import HANG


class Outcome(NamedTuple):
    """`Outcome("exit", 0, "42\\n", "")`: `code` is an exit code, or the signal that ended the program.

    "time" and "output": terminated because of that limit.
    """

    ended: Literal["exit", "signal", "time", "output"]
    code: int
    stdout: str
    stderr: str


def run_program(source: str, isolation: Isolation, limits: Limits) -> Outcome:
    """Run Python source as `__main__` in a fresh process, with the standard library only."""
    deadline = time.monotonic() + limits.seconds
    job, pipe = Job({"source": source}), subprocess.PIPE
    with sandboxed(job, isolation.layers, limits, bwrap=isolation.bwrap, stdout=pipe, stderr=pipe) as started:
        process = started.process
        out, err = process.stdout.fileno(), process.stderr.fileno()
        content, reason = read_all({started.status: MAX_STATUS_BYTES, out: limits.output, err: limits.output}, deadline)
        if reason == "end":
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # it closed its outputs and keeps running
                reason = "time"
        code = process.poll()
    if isolation.bwrap is not None and code is not None and code > 128:
        code = 128 - code  # as bubblewrap reports a signal
    started.check_status(content[started.status])
    texts = content[out].decode(errors="replace"), content[err].decode(errors="replace")
    out_of_cpu = -(signal.SIGKILL if isolation.bwrap else signal.SIGXCPU)
    if reason == "end" and code in (None, out_of_cpu):
        reason = "time"
    if reason in ("time", "output"):
        return Outcome(reason, signal.SIGKILL, *texts)
    return Outcome("exit" if code >= 0 else "signal", abs(code), *texts)


def refused(source: str, isolation: Isolation) -> None:
    """Check that every line of `source` fails with an OSError."""
    lines = "\n".join(
        f"try:\n    {line}\n    print({line!r}, 'worked')\nexcept OSError: pass" for line in source.strip().splitlines()
    )
    imports = "import os, sys, socket, signal, subprocess"
    outcome = run_program(f"{imports}\n{lines}\nprint('end')", isolation, Limits(seconds=HANG))
    assert outcome.stdout == "end\n", (outcome.stdout, outcome.stderr)
