"""Tasks of `reasoning-gym` (an optional extra): generated samples, and the scorer of each task as a reward."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from oxrl.machine.packages import missing_message
from oxrl.names import did_you_mean
from oxrl.rewards.answers import answer_text
from oxrl.rewards.grade import reads
from oxrl.rewards.workers import WORKERS
from oxrl.types import Message, Rollout, Sample


def reasoning_gym_samples(task: str, size: int = 500, seed: int = 0, **config: Any) -> list[Sample]:
    """`reasoning_gym_samples("leg_counting", size=100, seed=1)`; `config` is passed to the task."""
    gym = _reasoning_gym()
    try:
        entries = gym.create_dataset(task, size=size, seed=seed, **config)
    except (ValueError, TypeError, AssertionError) as error:
        known = import_module("reasoning_gym.factory").DATASETS
        near = "" if task in known else did_you_mean(task, known)
        raise ValueError(f"reasoning-gym cannot generate samples of {task!r} with {config}: {error}{near}") from error
    return [
        Sample(
            f"{task}:{seed}:{index}",
            (Message("user", entry["question"]),),
            answer=entry["answer"],
            metadata={"reasoning_gym_task": task, "reasoning_gym_entry": entry},
        )
        for index, entry in enumerate(entries)
    ]


@reads("metadata.reasoning_gym_task", "metadata.reasoning_gym_entry")
def reasoning_gym_score(rollout: Rollout, *, partial: bool = True) -> float:
    """The score of the task's own scorer, from 0 to 1; without `partial`, only a full 1 counts.

    For samples of `reasoning_gym_samples`. Many scorers give partial credit to any text that contains the answer. Some
    evaluate the answer as Python or by sympy: they run in another process, and are ungraded after the time limit.
    """
    metadata = rollout.sample.metadata
    if "reasoning_gym_task" not in metadata or "reasoning_gym_entry" not in metadata:
        raise ValueError(f"sample {rollout.sample.id} does not come from reasoning_gym_samples: its task is unknown")
    _reasoning_gym()
    task, entry = metadata["reasoning_gym_task"], metadata["reasoning_gym_entry"]
    score: float = WORKERS.call("gym_score", task, answer_text(rollout), entry)
    return score if partial or score >= 1 else 0.0


def _reasoning_gym() -> ModuleType:
    try:
        return import_module("reasoning_gym")
    except ImportError as error:
        raise ValueError(missing_message("reasoning-gym", "gym")) from error
