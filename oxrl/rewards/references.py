"""Before an RL run: do reference answers earn more than wrong ones, written as the model would have to sample them?

Each reference becomes completions in the common answer formats of `trial`: without what the prompt already has of the
response, and read back through the tokenizer, which drops special tokens. If no format pays correct answers more than
wrong ones, the reward does not fit the rows or the chat template, and nothing can be learned. No model is needed.
"""

from __future__ import annotations

import ast
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

from oxrl.concurrency import run_blocking
from oxrl.rewards.grade import AnyReward, as_reward
from oxrl.rewards.trial import Case, Grader, cases_of, forms_of, is_program, reference_of
from oxrl.types import Sample

ROWS = 8
PROGRAMS = 2  # each starts a sandbox
_WORKERS = 2


class Comparison(NamedTuple):
    """`Comparison("bare", "4", "5", 1.0, 0.0)`: completions of the first row, and mean rewards of all."""

    form: str
    right: str
    wrong: str
    right_earns: float
    wrong_earns: float


def compare_references(
    reward: AnyReward,
    samples: Sequence[Sample],
    *,
    opened: str = "",
    as_sampled: Callable[[str], str] = str,
    time_limit: float = 30.0,
) -> Comparison | None:
    """Return the format in which correct answers earn the most more than wrong ones; None if no row can be compared.

    `opened` is what each prompt already has of the response, `as_sampled` reads a completion back through tokens.
    Formats are tried until one pays correct answers more.
    """
    rows = [sample for sample in samples if _is_comparable(sample)]
    cases = cases_of(rows[: PROGRAMS if any(map(is_program, rows)) else ROWS]) if rows else []
    grader = Grader(as_reward(reward), time_limit, _WORKERS, opened)
    return run_blocking(partial(_compare, grader, cases, as_sampled)) if cases else None


def _is_comparable(sample: Sample) -> bool:
    """With a reference; of a program, a complete one."""
    reference = reference_of(sample)
    if not is_program(sample):
        return bool(reference.strip())
    try:
        return bool(ast.parse(reference).body)
    except (SyntaxError, ValueError):
        return False


async def _compare(grader: Grader, cases: Sequence[Case], as_sampled: Callable[[str], str]) -> Comparison | None:
    best: Comparison | None = None
    for form, rights, wrongs in _pairs(cases):
        right, wrong = ([as_sampled(_continued(text, grader.opened)) for text in texts] for texts in (rights, wrongs))
        samples = [case.sample for case in cases]
        scores = await grader.scores([*zip(samples, right, strict=True), *zip(samples, wrong, strict=True)])
        earned = [[x for x in part if x is not None] for part in (scores[: len(cases)], scores[len(cases) :])]
        if not all(earned):  # ungraded; the run reports why
            continue
        found = Comparison(form, right[0], wrong[0], *map(statistics.fmean, earned))
        if best is None or found.right_earns - found.wrong_earns > best.right_earns - best.wrong_earns:
            best = found
        if best.right_earns > best.wrong_earns:
            return best
    return best


def _pairs(cases: Sequence[Case]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Form, correct and wrong texts of all rows; last, the references as in the file, beside those of other rows."""
    for name, form in forms_of(cases).items():
        yield name, [form(case.right) for case in cases], [form(case.wrong[0]) for case in cases]
    references = [reference_of(case.sample) for case in cases]
    others = [next((other for other in references if other != each), None) for each in references]
    if None not in others:
        yield "as in the file", references, [other for other in others if other is not None]


def _continued(text: str, opened: str) -> str:
    """The completion that makes `text` the response, where the prompt has `opened` of it; a block is closed first."""
    tag = opened.strip()
    if not tag or "</" in tag:
        return text
    return text.removeprefix(tag) if text.startswith(tag) else f"We work it out.\n</{tag[1:]}\n\n{text}"
