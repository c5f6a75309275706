"""Endless, deterministic, resumable streams of items: one dataset, or several mixed by ratio.

A buffer does not interpret its items; its state is the position in the stream.
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
            raise ValueError(f"seed must be non-negative, got {seed}")
        self._items = list(items)
        self._seed = seed
        self._shuffle = shuffle
        self._fingerprint = ""
        self._epoch, self._offset = 0, 0
        self._order = self._order_of(0)

    @property
    def epoch_id(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    @property
    def sample_offset(self) -> int:
        """Number of items drawn in the current epoch; always less than the number of items."""
        return self._offset

    def __len__(self) -> int:
        return len(self._items)

    def get_prompts(self, n: int) -> list[T]:
        """Return the next `n` items: samples, or rows that stay together."""
        _check_count(n)
        drawn: list[T] = []
        while len(drawn) < n:
            end = min(self._offset + n - len(drawn), len(self))
            drawn += [self._items[index] for index in self._order[self._offset : end]]
            if end == len(self):
                self._seek(self._epoch + 1, 0)
            else:
                self._offset = end
        return drawn

    def state(self) -> dict[str, Any]:
        return {"epoch_id": self._epoch, "sample_offset": self._offset, **self._identity()}

    def restore(self, state: Mapping[str, Any]) -> None:
        _check_same(self._identity(), state)
        epoch, offset = state.get("epoch_id"), state.get("sample_offset")
        if not (isinstance(epoch, int) and epoch >= 0 and isinstance(offset, int) and 0 <= offset < len(self)):
            raise ValueError(f"invalid state: epoch_id {epoch!r}, sample_offset {offset!r} for {len(self)} items")
        self._seek(epoch, offset)

    def note(self, id: str, reward: float) -> None:
        """Rewards do not change the order of this stream."""

    def report(self) -> dict[str, float]:
        return {}

    def _seek(self, epoch: int, offset: int) -> None:
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
    """Hash a value's content, equal in every run: arrays in full (`repr` shortens them), without memory addresses."""
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
        return
    parts: Iterable[object]
    if is_dataclass(value):
        # Without media, fingerprints are those of records before they had this field.
        named = [field.name for field in fields(value) if field.compare]
        names = [name for name in named if name != "media" or getattr(value, name)]
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
    """`MixedBuffer({"math": a, "chat": b}, ratios={"math": 0.8, "chat": 0.2})`, itself a `DataSource`.

    Each draw goes to the source with the largest deficit, `ratio * draws - draws of that source`. Every
    prefix is within about one draw of the ratios. Shares are integers, so rounding errors do not accumulate.
    """

    def __init__(self, sources: Mapping[str, DataSource[T]], *, ratios: Mapping[str, float]) -> None:
        self._sources = dict(sorted(sources.items()))  # ties go to the first name, whatever the caller's order
        self._shares = _integer_shares(self._sources, ratios)
        self._total = sum(self._shares.values())
        self._drawn = dict.fromkeys(self._sources, 0)

    def get_prompts(self, n: int) -> list[T]:
        """Return the next `n` items of the mixture."""
        _check_count(n)
        names = [self._next_source() for _ in range(n)]
        items = {name: iter(self._sources[name].get_prompts(count)) for name, count in Counter(names).items()}
        return [next(items[name]) for name in names]

    def state(self) -> dict[str, Any]:
        sources = {name: source.state() for name, source in self._sources.items()}
        return {"shares": dict(self._shares), "drawn": dict(self._drawn), "sources": sources}

    def restore(self, state: Mapping[str, Any]) -> None:
        _check_same({"shares": self._shares}, state)
        for name, source in self._sources.items():
            source.restore(state["sources"][name])
        self._drawn = {name: int(state["drawn"][name]) for name in self._sources}

    def note(self, id: str, reward: float) -> None:
        """Pass the mean reward of a group to the sources that remember it."""
        for source in self._sources.values():
            if hasattr(source, "note"):
                source.note(id, reward)

    def report(self) -> dict[str, float]:
        """Metrics of the sources, weighted by their shares."""
        reports = {name: source.report() for name, source in self._sources.items() if hasattr(source, "report")}
        names = {metric for found in reports.values() for metric in found}
        return {
            metric: sum(self._shares[name] * found[metric] for name, found in reports.items()) / self._total
            for metric in sorted(names)
        }

    def _next_source(self) -> str:
        draws = sum(self._drawn.values()) + 1
        deficits = {name: draws * share - self._drawn[name] * self._total for name, share in self._shares.items()}
        name = max(deficits, key=deficits.__getitem__)
        self._drawn[name] += 1
        return name


def _integer_shares(sources: Mapping[str, object], ratios: Mapping[str, float]) -> dict[str, int]:
    if set(sources) != set(ratios):
        raise ValueError(f"ratios must have the keys {_names(sources)} (one per dataset), got {_names(ratios)}")
    wrong = {name: ratio for name, ratio in ratios.items() if not (math.isfinite(ratio) and ratio >= 0)}
    if wrong:
        raise ValueError(f"ratios must be finite and non-negative, got {wrong}")
    if not any(ratios.values()):
        raise ValueError("at least one ratio must be greater than 0")
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
                f"the saved state does not match the data or settings: saved {name} {state.get(name)!r}, current "
                f"{name} {value!r}; resume with the data and settings of the interrupted run, or start a new run"
            )
