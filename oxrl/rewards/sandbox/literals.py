"""Serialization of plain values between two processes of which one does not trust the other.

`loads` returns built-in types, and a few of the standard library and numpy, whatever the other side wrote: no custom
classes, no pickle, no custom `__eq__`. Other objects are passed by reference, in a form that the caller chooses. It
needs the standard library only, because it also runs inside the sandbox.
"""

from __future__ import annotations

import builtins
import json
from collections import Counter, OrderedDict, deque, namedtuple
from collections.abc import Iterator
from itertools import chain, islice

TYPE_CHECKING = False  # `typing` costs more to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    Refer = Callable[[Any], Any]  # an object to the content of its reference
    Resolve = Callable[[Any], Any]  # and back

MAX_DEPTH = 100
_MAX_ITEMS = 1_000_000
_MANY = 1000  # more numbers of one type are written as one text, which is faster


class NotSerializableError(Exception):
    """A value that is not made of plain literals; the message is the name of its type."""


def refuse(value: Any) -> Any:
    """The `refer` of a side that sends plain values only."""
    raise NotSerializableError(type(value).__name__)


def dumps(value: Any) -> str:
    """Raises a NotSerializableError."""
    return Encoder().dumps(value)


def loads(text: str | bytes, resolve: Resolve | None = None) -> Any:
    """Raises a ValueError for anything that `dumps` does not write."""
    try:
        return decode(json.loads(text), resolve)
    except (TypeError, KeyError, AttributeError, OverflowError, RecursionError, ArithmeticError) as error:
        raise ValueError(f"not a literal: {type(error).__name__}") from None


class Encoder:
    """Writes values; objects that cannot be copied, and those of `kind`, become what `refer` returns for them.

    An iterator with more than `iterator_items`, which may be endless, is such an object.
    """

    def __init__(self, refer: Refer = refuse, kind: tuple[type, ...] = (), iterator_items: int = _MAX_ITEMS):
        self.refer, self.kind, self.iterator_items = refer, kind, iterator_items

    def dumps(self, value: Any) -> str:
        return json.dumps(self.encode(value))

    def encode(self, value: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise NotSerializableError(f"a value nested more than {MAX_DEPTH} deep")
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, self.kind):
            return ["object", self.refer(value)]
        if isinstance(value, str):
            return str.__str__(value)
        for tag, kind, parts in _SCALARS:
            if isinstance(value, kind):
                return [tag, parts(value)]
        if isinstance(value, type):
            known = _TYPES.get(value.__name__) is value
            return ["type", value.__name__] if known else ["object", self.refer(value)]
        return self._container(value, depth) or self._standard(value, depth) or ["object", self.refer(value)]

    def _container(self, value: Any, depth: int) -> Any:
        if _has_own_methods(type(value)):
            return None
        if isinstance(value, tuple) and hasattr(type(value), "_fields"):
            fields = [*getattr(type(value), "_fields", ())]
            return ["namedtuple", [type(value).__name__, fields, self._all(value, depth)]]
        if isinstance(value, Iterator):
            return self._iterator(value, depth)
        for tag, kinds, _ in _CONTAINERS:
            if isinstance(value, kinds):
                return [tag, self._all(value, depth)]
        for tag, kind, _ in _MAPPINGS:
            if isinstance(value, kind):
                return [tag, [[self.encode(part, depth + 1) for part in pair] for pair in value.items()]]
        return None

    def _all(self, values: Any, depth: int) -> Any:
        items = list(islice(values, _MAX_ITEMS + 1))
        if len(items) > _MAX_ITEMS:
            raise NotSerializableError(f"a {type(values).__name__} of more than {_MAX_ITEMS} items")
        kinds = {*map(type, items)} if len(items) > _MANY else set()
        for tag, kind, write, _ in _NUMBERS:
            if kinds == {kind}:
                return {tag: " ".join(map(write, items))}
        return [self.encode(item, depth + 1) for item in items]

    def _iterator(self, values: Iterator[Any], depth: int) -> Any:
        items = list(islice(values, self.iterator_items + 1))
        if len(items) > self.iterator_items:
            return ["object", self.refer(chain(items, values))]
        return ["iterator", [self.encode(item, depth + 1) for item in items]]

    def _standard(self, value: Any, depth: int) -> Any:
        """A value of the standard library or numpy, by the name of its type: most programs import neither."""
        kind = type(value)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name in _STANDARD:
            return [name, [self.encode(part, depth + 1) for part in _STANDARD[name][0](value)]]
        if kind.__module__ == "numpy" and getattr(value, "ndim", None) == 0:
            return self.encode(value.item(), depth + 1)
        return None


def _has_own_methods(kind: type) -> bool:
    """Whether a class adds methods to a built-in type: its instances are more than their content."""
    own = [each for each in kind.__mro__ if each.__module__ not in ("builtins", "collections", "typing")]
    return kind.__module__ not in ("itertools", "numpy") and any(
        callable(value) and not name.startswith("_") for each in own for name, value in vars(each).items()
    )


