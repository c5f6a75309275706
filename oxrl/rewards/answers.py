"""The final answer in a rollout, the reference to compare it with, and detection of negated answers."""

from __future__ import annotations

import re

from oxrl.types import Rollout, Sample


def answer_text(rollout: Rollout) -> str:
    """The last response without its reasoning: the text in the last `<answer>`, or all text after `</think>`."""
    text = rollout.generation.full_text.rpartition("</think>")[2]
    if "<think>" in text:  # the reasoning did not end
        return ""
    opened = text.rfind("<answer>")
    if opened >= 0:
        text = text[opened + len("<answer>") :].partition("</answer>")[0]
    return text.strip()


_NEGATION = re.compile(
    r"(?i)(?:\b(?:not|never|cannot|nor|neither)|n['’]t|≠|!=|\\neq?)"
    r"(?:\s{1,4}(?:be|equals?|to|the|just|simply|option|choice|letter)\b)*[\s*_`'\"$(\[{]{0,6}$"
)


def is_negated(text: str, start: int) -> bool:
    """Whether the text at `start` is negated: "it is not 42", "43, not (B)"."""
    return _NEGATION.search(text[max(0, start - 40) : start]) is not None


def reference(sample: Sample, reward: str) -> str:
    """The sample's answer; raises a ValueError if it has none."""
    if sample.answer is None or not sample.answer.strip():
        raise ValueError(f"sample {sample.id} has no `answer`, which {reward} compares with")
    return sample.answer.strip()
