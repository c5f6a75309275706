"""Rollouts grouped, merged and split by prompt, and converted to plain lists for custom trainers.

To filter or subsample, use a list comprehension over `group_rollouts`: rollouts of one prompt are compared with each
other and must stay together. Convert to a `RolloutBatch` last.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

from oxrl.concurrency import run_blocking
from oxrl.names import kind_of
from oxrl.rewards.grade import AnyReward, grade
from oxrl.rewards.primitives import compute_scalar_reward
from oxrl.rollouts.buffer import Group
from oxrl.types import RewardFn, Rollout, Status


def as_rollout(given: Any) -> Rollout:
    """Return a rollout as it is, and another dataclass with `prompt`, `tokens` and `loss_mask` as a rollout.

    There, a reward that equals the default of its field is not a grade. Fields that a rollout does not have are kept
    in its metadata.
    """
    if isinstance(given, Rollout):
        return given
    values = {each.name: getattr(given, each.name) for each in fields(given)} if is_dataclass(given) else {}
    if "prompt" not in values:
        raise ValueError(
            f"{kind_of(given)} is not a rollout; give rollouts of create_batch_rollouts, or for completions of other "
            "code Sample(prompt=..., tokens=..., loss_mask=...)"
        )
    if any(each.name == "reward" and each.default == values["reward"] for each in fields(given)):
        values["reward"] = None
    names = [getattr(status, "value", status) for status in (values.pop("status", None),)]
    known = inspect.signature(Rollout.from_fields).parameters
    others = {name: values.pop(name) for name in list(values) if name not in known}
    values["metadata"] = {**others, **(values.get("metadata") or {})}
    return Rollout.from_fields(**values, status=next((each for each in Status if each.value == names[0]), None))


def group_rollouts(rollouts: Sequence[Rollout] | Sequence[Group]) -> list[Group]:
    """Return the rollouts of each prompt as one group, groups in the order of their first rollout."""
    groups: dict[int, list[Rollout]] = {}
    for each in rollouts:
        for rollout in each if isinstance(each, list | tuple) else [each]:
            found = as_rollout(rollout)
            groups.setdefault(found.group, []).append(found)
    return [tuple(group) for group in groups.values()]


def merge_rollouts(*several: Sequence[Rollout]) -> list[Rollout]:
    """Return one list of all, groups renumbered, so that rollouts from different calls never share a group."""
    groups = [group for rollouts in several for group in group_rollouts(rollouts)]
    return [replace(rollout, group=number) for number, group in enumerate(groups) for rollout in group]


def split_rollouts(rollouts: Sequence[Rollout], share: float, *, seed: int = 0) -> tuple[list[Rollout], list[Rollout]]:
    """`kept, held_out = split_rollouts(rollouts, 0.9)`: a random share of the prompts, and the others.

    All rollouts of a prompt are on the same side.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share is {share}; it is the fraction of prompts in the first part, 0 to 1")
    groups = group_rollouts(rollouts)
    chosen = set(random.Random(seed).sample(range(len(groups)), round(share * len(groups))))  # noqa: S311 - no secret
    sides: tuple[list[Rollout], list[Rollout]] = ([], [])
    for index, group in enumerate(groups):
        sides[index not in chosen].extend(group)
    return sides


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """N rollouts as lists: `tokens[i]` is prompt and generation, `loss_masks[i]` is 1 for sampled tokens."""

    tokens: list[list[int]]
    loss_masks: list[list[float]]
    rewards: list[float]
    response_lengths: list[int]
    metadata: dict[str, Any] = field(default_factory=dict)


def compute_reward(rollout: Rollout, reward_fn: RewardFn | None = None) -> float:
    """Return the reward by `reward_fn`; without one its score, or 1 or 0 from `correct` in its metadata."""
    if reward_fn is not None:
        return compute_scalar_reward(rollout, reward_fn)
    rollout = as_rollout(rollout)
    if rollout.score is not None:
        return rollout.score.value
    if "correct" in rollout.metadata:
        return 1.0 if rollout.metadata["correct"] else 0.0
    raise ValueError(
        f"rollout {rollout.id} was not graded{f': {rollout.error}' if rollout.error else ''}; a missing grade is not a "
        "reward of 0: grade it, set reward= or metadata={'correct': ...}, or leave it out"
    )


def extract_sample_fields(
    rollouts: Sequence[Rollout],
) -> tuple[list[list[int]], list[list[float]], list[float]]:
    """Return tokens, loss masks and rewards."""
    rollouts = [as_rollout(each) for each in rollouts]
    return (
        [rollout.tokens for rollout in rollouts],
        [rollout.loss_mask for rollout in rollouts],
        [compute_reward(rollout) for rollout in rollouts],
    )


def compute_response_lengths(loss_masks: Sequence[Sequence[float] | Rollout]) -> list[int]:
    """Return the number of sampled tokens of each mask or rollout."""
    masks = [each if isinstance(each, Sequence) else as_rollout(each).loss_mask for each in loss_masks]
    return [sum(1 for each in mask if each) for mask in masks]


def build_batch_metadata(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return groups, log-probs, versions, status and metadata of the rollouts, one entry each."""
    rollouts = [as_rollout(each) for each in rollouts]
    return {
        "group_indices": [rollout.group_index for rollout in rollouts],
        "rollout_log_probs": [rollout.rollout_log_probs for rollout in rollouts],
        "versions": [rollout.version for rollout in rollouts],
        "token_versions": [list(rollout.versions) for rollout in rollouts],
        "status": [rollout.status.value for rollout in rollouts],
        "samples": [dict(rollout.metadata) for rollout in rollouts],
    }


def convert_to_batch(rollouts: Sequence[Rollout]) -> RolloutBatch:
    """Convert graded rollouts to lists; greedy baselines are left out."""
    trained = [rollout for rollout in map(as_rollout, rollouts) if not rollout.greedy]
    tokens, masks, rewards = extract_sample_fields(trained)
    return RolloutBatch(tokens, masks, rewards, compute_response_lengths(masks), build_batch_metadata(trained))


def apply_sample_transforms(
    rollouts: Sequence[Rollout],
    filter_fn: Callable[[Rollout], bool] | None = None,
    reward_fn: AnyReward | None = None,
) -> list[Rollout]:
    """Grade with `reward_fn`, also what has a reward already, then return those that `filter_fn` keeps.

    Ungraded rollouts have an `error`.
    """
    rollouts = [as_rollout(each) for each in rollouts]
    unscored = [replace(rollout, score=None) for rollout in rollouts]
    graded = rollouts if reward_fn is None else run_blocking(grade, unscored, reward_fn)
    return [rollout for rollout in graded if filter_fn is None or filter_fn(rollout)]
