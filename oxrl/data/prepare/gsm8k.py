"""GSM8K: grade-school word problems with worked solutions that end in `#### 1,234`."""

from __future__ import annotations

import re

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import Dataset, Raw, text_of, user_prompt
from oxrl.types import Sample

_CALCULATOR = re.compile(r"<<[^<>]*>>")  # calculator annotations, as in "48/2 = <<48/2=24>>24"
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def convert(row: Raw) -> list[Sample]:
    worked = text_of(row, "answer")
    _, marker, last = worked.rpartition("####")
    number = last.strip().lstrip("$").replace(",", "")
    if not marker or not _NUMBER.fullmatch(number):
        raise BadRow("answer does not end with '#### ' and a number")
    solution = _CALCULATOR.sub("", worked)
    return [Sample("", user_prompt(text_of(row, "question")), answer=number, metadata={"solution": solution})]


GSM8K = Dataset(
    name="gsm8k",
    summary="grade-school word problems; the answer is a number",
    licence="MIT",
    convert=convert,
    hub="openai/gsm8k:main",
    elsewhere="github.com/openai/grade-school-math, grade_school_math/data/train.jsonl and test.jsonl",
    reward="gsm8k_reward_func",
    instruction="Reason step by step. Write the final number on the last line, after ####.",
    seen_real_rows=True,
)
