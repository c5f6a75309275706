"""Runs inside a second sandbox: executes trusted tests, whose calls to the program go to the program's process.

Only literals come back, so that every comparison is between built-in values in a process that the program cannot
modify. The verdict is written to a pipe that only this process has.
"""

from __future__ import annotations

import builtins
import json
import os

from oxrl.rewards.sandbox.literals import NotSerializableError, dumps, loads

TYPE_CHECKING = False  # `typing` costs more to import than all the rest
if TYPE_CHECKING:
    from typing import Any

_MAX_REPLY_BYTES = 8 << 20


class ProgramError(Exception):
    """The program raised an exception that is not built in."""


class ProgramGoneError(BaseException):
    """The program ended, or sent an invalid reply; a test cannot catch this with `except Exception`."""


class UngradableError(BaseException):
    """The test needs something that only works inside one process."""


class ProgramConnection:
    """Calls functions in the program's process, and keeps why that is no longer possible."""

    def __init__(self, calls: int, replies: int):
        self.calls, self.replies = calls, replies
        self.call_count = 0
        self.gone: str | None = None
        self.ungradable: str | None = None

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        self.call_count += 1
        try:
            request = dumps([name, arguments, keywords]).encode() + b"\n"
        except NotSerializableError as error:
            self.ungradable = f"a test calls {name} with {error}, which cannot be sent to another process"
            raise UngradableError from None
        status, value = self.exchange(request)
        if status == "value":
            try:
                return loads(value)
            except (ValueError, MemoryError):
                raise self._lost("it sent a value that cannot be read") from None
        if status == "raised":
            raise _builtin_exception(value)
        if status == "opaque":
            self.ungradable = f"{name} returned {value[:80]}, which cannot be compared outside of the program"
            raise UngradableError
        raise self._lost(f"it sent the status {status[:20]}")

    def exchange(self, request: bytes) -> tuple[str, str]:
        """Write one line, read one line."""
        if self.gone is not None:
            raise ProgramGoneError
        try:
            while request:
                request = request[os.write(self.calls, request) :]
            reply = json.loads(self._read_line())
        except (OSError, ValueError, RecursionError, MemoryError):
            raise self._lost("it ended or ran out of time") from None
        if not (isinstance(reply, list) and len(reply) == 2 and all(isinstance(part, str) for part in reply)):
            raise self._lost("it sent an invalid reply")
        return reply[0], reply[1]

    def _read_line(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        while not parts or not parts[-1].endswith(b"\n"):
            part = os.read(self.replies, 1 << 16)
            size += len(part)
            if not part or size > _MAX_REPLY_BYTES:
                raise OSError("no complete line")
            parts.append(part)
        return b"".join(parts)

    def _lost(self, reason: str) -> ProgramGoneError:
        self.gone = self.gone or reason
        return ProgramGoneError()


def _builtin_exception(name: str) -> Exception:
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind("raised by the program")
        except TypeError:  # UnicodeDecodeError and others need more arguments
            return ProgramError(name)
    return ProgramError(name[:80])


def judge(
    context: str, setup: str, tests: list[str], remote: dict[str, str], calls: int, replies: int, verdict: int
) -> None:
    """`context` is trusted code that comes with the task; `remote` maps names in the tests to names in the program."""
    program = ProgramConnection(calls, replies)

    def report(**fields: Any) -> None:
        os.write(verdict, json.dumps(fields).encode() + b"\n")

    try:
        status, error = program.exchange(b"")
        if status != "ready":
            return report(
                ended=f"the program raised {error[:80]}" if status == "broken" else "the program sent an invalid reply"
            )
        namespace: dict[str, Any] = {"__name__": "tests"}
        failure = _run(context, namespace)
        namespace |= {here: _proxy(program, there) for here, there in remote.items()}
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
        exec(compile(source, "<tests>", "exec"), namespace)  # noqa: S102
    except ProgramGoneError:
        return "the program has ended"
    except BaseException as error:  # noqa: BLE001 - a test that raises anything fails
        return f"{type(error).__name__}: {error}"[:200]
    return None


def _proxy(program: ProgramConnection, name: str) -> Any:
    def remote(*arguments: Any, **keywords: Any) -> Any:
        return program.call(name, arguments, keywords)

    remote.__name__ = name
    return remote
