"""Where in a rollout the answer is, and what it is compared with."""

from __future__ import annotations

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


def reference(sample: Sample, reward: str) -> str:
    """The sample's answer; without one there is nothing to compare with."""
    if sample.answer is None or not sample.answer.strip():
        raise ValueError(f"sample {sample.id} has no `answer`, which {reward} compares with")
    return sample.answer.strip()
