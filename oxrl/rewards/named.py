"""Rewards under the names that recipes of other frameworks use, composed of the other reward functions.

With `strict`, only the answer format of the dataset is accepted; otherwise the answer is found by common conventions.
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
    """1 if the last number of the response is the sample's answer; with `strict`, only alone after the last `####`."""
    correct = number_match(rollout)
    return correct * _ends_with_hashes(answer_text(rollout)) if strict else correct


def _ends_with_hashes(text: str) -> bool:
    _, hashes, final = text.rpartition("####")
    return bool(hashes) and len(final) < 100 and len(numbers_in(final)) == 1


@reads("answer")
def math_reward_func(rollout: Rollout, *, strict: bool = True) -> float:
    """1 if the last `\\boxed{}` equals the sample's answer, also by algebra if math-verify is installed.

    Without `strict`, a response without a box is read as well: its final statement.
    """
    correct = math_match(rollout)
    return 0.0 if strict and boxed(answer_text(rollout)) is None else correct


@reads("answer")
def soft_math(rollout: Rollout, *, unboxed: float = 0.5) -> float:
    """1 for the correct answer in the last `\\boxed{}`, `unboxed` for the correct answer without a box, otherwise 0.

    A wrong box earns nothing, even if the correct answer is next to it.
    """
    return math_match(rollout) * (unboxed if boxed(answer_text(rollout)) is None else 1.0)


@reads()
def format_reward_func(
    rollout: Rollout, *, tags: Sequence[str] = ("think", "answer"), begun: bool = False, strict: bool = True
) -> float:
    """1 for `<think>...</think><answer>...</answer>` with any content; an alias of `tag_format`."""
    return tag_format(rollout, tags=tags, begun=begun, strict=strict)


@reads("answer")
def mcqa_reward_func(rollout: Rollout, *, letters: str = "ABCDE", strict: bool = False) -> float:
    """1 if the response chooses the sample's letter and no other; with `strict`, it must be that letter alone.

    Alone means in a box, in answer tags, or as the whole response.
    """
    correct = multiple_choice(rollout, letters=letters)
    text = answer_text(rollout)
    alone = (boxed(text) or text).strip(_MARKS) if len(text) < 100 else ""
    return 0.0 if strict and len(alone) != 1 else correct


@reads("answer")
def reasoning_reward_func(
    rollout: Rollout, *, answer_is: str = "math", form_weight: float = 0.0, begun: bool = False
) -> Score:
    """1 for think and answer tags with the correct answer; `form_weight` of it for the tags alone.

    `answer_is` selects how answers are compared: math, number, choice or text. By default, tags without the correct
    answer earn nothing. A `<think>` that the chat template opens in the prompt counts; `begun` is for prompts that end
    with it themselves.
    """
    if answer_is not in ANSWERS:
        raise ValueError(f"answer_is must be one of {', '.join(ANSWERS)}, not {answer_is!r}")
    if not 0 <= form_weight <= 1:
        raise ValueError(f"form_weight is a fraction of the reward, from 0 to 1, not {form_weight}")
    form, correct = tag_format(rollout, begun=begun), ANSWERS[answer_is](rollout)
    return Score(form * (form_weight + (1 - form_weight) * correct), {"form": form, "correct": correct})
