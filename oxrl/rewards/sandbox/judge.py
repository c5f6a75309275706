"""Runs inside a second sandbox: executes trusted tests, whose calls to the program go to the program's process.

Only literals and references to the program's own objects come back, so that every comparison with a value of the tests
is made in a process that the program cannot modify. The verdict is written to a pipe that only this process has.
"""

from __future__ import annotations

import json
import os

from oxrl.rewards.sandbox.remote import ProgramConnection, ProgramGoneError, RemoteObject

TYPE_CHECKING = False  # `typing` costs more to import than all the rest
if TYPE_CHECKING:
    from typing import Any


def judge(
    context: str,
    setup: str,
    tests: list[str],
    remote: dict[str, str],
    exceptions: list[str],
    calls: int,
    replies: int,
    verdict: int,
) -> None:
    """`context` is trusted code that comes with the task; `remote` maps names in the tests to names in the program.

    `exceptions` are classes of the program that the tests catch.
    """
    program = ProgramConnection(calls, replies, exceptions)

    def report(**fields: Any) -> None:
        os.write(verdict, json.dumps(fields).encode() + b"\n")

    try:
        status, error = program.receive()
        if status != "ready":
            return report(
                ended=f"the program raised {error[:80]}" if status == "broken" else "the program sent an invalid reply"
            )
        namespace: dict[str, Any] = {"__name__": "tests"}
        failure = _run(context, namespace)
        namespace |= {here: RemoteObject(program, ["name", there]) for here, there in remote.items()}
        namespace |= program.exceptions
        failure = failure or _run(setup, namespace)
    except ProgramGoneError:
        return report(ended=f"the program: {program.gone}")
    if failure is not None:
        program_failed = program.call_count and not program.ungradable
        return report(**{"ended" if program_failed else "ungraded": program.ungradable or f"setup: {failure}"})
    for test in tests:
        failure = _run(test, namespace) or program.gone
        if program.ungradable is not None:
            return report(ungraded=program.ungradable)
        report(passed=failure is None, why=failure)
    return report(ended=None)


def _run(source: str, namespace: dict[str, Any]) -> str | None:
    """Execute `source`; return what failed, or None."""
    try:
        exec(compile(source, "<tests>", "exec", dont_inherit=True), namespace)  # noqa: S102
    except ProgramGoneError:
        return "the program has ended"
    except BaseException as error:  # noqa: BLE001 - a test that raises anything fails
        return f"{type(error).__name__}: {_text(error)}"[:200]
    return None


def _text(error: BaseException) -> str:
    """It may contain objects of the program, which raise what they like, or have ended."""
    try:
        return str(error)
    except BaseException:  # noqa: BLE001
        return ""
