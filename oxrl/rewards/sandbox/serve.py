"""Runs inside the sandbox of an untrusted program: executes it, then serves calls to its functions and objects.

The other side trusts nothing from here: the program shares this process and can write any reply itself.
"""

from __future__ import annotations

import builtins
import json
import operator
import os
import sys
import types
from collections import deque
from collections.abc import Coroutine, Iterator

from oxrl.rewards.sandbox.literals import Encoder, decode, loads

TYPE_CHECKING = False  # `typing` costs more to import than all the rest
if TYPE_CHECKING:
    from typing import IO, Any

_ITERATOR_ITEMS = 1000  # a longer iterator, which may be endless, is not copied
_MUTABLE = (list, dict, set, deque, bytearray)


def serve(sources: list[str], calls: int, replies: int) -> None:
    """Each line is `[kind, text]`; `call` is answered by `value` or `raised`."""
    program = sys.modules["program"] = types.ModuleType("program")  # where pickle and dataclasses look for its classes
    with os.fdopen(calls, "rb") as incoming, os.fdopen(replies, "wb") as outgoing:
        server = _Server(vars(program), incoming, outgoing)
        try:
            for source in sources:
                exec(compile(source, "<program>", "exec", dont_inherit=True), vars(program))  # noqa: S102
        except BaseException as error:  # noqa: BLE001 - also SystemExit: how a program ends is data
            server.send("broken", type(error).__name__)
            return
        server.send("ready", "")
        server.serve()


class _Server:
    def __init__(self, program: dict[str, Any], incoming: IO[bytes], outgoing: IO[bytes]):
        self.program, self.incoming, self.outgoing = program, incoming, outgoing
        self.objects: list[Any] = []  # that the tests refer to; kept, so that an id stays theirs
        self.numbers: dict[int, int] = {}
        # A generator is not copied: the tests may send values to it.
        self.encoder = Encoder(self.refer, (types.GeneratorType,), iterator_items=_ITERATOR_ITEMS)
        self.loop: Any = None

    def send(self, kind: str, text: str) -> None:
        self.outgoing.write(json.dumps([kind, text]).encode() + b"\n")
        self.outgoing.flush()

    def serve(self) -> list[str]:
        """Answer calls until something else arrives: the reply to a callback, or the end."""
        for line in self.incoming:
            kind, text = json.loads(line)
            if kind != "call":
                return [kind, text]
            try:
                self.send("value", json.dumps(self.call(text)))
            except BaseException as error:  # noqa: BLE001 - as above
                self.send("raised", self.encoder.dumps(self._described(error)))
        return ["end", ""]

    def call(self, text: str) -> Any:
        coded = json.loads(text)
        name, arguments, keywords = decode(coded, self.resolve)
        if name == ".await":
            result = self._await(arguments[0])
        else:
            function = _OPERATIONS[name] if name.startswith(".") else self.resolve(["name", name])
            result = function(*arguments, **keywords)
        changes = []
        if result is None:
            before = [*coded[1][1][1], *(pair[1] for pair in coded[1][2][1])]
            for number, argument in enumerate([*arguments, *keywords.values()]):
                if isinstance(argument, _MUTABLE) or hasattr(argument, "shape"):
                    after = self.encoder.encode(argument)
                    if after != before[number]:
                        changes.append(["list", [["int", hex(number)], after]])
        return ["list", [self.encoder.encode(result), ["list", changes]]]

    def refer(self, value: Any) -> Any:
        if isinstance(value, _Callback):
            return ["function", value.number]
        if id(value) not in self.numbers:
            self.numbers[id(value)] = len(self.objects)
            self.objects.append(value)
        kind = "coroutine" if isinstance(value, Coroutine) else "iterator" if isinstance(value, Iterator) else "object"
        return [kind, self.numbers[id(value)]]

    def resolve(self, reference: Any) -> Any:
        kind, which = reference
        if kind == "function":
            return _Callback(self, which)
        if kind == "object":
            return self.objects[which]
        if which not in self.program:
            raise NameError(f"name {which!r} is not defined")
        return self.program[which]

    def _await(self, awaitable: Any) -> Any:
        import asyncio

        self.loop = self.loop or asyncio.new_event_loop()
        return self.loop.run_until_complete(awaitable)

    def _described(self, error: BaseException) -> list[Any]:
        """Names of its classes, its arguments, its text, and itself if it may have attributes of its own."""
        own = None if type(error).__module__ == "builtins" else error.with_traceback(None)
        return [[kind.__name__ for kind in type(error).__mro__], list(error.args), str(error), own]


class _Callback:
    """A function of the tests."""

    def __init__(self, server: _Server, number: int):
        self.server, self.number = server, number

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        server = self.server
        server.send("callback", server.encoder.dumps([self.number, arguments, keywords]))
        kind, text = server.serve()
        if kind == "value":
            return loads(text, server.resolve)
        raise getattr(builtins, text, RuntimeError)


def _resume(iterator: Any, method: str, *arguments: Any) -> list[Any]:
    """Whether there is another item, and this item, or what the generator returned."""
    try:
        return [True, next(iterator) if method == "next" else getattr(iterator, method)(*arguments)]
    except StopIteration as end:
        return [False, end.value]


def _copy(value: Any) -> Any:
    import copy

    return copy.deepcopy(value)


_OPERATIONS: dict[str, Any] = {
    ".call": lambda function, *arguments, **keywords: function(*arguments, **keywords),
    ".getattr": getattr,
    ".setattr": setattr,
    ".getitem": operator.getitem,
    ".setitem": operator.setitem,
    ".delitem": operator.delitem,
    ".contains": operator.contains,
    ".isinstance": lambda kind, value: isinstance(value, kind),
    ".eq": lambda one, other: bool(one == other),
    ".hash": hash,
    ".bool": bool,
    ".len": len,
    ".str": str,
    ".repr": repr,
    ".int": int,
    ".float": float,
    ".index": operator.index,
    ".abs": abs,
    ".neg": operator.neg,
    ".round": round,
    ".format": format,
    ".iter": iter,
    ".reversed": reversed,
    ".resume": _resume,
    ".enter": lambda manager: type(manager).__enter__(manager),
    ".exit": lambda manager: type(manager).__exit__(manager, None, None, None),
    ".deepcopy": _copy,
    **{f".{name}": getattr(operator, name) for name in ("lt", "le", "gt", "ge")},
}
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    _operator = getattr(operator, f"{_name}_" if _name in ("and", "or") else _name)
    _OPERATIONS[f".{_name}"] = _operator
    _OPERATIONS[f".r{_name}"] = lambda one, other, combine=_operator: combine(other, one)
