"""Rewards for programs: they run in a sandbox and are graded by tests in another process.

A sample has `metadata["tests"]` (statements), `["setup"]` (code for the tests, or "") and `["entry_point"]` (a
function's name, or None). Values are copied between tests and program; a test sees in-place changes of its arguments if
the function returns None, and objects of the program's classes by reference.
"""

from __future__ import annotations

import ast
import os
import re
import threading
from typing import NamedTuple

from oxrl.rewards.allowance import current_allowance
from oxrl.rewards.grade import reads
from oxrl.rewards.sandbox import Limits, Tests, names_in, require_isolation, run_tests
from oxrl.types import Rollout, Sample

# Possessive (`*+`): a model's text must not make a regex try every split of a long line.
_FENCED = re.compile(r"^[ \t]*+```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)^[ \t]*+```", re.DOTALL | re.MULTILINE)
_UNFINISHED_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")
_CODE_START = re.compile(r"^(?:import|from|def|class|async|@)", re.MULTILINE)
_WALL_TO_CPU = 3.0  # wall-clock limit per second of CPU limit: on a busy machine a program must not look slow
# As many programs run concurrently as there are cores; waiting needs no limit, since each of them has one.
_SLOTS = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))


class _Task(NamedTuple):
    tests: Tests
    entry_point: str | None
    prefix: str  # the code in the prompt that the model continues, or ""


@reads("metadata.tests", "metadata.setup", "metadata.entry_point")
def code_reward_func(
    rollout: Rollout,
    *,
    timeout: float = 5.0,
    partial: bool = False,
    allow_unsandboxed: bool = False,
) -> float:
    """1 if the program passes all tests of the sample in `timeout` seconds of CPU; with `partial`, the share it passes.

    The program is the last Python block of the response, or all of it; if the prompt ends with the head of a function,
    the response may be the body.
    """
    isolation = require_isolation(allow_unsandboxed)
    task = _task_of(rollout.sample)
    sources = _program(rollout.generation.full_text, task)
    if not sources:
        return 0.0
    allowance = current_allowance()
    limits = Limits(seconds=min(_WALL_TO_CPU * timeout, allowance.left), cpu_seconds=timeout)
    with allowance.stopped(), _SLOTS:  # the program has a clock of its own, from when it starts
        verdict = run_tests(sources, task.tests, isolation, limits)
    if verdict.ungraded is not None:
        raise ValueError(f"sample {rollout.sample.id}: {verdict.ungraded}")
    return verdict.passed / verdict.tests if partial else float(verdict.passed == verdict.tests)


def _task_of(sample: Sample) -> _Task:
    tests, setup = sample.metadata.get("tests"), sample.metadata.get("setup") or ""
    entry_point = sample.metadata.get("entry_point")
    if not isinstance(tests, list | tuple) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"sample {sample.id} has no metadata.tests: a list of statements such as 'assert f(1) == 2'")
    if not isinstance(setup, str) or not isinstance(entry_point, str | None):
        raise ValueError(f"sample {sample.id}: metadata.setup must be a string, metadata.entry_point a name or null")
    prefix = _code_prefix(sample, entry_point) if entry_point else ""
    context = f"{prefix.rstrip()}\n    pass\n" if prefix else ""
    try:
        names = names_in(tests, f"{context}\n{setup}", entry_point)
    except (SyntaxError, RecursionError) as error:
        reason = getattr(error, "msg", "nested too deeply")
        raise ValueError(f"sample {sample.id}: its tests or their setup are not Python: {reason}") from None
    # a task may also name its function like a built-in one
    remote = {name: name for name in names.program or ([] if entry_point else [_first_called(tests[0])])}
    if entry_point:
        remote |= {entry_point: entry_point, "candidate": entry_point}
    setup = f"{names.imports}\n{setup}"
    return _Task(Tests(tuple(tests), setup, context, remote, names.exceptions), entry_point, prefix)


def _first_called(test: str) -> str:
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(test))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    if not calls:
        raise ValueError(f"a test calls no function of the program: {test[:80]}")
    return calls[0]


def _code_prefix(sample: Sample, entry_point: str) -> str:
    """The part of the prompt that is Python and ends with the head of the function, as in HumanEval."""
    prompt = sample.messages[-1].text if sample.messages else ""
    blocks = [str(code) for _, code in _FENCED.findall(prompt)]
    first = _CODE_START.search(prompt)
    for code in [*blocks, prompt, prompt[first.start() :] if first else ""]:
        if _defines(code, entry_point) and _is_python(f"{code.rstrip()}\n    pass\n"):
            return code
    return ""


def _is_python(source: str) -> bool:
    """For trusted text only: the parser is C code that must not be exposed to a model's text."""
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _defines(source: str, name: str) -> bool:
    return (
        re.search(
            rf"^(?:(?:async[ \t]+)?def|class)[ \t]+{re.escape(name)}\b|^{re.escape(name)}[ \t]*[:=]", source, re.M
        )
        is not None
    )


def _program(text: str, task: _Task) -> list[str]:
    """Sources to execute in order; empty if the response has no code."""
    code = _extract_code(text)
    if not code.strip():
        return []
    if not task.prefix:
        return [code]
    if task.entry_point and _defines(code, task.entry_point):
        return [task.tests.context, code]
    return [f"{task.prefix.rstrip()}\n{_body(code)}"]


def _extract_code(text: str) -> str:
    """After the reasoning: the last Python block, also an unfinished one, or the whole text."""
    response = text.rpartition("</think>")[2]
    if "<think>" in response:
        return ""
    blocks = [code for language, code in _FENCED.findall(response) if language.lower() in _PYTHON]
    if blocks:
        return str(blocks[-1])
    unfinished = _UNFINISHED_FENCE.search(response)
    return unfinished[1] if unfinished else response


def _body(code: str) -> str:
    """The lines of a function's body, indented, up to the first line that is not indented."""
    lines = code.strip("\n").splitlines()
    if lines and lines[0][:1] not in (" ", "\t"):
        return "\n".join(f"    {line}" for line in lines)
    body = []
    for line in lines:
        if line.strip() and line[:1] not in (" ", "\t"):
            break
        body.append(line)
    return "\n".join(body)
