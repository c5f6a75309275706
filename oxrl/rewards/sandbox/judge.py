"""Runs inside a cage of its own: executes trusted tests, whose calls of the program go to another process.

Only literals come back from there, so that every comparison is one of built-in values in a process which the program
never touched. The verdict goes out on a pipe that only this process has.
"""

from __future__ import annotations

import builtins
import json
import os

from oxrl.rewards.sandbox.literals import CannotTravelError, dumps, loads

TYPE_CHECKING = False  # `typing` costs more to import than all the rest
if TYPE_CHECKING:
    from typing import Any

_LONGEST_ANSWER = 8 << 20


class ProgramError(Exception):
    """The program raised something that is no built-in exception."""


class GoneError(BaseException):
    """The program ended, or says things that make no sense; no test may go on by catching Exception."""


class UngradableError(BaseException):
    """The test asks for something that only works inside one process."""


class Line:
    """The other process: what is called there, and what has become of it."""

    def __init__(self, calls: int, answers: int):
        self.calls, self.answers = calls, answers
        self.asked = 0
        self.gone: str | None = None
        self.ungradable: str | None = None

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self.asked += 1
        try:
            request = dumps([name, arguments, keywords]).encode() + b"\n"
        except CannotTravelError as error:
            self.ungradable = f"it calls {name} with {error}, which cannot be sent to another process"
            raise UngradableError from None
        how, value = self.exchange(request)
        if how == "value":
            try:
                return loads(value)
            except (ValueError, MemoryError):
                raise self._lost("it answered with something else than a value") from None
        if how == "raised":
            raise _builtin_exception(value)
        if how == "opaque":
            self.ungradable = f"{name} returned {value[:80]}, which cannot be compared outside of the program"
            raise UngradableError
        raise self._lost(f"it is {how[:20]}")

    def exchange(self, request: bytes) -> tuple[str, str]:
        """One line out, one line in."""
        if self.gone is not None:
            raise GoneError
        try:
            while request:
                request = request[os.write(self.calls, request) :]
            said = json.loads(self._line())
        except (OSError, ValueError, RecursionError, MemoryError):
            raise self._lost("it ended or ran out of time") from None
        if not (isinstance(said, list) and len(said) == 2 and all(isinstance(part, str) for part in said)):
            raise self._lost("its answer makes no sense")
        return said[0], said[1]

    def _line(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while not parts or not parts[-1].endswith(b"\n"):
            part = os.read(self.answers, 1 << 16)
            size += len(part)
            if not part or size > _LONGEST_ANSWER:
                raise OSError("no line")
            parts.append(part)
        return b"".join(parts)

    def _lost(self, why: str) -> GoneError:
        self.gone = self.gone or why
        return GoneError()


def _builtin_exception(name: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind("raised by the program")
        except TypeError:  # UnicodeDecodeError and its like want more arguments
            return ProgramError(name)
    return ProgramError(name[:80])


def judge(
    known: str, setup: str, tests: list[str], remote: dict[str, str], calls: int, answers: int, verdict: int
) -> None:
    """`known` is trusted code that comes with the task; `remote` maps names in the tests to names in the program."""
    line = Line(calls, answers)

    def report(**said: Any) -> None:
        os.write(verdict, json.dumps(said).encode() + b"\n")

    try:
        how, why = line.exchange(b"")
        if how != "ready":
            return report(ended=f"the program raised {why[:80]}" if how == "broken" else "its answer makes no sense")
        namespace: dict[str, Any] = {"__name__": "tests"}
        failure = _run(known, namespace)
        namespace |= {here: _proxy(line, there) for here, there in remote.items()}
        failure = failure or _run(setup, namespace)
    except GoneError:
        return report(ended=f"the program: {line.gone}")
    if failure is not None:
        blames_the_program = line.asked and not line.ungradable
        return report(**{"ended" if blames_the_program else "ungraded": line.ungradable or f"setup: {failure}"})
    for test in tests:
        failure = _run(test, namespace) or line.gone
        if line.ungradable is not None:
            return report(ungraded=line.ungradable)
        report(passed=failure is None, why=failure)
    return report(ended=None)


def _run(source: str, namespace: dict[str, Any]) -> str | None:
    """What went wrong, or None."""
    try:
        exec(compile(source, "<tests>", "exec"), namespace)  # noqa: S102
    except GoneError:
        return "the program is gone"
    except BaseException as error:  # noqa: BLE001 - whatever a test raises, it did not pass
        return f"{type(error).__name__}: {error}"[:200]
    return None


def _proxy(line: Line, name: str) -> Any:
    def remote(*arguments: Any, **keywords: Any) -> Any:
        return line.call(name, arguments, keywords)

    remote.__name__ = name
    return remote
