"""Metrics of a batch of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from oxrl.rewards.length import sampled_tokens
from oxrl.rollouts.buffer import Group, age_of
from oxrl.rollouts.filters import check_reward_nonzero_std
from oxrl.types import Rollout, Status


def reward_std(rewards: Sequence[float]) -> float:
    """The standard deviation; exactly 0 for equal rewards, whose mean may be rounded."""
    return 0.0 if min(rewards) == max(rewards) else float(np.std(rewards))


def rollout_metrics(groups: Sequence[Group], version: int) -> dict[str, float]:
    """Return rewards, lengths, entropy and age of a batch, for weights of this version."""
    sampled = [rollout for group in groups for rollout in group if not rollout.greedy]
    rewards = [rollout.score.value for rollout in sampled if rollout.score is not None]
    lengths = np.array([sampled_tokens(rollout) for rollout in sampled])
    logprobs = [x for rollout in sampled for turn in rollout.turns for x in turn.generation.logprobs]
    versions = [each for rollout in sampled for each in rollout.versions]
    generated = sum(sampled_tokens(rollout) for group in groups for rollout in group)
    metrics = {
        "entropy": -float(np.mean(logprobs)) if logprobs else 0.0,  # of the sampler, estimated from its log-probs
        "length": float(lengths.mean()),
        "longest": float(lengths.max()),
        "truncated": float(np.mean([rollout.status is Status.TRUNCATED for rollout in sampled])),
        "age": float(max(age_of(group, version) for group in groups)),
        "age_mean": version - float(np.mean(versions)) if versions else 0.0,  # over tokens
        "turns": float(np.mean([len(rollout.turns) for rollout in sampled])),
        "groups": float(len(groups)),
        "generated_tokens": float(generated),
        **_cut_mass(sampled),
    }
    if not rewards:
        return metrics
    flat = sum(not check_reward_nonzero_std(group) for group in groups)
    spread = {"reward_std": reward_std(rewards), "flat_groups": float(flat)}
    return {"reward": float(np.mean(rewards)), **spread, **_reward_parts(sampled), **metrics}


def _cut_mass(rollouts: Sequence[Rollout]) -> dict[str, float]:
    cut = float(np.mean([turn.generation.cut_mass for rollout in rollouts for turn in rollout.turns]))
    return {"cut_mass": cut} if cut else {}


def _reward_parts(rollouts: Sequence[Rollout]) -> dict[str, float]:
    parts: dict[str, list[float]] = {}
    for rollout in rollouts:
        for name, value in (rollout.score.parts if rollout.score is not None else {}).items():
            parts.setdefault(name, []).append(value)
    return {f"reward_{name}": float(np.mean(values)) for name, values in parts.items()}
