"""Samples to items: rendered by the algorithm, checked, and limited in length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple, TypeAlias

from oxrl.data.fit import Overlong, fit
from oxrl.data.template import EndlessTemplateError
from oxrl.types import Algorithm, Item, Render, Row, Sample

BadRows: TypeAlias = Literal["stop", "skip"]


class Assembled(NamedTuple):
    """The items to train on, and counts of what was skipped, dropped and truncated."""

    items: list[Item]
    skipped: list[str]  # one reason per sample that could not be rendered
    dropped: int  # items over the length limit
    truncated: int
    unended: int  # truncated rows without their end-of-turn token

    @property
    def empty(self) -> list[Row]:
        """The rows that train no more than one token: the end of an empty reply."""
        return [row for item in self.items for row in item if row.mask.sum() <= 1]

    def describe(self) -> str:
        tokens = sum(len(row) for item in self.items for row in item)
        trained = sum(int(row.mask.sum()) for item in self.items for row in item)
        parts = [f"{len(self.items)} rows, {tokens} tokens, {trained} of them trained"]
        if self.skipped:
            parts.append(f"{len(self.skipped)} skipped (first: {self.skipped[0]})")
        if self.dropped:
            parts.append(f"{self.dropped} dropped as over-long")
        if self.truncated:
            parts.append(f"{self.truncated} truncated, {self.unended} of them without their end-of-turn token")
        return "; ".join(parts)


def assemble(
    samples: Sequence[Sample],
    algorithm: Algorithm,
    render: Render,
    *,
    max_len: int | None = None,
    overlong: Overlong = "drop",
    bad_rows: BadRows = "stop",
    track: Callable[[Iterable[Sample]], Iterable[Sample]] = iter,
) -> Assembled:
    """Render every sample; one that cannot be rendered raises, or is skipped and counted (`bad_rows`)."""
    items: list[Item] = []
    skipped: list[str] = []
    for sample in track(samples):
        try:
            items.extend(algorithm.assemble(sample, render))
        except EndlessTemplateError:
            raise
        except ValueError as error:
            if bad_rows == "stop":
                raise ValueError(f"{error} (bad_rows: skip leaves such rows out)") from error
            skipped.append(str(error))
    if not items:
        raise ValueError(f"no row is left to train on; the first reason: {skipped[0] if skipped else 'no samples'}")
    if max_len is None:
        return Assembled(items, skipped, 0, 0, 0)
    fitted = fit(items, max_len, overlong)
    return Assembled(fitted.items, skipped, fitted.dropped, fitted.truncated, fitted.unended)
