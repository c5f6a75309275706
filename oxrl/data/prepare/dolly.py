"""Dolly: instructions, some with a context, and a reply to each, all written by people."""

from __future__ import annotations

from oxrl.data.prepare.recipe import Dataset, Raw, known, text_of, user_prompt
from oxrl.types import Message, Sample


def convert(row: Raw) -> list[Sample]:
    prompt = user_prompt(text_of(row, "instruction"), str(row.get("context") or "").strip())
    return [Sample("", (*prompt, Message("assistant", text_of(row, "response"))), metadata=known(row, "category"))]


DOLLY = Dataset(
    name="dolly",
    summary="instructions and replies, written by people",
    licence="CC-BY-SA-3.0",
    convert=convert,
    hub="databricks/databricks-dolly-15k",
    splits={"train": "train"},
    held_out=0.02,
)
