"""Programs are worth what their tests say: run in a sandbox, judged in another process, never by their own word.

A sample has `metadata["tests"]` (statements), `["setup"]` (code for the tests, or "") and `["entry_point"]` (a
function's name, or None). Values pass by copy between tests and program: a test that looks for a change in its own
list does not see one, and objects of a program's own classes leave an answer ungraded.
"""

from __future__ import annotations

import ast
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

from oxrl.rewards.grade import reads
from oxrl.rewards.sandbox import Limits, Tests, isolation_or_refusal, names_of_program, run_tests
from oxrl.types import Rollout, Sample

# Possessive (`*+`): what a model wrote must not make a regex try every split of a long line.
_FENCED = re.compile(r"^[ \t]*+```[ \t]*+([\w+-]*+)[^\n]*+\n(.*?)^[ \t]*+```", re.DOTALL | re.MULTILINE)
_UNFINISHED_FENCE = re.compile(r"^[ \t]*+```[ \t]*+(?:python3?|py)?[ \t]*+\n(.*)", re.DOTALL | re.MULTILINE)
_PYTHON = ("", "python", "py", "python3")
_CODE_BEGINS = re.compile(r"^(?:import|from|def|class|async|@)", re.MULTILINE)
_LONGEST_WAIT = 60.0
_SLOWEST_MACHINE = 3.0  # seconds by the clock for one of CPU: a busy machine must not look like a slow program
_SLOTS = threading.BoundedSemaphore(max(2, os.cpu_count() or 1))


class _Task(NamedTuple):
    tests: Tests
    entry_point: str | None
    begun: str  # the code in the prompt that the model was to go on with, or ""


@reads("metadata.tests", "metadata.setup", "metadata.entry_point")
def code_reward_func(
    rollout: Rollout, *, timeout: float = 5.0, partial: bool = False, allow_unsandboxed: bool = False
) -> float:
    """1 if the program passes all tests of the sample in `timeout` seconds of CPU; with `partial`, the share it passes.

    The program is the last Python block of the answer, else all of it; where the prompt begins a function, the answer
    may be its body.
    """
    isolation = isolation_or_refusal(allow_unsandboxed)
    task = _task_of(rollout.sample)
    sources = _program(rollout.generation.text, task)
    if not sources:
        return 0.0
    with _slot():
        trial = run_tests(
            sources, task.tests, isolation, Limits(seconds=_SLOWEST_MACHINE * timeout, cpu_seconds=timeout)
        )
    if trial.ungraded is not None:
        raise ValueError(f"sample {rollout.sample.id}: {trial.ungraded}")
    return trial.passed / trial.tests if partial else float(trial.passed == trial.tests)


@contextmanager
def _slot() -> Iterator[None]:
    """Not more programs at once than there are cores."""
    if not _SLOTS.acquire(timeout=_LONGEST_WAIT):
        raise TimeoutError(f"waited {_LONGEST_WAIT:g} s for other programs to end")
    try:
        yield
    finally:
        _SLOTS.release()


def _task_of(sample: Sample) -> _Task:
    tests, setup = sample.metadata.get("tests"), sample.metadata.get("setup") or ""
    entry_point = sample.metadata.get("entry_point")
    if not isinstance(tests, list | tuple) or not tests or not all(isinstance(test, str) for test in tests):
        raise ValueError(f"sample {sample.id} has no metadata.tests, a list of statements such as 'assert f(1) == 2'")
    if not isinstance(setup, str) or not isinstance(entry_point, str | None):
        raise ValueError(f"sample {sample.id}: metadata.setup must be a text, metadata.entry_point a name or null")
    begun = _begun_code(sample, entry_point) if entry_point else ""
    known = f"{begun.rstrip()}\n    pass\n" if begun else ""
    try:
        names = names_of_program(tests, f"{known}\n{setup}")
    except SyntaxError as error:
        raise ValueError(f"sample {sample.id}: its tests or their setup are not Python: {error.msg}") from None
    # a program may also be asked for under the name of a built-in function
    remote = {name: name for name in names or ([] if entry_point else [_first_called(tests[0])])}
    if entry_point:
        remote |= {entry_point: entry_point, "candidate": entry_point}
    return _Task(Tests(tuple(tests), setup, known, remote), entry_point, begun)


def _first_called(test: str) -> str:
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(test))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    if not calls:
        raise ValueError(f"a test calls no function of the program: {test[:80]}")
    return calls[0]


def _begun_code(sample: Sample, entry_point: str) -> str:
    """The part of the prompt that is Python and ends with the head of the function, as HumanEval writes it."""
    prompt = sample.messages[-1].text if sample.messages else ""
    blocks = [str(code) for _, code in _FENCED.findall(prompt)]
    first = _CODE_BEGINS.search(prompt)
    for code in [*blocks, prompt, prompt[first.start() :] if first else ""]:
        if _defines(code, entry_point) and _is_python(f"{code.rstrip()}\n    pass\n"):
            return code
    return ""


def _is_python(source: str) -> bool:
    """For trusted text only: a parser is a lot of C to hand a model's text to."""
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
    """Sources to execute one after the other; none where nothing was said."""
    said = _said_code(text)
    if not said.strip():
        return []
    if not task.begun:
        return [said]
    if task.entry_point and _defines(said, task.entry_point):
        return [task.tests.known, said]
    return [f"{task.begun.rstrip()}\n{_body(said)}"]


def _said_code(text: str) -> str:
    """Behind the model's thoughts: the last block of Python, also one that was cut off, else everything."""
    said = text.rpartition("</think>")[2]
    if "<think>" in said:
        return ""
    blocks = [code for language, code in _FENCED.findall(said) if language.lower() in _PYTHON]
    if blocks:
        return str(blocks[-1])
    unfinished = _UNFINISHED_FENCE.search(said)
    return unfinished[1] if unfinished else said


def _body(said: str) -> str:
    """The lines of a function's body, indented, until something else begins."""
    lines = said.strip("\n").splitlines()
    if lines and lines[0][:1] not in (" ", "\t"):
        return "\n".join(f"    {line}" for line in lines)
    body = []
    for line in lines:
        if line.strip() and line[:1] not in (" ", "\t"):
            break
        body.append(line)
    return "\n".join(body)
