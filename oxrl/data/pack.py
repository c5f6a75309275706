"""Items (rows that stay together) to batches under a token budget: flat tensors, no padding, nothing left out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from oxrl.types import Batch, Counts, Item, Layout, Media, Row

if TYPE_CHECKING:
    import torch


def count_units(items: Sequence[Item]) -> Counts:
    """How many tokens, sequences and pairs of a step are trained: the denominators of its losses.

    Rows of one rollout are one sequence. What has no trained token is no sequence and no pair.
    """
    trained = [[row for row in item if row.mask.any()] for item in items]
    return {
        "token": float(sum(int(row.mask.sum()) for rows in trained for row in rows)),
        "chosen_token": float(sum(int(item[0].mask.sum()) for item in items if len(item) == 2)),
        "sequence": float(_sequences([row for rows in trained for row in rows])),
        "pair": float(sum(len(rows) == 2 for rows in trained)),
        "constant": 1.0,
    }


def _sequences(rows: Sequence[Row]) -> int:
    """A row that does not say which sequence it belongs to is one, also where the same row comes twice."""
    return len({row.sequence for row in rows if row.sequence}) + sum(not row.sequence for row in rows)


def worth_sharing(common: int, length: int) -> bool:
    """Whether a row of `length` tokens that begins with `common` tokens of another is better run behind that other."""
    return common >= max(8, length // 32)


def pack(items: Sequence[Item], budget: int, *, layout: Layout = "shared", parallel: int = 1) -> list[list[Item]]:
    """Divide a step's items into micro-batches of at most `budget` tokens; an item that is larger stands alone.

    First-fit decreasing. Where prompts are shared, items with the same one stay together as far as the budget allows,
    and a micro-batch pays for it once, for it is computed once. Where `parallel` of them run side by side there are as
    many, or a multiple, as long as there are items enough, and the largest is as small as it can be.
    """
    parts = _pack(items, budget, layout)
    wanted = min(-(-len(parts) // parallel) * parallel, len(items))
    if len(parts) == wanted:
        return parts
    parts = _pack(items, _least_budget(items, budget, layout, wanted), layout)
    while len(parts) < wanted:
        place = max((place for place, part in enumerate(parts) if len(part) > 1), key=lambda place: _size(parts[place]))
        part = parts.pop(place)
        parts += [part[::2], part[1::2]]
    return parts


def _least_budget(items: Sequence[Item], budget: int, layout: Layout, most: int) -> int:
    """Which still fills no more than `most` micro-batches: as `budget` itself does."""
    low, high = 0, min(budget, _size(items) * len(items))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len(_pack(items, middle, layout)) <= most else (middle, high)
    return high


def _size(items: Sequence[Item]) -> int:
    return sum(len(row) for item in items for row in item)


def _pack(items: Sequence[Item], budget: int, layout: Layout) -> list[list[Item]]:
    if layout == "padded":
        return _pack_padded(items, budget)
    if layout == "packed":
        return [part.items for part in _first_fit([_Part([i], frozenset(), sum(map(len, i))) for i in items], budget)]
    bundles: dict[_Prompt | int, list[_Part]] = {}
    for index, item in enumerate(items):
        prompt = _prompt(item[0])
        bundles.setdefault(prompt if prompt.tokens else index, []).append(_part(item))
    parts = [part for bundle in bundles.values() for part in _first_fit(bundle, budget)]
    return [part.items for part in _first_fit(parts, budget)]


def computed_tokens(items: Sequence[Item]) -> int:
    """What a micro-batch of all these items would compute where prompts are shared: each prompt once."""
    prompts = [_prompt(row) for item in items for row in item]
    return sum(len(row) for item in items for row in item) - _num_tokens(prompts) + _num_tokens(set(prompts))


class _Prompt(NamedTuple):
    """Key of a prompt that rows can share: its token ids as bytes, and its media."""

    tokens: bytes = b""
    media: tuple[Media, ...] = ()


class _Part(NamedTuple):
    """Items of one micro-batch. Their price is what will be computed: each of their prompts once, and all behind."""

    items: list[Item]
    prompts: frozenset[_Prompt]
    price: int

    def price_beside(self, other: _Part) -> int:
        return self.price + other.price - _num_tokens(self.prompts & other.prompts)


def _part(item: Item) -> _Part:
    prompts = [_prompt(row) for row in item]
    distinct = frozenset(prompts)
    return _Part([item], distinct, sum(map(len, item)) - _num_tokens(prompts) + _num_tokens(distinct))


def _prompt(row: Row) -> _Prompt:
    """The tokens before the first trained one; nothing where no other row could make use of them."""
    length = int(row.mask.argmax())
    return _Prompt(row.tokens[:length].tobytes(), row.media) if worth_sharing(length, len(row)) else _Prompt()


def _num_tokens(prompts: Iterable[_Prompt]) -> int:
    return sum(len(prompt.tokens) for prompt in prompts) // np.dtype(np.int64).itemsize


def _first_fit(parts: Sequence[_Part], budget: int) -> list[_Part]:
    filled: list[_Part] = []
    for part in sorted(parts, key=lambda part: -part.price):
        for index, place in enumerate(filled):
            price = place.price_beside(part)
            if price <= budget:
                filled[index] = _Part(place.items + part.items, place.prompts | part.prompts, price)
                break
        else:
            filled.append(part)
    return filled


def _pack_padded(items: Sequence[Item], budget: int) -> list[list[Item]]:
    """An item's price is its longest row times the rows beside it, and no prompt is shared.

    So rows of like length meet, and each micro-batch closes as soon as the next row would not fit.
    """
    micro_batches: list[list[Item]] = []
    for item in sorted(items, key=lambda item: -max(map(len, item))):
        if micro_batches and _padded_size([*micro_batches[-1], item]) <= budget:
            micro_batches[-1].append(item)
        else:
            micro_batches.append([item])
    return micro_batches


def _padded_size(items: Sequence[Item]) -> int:
    lengths = [len(row) for item in items for row in item]
    return max(lengths) * len(lengths)


def collate(items: Sequence[Item], device: str | torch.device = "cpu") -> Batch:
    """The rows of `items` end to end. All rows must carry the same streams and scalars."""
    import torch

    rows = [row for item in items for row in item]
    _check_alike(rows)
    lengths = [len(row) for row in rows]
    arrays = {
        "tokens": np.concatenate([row.tokens for row in rows]),
        "mask": np.concatenate([row.mask for row in rows]),
        "positions": np.concatenate([np.arange(length) for length in lengths]),
        "segments": np.repeat(np.arange(len(rows)), lengths),
    }
    streams = {name: np.concatenate([row.streams[name] for row in rows]) for name in rows[0].streams}
    scalars = {name: np.array([row.scalars[name] for row in rows]) for name in rows[0].scalars}
    return Batch(
        ids=tuple(row.id for row in rows),
        borders=(0, *np.cumsum(lengths).tolist()),
        streams={name: torch.from_numpy(s.astype(np.float32)).to(device) for name, s in streams.items()},
        scalars={name: torch.from_numpy(s.astype(np.float32)).to(device) for name, s in scalars.items()},
        media=tuple(row.media for row in rows) if any(row.media for row in rows) else (),
        **{name: torch.from_numpy(array).to(device) for name, array in arrays.items()},
    )


def _check_alike(rows: Sequence[Row]) -> None:
    first = rows[0]
    for row in rows:
        if row.streams.keys() != first.streams.keys() or row.scalars.keys() != first.scalars.keys():
            raise ValueError(
                f"rows {first.id} and {row.id} carry different streams and cannot share a batch: "
                f"{sorted([*first.streams, *first.scalars])} and {sorted([*row.streams, *row.scalars])}"
            )
