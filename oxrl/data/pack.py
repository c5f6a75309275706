"""Items (rows that stay together) to batches under a token budget: flat tensors without padding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from oxrl.types import Batch, Counts, Item, Layout, Media, Row

if TYPE_CHECKING:
    import torch


def count_units(items: Sequence[Item]) -> Counts:
    """Count the trained tokens, sequences and pairs of a step: the denominators of its losses.

    Rows of one rollout are one sequence. Rows without a trained token are not counted.
    """
    trained = [[row for row in item if row.mask.any()] for item in items]
    return {
        "token": float(sum(int(row.mask.sum()) for rows in trained for row in rows)),
        "chosen_token": float(sum(int(item[0].mask.sum()) for item in items if len(item) == 2)),
        "sequence": float(_num_sequences([row for rows in trained for row in rows])),
        "pair": float(sum(len(rows) == 2 for rows in trained)),
        "constant": 1.0,
    }


def _num_sequences(rows: Sequence[Row]) -> int:
    """Count sequences; a row without a sequence name counts as one, even if it occurs twice."""
    return len({row.sequence for row in rows if row.sequence}) + sum(not row.sequence for row in rows)


def worth_sharing(common: int, length: int) -> bool:
    """Return whether a row of `length` tokens should share its first `common` tokens with another row."""
    return common >= max(8, length // 32)


def pack(items: Sequence[Item], budget: int, *, layout: Layout = "shared", parallel: int = 1) -> list[list[Item]]:
    """Divide a step's items into micro-batches of at most `budget` tokens; a larger item gets its own micro-batch.

    First-fit decreasing. With the layout "shared", items with the same prompt stay together as far as the budget
    allows, and the prompt counts once per micro-batch, since it is computed once. The number of micro-batches is a
    multiple of `parallel` (data-parallel ranks) if there are enough items, and the largest is as small as possible.
    """
    parts = _pack(items, budget, layout)
    wanted = min(-(-len(parts) // parallel) * parallel, len(items))
    if len(parts) == wanted:
        return parts
    parts = _pack(items, _smallest_budget(items, budget, layout, wanted), layout)
    while len(parts) < wanted:
        index = max((i for i, part in enumerate(parts) if len(part) > 1), key=lambda i: _size(parts[i]))
        part = parts.pop(index)
        parts += [part[::2], part[1::2]]
    return parts


def _smallest_budget(items: Sequence[Item], budget: int, layout: Layout, most: int) -> int:
    """Return the smallest budget that needs at most `most` micro-batches; `budget` is known to."""
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
    """Return the number of tokens computed for a micro-batch with shared prompts, each prompt counted once."""
    prompts = [_prompt(row) for item in items for row in item]
    return sum(len(row) for item in items for row in item) - _num_tokens(prompts) + _num_tokens(set(prompts))


def micro_batch_size(items: Sequence[Item], layout: Layout) -> int:
    """Return how much of the budget these items use as one micro-batch."""
    if layout == "padded":
        return _padded_size(items)
    return _size(items) if layout == "packed" else computed_tokens(items)


class _Prompt(NamedTuple):
    """Key of a prompt that rows can share: its token ids as bytes, and its media."""

    tokens: bytes = b""
    media: tuple[Media, ...] = ()


class _Part(NamedTuple):
    """Items of one micro-batch. Their cost is the number of computed tokens, each prompt counted once."""

    items: list[Item]
    prompts: frozenset[_Prompt]
    cost: int

    def cost_with(self, other: _Part) -> int:
        return self.cost + other.cost - _num_tokens(self.prompts & other.prompts)


def _part(item: Item) -> _Part:
    prompts = [_prompt(row) for row in item]
    distinct = frozenset(prompts)
    return _Part([item], distinct, sum(map(len, item)) - _num_tokens(prompts) + _num_tokens(distinct))


def _prompt(row: Row) -> _Prompt:
    """Return the tokens before the first trained one, or nothing if they are too few to share."""
    length = int(row.mask.argmax())
    return _Prompt(row.tokens[:length].tobytes(), row.media) if worth_sharing(length, len(row)) else _Prompt()


def _num_tokens(prompts: Iterable[_Prompt]) -> int:
    return sum(len(prompt.tokens) for prompt in prompts) // np.dtype(np.int64).itemsize


def _first_fit(parts: Sequence[_Part], budget: int) -> list[_Part]:
    filled: list[_Part] = []
    for part in sorted(parts, key=lambda part: -part.cost):
        for index, other in enumerate(filled):
            cost = other.cost_with(part)
            if cost <= budget:
                filled[index] = _Part(other.items + part.items, other.prompts | part.prompts, cost)
                break
        else:
            filled.append(part)
    return filled


def _pack_padded(items: Sequence[Item], budget: int) -> list[list[Item]]:
    """Pack rows of similar length; the cost of a micro-batch is its longest row times the number of rows.

    Items are sorted by length, and a micro-batch is closed as soon as the next item does not fit. No prompt is shared.
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
    """Concatenate the rows of `items`. All rows must have the same streams and scalars."""
    import torch

    rows = [row for item in items for row in item]
    _check_same_streams(rows)
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
        allowed_tokens=tuple(row.allowed_tokens for row in rows) if any(row.allowed_tokens for row in rows) else (),
        **{name: torch.from_numpy(array).to(device) for name, array in arrays.items()},
    )


def _check_same_streams(rows: Sequence[Row]) -> None:
    first = rows[0]
    for row in rows:
        if row.streams.keys() != first.streams.keys() or row.scalars.keys() != first.scalars.keys():
            raise ValueError(
                f"rows {first.id} and {row.id} have different streams and cannot share a batch: "
                f"{sorted([*first.streams, *first.scalars])} and {sorted([*row.streams, *row.scalars])}"
            )
