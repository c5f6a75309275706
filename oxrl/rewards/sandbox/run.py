"""Source text to an `Outcome`: a program that nobody trusts, run on its own, with what it said and how it ended."""

from __future__ import annotations

import signal
import subprocess
import time
from typing import Literal, NamedTuple

from oxrl.rewards.sandbox.isolation import Isolation, isolation_or_refusal
from oxrl.rewards.sandbox.process import LONGEST_STATUS, Job, Limits, caged, gather, in_memory


class Outcome(NamedTuple):
    """`Outcome("exit", 0, "42\\n", "", 0.05)`: `code` is an exit code, or the number of the signal that ended it.

    "time" and "output" were ended because of that limit. All of it is what the program makes of itself: an exit code
    of 0 says nothing about whether it is right.
    """

    ended: Literal["exit", "signal", "time", "output"]
    code: int
    stdout: str
    stderr: str
    seconds: float


def run_program(
    source: str, *, stdin: str = "", limits: Limits | None = None, isolation: Isolation | None = None
) -> Outcome:
    """Run Python source as `__main__` in a fresh process, with the standard library and nothing else.

    Without `isolation` the best that works here; where there is none, a ValueError (`isolation_or_refusal`).
    """
    isolation, limits = isolation or isolation_or_refusal(), limits or Limits()
    started_at = time.monotonic()
    deadline = started_at + limits.seconds
    with (
        in_memory(stdin.encode(errors="surrogatepass")) as given,
        caged(
            Job({"source": source}),
            isolation.layers,
            limits,
            bwrap=isolation.bwrap,
            stdin=given.fileno(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as started,
    ):
        process = started.process
        assert process.stdout is not None, "it was asked for"
        assert process.stderr is not None, "it was asked for"
        out, err = process.stdout.fileno(), process.stderr.fileno()
        said, reason = gather({started.status: LONGEST_STATUS, out: limits.output, err: limits.output}, deadline)
        if reason == "end":
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:  # it closed what we read from and goes on
                reason = "time"
        code = process.poll()
    if isolation.bwrap is not None and code is not None and code > 128:
        code = 128 - code  # as bubblewrap reports a signal
    started.confirm(said[started.status])
    texts = said[out].decode(errors="replace"), said[err].decode(errors="replace")
    seconds = time.monotonic() - started_at
    if reason == "output":
        return Outcome("output", 9, *texts, seconds)
    out_of_cpu = -(signal.SIGKILL if isolation.bwrap else signal.SIGXCPU)  # as the cage sets the limit
    if reason == "time" or code in (None, out_of_cpu):
        return Outcome("time", 9, *texts, seconds)
    return Outcome("exit" if code >= 0 else "signal", abs(code), *texts, seconds)
