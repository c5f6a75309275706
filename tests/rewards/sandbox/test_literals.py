"""Only plain values pass between two processes, and they keep their types."""

import collections
import datetime
import decimal
import fractions
import json
import math
import uuid

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
    list(range(-2000, 2000)),
    tuple(x / 3 for x in range(2000)),
    {*range(2000)},
    [True, *range(2000)],
    ["ints", "0x1 0x2"],
    (1,),
    (),
    {1, 2},
    frozenset({"a"}),
    {(1, 2): {"x": None}, "y": [True]},
    range(3, 9, 2),
    collections.deque([1, 2]),
    [int, dict, ValueError],
    bytearray(b"ab"),
    collections.Counter("aab"),
    collections.OrderedDict([("b", 1), ("a", 2)]),
    collections.namedtuple("Point", "x y")(1, [2]),
    fractions.Fraction(-2, 3),
    decimal.Decimal("1.50"),
    datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC),
    datetime.date(2024, 2, 29),
    datetime.timedelta(days=-1, microseconds=1),
    uuid.UUID(int=5),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: str(type(value).__name__))
def test_a_value_arrives_with_its_type(value):
    arrived = loads(dumps(value))
    assert type(arrived).__name__ == type(value).__name__ and arrived == value and repr_of(arrived) == repr_of(value)


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
    assert type(loads(dumps(collections.defaultdict(int, a=1)))) is dict
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
    '["list", {}]',
    '["list", {"ints": "0x1 x"}]',
    '["list", {"ints": null}]',
    '["list", {"eval": "1"}]',
    '["int", {"ints": "0x1"}]',
    '["dict", [1]]',
    '["set", [["list", []]]]',
    '["object", ["object", 0]]',
    '["namedtuple", ["P", ["x", "_eq"], [null, null]]]',
    '["namedtuple", ["P", ["x"], []]]',
    '["fractions.Fraction", [["int", "0x1"], ["int", "0x0"]]]',
    '["decimal.Decimal", ["x"]]',
    '["datetime.date", ["datetime", null]]',
    '["uuid.UUID", ["x"]]',
    '["numpy.ndarray", ["O", ["tuple", [["int", "0x1"]]], ["list", [null]]]]',
    '["type", "eval"]',
    '["type", "SystemExit"]',
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


def test_arrays_arrive_and_an_empty_one_is_a_list():
    numpy = pytest.importorskip("numpy")
    for array in (numpy.arange(6).reshape(2, 3), numpy.array(1.5), numpy.array(["ab", "c"]), numpy.array([True])):
        arrived = loads(dumps(array))
        assert arrived.dtype == array.dtype and arrived.shape == array.shape and (arrived == array).all()
    assert loads(dumps(numpy.int64(3))) == 3 and loads(dumps(numpy.bool_(True))) is True
    assert loads(dumps(numpy.zeros((0, 1)))) == [], "it would equal all that it can be broadcast with"


def test_a_subclass_with_methods_is_more_than_its_content():
    class Ledger(dict):
        def total(self):
            return 0

    with pytest.raises(NotSerializableError):
        dumps(Ledger(a=1))
