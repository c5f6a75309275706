r"""MATH: competition problems whose solutions have the answer in a `\boxed{}`; `math_hard` is level 5 of them."""

from __future__ import annotations

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import Dataset, Raw, known, text_of, user_prompt
from oxrl.rewards.mathematics import boxed
from oxrl.types import Sample


def convert(row: Raw) -> list[Sample]:
    solution = text_of(row, "solution")
    answer = boxed(solution)
    if not answer:
        raise BadRow(r"solution has no \boxed{} with content")
    metadata = {**known(row, "level", "type"), "solution": solution}
    return [Sample("", user_prompt(text_of(row, "problem")), answer=answer, metadata=metadata)]


def convert_hard(row: Raw) -> list[Sample]:
    if text_of(row, "level") != "Level 5":
        raise BadRow("below level 5")
    return convert(row)


MATH = Dataset(
    name="math",
    summary="competition problems of five levels; the answer is an expression",
    licence="MIT",
    convert=convert,
    hub="DigitalLearningGmbH/MATH-lighteval",
    elsewhere="github.com/hendrycks/math",
    reward="math_reward_func",
    instruction=r"Reason step by step and put the final answer in \boxed{}.",
)
MATH_HARD = MATH._replace(name="math_hard", summary="the problems of `math` of level 5", convert=convert_hard)