def decode(coded: Any, resolve: Resolve | None = None, depth: int = 0) -> Any:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested more than {MAX_DEPTH} deep")
    if coded is None or isinstance(coded, bool | str):
        return coded
    if not isinstance(coded, list) or len(coded) != 2 or not isinstance(coded[0], str):
        raise ValueError("not a literal")
    tag, content = coded
    if tag == "object" and resolve is not None:
        return resolve(content)
    if tag in _TO_SCALAR:
        return _TO_SCALAR[tag](content)
    if isinstance(content, dict) and tag in _TO_CONTAINER:
        ((numbers, text),) = content.items()
        return _TO_CONTAINER[tag]([*map(_TO_NUMBERS[numbers], text.split(" "))])
    if not isinstance(content, list):
        raise ValueError("not a literal")
    if tag in _TO_MAPPING:
        pairs = [(decode(key, resolve, depth + 1), decode(item, resolve, depth + 1)) for key, item in content]
        return _TO_MAPPING[tag](pairs)
    if tag == "namedtuple":
        name, fields, values = content
        if len(fields) != len(values) or len(fields) > MAX_DEPTH:
            raise ValueError("not a literal")
        return _new_namedtuple(name, fields)(*[decode(item, resolve, depth + 1) for item in values])
    parts = [decode(item, resolve, depth + 1) for item in content]
    if tag in _TO_CONTAINER:
        return _TO_CONTAINER[tag](parts)
    if tag in _STANDARD:
        return _STANDARD[tag][1](*parts)
    raise ValueError("not a literal")


_new_namedtuple: Any = namedtuple  # its names are known at run time only


def _complex(parts: list[str]) -> complex:
    real, imaginary = parts
    return complex(float.fromhex(real), float.fromhex(imaginary))


def _fraction(numerator: int, denominator: int) -> Any:
    from fractions import Fraction

    return Fraction(numerator, denominator)


def _decimal(text: str) -> Any:
    from decimal import Decimal

    return Decimal(text)


def _time(kind: str, text: str) -> Any:
    import datetime

    kinds: dict[str, Any] = {"datetime": datetime.datetime, "date": datetime.date, "time": datetime.time}
    return kinds[kind].fromisoformat(text)


def _timedelta(days: int, seconds: int, microseconds: int) -> Any:
    from datetime import timedelta

    return timedelta(days, seconds, microseconds)


def _uuid(number: int) -> Any:
    from uuid import UUID

    return UUID(int=number)


def _array(dtype: str, shape: tuple[int, ...], values: list[Any]) -> Any:
    import numpy

    if not values:  # an empty array would equal everything that it can be broadcast with
        return []
    if numpy.dtype(dtype).kind not in "biufcSU":
        raise ValueError(f"not an array of numbers or strings: {dtype}")
    return numpy.array(values, dtype).reshape(shape)


_SCALARS: tuple[tuple[str, type, Callable[[Any], Any]], ...] = (
    ("int", int, hex),  # decimal digits are limited, and slow
    ("float", float, float.hex),
    ("complex", complex, lambda value: [value.real.hex(), value.imag.hex()]),
    ("bytes", bytes, bytes.hex),
    ("bytearray", bytearray, bytearray.hex),
    ("range", range, lambda value: [hex(value.start), hex(value.stop), hex(value.step)]),
)
_NUMBERS: tuple[tuple[str, type, Callable[[Any], str], Callable[[str], Any]], ...] = (
    ("ints", int, hex, lambda text: int(text, 16)),
    ("floats", float, float.hex, float.fromhex),
)
_CONTAINERS: tuple[tuple[str, tuple[type, ...], Callable[[list[Any]], Any]], ...] = (
    ("list", (list,), list),
    ("tuple", (tuple,), tuple),
    ("set", (set,), set),
    ("frozenset", (frozenset,), frozenset),
    ("deque", (deque,), deque),
    ("keys", (type({}.keys()),), lambda items: dict.fromkeys(items).keys()),
    ("values", (type({}.values()),), lambda items: dict(enumerate(items)).values()),
    ("items", (type({}.items()),), lambda items: dict(items).items()),
    ("iterator", (), iter),
)
_MAPPINGS: tuple[tuple[str, type[dict[Any, Any]], Callable[[list[Any]], Any]], ...] = (
    ("Counter", Counter, lambda pairs: Counter(dict(pairs))),
    ("OrderedDict", OrderedDict, OrderedDict),
    ("dict", dict, dict),
)
# name of the type -> to its parts, and back
_STANDARD: dict[str, tuple[Callable[[Any], tuple[Any, ...]], Callable[..., Any]]] = {
    "fractions.Fraction": (lambda value: (value.numerator, value.denominator), _fraction),
    "decimal.Decimal": (lambda value: (str(value),), _decimal),
    "datetime.datetime": (lambda value: ("datetime", value.isoformat()), _time),
    "datetime.date": (lambda value: ("date", value.isoformat()), _time),
    "datetime.time": (lambda value: ("time", value.isoformat()), _time),
    "datetime.timedelta": (lambda value: (value.days, value.seconds, value.microseconds), _timedelta),
    "uuid.UUID": (lambda value: (value.int,), _uuid),
    "numpy.ndarray": (lambda value: (value.dtype.str, value.shape, value.ravel().tolist()), _array),
}
_ERRORS = [kind for kind in vars(builtins).values() if isinstance(kind, type) and issubclass(kind, Exception)]
_PLAIN = (bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
_TYPES: dict[str, type] = {kind.__name__: kind for kind in (*_PLAIN, *_ERRORS)}
_TO_SCALAR: dict[str, Callable[[Any], Any]] = {
    "int": lambda text: int(text, 16),
    "float": float.fromhex,
    "complex": _complex,
    "bytes": bytes.fromhex,
    "bytearray": bytearray.fromhex,
    "range": lambda parts: range(*(int(part, 16) for part in parts)),
    "type": _TYPES.__getitem__,
}
_TO_NUMBERS = {tag: read for tag, _, _, read in _NUMBERS}
_TO_CONTAINER = {tag: make for tag, _, make in _CONTAINERS}
_TO_MAPPING = {tag: make for tag, _, make in _MAPPINGS}
