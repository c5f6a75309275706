"""A program and tests to the number of tests that it passed, by two processes that share nothing but literals.

The program runs in one cage, the tests in another, with the program's functions as proxies. What the program could
forge is its own answers; whether they are right is decided where it has no hand in.
"""

from __future__ import annotations

import ast
import builtins
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import NamedTuple

from oxrl.rewards.sandbox.isolation import Isolation
from oxrl.rewards.sandbox.process import LONGEST_STATUS, Caged, Job, Limits, caged, end, gather, pipe

_LONGEST_VERDICT = 1 << 20
_TIME_TO_CONCLUDE = 2.0
_SHARED = ("oxrl", "oxrl.rewards.sandbox", "oxrl.rewards.sandbox.literals")


class Tests(NamedTuple):
    """`Tests(("assert add(1, 2) == 3",), remote={"add": "add"})`: trusted code, and what it calls in the program."""

    statements: tuple[str, ...]
    setup: str = ""
    known: str = ""  # code that the task brings along, such as helpers in its prompt
    remote: Mapping[str, str] = {}  # name in the tests -> name in the program


class Trial(NamedTuple):
    """`Trial(2, 3, "AssertionError: ")`: tests passed of how many, and the first thing that went wrong."""

    passed: int
    tests: int
    why: str | None = None
    ungraded: str | None = None


def run_tests(sources: Sequence[str], tests: Tests, isolation: Isolation, limits: Limits) -> Trial:
    """`sources` are executed one after the other in one namespace; then each test on its own.

    All of it together has `limits.seconds`. Raises a SandboxError where a cage could not be shut, and a RuntimeError
    where the tests' own process broke down.
    """
    deadline = time.monotonic() + limits.seconds
    with ExitStack() as stack:
        take_call, call = stack.enter_context(pipe())
        take_answer, answer = stack.enter_context(pipe())
        take_verdict, verdict = stack.enter_context(pipe())

        def start(module: str, given: dict[str, object], own: Limits, *pass_on: int) -> Caged:
            job = Job(given, (f"oxrl.rewards.sandbox.{module}", module), (*_SHARED, f"oxrl.rewards.sandbox.{module}"))
            return stack.enter_context(caged(job, isolation.layers, own, bwrap=isolation.bwrap, pass_on=pass_on))

        incoming, outgoing = take_call.fileno(), answer.fileno()
        program = start(
            "serve", {"sources": [*sources], "calls": incoming, "answers": outgoing}, limits, incoming, outgoing
        )
        ends = {"calls": call.fileno(), "answers": take_answer.fileno(), "verdict": verdict.fileno()}
        task = {"known": tests.known, "setup": tests.setup, "tests": [*tests.statements], "remote": {**tests.remote}}
        patient = limits._replace(cpu_seconds=limits.seconds + _TIME_TO_CONCLUDE, memory=2 * limits.memory)
        judging = start("judge", {**task, **ends}, patient, *ends.values())
        for end in (take_call, call, take_answer, answer, verdict):
            end.close()
        return _watch(program, judging, take_verdict.fileno(), deadline, len(tests.statements))


def _watch(program: Caged, judging: Caged, verdict: int, deadline: float, tests: int) -> Trial:
    """The program is ended at the deadline; the judge notices, and concludes."""
    statuses = {program.status: LONGEST_STATUS, judging.status: LONGEST_STATUS}
    said, _ = gather(statuses, deadline)
    for each in (program, judging):
        each.confirm(said[each.status])
    first, reason = gather({verdict: _LONGEST_VERDICT}, deadline)
    told = first[verdict]
    if reason == "time":
        end(program.process)
        rest, reason = gather({verdict: _LONGEST_VERDICT}, time.monotonic() + _TIME_TO_CONCLUDE)
        told += rest[verdict]
    return _read(told, tests, out_of_time=reason == "time")


def _read(told: bytes, tests: int, *, out_of_time: bool) -> Trial:
    lines = [json.loads(line) for line in told.splitlines(keepends=True) if line.endswith(b"\n")]
    passed = sum(1 for line in lines if line.get("passed"))
    reasons = [line.get("why") for line in lines if line.get("why")]
    closing = lines[-1] if lines else {}
    if "ungraded" in closing:
        return Trial(passed, tests, ungraded=closing["ungraded"])
    if "ended" not in closing and not out_of_time:
        raise RuntimeError("the process that runs the tests broke down without a verdict")
    why = closing.get("ended") or (reasons[0] if reasons else "out of time" if out_of_time else None)
    return Trial(passed, tests, why)


def names_of_program(tests: Sequence[str], trusted: str) -> list[str]:
    """The names that tests use and that neither Python nor the code which comes with them defines."""
    used: set[str] = set()
    defined: set[str] = set(dir(builtins))
    for source in [trusted, *tests]:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                (used if isinstance(node.ctx, ast.Load) else defined).add(node.id)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.arg):
                defined.add(node.arg)
            elif isinstance(node, ast.alias):
                defined.add((node.asname or node.name).partition(".")[0])
            elif isinstance(node, ast.ExceptHandler) and node.name:
                defined.add(node.name)
    return sorted(used - defined)
