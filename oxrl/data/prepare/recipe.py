"""The description of a dataset, and helpers that its conversions from raw rows share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

from oxrl.data.formats import BadRow
from oxrl.types import Message, Sample

Raw: TypeAlias = Mapping[str, Any]

SPLITS = ("train", "validation", "test")


class Dataset(NamedTuple):
    """`Dataset("gsm8k", "grade-school word problems", "MIT", convert, hub="openai/gsm8k:main")`.

    `convert` turns one raw row into samples without ids, or raises `BadRow` with the reason why the row is skipped.
    Rows published without splits are split by `split_of`, or a share `held_out` of their prompts becomes the test
    split.
    """

    name: str
    summary: str
    licence: str
    convert: Callable[[Raw], list[Sample]]
    hub: str | None = None  # "owner/name" or "owner/name:subset"
    splits: Mapping[str, str] = {"train": "train", "test": "test"}  # ours -> the hub's, or a file in its repository
    elsewhere: str = ""  # where raw files can be downloaded
    generate: Callable[[str], Iterable[Raw]] | None = None  # yields the rows of a split, if there is no file
    split_of: Callable[[Raw], str] | None = None
    held_out: float = 0.0
    group: Callable[[Sample], str] | None = None  # samples of a group go to the same split; default: the prompt
    reward: str | None = None  # the name of a suitable reward
    instruction: str = ""  # appended to the question
    seen_real_rows: bool = False  # whether the conversion was tested on real rows, or only on rows in the same schema

    @property
    def evaluation_only(self) -> bool:
        return "train" not in self.splits


def text_of(row: Raw, *names: str) -> str:
    """Return the first of these columns that has a value; it must be text."""
    name = next((name for name in names if row.get(name) is not None), None)
    if name is None:
        raise BadRow(f"there is no column {' or '.join(names)}")
    if not isinstance(row[name], str):
        raise BadRow(f"{name} must be text, it is a {type(row[name]).__name__}")
    if not row[name].strip():
        raise BadRow(f"{name} is empty")
    text: str = row[name].strip()
    return text


def texts_of(row: Raw, name: str) -> list[str]:
    """Return a column with a list of texts; an empty list if there is no such column."""
    value = row.get(name)
    if value is None:
        return []
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) for each in value):
        raise BadRow(f"{name} must be a list of texts, it is a {type(value).__name__}")
    return list(value)


def user_prompt(*parts: str) -> tuple[Message, ...]:
    """Return one user message: the parts that are not empty, separated by blank lines."""
    return (Message("user", "\n\n".join(part for part in parts if part)),)


def known(row: Raw, *names: str) -> dict[str, Any]:
    """Return those of the columns that have a value, for the metadata."""
    return {name: row[name] for name in names if row.get(name) is not None}
