"""Runs a program against tests, in two processes that exchange only plain values, and counts the tests it passes.

The program runs in one sandbox, the tests in another, with proxies for the program's functions. The program can forge
its own return values only; they are compared in a process that it cannot modify.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from oxrl.rewards.sandbox.isolation import Isolation
from oxrl.rewards.sandbox.process import (
    MAX_STATUS_BYTES,
    Job,
    Limits,
    SandboxedProcess,
    pipe,
    read_all,
    sandboxed,
    terminate,
)

_MAX_VERDICT_BYTES = 1 << 20
_GRACE_SECONDS = 2.0
_START_SECONDS = 60.0  # for two interpreters: only ends a hang of the machine
_PACKAGE = "oxrl.rewards.sandbox"
_MODULES = {"serve": ("literals", "serve"), "judge": ("literals", "remote", "judge")}


class Tests(NamedTuple):
    """`Tests(("assert add(1, 2) == 3",), remote={"add": "add"})`: trusted code, and the functions it calls."""

    statements: tuple[str, ...]
    setup: str = ""
    context: str = ""  # code that comes with the task, such as helpers in its prompt
    remote: Mapping[str, str] = {}  # name in the tests -> name in the program
    exceptions: tuple[str, ...] = ()  # classes of the program that the tests catch


class Verdict(NamedTuple):
    """`Verdict(2, 3, "AssertionError: ")`: 2 of 3 tests passed, and the first failure."""

    passed: int
    tests: int
    failure: str | None = None
    ungraded: str | None = None  # why the program cannot be graded


def run_tests(sources: Sequence[str], tests: Tests, isolation: Isolation, limits: Limits) -> Verdict:
    """Execute `sources` in order in one namespace, then each test separately, all within `limits.seconds`.

    These count from when both interpreters have started. Raises a SandboxError if a sandbox could not be set up, and a
    RuntimeError if the process of the tests failed.
    """
    with ExitStack() as stack:
        call_reader, call_writer = stack.enter_context(pipe())
        reply_reader, reply_writer = stack.enter_context(pipe())
        verdict_reader, verdict_writer = stack.enter_context(pipe())

        def start(module: str, arguments: dict[str, object], own: Limits, *pass_fds: int) -> SandboxedProcess:
            name = f"{_PACKAGE}.{module}"
            job = Job(arguments, (name, module), tuple(f"{_PACKAGE}.{each}" for each in _MODULES[module]))
            return stack.enter_context(sandboxed(job, isolation.layers, own, bwrap=isolation.bwrap, pass_fds=pass_fds))

        served = {"calls": call_reader.fileno(), "replies": reply_writer.fileno()}
        program = start("serve", {"sources": [*sources], **served}, limits, *served.values())
        judged = {"calls": call_writer.fileno(), "replies": reply_reader.fileno(), "verdict": verdict_writer.fileno()}
        task = {
            "context": tests.context,
            "setup": tests.setup,
            "tests": [*tests.statements],
            "remote": {**tests.remote},
            "exceptions": [*tests.exceptions],
        }
        generous = limits._replace(cpu_seconds=limits.seconds + _GRACE_SECONDS, memory=2 * limits.memory)
        judge = start("judge", {**task, **judged}, generous, *judged.values())
        for end in (call_reader, call_writer, reply_reader, reply_writer, verdict_writer):
            end.close()
        return _await_verdict(program, judge, verdict_reader.fileno(), limits.seconds, len(tests.statements))


def _await_verdict(
    program: SandboxedProcess, judge: SandboxedProcess, verdict: int, seconds: float, tests: int
) -> Verdict:
    """At the deadline the program is terminated; the judge then completes its verdict."""
    start_limit = time.monotonic() + _START_SECONDS
    statuses, _ = read_all({program.status: MAX_STATUS_BYTES, judge.status: MAX_STATUS_BYTES}, start_limit)
    for each in (program, judge):
        each.check_status(statuses[each.status])
    deadline = time.monotonic() + seconds
    first, reason = read_all({verdict: _MAX_VERDICT_BYTES}, deadline)
    report = first[verdict]
    if reason == "time":
        terminate(program.process)
        rest, reason = read_all({verdict: _MAX_VERDICT_BYTES}, time.monotonic() + _GRACE_SECONDS)
        report += rest[verdict]
    return _verdict(report, tests, timed_out=reason == "time")


def _verdict(report: bytes, tests: int, *, timed_out: bool) -> Verdict:
    lines = [json.loads(line) for line in report.splitlines(keepends=True) if line.endswith(b"\n")]
    passed = sum(1 for line in lines if line.get("passed"))
    failures = [line.get("why") for line in lines if line.get("why")]
    closing = lines[-1] if lines else {}
    if "ungraded" in closing:
        return Verdict(passed, tests, ungraded=closing["ungraded"])
    if "ended" not in closing and not timed_out:
        raise RuntimeError("the process that runs the tests ended without a verdict")
    failure = closing.get("ended") or (failures[0] if failures else "time limit reached" if timed_out else None)
    return Verdict(passed, tests, failure)
