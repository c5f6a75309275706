"""GPQA: hard science questions with four choices, for evaluation only. The order of choices depends on the question."""

from __future__ import annotations

import hashlib

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import Dataset, Raw, known, text_of, user_prompt
from oxrl.types import Sample

LETTERS = "ABCD"


def convert(row: Raw) -> list[Sample]:
    question, right = text_of(row, "Question"), text_of(row, "Correct Answer")
    choices = [right, *(text_of(row, f"Incorrect Answer {number}") for number in (1, 2, 3))]
    if len(set(choices)) < len(choices):
        raise BadRow("two of the choices are the same")
    choices.sort(key=lambda choice: hashlib.sha256(f"{question}\n{choice}".encode()).digest())
    shown = "\n".join(f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    metadata = {"choices": choices, **known(row, "Record ID", "High-level domain", "Subdomain")}
    return [Sample("", user_prompt(question, shown), answer=LETTERS[choices.index(right)], metadata=metadata)]


GPQA = Dataset(
    name="gpqa",
    summary="hard science questions with four choices (the diamond set); the answer is a letter",
    licence="CC-BY-4.0",
    convert=convert,
    hub="Idavidrein/gpqa:gpqa_diamond",
    splits={"test": "train"},
    elsewhere="github.com/idavidrein/gpqa, gpqa_diamond.csv (the hub requires a login and its terms to be accepted)",
    reward="mcqa_reward_func",
    instruction="Reason step by step, then end with `Answer: ` and the letter of the right choice.",
)
