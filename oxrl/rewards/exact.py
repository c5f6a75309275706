"""Responses that must equal the sample's answer, or contain it."""

from __future__ import annotations

import re

from oxrl.rewards.answers import answer_text, reference
from oxrl.rewards.grade import reads
from oxrl.types import Rollout

_MARKS = " \t\n.,;:!?…。"


@reads("answer")
def exact_match(
    rollout: Rollout,
    *,
    ignore_case: bool = True,
    ignore_whitespace: bool = True,
    ignore_punctuation: bool = True,
) -> float:
    """1 if the response equals the sample's answer, ignoring case, repeated whitespace and final punctuation."""

    def plain(text: str) -> str:
        text = " ".join(text.split()) if ignore_whitespace else text
        text = text.rstrip(_MARKS) if ignore_punctuation else text
        return text.casefold() if ignore_case else text

    expected = plain(reference(rollout.sample, "exact_match"))
    if not expected:
        raise ValueError(f"sample {rollout.sample.id}: its `answer` has nothing but punctuation")
    return float(plain(answer_text(rollout)) == expected)


@reads("answer")
def contains(rollout: Rollout, *, ignore_case: bool = True, whole_words: bool = True) -> float:
    """1 if the sample's answer occurs in the response; a response that lists all answers also gets 1."""
    wanted = re.escape(reference(rollout.sample, "contains"))
    pattern = rf"(?<!\w){wanted}(?!\w)" if whole_words else wanted
    return float(re.search(pattern, answer_text(rollout), re.IGNORECASE if ignore_case else 0) is not None)
