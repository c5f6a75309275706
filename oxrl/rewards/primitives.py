"""Rewards as plain functions over plain numbers: thin wrappers around `grade` and `compose`.

`None` stands for a rollout that could not be graded, and stays `None`.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias, overload

from oxrl.concurrency import run_blocking
from oxrl.rewards.compose import Normalizer, zscore
from oxrl.rewards.grade import AnyReward, as_score, grade
from oxrl.types import RewardFn, Rollout, Score

Rewards: TypeAlias = Sequence[float] | Mapping[str, float]


def compute_scalar_reward(rollout: Rollout, reward_fn: RewardFn) -> float:
    """The reward of one rollout; exceptions of `reward_fn` are raised."""
    return _score(rollout, reward_fn).value


def compute_vector_reward(rollout: Rollout, reward_fns: Sequence[RewardFn]) -> list[float]:
    """The reward of one rollout by each of several reward functions."""
    return [_score(rollout, reward_fn).value for reward_fn in reward_fns]


def weighted_sum(rewards: Rewards, weights: Rewards | None = None) -> float:
    """`weighted_sum([1.0, 0.5], [1.0, 0.2])`, or with two mappings; without weights, the plain sum."""
    if weights is None:
        return math.fsum(rewards.values() if isinstance(rewards, Mapping) else rewards)
    if isinstance(rewards, Mapping) and isinstance(weights, Mapping) and rewards.keys() == weights.keys():
        return math.fsum(rewards[name] * weights[name] for name in rewards)
    if isinstance(rewards, Mapping) or isinstance(weights, Mapping) or len(rewards) != len(weights):
        raise ValueError(
            f"each reward needs its weight, in two lists or two mappings with equal keys: {rewards}, {weights}"
        )
    return math.fsum(reward * weight for reward, weight in zip(rewards, weights, strict=True))


def aggregate_vector_rewards(
    rewards: Rewards, *, aggregator: Callable[..., float] = weighted_sum, **parameters: Any
) -> float:
    """Reduce several rewards to one: `aggregate_vector_rewards([1, 0], weights=[1, 0.2])`, or `aggregator=min`."""
    return aggregator(rewards, **parameters)


def compute_batch_rewards(
    rollouts: Sequence[Rollout], reward_fn: AnyReward, *, time_limit: float = 30.0
) -> list[float | None]:
    """The reward of each rollout of one group, graded concurrently; None if it could not be graded.

    `await grade(...)` does not block the event loop, and also returns the reasons.
    """
    graded = run_blocking(partial(grade, rollouts, reward_fn, time_limit=time_limit))
    return [rollout.reward for rollout in graded]


def normalize_rewards(rewards: Sequence[float | None], *, normalizer: Normalizer = zscore) -> list[float | None]:
    """Rewards normalized within the list, by default as z-scores."""
    known = [reward for reward in rewards if reward is not None]
    values = iter(normalizer(known) if known else ())
    return [None if reward is None else next(values) for reward in rewards]


@overload
def apply_reward_shaping(
    rewards: Sequence[float | None], *, shaping_fn: Callable[[float], float]
) -> list[float | None]: ...


@overload
def apply_reward_shaping(rewards: Sequence[Rollout], *, shaping_fn: Callable[[Rollout], float]) -> list[Rollout]: ...


def apply_reward_shaping(
    rewards: Sequence[Any], *, shaping_fn: Callable[[Any], float]
) -> list[float | None] | list[Rollout]:
    """Apply `shaping_fn` to each reward; for graded rollouts it takes the rollout and returns the new score."""
    return [_shaped(each, shaping_fn) for each in rewards]


def _shaped(item: Any, shaping_fn: Callable[[Any], float]) -> Any:
    if not isinstance(item, Rollout):
        return None if item is None else shaping_fn(item)
    if item.score is None:
        return item
    parts = item.score.parts or {"before_shaping": item.score.value}
    return replace(item, score=as_score(Score(shaping_fn(item), parts), item))


def _score(rollout: Rollout, reward_fn: RewardFn) -> Score:
    result = reward_fn(rollout)
    if inspect.isawaitable(result):
        if inspect.iscoroutine(result):
            result.close()
        raise ValueError("this reward function is async; use compute_batch_rewards, or await grade(...)")
    return as_score(result, rollout)
