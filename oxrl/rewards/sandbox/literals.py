"""Serialization of plain values between two processes of which one does not trust the other.

`loads` returns built-in types only, whatever the other side wrote: no classes, no pickle, no custom `__eq__`. It needs
the standard library only, because it also runs inside the sandbox.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator

TYPE_CHECKING = False  # `typing` costs more to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

MAX_DEPTH = 100
_MAX_ITEMS = 100_000


class NotSerializableError(Exception):
    """A value that is not made of plain literals; the message is the name of its type."""


def dumps(value: Any) -> str:
    return json.dumps(_encode(value, 0))


def loads(text: str | bytes) -> Any:
    """Raises a ValueError for anything that `dumps` does not write."""
    try:
        return _decode(json.loads(text), 0)
    except (TypeError, KeyError, OverflowError, RecursionError) as error:
        raise ValueError(f"not a literal: {type(error).__name__}") from None


def _encode(value: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise NotSerializableError(f"a value nested more than {MAX_DEPTH} deep")
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    for tag, kind, parts in _SCALARS:
        if isinstance(value, kind):
            return [tag, parts(value)]
    for tag, kinds, _ in _CONTAINERS:
        if isinstance(value, kinds):
            return [tag, [_encode(item, depth + 1) for item in _items(value)]]
    if isinstance(value, dict):
        return ["dict", [[_encode(key, depth + 1), _encode(item, depth + 1)] for key, item in value.items()]]
    for name, kind in _TYPES.items():
        if value is kind:
            return ["type", name]
    raise NotSerializableError(type(value).__name__)


def _items(values: Any) -> Iterator[Any]:
    for count, item in enumerate(values):
        if count >= _MAX_ITEMS:
            raise NotSerializableError(f"a {type(values).__name__} of more than {_MAX_ITEMS} items")
        yield item


def _decode(coded: Any, depth: int) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if coded is None or isinstance(coded, bool | str):
        return coded
    if not isinstance(coded, list) or len(coded) != 2 or not isinstance(coded[0], str):
        raise ValueError("not a literal")
    tag, content = coded
    if tag == "dict":
        return {_decode(key, depth + 1): _decode(item, depth + 1) for key, item in content}
    if tag == "type":
        return _TYPES[content]
    if tag in _TO_SCALAR:
        return _TO_SCALAR[tag](content)
    if tag in _TO_CONTAINER and isinstance(content, list):
        return _TO_CONTAINER[tag]([_decode(item, depth + 1) for item in content])
    raise ValueError("not a literal")


def _complex(parts: list[str]) -> complex:
    real, imaginary = parts
    return complex(float.fromhex(real), float.fromhex(imaginary))


_SCALARS: tuple[tuple[str, type, Callable[[Any], Any]], ...] = (
    ("int", int, hex),  # decimal digits are limited, and slow
    ("float", float, float.hex),
    ("complex", complex, lambda value: [value.real.hex(), value.imag.hex()]),
    ("bytes", bytes, bytes.hex),
    ("range", range, lambda value: [hex(value.start), hex(value.stop), hex(value.step)]),
)
_TO_SCALAR: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": _complex,
    "bytes": bytes.fromhex,
    "range": lambda parts: range(*(int(part, 16) for part in parts)),
}
_CONTAINERS: tuple[tuple[str, tuple[type, ...], Callable[[list[Any]], Any]], ...] = (
    ("list", (list,), list),
    ("tuple", (tuple,), tuple),
    ("set", (set,), set),
    ("frozenset", (frozenset,), frozenset),
    ("deque", (deque,), deque),
    ("keys", (type({}.keys()),), lambda items: dict.fromkeys(items).keys()),
    ("values", (type({}.values()),), lambda items: dict(enumerate(items)).values()),
    ("items", (type({}.items()),), lambda items: dict(items).items()),
    ("iterator", (Iterator,), iter),
)
_TYPES = {kind.__name__: kind for kind in (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)}
_TO_CONTAINER = {tag: make for tag, _, make in _CONTAINERS}
