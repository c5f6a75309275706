"""What every evaluation has in common: numbers per model, and comparisons of two models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from oxrl.loops.statistics import Comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(ABC):
    """Result of `evaluate`: `str(evaluation)` is a printable report, `results` holds the numbers of each model.

    `results[0].marks` after sampling (`SampledEvaluation`), `results[0].measures` of rows with responses or pairs
    (`RowEvaluation`). `comparisons` compares the model with `against`; empty without it.
    """

    data: str
    rows: int
    results: tuple[Any, ...]
    comparisons: Mapping[str, Comparison]

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """All numbers, as JSON can hold them."""

    @abstractmethod
    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield one record per answer or row, for a JSONL file."""
