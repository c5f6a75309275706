"""Runs in the process of the tests: calls the program's functions, and stands in for objects that cannot be copied.

A comparison of such an object with a value of the tests is never left to the program: it would always be equal. What
the program may decide is how objects of its own classes behave: methods, operators between them, `len`, `str`.
"""

from __future__ import annotations

import builtins
import json
import os
from collections import deque

from oxrl.rewards.sandbox.literals import Encoder, NotSerializableError, loads

TYPE_CHECKING = False  # `typing` costs more to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from typing import Any

_MAX_REPLY_BYTES = 64 << 20
# An object that a function returned in place of a value must not answer as that value would.
_METHODS_OF_VALUES = frozenset(
    name for kind in (str, bytes, list, tuple, dict, set, int, float, complex) for name in dir(kind)
)


class ProgramError(Exception):
    """The program raised an exception that is not built in."""


class ProgramGoneError(BaseException):
    """The program ended, or sent an invalid reply; a test cannot catch this with `except Exception`."""


class UngradableError(BaseException):
    """The test needs something that only works inside one process."""


class ProgramConnection:
    """Calls functions in the program's process, and keeps why that is no longer possible."""

    def __init__(self, calls: int, replies: int, exceptions: list[str]):
        self.calls, self.replies = calls, replies
        self.call_count = 0
        self.gone: str | None = None
        self.ungradable: str | None = None
        self.exceptions = {name: type(name, (ProgramError,), {}) for name in exceptions}
        self.objects: dict[int, Any] = {}  # of the program
        self.functions: list[Callable[..., Any]] = []  # of the tests, which the program may call
        self.encoder = Encoder(self.refer, (RemoteObject,))
        self.failed_assertion: AssertionError | None = None

    def call(self, name: str, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
        """`name` is a function of the program, or with a dot an operation on its first argument."""
        self.call_count += 1
        try:
            request = self.encoder.dumps([name, arguments, keywords])
        except NotSerializableError as error:
            self.ungradable = f"a test calls {name} with {error}, which cannot be sent to another process"
            raise UngradableError from None
        status, text = self.exchange("call", request)
        if (failed := self.failed_assertion) is not None:  # the program may have caught it
            self.failed_assertion = None
            raise failed
        content = self._read(text)
        if status == "raised":
            raise self._exception(content)
        if status != "value" or not isinstance(content, list) or len(content) != 2:
            raise self._lost(f"it sent the status {status[:20]}")
        result, changes = content
        if result is None:  # as functions do that change their arguments: others could change what they are compared to
            _change([*arguments, *keywords.values()], changes)
        return result

    def exchange(self, kind: str, text: str) -> tuple[str, str]:
        """Send a message and return the reply; the program may call functions of the tests before it replies."""
        self._send(kind, text)
        while (message := self.receive())[0] == "callback":
            self._send(*self._run_callback(message[1]))
        return message

    def receive(self) -> tuple[str, str]:
        """Read one line."""
        try:
            reply = json.loads(self._read_line())
        except (OSError, ValueError, RecursionError, MemoryError):
            raise self._lost("it ended or ran out of time") from None
        if not (isinstance(reply, list) and len(reply) == 2 and all(isinstance(part, str) for part in reply)):
            raise self._lost("it sent an invalid reply")
        return reply[0], reply[1]

    def refer(self, value: Any) -> Any:
        """The reference to an object of the program, or to a function of the tests."""
        if isinstance(value, RemoteObject):
            return reference_of(value)
        if not callable(value) or isinstance(value, type):
            raise NotSerializableError(type(value).__name__)
        if value not in self.functions:
            self.functions.append(value)
        return ["function", self.functions.index(value)]

    def _resolve(self, reference: Any) -> Any:
        """What the program refers to."""
        kind, number = reference
        if kind == "function":
            return self.functions[number]
        if not isinstance(number, int) or kind not in ("object", "iterator", "coroutine"):
            raise ValueError("not a reference")
        if kind == "coroutine":
            return self._await(number)
        return self.objects.setdefault(number, RemoteObject(self, ["object", number], is_iterator=kind == "iterator"))

    async def _await(self, number: int) -> Any:
        return self.call(".await", (RemoteObject(self, ["object", number]),), {})

    def _run_callback(self, text: str) -> tuple[str, str]:
        number, arguments, keywords = self._read(text)
        try:
            return "value", self.encoder.dumps(self.functions[number](*arguments, **keywords))
        except AssertionError as error:
            self.failed_assertion = error
            return "raised", type(error).__name__
        except Exception as error:  # noqa: BLE001 - also a result that cannot be sent: the program chose the arguments
            return "raised", type(error).__name__

    def _read(self, text: str) -> Any:
        try:
            return loads(text, self._resolve)
        except (ValueError, IndexError, MemoryError):
            raise self._lost("it sent a value that cannot be read") from None

    def _send(self, kind: str, text: str) -> None:
        if self.gone is not None:
            raise ProgramGoneError
        message = json.dumps([kind, text]).encode() + b"\n"
        try:
            while message:
                message = message[os.write(self.calls, message) :]
        except OSError:
            raise self._lost("it ended or ran out of time") from None

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

    def _exception(self, content: Any) -> Exception:
        """The exception that the program raised: built in, or one that the tests name, or a `ProgramError`.

        A StopIteration would end the loop of the tests around the call, as if there were nothing left to test.
        """
        names, arguments, text, own = content
        known = [self.exceptions[name] for name in names if name in self.exceptions]
        kind = next((kind for name in names if (kind := _builtin_exception(name))), ProgramError)
        try:
            if own is None:
                return kind(*arguments)
            members = {"__str__": lambda _: text, "__getattr__": lambda _, name: _attribute(own, name)}
            combined: type[Exception] = type(names[0], (*dict.fromkeys(known), kind), members)
            return combined(*arguments)
        except (TypeError, ValueError):
            return ProgramError(text)


def _attribute(error: RemoteObject, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _operate(error, ".getattr", name)


def _builtin_exception(name: str) -> type[Exception] | None:
    kind = getattr(builtins, name, None)
    if not isinstance(kind, type) or not issubclass(kind, Exception):
        return None
    return None if issubclass(kind, StopIteration | StopAsyncIteration) else kind


def _change(arguments: list[Any], changes: Any) -> None:
    """Change lists, dictionaries and the like in place: they were copied to the program, which changed its copy."""
    for number, changed in changes:
        argument = arguments[number]
        if isinstance(argument, list | bytearray):
            argument[:] = changed
        elif isinstance(argument, dict | set):
            argument.clear()
            argument.update(changed)
        elif isinstance(argument, deque):
            argument.clear()
            argument.extend(changed)
        elif type(argument).__module__ == "numpy":
            argument[...] = changed


class RemoteObject:
    """An object of the program, or a name in it; `is_own`: an instance of a class that the tests themselves call."""

    __slots__ = ("_connection", "_is_iterator", "_is_own", "_reference")

    def __init__(self, connection: ProgramConnection, reference: Any, *, is_iterator: bool = False):
        set_own = object.__setattr__
        set_own(self, "_connection", connection)
        set_own(self, "_reference", reference)
        set_own(self, "_is_iterator", is_iterator)
        set_own(self, "_is_own", isinstance(reference[1], str) and reference[1][:1].isupper())

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        kind, name = reference_of(self)
        if kind != "name":
            return _operate(self, ".call", *arguments, **keywords)
        return _owned(self._connection.call(name, arguments, keywords), is_own=self._is_own)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or (name in _METHODS_OF_VALUES and not self._is_own):
            raise AttributeError(f"an object of the program has no {name}")
        if self._is_iterator and name in ("send", "throw"):
            return lambda *arguments: _resume(self, name, *arguments)
        return _operate(self, ".getattr", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _operate(self, ".setattr", name, value)

    @property
    def __name__(self) -> str:
        return str(self._reference[1])  # for messages of the tests

    def __eq__(self, other: object) -> Any:
        if not isinstance(other, RemoteObject):
            return NotImplemented
        return self is other or _operate(self, ".eq", other) is True

    def __hash__(self) -> int:
        return hash(_operate(self, ".hash"))

    def __bool__(self) -> bool:
        return _operate(self, ".bool") is True

    def __iter__(self) -> Iterator[Any]:
        return self if self._is_iterator else iter(_operate(self, ".iter"))

    def __next__(self) -> Any:
        return _resume(self, "next")

    def __contains__(self, value: Any) -> bool:
        if self._is_own:
            return _operate(self, ".contains", value) is True
        return any(item is value or item == value for item in self)

    def __instancecheck__(self, value: Any) -> bool:
        return _operate(self, ".isinstance", value) is True

    def __exit__(self, *_: object) -> None:
        _operate(self, ".exit")

    def __deepcopy__(self, _: Any) -> Any:
        return _owned(_operate(self, ".deepcopy"), is_own=self._is_own)

    def __mro_entries__(self, _: Any) -> Any:
        self._connection.ungradable = f"a test derives a class from {self._reference[1]} of the program"
        raise UngradableError


def reference_of(value: RemoteObject) -> Any:
    return object.__getattribute__(value, "_reference")


def _operate(operand: RemoteObject, operation: str, *arguments: Any, **keywords: Any) -> Any:
    return operand._connection.call(operation, (operand, *arguments), keywords)


def _resume(iterator: RemoteObject, method: str, *arguments: Any) -> Any:
    has_item, value = _operate(iterator, ".resume", method, *arguments)
    if not has_item:
        raise StopIteration(value)
    return value


def _owned(value: Any, *, is_own: bool) -> Any:
    if is_own and isinstance(value, RemoteObject):
        object.__setattr__(value, "_is_own", True)
    return value


def _unary(name: str) -> Any:
    def method(self: RemoteObject, *arguments: Any) -> Any:
        return _operate(self, f".{name}", *arguments)

    return method


def _binary(name: str, *, reflected: bool = False) -> Any:
    """Between two objects of the program, or with a value of the tests if the object is of a class that they call."""

    def method(self: RemoteObject, other: Any) -> Any:
        if not (self._is_own or isinstance(other, RemoteObject)):
            return NotImplemented
        return _owned(_operate(self, f".{'r' * reflected}{name}", other), is_own=self._is_own)

    return method


for _name in ("len", "str", "repr", "int", "float", "index", "abs", "neg", "round", "reversed", "format", "enter"):
    setattr(RemoteObject, f"__{_name}__", _unary(_name))
for _name in ("getitem", "setitem", "delitem"):
    setattr(RemoteObject, f"__{_name}__", _unary(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _binary(_name))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(RemoteObject, f"__{_name}__", _binary(_name))
    setattr(RemoteObject, f"__r{_name}__", _binary(_name, reflected=True))
