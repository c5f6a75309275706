"""Right programs that use much of Python, each with a test that it passes; all names differ from each other."""

_SEPARATOR = "# test\n"
_PROGRAMS = {
    "plain function": """
def triple(n):
    return 3 * n
# test
assert triple(4) == 12
""",
    "recursion": """
def fib(n):
    return n if n < 2 else fib(n - 1) + fib(n - 2)
# test
assert [fib(n) for n in range(8)] == [0, 1, 1, 2, 3, 5, 8, 13]
""",
    "memoized recursion": """
from functools import lru_cache

@lru_cache(maxsize=None)
def ways(n):
    return 1 if n < 2 else ways(n - 1) + ways(n - 2)
# test
assert ways(90) == 4660046610375530309
assert ways.cache_info().hits > 0
""",
    "keyword and default arguments": """
def greet(name, *others, mark='!', **extra):
    return ' '.join([name, *others, *sorted(extra)]) + mark
# test
assert greet('a', 'b', mark='?', z=1) == 'a b z?'
""",
    "several results": """
def split(xs):
    return [x for x in xs if x % 2], {x for x in xs if not x % 2}
# test
odd, even = split([1, 2, 3, 4])
assert odd == [1, 3] and even == {2, 4}
""",
    "expected exception": """
def root(x):
    if x < 0:
        raise ValueError('negative')
    return x ** 0.5
# test
try:
    root(-1)
except ValueError as error:
    assert str(error) == 'negative'
else:
    raise AssertionError
assert root(9) == 3
""",
    "own exception": """
class EmptyError(ValueError):
    pass

def first(xs):
    if not xs:
        raise EmptyError('nothing')
    return xs[0]
# test
for kind in (EmptyError, ValueError):
    try:
        first([])
    except kind as error:
        assert 'nothing' in str(error)
    else:
        raise AssertionError
""",
    "own exception with attributes": """
class FundsError(ValueError):
    def __init__(self, missing, owner):
        super().__init__(f'{owner} lacks {missing}')
        self.missing, self.owner = missing, {'name': owner}
    @property
    def is_large(self):
        return self.missing > 100
    def doubled(self):
        return 2 * self.missing

def withdraw(amount):
    raise FundsError(amount, 'eve')
# test
for kind in (FundsError, ValueError, Exception):
    try:
        withdraw(5)
    except kind as error:
        assert error.missing == 5 and error.owner == {'name': 'eve'} and not error.is_large and error.doubled() == 10
        assert str(error) == 'eve lacks 5' and error.args == ('eve lacks 5',) and not hasattr(error, 'other')
    else:
        raise AssertionError
""",
    "postponed annotations with a dataclass": """
from __future__ import annotations
from dataclasses import dataclass, field

@dataclass(order=True)
class Item:
    price: int
    tags: list[str] = field(default_factory=list)

def cheapest(prices):
    return min(Item(price) for price in prices).price
# test
assert cheapest([3, 1, 2]) == 1
assert Item(1, ['a']) == Item(1, ['a']) and Item(1) < Item(2)
""",
    "annotations at run time": """
def typed(x: int) -> str:
    return typed.__annotations__['x'].__name__ + str(x)
# test
assert typed(1) == 'int1'
""",
    "type hints": """
from typing import get_type_hints

class Shape:
    size: 'int'

def hints():
    return {name: kind.__name__ for name, kind in get_type_hints(Shape).items()}
# test
assert hints() == {'size': 'int'}
""",
    "pickle of an own class": """
import pickle

class Box:
    def __init__(self, content):
        self.content = content

def through_pickle(x):
    return pickle.loads(pickle.dumps(Box(x))).content
# test
assert through_pickle([1, 2]) == [1, 2]
""",
    "deep copy": """
import copy

class Tree:
    def __init__(self, *children):
        self.children = list(children)

def copied():
    one = Tree(Tree())
    other = copy.deepcopy(one)
    other.children.clear()
    return len(one.children), len(other.children)
# test
assert copied() == (1, 0)
""",
    "asyncio": """
import asyncio

async def later(x):
    await asyncio.sleep(0)
    return 2 * x

def gathered(xs):
    async def main():
        return await asyncio.gather(*map(later, xs))
    return asyncio.run(main())
# test
assert gathered([1, 2]) == [2, 4]
""",
    "coroutine that the tests await": """
import asyncio

async def awaited(x):
    await asyncio.sleep(0)
    return x + 1
# test
import asyncio
assert asyncio.run(awaited(1)) == 2
""",
    "asyncio with a thread": """
import asyncio

def in_thread(x):
    async def main():
        return await asyncio.wait_for(asyncio.to_thread(pow, x, 2), 60)
    return asyncio.run(main())
# test
assert in_thread(5) == 25
""",
    "threads with a lock": """
import threading

def count_up(threads, steps):
    total, lock = 0, threading.Lock()
    def work():
        nonlocal total
        for _ in range(steps):
            with lock:
                total += 1
    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers: worker.start()
    for worker in workers: worker.join()
    return total
# test
assert count_up(4, 25) == 100 and count_up(50, 2) == 100
""",
    "pool of threads": """
from concurrent.futures import ThreadPoolExecutor

def squares(xs):
    with ThreadPoolExecutor(max_workers=4) as pool:
        return list(pool.map(lambda x: x * x, xs))
# test
assert squares(range(10)) == [x * x for x in range(10)]
""",
    "producer and consumer": """
import queue, threading

def passed_on(xs):
    waiting, done = queue.Queue(), []
    def consume():
        while (x := waiting.get()) is not None:
            done.append(x)
    consumer = threading.Thread(target=consume)
    consumer.start()
    for x in xs: waiting.put(x)
    waiting.put(None)
    consumer.join()
    return done
# test
assert passed_on([1, 2, 3]) == [1, 2, 3]
""",
    "time zones": """
from datetime import datetime
from zoneinfo import ZoneInfo

def offset(month):
    return datetime(2024, month, 1, tzinfo=ZoneInfo('Europe/Berlin')).utcoffset().total_seconds() / 3600
# test
assert offset(1) == 1 and offset(7) == 2
""",
    "dates": """
from datetime import date, timedelta

def due(day, days):
    return day + timedelta(days=days)
# test
from datetime import date, timedelta
assert due(date(2024, 2, 28), 2) == date(2024, 3, 1)
assert due(date(2024, 1, 2), 0) - date(2024, 1, 1) == timedelta(days=1)
""",
    "numpy numbers": """
import numpy as np

def mean_of(xs):
    return np.mean(xs)

def total_of(xs):
    return np.array(xs).sum()

def any_of(xs):
    return np.any(xs)
# test
assert mean_of([1, 2, 3]) == 2.0 and total_of([1, 2]) == 3 and any_of([0, 1]) == True
""",
    "numpy arrays": """
import numpy as np

def solve(a, b):
    return np.linalg.solve(np.array(a, float), np.array(b, float))
# test
assert np.allclose(solve([[2, 0], [0, 4]], [2, 4]), [1, 1])
assert solve([[1.0]], [3.0]).tolist() == [3.0]
""",
    "numpy arrays as arguments": """
def doubled(array):
    return array * 2

def fill(array):
    array[:] = 7
# test
import numpy
assert (doubled(numpy.arange(3)) == numpy.array([0, 2, 4])).all()
xs = numpy.zeros(2)
fill(xs)
assert xs.tolist() == [7, 7]
""",
    "list changed in place": """
def sort_in_place(xs):
    for i in range(len(xs)):
        for j in range(i):
            if xs[i] < xs[j]:
                xs[i], xs[j] = xs[j], xs[i]
# test
xs = [3, 1, 2]
assert sort_in_place(xs) is None
assert xs == [1, 2, 3]
""",
    "matrix and dictionary changed in place": """
def transpose(m):
    m[:] = [list(row) for row in zip(*m)]

def bump(counts, *, key):
    counts[key] = counts.get(key, 0) + 1
# test
m = [[1, 2], [3, 4]]
transpose(m)
assert m == [[1, 3], [2, 4]]
c = {'a': 1}
bump(c, key='a')
bump(counts=c, key='b')
assert c == {'a': 2, 'b': 1}
""",
    "tests that forgot to import math": """
import math

def area(r):
    return math.pi * r * r
# test
assert math.isclose(area(2), 4 * math.pi)
assert isclose(area(1), pi)
""",
    "tests that forgot to import Counter": """
def letters(word):
    return sorted(word)
# test
assert Counter(letters('abca')) == Counter({'a': 2, 'b': 1, 'c': 1})
""",
    "fraction": """
from fractions import Fraction

def half_of(x):
    return Fraction(x, 2)
# test
from fractions import Fraction
assert half_of(3) == Fraction(3, 2) and half_of(4) == 2
""",
    "decimal": """
from decimal import Decimal

def rounded(text):
    return Decimal(text).quantize(Decimal('0.01'))
# test
from decimal import Decimal
assert rounded('1.005') == Decimal('1.00') and rounded(text='2') == 2
""",
    "own class with methods": """
class Stack:
    def __init__(self):
        self.items = []
    def push(self, x):
        self.items.append(x)
    def pop(self):
        return self.items.pop()
    def __len__(self):
        return len(self.items)
# test
s = Stack()
s.push(1)
s.push(2)
assert len(s) == 2 and s.pop() == 2 and s.items == [1]
try:
    s.pop(); s.pop()
except IndexError:
    pass
else:
    raise AssertionError
""",
    "own class as a result": """
class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y
    def __eq__(self, other):
        return (self.x, self.y) == (other.x, other.y)
    def __repr__(self):
        return f'Point({self.x}, {self.y})'

def mirrored(p):
    return Point(-p.x, p.y)
# test
p = mirrored(Point(1, 2))
assert p == Point(-1, 2) and p != Point(1, 2)
assert (p.x, p.y) == (-1, 2) and repr(p) == 'Point(-1, 2)' and isinstance(p, Point)
""",
    "operators": """
class Vector:
    def __init__(self, *xs):
        self.xs = xs
    def __add__(self, other):
        return Vector(*[a + b for a, b in zip(self.xs, other.xs)])
    def __mul__(self, k):
        return Vector(*[k * x for x in self.xs])
    __rmul__ = __mul__
    def __eq__(self, other):
        return self.xs == other.xs
    def __getitem__(self, i):
        return self.xs[i]
    def __abs__(self):
        return sum(x * x for x in self.xs) ** 0.5
# test
assert Vector(1, 2) + Vector(2, 2) == Vector(3, 4)
assert abs(Vector(3, 4)) == 5.0 and (2 * Vector(1, 2) * 3)[1] == 12
""",
    "container of its own": """
class Bag:
    def __init__(self, xs):
        self.xs = list(xs)
    def __iter__(self):
        return iter(self.xs)
    def __contains__(self, x):
        return x in self.xs
    def __bool__(self):
        return bool(self.xs)
# test
bag = Bag('abc')
assert list(bag) == ['a', 'b', 'c'] and 'a' in bag and 'z' not in bag and bag and not Bag('')
""",
    "linked nodes": """
class Node:
    def __init__(self, value, next=None):
        self.value, self.next = value, next

def reverse(head):
    done = None
    while head:
        head.next, done, head = done, head, head.next
    return done

def build(xs):
    head = None
    for x in reversed(xs):
        head = Node(x, head)
    return head
# test
node, seen = reverse(build([1, 2, 3])), []
while node is not None:
    seen.append(node.value)
    node = node.next
assert seen == [3, 2, 1]
n = Node(1)
n.value = 5
assert n.value == 5
""",
    "inheritance and properties": """
from abc import ABC, abstractmethod

class Animal(ABC):
    @abstractmethod
    def sound(self): ...
    @property
    def loud(self):
        return self.sound().upper()

class Dog(Animal):
    def sound(self):
        return 'wuff'
# test
assert Dog().loud == 'WUFF' and isinstance(Dog(), Animal)
try:
    Animal()
except TypeError:
    pass
else:
    raise AssertionError
""",
    "class and static methods": """
class Celsius:
    count = 0
    def __init__(self, degrees):
        self.degrees = degrees
        Celsius.count += 1
    @classmethod
    def from_fahrenheit(cls, f):
        return cls((f - 32) / 1.8)
    @staticmethod
    def valid(d):
        return d >= -273.15
# test
assert round(Celsius.from_fahrenheit(212).degrees) == 100 and not Celsius.valid(-300) and Celsius.count == 1
""",
    "subclass of a built-in type": """
class Ledger(dict):
    def total(self):
        return sum(self.values())
# test
assert Ledger(a=1, b=2).total() == 3
""",
    "named tuple": """
from collections import namedtuple
from typing import NamedTuple

Pair = namedtuple('Pair', 'left right')

class Range(NamedTuple):
    low: int
    high: int

def bounds(xs):
    return Range(min(xs), max(xs))
# test
assert bounds([2, 1, 3]) == (1, 3) and bounds([4]).high == 4 and Pair(1, 2).right == 2
""",
    "enumeration": """
from enum import Enum, IntEnum

class Color(Enum):
    RED = 1
    BLUE = 2

class Level(IntEnum):
    LOW = 1

def opposite(color):
    return Color.BLUE if color is Color.RED else Color.RED

def lowest():
    return Level.LOW
# test
assert opposite(Color.RED) == Color.BLUE and opposite(Color.BLUE).name == 'RED' and lowest() == 1
""",
    "counter and ordered dictionary": """
from collections import Counter, OrderedDict, defaultdict

def tally(text):
    return Counter(text)

def ordered(keys):
    return OrderedDict((key, len(key)) for key in keys)

def grouped(words):
    groups = defaultdict(list)
    for word in words:
        groups[word[0]].append(word)
    return groups
# test
assert tally('aab').most_common(1) == [('a', 2)] and tally('a')['z'] == 0
assert list(ordered(['b', 'a'])) == ['b', 'a'] and grouped(['ab', 'ac']) == {'a': ['ab', 'ac']}
""",
    "generator": """
def evens(n):
    for i in range(n):
        if i % 2 == 0:
            yield i
# test
assert list(evens(5)) == [0, 2, 4]
assert next(evens(3)) == 0 and sum(evens(10)) == 20
""",
    "endless generator": """
def naturals():
    n = 0
    while True:
        yield n
        n += 1
# test
from itertools import islice
numbers = naturals()
assert [next(numbers) for _ in range(3)] == [0, 1, 2] and list(islice(naturals(), 4)) == [0, 1, 2, 3]
""",
    "generator that is sent values": """
def running_mean():
    total, count, mean = 0.0, 0, None
    while True:
        x = yield mean
        if x is None:
            return count
        total, count = total + x, count + 1
        mean = total / count

def guarded():
    try:
        yield 'open'
    except ValueError:
        yield 'caught'
# test
mean = running_mean()
assert next(mean) is None
assert mean.send(1) == 1.0 and mean.send(3) == 2.0 and [mean.send(x) for x in (2, 6)] == [2.0, 3.0]
try:
    mean.send(None)
except StopIteration as end:
    assert end.value == 4
else:
    raise AssertionError
door = guarded()
assert next(door) == 'open' and door.throw(ValueError) == 'caught' and list(door) == []
door.close()
""",
    "own iterator": """
class Countdown:
    def __init__(self, n):
        self.n = n
    def __iter__(self):
        return self
    def __next__(self):
        if self.n <= 0:
            raise StopIteration
        self.n -= 1
        return self.n + 1
# test
assert list(Countdown(3)) == [3, 2, 1] and max(Countdown(2)) == 2
""",
    "closure": """
def adder(n):
    return lambda x: x + n

def counter():
    count = 0
    def step():
        nonlocal count
        count += 1
        return count
    return step
# test
assert adder(2)(3) == 5
step = counter()
assert (step(), step()) == (1, 2)
""",
    "function of the tests as an argument": """
def apply_all(functions, x):
    return [function(x) for function in functions]

def fold(f, xs, start):
    for x in xs:
        start = f(start, x)
    return start
# test
assert fold(lambda a, b: a * b, [2, 3], 1) == 6
assert apply_all([lambda x: x + 1, abs], -2) == [-1, 2]
""",
    "decorator": """
import functools

def logged(function):
    calls = []
    @functools.wraps(function)
    def wrapper(*args):
        calls.append(args)
        return function(*args), len(calls)
    return wrapper
# test
double = logged(lambda x: 2 * x)
assert double(2) == (4, 1) and double(3) == (6, 2)
""",
    "context manager": """
from contextlib import contextmanager

class Session:
    log = []
    def __enter__(self):
        self.log.append('in')
        return self
    def __exit__(self, *_):
        self.log.append('out')

@contextmanager
def opened(name):
    yield name.upper()
# test
with Session() as session:
    pass
assert session.log == ['in', 'out']
with opened('x') as name:
    assert name == 'X'
""",
    "two functions that undo each other": """
def encode(text):
    return [ord(c) + 1 for c in text]

def decode(codes):
    return ''.join(chr(c - 1) for c in codes)
# test
assert decode(encode('abc')) == 'abc' and encode('a') == [98]
""",
    "file in the current folder": """
import json, os, tempfile

def saved(value):
    with tempfile.NamedTemporaryFile('w+', suffix='.json') as file:
        json.dump(value, file)
        file.flush()
        with open(file.name) as again:
            return json.load(again)
# test
assert saved({'a': [1]}) == {'a': [1]}
""",
    "standard library": r"""
import base64, bisect, hashlib, heapq, itertools, re, statistics, string, textwrap, uuid

def tour(text):
    heap = [3, 1, 2]
    heapq.heapify(heap)
    digest = hashlib.md5(text.encode()).hexdigest()[:4]
    return [base64.b64encode(text.encode()), bisect.bisect([1, 3], 2), digest, heap[0],
            list(itertools.accumulate([1, 2])), re.findall(r'\d+', text), statistics.median([1, 2, 9])]
# test
assert tour('a1b22') == [b'YTFiMjI=', 1, 'b766', 1, [1, 3], ['1', '22'], 2]
""",
    "large results": """
def squares_below(n):
    return [x * x for x in range(n)]

def halves(n):
    return tuple(x / 2 for x in range(n)), ['ab'] * n, {x: str(x) for x in range(n)}
# test
many = 150_000
assert squares_below(many) == [x * x for x in range(many)] and squares_below(2) == [0, 1]
numbers, texts, table = halves(many)
assert numbers == tuple(x / 2 for x in range(many)) and texts == ['ab'] * many and table[7] == '7'
""",
    "large numbers and text": r"""
def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)

def umlauts(text):
    return text.translate({ord('ä'): 'ae'}) + '\u2603'
# test
import math
assert factorial(400) == math.factorial(400) and umlauts('bär') == 'baer☃'
""",
    "sets and nested values": """
def pairs(xs):
    return {frozenset((a, b)) for a in xs for b in xs if a < b}, {(1, 2): [{'a': (None, True)}]}
# test
assert pairs([1, 2]) == ({frozenset({1, 2})}, {(1, 2): [{'a': (None, True)}]})
""",
    "main guard and output": """
def shout(x):
    print('called', x)
    return x.upper()

if __name__ == '__main__':
    print(shout(input()))
# test
assert shout('a') == 'A'
""",
    "graph search": """
from collections import deque

def shortest(graph, start, goal):
    queue, seen = deque([(start, 0)]), {start}
    while queue:
        node, distance = queue.popleft()
        if node == goal:
            return distance
        for other in graph.get(node, ()):
            if other not in seen:
                seen.add(other)
                queue.append((other, distance + 1))
    return None
# test
assert shortest({1: [2, 3], 2: [4], 3: [4]}, 1, 4) == 2 and shortest({1: []}, 1, 9) is None
""",
}
HONEST = {name: tuple(text.split(_SEPARATOR)) for name, text in _PROGRAMS.items()}
"""Name -> program and test."""
