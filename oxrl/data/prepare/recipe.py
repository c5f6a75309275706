"""What is known about a dataset, and the few words that its conversions from raw rows share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from oxrl.data.formats import BadRow
from oxrl.types import Message, Sample

Raw: TypeAlias = Mapping[str, Any]

SPLITS = ("train", "validation", "test")


class Dataset(NamedTuple):
    """`Dataset("gsm8k", "grade-school word problems", "MIT", convert, hub="openai/gsm8k:main")`.

    `convert` turns one raw row into samples, none of which has an id yet, or raises `BadRow` with the reason why the
    row is left out. Undivided rows are divided by `split_of`, or a share `held_out` of their prompts becomes the test
    split.
    """

    name: str
    summary: str
    licence: str
    convert: Callable[[Raw], list[Sample]]
    hub: str | None = None  # "owner/name" or "owner/name:subset"
    splits: Mapping[str, str] = {"train": "train", "test": "test"}  # ours -> the hub's, or a file in its repository
    elsewhere: str = ""  # where raw files can be had
    made: Callable[[str], Iterable[Raw]] | None = None  # rows of a split that are made on the spot
    split_of: Callable[[Raw], str] | None = None
    held_out: float = 0.0
    group: Callable[[Sample], str] | None = None  # what stays together when a test split is drawn; default the prompt
    reward: str | None = None  # the reward that fits
    instruction: str = ""  # put behind the question
    seen_real_rows: bool = False  # whether the conversion was run on real rows, or only on ones in the same schema

    @property
    def evaluation_only(self) -> bool:
        return "train" not in self.splits


def text_of(row: Raw, *names: str) -> str:
    """The first of these columns that the row has; it must hold text."""
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise BadRow(f"there is no column {' or '.join(names)}")
    if not isinstance(row[name], str):
        raise BadRow(f"{name} must be text, it is a {type(row[name]).__name__}")
    if not row[name].strip():
        raise BadRow(f"{name} is empty")
    said: str = row[name].strip()
    return said


def texts_of(row: Raw, name: str) -> list[str]:
    """A column that holds a list of texts; without the column the list is empty."""
    value = row.get(name)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise BadRow(f"{name} must be a list of texts, it is a {type(value).__name__}")
    return list(value)


def asked(*parts: str) -> tuple[Message, ...]:
    """One user message; what is empty is left out, the rest is kept apart by blank lines."""
    return (Message("user", "\n\n".join(part for part in parts if part)),)


def known(row: Raw, *names: str) -> dict[str, Any]:
    """Those of the columns that hold something, to be kept as metadata."""
    return {name: row[name] for name in names if row.get(name) is not None}
