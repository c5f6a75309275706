"""Items become an endless, deterministic, resumable stream: one dataset, or several mixed by ratio.

The buffers know nothing about what they hold; they keep where they are, and nothing else.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any, Generic

import numpy as np

from oxrl.types import DataSource, IntArray, T


class DataBuffer(Generic[T]):
    """`DataBuffer(samples, seed=1).get_prompts(8)`: every item once per epoch, in an order drawn from (seed, epoch)."""

    def __init__(self, items: Sequence[T], *, seed: int = 0, shuffle: bool = True) -> None:
        if not items:
            raise ValueError("a DataBuffer needs at least one item")
        if seed < 0:
            raise ValueError(f"seed must be 0 or more, not {seed}")
        self._items = list(items)
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = ""
        self._epoch, self._offset = 0, 0
        self._order = self._order_of(0)

    @property
    def epoch_id(self) -> int:
        """How many epochs are complete."""
        return self._epoch

    @property
    def sample_offset(self) -> int:
        """How many items of the current epoch were handed out; always less than the number of items."""
        return self._offset

    def __len__(self) -> int:
        return len(self._items)

    def get_prompts(self, n: int) -> list[T]:
        _check_count(n)
        drawn: list[T] = []
        while len(drawn) < n:
            end = min(self._offset + n - len(drawn), len(self))
            drawn += [self._items[index] for index in self._order[self._offset : end]]
            if end == len(self):
                self._move_to(self._epoch + 1, 0)
            else:
                self._offset = end
        return drawn

    def state(self) -> dict[str, Any]:
        return {"epoch_id": self._epoch, "sample_offset": self._offset, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        _check_same(self._identity(), state)
        epoch, offset = state.get("epoch_id"), state.get("sample_offset")
        if not (isinstance(epoch, int) and epoch >= 0 and isinstance(offset, int) and 0 <= offset < len(self)):
            raise ValueError(f"a state cannot be at epoch {epoch!r}, offset {offset!r} of {len(self)} items")
        self._move_to(epoch, offset)

    def _move_to(self, epoch: int, offset: int) -> None:
        self._epoch, self._offset = epoch, offset
        self._order = self._order_of(epoch)

    def _order_of(self, epoch: int) -> IntArray:
        if not self._shuffle:
            return np.arange(len(self))
        return np.random.default_rng(np.random.SeedSequence([self._seed, epoch])).permutation(len(self))

    def _identity(self) -> dict[str, Any]:
        if not self._fingerprint:
            digest = hashlib.blake2b(digest_size=16)
            _digest_content(self._items, digest.update)
            self._fingerprint = digest.hexdigest()
        return {"size": len(self), "fingerprint": self._fingerprint, "seed": self._seed, "shuffle": self._shuffle}


def _digest_content(value: object, update: Callable[[bytes], None]) -> None:
    """Feed what a value holds, the same in every run: arrays whole, which `repr` shortens, and no memory addresses."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        return
    parts: Iterable[object]
    if is_dataclass(value):
        # Without media, fingerprints are those of records before they had this field.
        names = [field.name for field in fields(value) if field.name != "media" or getattr(value, field.name)]
        parts = [getattr(value, name) for name in names]
    elif isinstance(value, Mapping):
        parts = [part for pair in value.items() for part in pair]
    elif isinstance(value, list | tuple):
        parts = value
    else:
        update(re.sub(r" at 0x[0-9a-fA-F]+", "", repr(value)).encode("utf-8", "surrogatepass") + b",")
        return
    update(b"(")
    for part in parts:
        _digest_content(part, update)
    update(b")")


class MixedBuffer(Generic[T]):
    """`MixedBuffer({"math": a, "chat": b}, ratios={"math": 0.8, "chat": 0.2})`, itself a source like its parts.

    After any k draws each dataset has had k x ratio of them, off by less than one. For that, draw j of a dataset with
    ratio r must fall on one of the places floor((j-1)/r) + 1 to ceil(j/r). Tijdeman ("The chairman assignment
    problem", 1980) proves that this can be done; unit jobs with such windows are then served in time by always taking
    the earliest deadline. Largest deficit first, the simpler rule, fails when there are many datasets. All integers:
    nothing drifts, however long the run.
    """

    def __init__(self, sources: Mapping[str, DataSource[T]], *, ratios: Mapping[str, float]) -> None:
        self._sources = dict(sorted(sources.items()))  # the order settles ties, so it must not depend on the caller
        self._shares = _integer_shares(self._sources, ratios)
        self._total = sum(self._shares.values())
        self._drawn = dict.fromkeys(self._sources, 0)

    def get_prompts(self, n: int) -> list[T]:
        _check_count(n)
        turns = [self._next_turn() for _ in range(n)]
        items = {name: iter(self._sources[name].get_prompts(count)) for name, count in Counter(turns).items()}
        return [next(items[name]) for name in turns]

    def state(self) -> dict[str, Any]:
        sources = {name: source.state() for name, source in self._sources.items()}
        return {"shares": dict(self._shares), "drawn": dict(self._drawn), "sources": sources}

    def restore(self, state: Mapping[str, Any]) -> None:
        _check_same({"shares": self._shares}, state)
        for name, source in self._sources.items():
            source.restore(state["sources"][name])
        self._drawn = {name: int(state["drawn"][name]) for name in self._sources}

    def _next_turn(self) -> str:
        place = sum(self._drawn.values()) + 1
        ready = [name for name, share in self._shares.items() if self._drawn[name] * self._total < place * share]
        name = min(ready, key=self._deadline)
        self._drawn[name] += 1
        return name

    def _deadline(self, name: str) -> int:
        return -(-(self._drawn[name] + 1) * self._total // self._shares[name])


def _integer_shares(sources: Mapping[str, object], ratios: Mapping[str, float]) -> dict[str, int]:
    if set(sources) != set(ratios):
        raise ValueError(f"ratios must name the datasets {_names(sources)}, they name {_names(ratios)}")
    wrong = {name: ratio for name, ratio in ratios.items() if not (math.isfinite(ratio) and ratio >= 0)}
    if wrong:
        raise ValueError(f"ratios must be finite and 0 or more, not {wrong}")
    if not any(ratios.values()):
        raise ValueError("at least one ratio must be more than 0, or nothing is ever drawn")
    exact = {name: Fraction(repr(float(ratios[name]))) for name in sources}  # 0.8 means 4/5, not its nearest float
    scale = math.lcm(*(ratio.denominator for ratio in exact.values()))
    shares = {name: int(ratio * scale) for name, ratio in exact.items()}
    divisor = math.gcd(*shares.values())
    return {name: share // divisor for name, share in shares.items()}


def _names(names: Mapping[str, object]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _check_count(n: int) -> None:
    if n < 0:
        raise ValueError(f"cannot draw {n} items")


def _check_same(own: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    for name, value in own.items():
        if state.get(name) != value:
            raise ValueError(
                f"this state belongs to other data or settings: its {name} is {state.get(name)!r}, here {value!r}; "
                "resume with the data and settings of the interrupted run, or start afresh"
            )
