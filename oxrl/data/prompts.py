"""Fill a prompt template with rows to get samples. Placeholders are `{name}`; anything else is left to the caller."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from oxrl.data.fill import fill
from oxrl.data.sources import load_samples
from oxrl.types import Sample


def fill_prompts(template: str, rows: Iterable[Mapping[str, Any]], *, system: str | None = None) -> list[Sample]:
    """`fill_prompts("What is {a} + {b}?", [{"a": 2, "b": 3, "answer": "5"}])`: one sample per row.

    A row's `answer` becomes the sample's, its other columns go to `metadata`. A literal brace is doubled.
    """
    common = {} if system is None else {"system": system}
    return load_samples([{**row, "prompt": _fill(template, row, i), **common} for i, row in enumerate(rows)]).samples


def _fill(template: str, row: Mapping[str, Any], number: int) -> str:
    try:
        return fill(template, row)
    except ValueError as error:
        raise ValueError(f"row {number}: {error}") from None


def as_prompt(sample: Sample) -> Sample:
    """A conversation that ends with a response, as its prompt with the response as the reference answer."""
    if not sample.messages or sample.messages[-1].role != "assistant":
        return sample
    response = sample.messages[-1].text
    return replace(sample, messages=sample.messages[:-1], answer=response if sample.answer is None else sample.answer)
