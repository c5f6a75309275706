"""Items (rows that stay together) to batches under a token budget: flat tensors, no padding, nothing left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from oxrl.types import Batch, Counts, Item, Row

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
        "sequence": float(len({row.sequence or row.id for rows in trained for row in rows})),
        "pair": float(sum(len(rows) == 2 for rows in trained)),
        "constant": 1.0,
    }


def pack(items: Sequence[Item], budget: int, *, padded: bool = False) -> list[list[Item]]:
    """Divide a step's items into micro-batches of at most `budget` tokens; an item that is larger stands alone.

    First-fit decreasing. Where rows will run padded, an item's price is its longest row times the rows beside it, so
    rows of like length meet and each micro-batch closes as soon as the next row would not fit.
    """
    longest_first = sorted(items, key=lambda item: -max(map(len, item)) if padded else -_size(item))
    micro_batches: list[list[Item]] = []
    sizes: list[int] = []
    for item in longest_first:
        for index in range(len(sizes) - 1 if padded and sizes else 0, len(sizes)):
            grown = _padded_size([*micro_batches[index], item]) if padded else sizes[index] + _size(item)
            if grown <= budget:
                micro_batches[index].append(item)
                sizes[index] = grown
                break
        else:
            micro_batches.append([item])
            sizes.append(_padded_size([item]) if padded else _size(item))
    return micro_batches


def _size(item: Item) -> int:
    return sum(map(len, item))


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
