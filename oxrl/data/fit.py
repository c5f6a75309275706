"""Drop, truncate or refuse items that are longer than the length limit.

Everything that is dropped or truncated is counted. Packing into batches is in `pack`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from oxrl.types import Item, Row

Overlong: TypeAlias = Literal["drop", "truncate", "error"]
_EXAMPLES = 5


class Fitted(NamedTuple):
    """`Fitted(items, dropped=3, truncated=0, unended=0, examples=["train.jsonl:12 (5321 tokens)"])`."""

    items: list[Item]
    dropped: int  # items over the limit that were removed
    truncated: int  # rows that were truncated and kept
    unended: int  # truncated rows without their last trained token, the end of the turn
    examples: list[str]  # the first few items that were dropped or truncated


def fit(items: Sequence[Item], max_len: int, overlong: Overlong = "drop") -> Fitted:
    """Return the items with rows of at most `max_len` tokens; all rows of an item are kept, or none."""
    if overlong not in get_args(Overlong):
        raise ValueError(f"overlong is {overlong!r}; allowed are {', '.join(map(repr, get_args(Overlong)))}")
    if max_len < 2:
        raise ValueError(f"max_len is {max_len}, but a row needs at least 2 tokens; set a larger max_len")
    if not items:
        raise ValueError("there are no items to fit; pass at least one")
    kept: list[Item] = []
    dropped = truncated = unended = 0
    examples: list[str] = []
    for item in items:
        if _length(item) <= max_len:
            kept.append(item)
            continue
        if overlong == "error":
            raise ValueError(
                f"{_describe(item)} is longer than max_len={max_len}; raise max_len, or set overlong to 'drop' or "
                "'truncate'"
            )
        if len(examples) < _EXAMPLES:
            examples.append(_describe(item))
        shortened = tuple(_truncate(row, max_len) for row in item)
        if overlong == "drop" or not all(row.mask.any() for row in shortened):
            dropped += 1
            continue
        kept.append(shortened)
        truncated += sum(len(row) > max_len for row in item)
        unended += sum(bool(row.mask[len(cut) :].any()) for row, cut in zip(item, shortened, strict=True))
    if not kept:
        raise ValueError(_all_too_long(items, max_len))
    return Fitted(kept, dropped, truncated, unended, examples)


def _length(item: Item) -> int:
    return max(len(row) for row in item)


def _truncate(row: Row, max_len: int) -> Row:
    """Cut a row at `max_len`, or before the image or sound that would be cut there."""
    if len(row) <= max_len:
        return row
    if len(row.media_spans) != len(row.media):  # not known where they are
        return replace(row, mask=np.zeros(len(row), np.bool_))
    end = min([max_len, *(start for start, end in row.media_spans if start < max_len < end)])
    whole = [span for span in row.media_spans if span[1] <= end]
    streams = {name: stream[:end] for name, stream in row.streams.items()}
    cut = replace(row, media=row.media[: len(whole)], media_spans=tuple(whole))
    return replace(cut, tokens=row.tokens[:end], mask=row.mask[:end], streams=streams)


def _describe(item: Item) -> str:
    return ", ".join(f"{row.id} ({len(row)} tokens)" for row in item)


def _all_too_long(items: Sequence[Item], max_len: int) -> str:
    lengths = sorted(map(_length, items))
    p95 = lengths[math.ceil(0.95 * len(lengths)) - 1]
    return (
        f"none of {len(items)} items is left at max_len={max_len}: the longest has {lengths[-1]} tokens, the median "
        f"{statistics.median(lengths):g}; max_len={p95} would keep 95% of them"
    )
