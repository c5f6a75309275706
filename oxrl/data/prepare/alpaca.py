"""Alpaca: instructions, some with an input, and a reply to each."""

from __future__ import annotations

from oxrl.data.prepare.recipe import Dataset, Raw, text_of, user_prompt
from oxrl.types import Message, Sample


def convert(row: Raw) -> list[Sample]:
    prompt = user_prompt(text_of(row, "instruction"), str(row.get("input") or "").strip())
    return [Sample("", (*prompt, Message("assistant", text_of(row, "output"))))]


ALPACA = Dataset(
    name="alpaca",
    summary="instructions and replies, written by a model",
    licence="CC-BY-NC-4.0",
    convert=convert,
    hub="tatsu-lab/alpaca",
    splits={"train": "train"},
    elsewhere="github.com/tatsu-lab/stanford_alpaca, alpaca_data.json",
    held_out=0.02,
)
