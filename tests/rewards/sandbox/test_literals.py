"""Only plain values pass between two processes, and they keep their types."""

import collections
import json
import math

import pytest

from oxrl.rewards.sandbox.literals import MAX_DEPTH, NotSerializableError, dumps, loads

VALUES = [
    None,
    True,
    0,
    -(10**5000),
    1.5,
    -0.0,
    math.inf,
    2 - 3j,
    "a\n\ud800\0é",
    b"\x00\xff",
    [1, [2, []]],
    (1,),
    (),
    {1, 2},
    frozenset({"a"}),
    {(1, 2): {"x": None}, "y": [True]},
    range(3, 9, 2),
    collections.deque([1, 2]),
    [int, dict],
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(type(value).__name__))
def test_a_value_arrives_with_its_type(value):
    arrived = loads(dumps(value))
    assert type(arrived) is type(value) and arrived == value and repr_of(arrived) == repr_of(value)


def repr_of(value):
    return hex(value) if type(value) is int else repr(value)


def test_nan_arrives():
    assert math.isnan(loads(dumps(math.nan)))


def test_subclasses_arrive_as_their_base_types():
    class AlwaysEqual(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert loads(dumps(AlwaysEqual(3))) != 4
    assert type(loads(dumps(collections.Counter("aab")))) is dict
    assert list(loads(dumps(x for x in "ab"))) == ["a", "b"]


@pytest.mark.parametrize("value", [object(), print, [object()], {"a": lambda: 0}, type, type("int", (), {})])
def test_objects_are_not_serializable(value):
    with pytest.raises(NotSerializableError):
        dumps(value)


def test_deep_and_endless_values_are_not_serializable():
    deep = []
    for _ in range(MAX_DEPTH + 1):
        deep = [deep]
    with pytest.raises(NotSerializableError):
        dumps(deep)
    with pytest.raises(NotSerializableError):
        dumps(iter(int, 1))


BAD = [
    "1",
    "{}",
    '["int"]',
    '["int", 5]',
    '["int", "x y"]',
    '["list", "ab"]',
    '["dict", [1]]',
    '["set", [["list", []]]]',
]


@pytest.mark.parametrize("text", [*BAD, '["eval", "1"]', '["float", null]', "[" * 10**5, '["bytes", "0"]', "nonsense"])
def test_other_text_is_not_a_value(text):
    with pytest.raises(ValueError):
        loads(text)


def test_a_deep_value_is_refused_before_it_is_built():
    text = json.dumps(0)
    nested = '["list", [' * (MAX_DEPTH + 2) + "null" + "]]" * (MAX_DEPTH + 2)
    with pytest.raises(ValueError):
        loads(nested)
    with pytest.raises(ValueError):
        loads(text)
