"""A text with gaps and rows to fill them become samples. Anything beyond `{name}` is left to `str.format` by hand."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from oxrl.data.sources import load_samples
from oxrl.types import Sample


def fill_prompts(template: str, rows: Iterable[Mapping[str, Any]], *, system: str | None = None) -> list[Sample]:
    """`fill_prompts("What is {a} + {b}?", [{"a": 2, "b": 3, "answer": "5"}])`: each row's prompt, filled in.

    A row's `answer` is the sample's, its other columns are kept in `metadata`. A brace that is meant is doubled.
    """
    told = {} if system is None else {"system": system}
    return load_samples([{**row, "prompt": _filled(template, row, at), **told} for at, row in enumerate(rows)]).samples


def _filled(template: str, row: Mapping[str, Any], number: int) -> str:
    try:
        return template.format_map(row)
    except KeyError as error:
        raise ValueError(
            f"row {number} has no column {error} for the template; it has: {', '.join(row)}. "
            "A brace that is meant is written twice: {{ and }}"
        ) from error
    except (IndexError, ValueError) as error:
        raise ValueError(
            f"the template cannot be filled: {error}; gaps are named, as {{question}}, and a brace that is meant is "
            "written twice: {{ and }}"
        ) from error


def as_prompt(sample: Sample) -> Sample:
    """A conversation that ends with a response, as its prompt with the response as the reference answer."""
    if not sample.messages or sample.messages[-1].role != "assistant":
        return sample
    response = str(sample.messages[-1].content)
    return replace(sample, messages=sample.messages[:-1], answer=response if sample.answer is None else sample.answer)
