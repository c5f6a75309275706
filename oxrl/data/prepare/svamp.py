"""SVAMP: one-step arithmetic word problems; the answer is a number."""

from __future__ import annotations

import math

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import Dataset, Raw, known, text_of, user_prompt
from oxrl.types import Sample


def convert(row: Raw) -> list[Sample]:
    body, question = text_of(row, "Body"), text_of(row, "Question")
    joined = f"{body} {question}" if body[-1] in ".?!" else f"{body}, {question}"
    metadata = known(row, "Equation", "Type", "ID")
    return [Sample("", user_prompt(joined), answer=_number(row.get("Answer")), metadata=metadata)]


def _number(answer: object) -> str:
    """`145.0` and `"145.0"` are "145"."""
    try:
        value = float(str(answer))
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise BadRow("Answer is not a number")
    return str(int(value)) if value == int(value) else str(value)


SVAMP = Dataset(
    name="svamp",
    summary="one-step arithmetic word problems; the answer is a number",
    licence="MIT",
    convert=convert,
    hub="ChilleD/SVAMP",
    elsewhere="github.com/arkilpatel/SVAMP",
    held_out=0.3,
    reward="gsm8k_reward_func",
    instruction="Reason step by step. Write the final number on the last line, after ####.",
    seen_real_rows=True,
)
