"""The rewards that recipes of other frameworks name: each a composition of the families beside it, none a second copy.

Where a data set asks for its answer in a certain form, `strict` is that form and nothing else; otherwise the answer is
taken where people look for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from oxrl.rewards.answers import answer_text
from oxrl.rewards.choice import multiple_choice
from oxrl.rewards.exact import exact_match
from oxrl.rewards.grade import reads
from oxrl.rewards.mathematics import boxed, math_match
from oxrl.rewards.numbers import number_match, numbers_in
from oxrl.rewards.pattern import tag_format
from oxrl.types import Rollout, Score

_MARKS = " \t\n.*_`'\"$()[]"

ANSWERS: Mapping[str, Callable[[Rollout], float]] = {
    "math": math_match,
    "number": number_match,
    "choice": multiple_choice,
    "text": exact_match,
}


@reads("answer")
def gsm8k_reward_func(rollout: Rollout, *, strict: bool = False) -> float:
    """1 if the last number said is the sample's; with `strict` only one that stands alone behind the last `####`."""
    right = number_match(rollout)
    return right * _ends_with_hashes(answer_text(rollout)) if strict else right


def _ends_with_hashes(text: str) -> bool:
    _, hashes, final = text.rpartition("####")
    return bool(hashes) and len(final) < 100 and len(numbers_in(final)) == 1


@reads("answer")
def math_reward_func(rollout: Rollout, *, strict: bool = True) -> float:
    """1 if the last `\\boxed{}` equals the sample's answer, also by algebra where math-verify is installed.

    Without `strict` an answer without a box is read as well: what it states at its end.
    """
    right = math_match(rollout)
    return 0.0 if strict and boxed(answer_text(rollout)) is None else right


@reads("answer")
def soft_math(rollout: Rollout, *, unboxed: float = 0.5) -> float:
    """1 for the right answer in the last `\\boxed{}`, `unboxed` for the right one without any box, else 0.

    A wrong box earns nothing, whatever is right beside it.
    """
    return math_match(rollout) * (unboxed if boxed(answer_text(rollout)) is None else 1.0)


@reads()
def format_reward_func(
    rollout: Rollout, *, tags: Sequence[str] = ("think", "answer"), begun: bool = False, strict: bool = True
) -> float:
    """1 for `<think>...</think><answer>...</answer>` whatever it says; `tag_format` under its other name."""
    return tag_format(rollout, tags=tags, begun=begun, strict=strict)


@reads("answer")
def mcqa_reward_func(rollout: Rollout, *, letters: str = "ABCDE", strict: bool = False) -> float:
    """1 if the answer settles on the sample's letter and on no other; with `strict` it must be that letter alone.

    Alone is in a box, between answer tags, or all that is said.
    """
    right = multiple_choice(rollout, letters=letters)
    said = answer_text(rollout)
    alone = (boxed(said) or said).strip(_MARKS) if len(said) < 100 else ""
    return 0.0 if strict and len(alone) != 1 else right


@reads("answer")
def reasoning_reward_func(
    rollout: Rollout, *, answer_is: str = "math", form_weight: float = 0.0, begun: bool = False
) -> Score:
    """1 for think and answer tags with the right answer between the latter; `form_weight` of it for the tags alone.

    `answer_is` says how answers are compared: math, number, choice or text. `begun` is for prompts that end with
    `<think>`. By default thoughts and tags without the right answer earn nothing.
    """
    if answer_is not in ANSWERS:
        raise ValueError(f"answer_is must be one of {', '.join(ANSWERS)}, not {answer_is!r}")
    if not 0 <= form_weight <= 1:
        raise ValueError(f"form_weight is a share of the reward, from 0 to 1, not {form_weight}")
    form, right = tag_format(rollout, begun=begun), ANSWERS[answer_is](rollout)
    return Score(form * (form_weight + (1 - form_weight) * right), {"form": form, "correct": right})
