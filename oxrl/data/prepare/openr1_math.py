"""OpenR1-Math: problems with verifiable answers; the recorded chains of thought are not used."""

from __future__ import annotations

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import Dataset, Raw, known, text_of, user_prompt
from oxrl.types import Sample

_NO_ANSWER = {"proof", "notfound"}


def convert(row: Raw) -> list[Sample]:
    answer = text_of(row, "answer")
    if answer.lower() in _NO_ANSWER:
        raise BadRow("there is no answer to verify (a proof, or no answer was found)")
    metadata = known(row, "solution", "problem_type", "source", "uuid")
    return [Sample("", user_prompt(text_of(row, "problem")), answer=answer, metadata=metadata)]


OPENR1_MATH = Dataset(
    name="openr1_math",
    summary="mathematical problems from many sources; the answer is an expression",
    licence="Apache-2.0",
    convert=convert,
    hub="open-r1/OpenR1-Math-220k:default",
    splits={"train": "train"},
    held_out=0.01,
    reward="reasoning_reward_func",
    instruction=(
        "Think between <think> and </think>, then write the final answer between <answer> and </answer>, "
        r"in a \boxed{}."
    ),
)
