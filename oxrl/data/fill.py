"""Row templates: text with column names in braces, filled with the values of a row. A literal brace is doubled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

from oxrl.names import nearest_name

TEMPLATED = ("prompt", "response", "answer", "system", "chosen", "rejected")
"""Columns that a row template can define. One without braces is the name of a column; for `system` it is the text."""


def fill(template: str, row: Mapping[str, Any]) -> str:
    """`fill("{a} + {b}?", {"a": 2, "b": 3}) == "2 + 3?"`; a missing column or value is a ValueError."""
    parts: list[str] = []
    for literal, name, spec in _parsed(template):
        parts.append(literal)
        if name is not None:
            parts.append(format(_printable(name, row), spec))
    return "".join(parts)


def fill_column(column: str, template: str, row: Mapping[str, Any]) -> Any:
    """The value of one of `TEMPLATED`; that of a single column as it is, also messages, but a number as text."""
    if column == "system" or placeholders(template):
        return fill(template, row)
    value = _value(template, row)
    return str(value) if isinstance(value, int | float) and column != "answer" else value


def placeholders(template: str) -> list[str]:
    """`placeholders("{Body} {Question}") == ["Body", "Question"]`; a template that cannot be filled is a ValueError."""
    return [name for _, name, _ in _parsed(template) if name is not None]


def _parsed(template: str) -> Iterator[tuple[str, str | None, str]]:
    try:
        parts = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"the template {template!r} cannot be read: {error}; {_BRACES}") from None
    for literal, name, spec, conversion in parts:
        if name == "" or conversion or "{" in (spec or ""):
            raise ValueError(f"the template {template!r} cannot be filled: {_BRACES}")
        yield literal, name, spec or ""


_BRACES = "placeholders have the names of columns, as in {question}; write a literal brace twice: {{ and }}"


def numbers_text(numbers: Sequence[float] | float) -> str:
    """`numbers_text([0.12345, -1]) == "0.1235 -1"`: four digits are enough to show a number to a model."""
    return " ".join(f"{number:.4g}" for number in (numbers if isinstance(numbers, list | tuple) else [numbers]))


def _printable(name: str, row: Mapping[str, Any]) -> Any:
    value = _value(name, row)
    if not isinstance(value, str | int | float):
        raise ValueError(f"the column {name!r} is a {type(value).__name__}, a template takes text and numbers")
    return value


def _value(name: str, row: Mapping[str, Any]) -> Any:
    if name not in row:
        by_case = {each.casefold(): each for each in map(str, row)}
        near = by_case.get(name.casefold()) or nearest_name(name, map(str, row))
        hint = f"did you mean {near}? " if near else ""
        raise ValueError(f"it has no column {name!r} for the template; {hint}it has: {', '.join(map(str, row))}")
    value = row[name]
    if value is None or value != value:  # NaN: a missing number
        raise ValueError(f"the column {name!r} of the template has no value")
    return value
