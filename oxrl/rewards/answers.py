"""Where in a rollout the answer is, what it is compared with, and what was said only to deny it."""

from __future__ import annotations

import re

from oxrl.types import Rollout, Sample


def answer_text(rollout: Rollout) -> str:
    """What the model said last, without its thoughts: inside the last `<answer>`, else all behind `</think>`."""
    said = rollout.generation.text.rpartition("</think>")[2]
    if "<think>" in said:  # it was still thinking when it ended
        return ""
    opened = said.rfind("<answer>")
    if opened >= 0:
        said = said[opened + len("<answer>") :].partition("</answer>")[0]
    return said.strip()


_DENIAL = re.compile(
    r"(?i)(?:\b(?:not|never|cannot|nor|neither)|n['’]t|≠|!=|\\neq?)"
    r"(?:\s{1,4}(?:be|equals?|to|the|just|simply|option|choice|letter)\b)*[\s*_`'\"$(\[{]{0,6}$"
)


def is_denied(text: str, start: int) -> bool:
    """Whether what begins at `start` is said not to be so: "it is not 42", "43, not (B)"."""
    return _DENIAL.search(text[max(0, start - 40) : start]) is not None


def reference(sample: Sample, reward: str) -> str:
    """The sample's answer; without one there is nothing to compare with."""
    if sample.answer is None or not sample.answer.strip():
        raise ValueError(f"sample {sample.id} has no `answer`, which {reward} compares with")
    return sample.answer.strip()
