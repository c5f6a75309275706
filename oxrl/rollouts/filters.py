"""Filters: the rollouts of one prompt to whether to train on them. Any function will do; these are selected by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from oxrl.names import did_you_mean, import_object
from oxrl.rewards.length import sampled_tokens
from oxrl.types import FilterFn, Rollout


def check_reward_nonzero_std(rollouts: Sequence[Rollout]) -> bool:
    """Not all rewards are equal: without variance, a group-relative advantage is zero (DAPO)."""
    rewards = _rewards(rollouts)
    return bool(rewards) and min(rewards) != max(rewards)


def check_min_reward(rollouts: Sequence[Rollout], *, min_reward: float = 0.0) -> bool:
    """The mean reward is at least `min_reward`."""
    rewards = _rewards(rollouts)
    return bool(rewards) and sum(rewards) / len(rewards) >= min_reward


def check_response_diversity(rollouts: Sequence[Rollout], *, min_distinct: float = 0.5) -> bool:
    """At least this share of the responses is distinct."""
    texts = [rollout.response.strip() for rollout in rollouts]
    return bool(texts) and len(set(texts)) >= min_distinct * len(texts)


def check_reasonable_length(rollouts: Sequence[Rollout], *, min_length: int = 1, max_length: int = 1_000_000) -> bool:
    """Every rollout has at least `min_length` and at most `max_length` sampled tokens."""
    return bool(rollouts) and all(min_length <= sampled_tokens(rollout) <= max_length for rollout in rollouts)


def check_quality_and_diversity(
    rollouts: Sequence[Rollout], *, min_reward: float = 0.0, min_distinct: float = 0.5
) -> bool:
    """The mean reward is high enough, responses are diverse, and rewards are not all equal."""
    return (
        check_reward_nonzero_std(rollouts)
        and check_min_reward(rollouts, min_reward=min_reward)
        and check_response_diversity(rollouts, min_distinct=min_distinct)
    )


def keep_all(rollouts: Sequence[Rollout]) -> bool:  # noqa: ARG001 - the signature of a filter
    return True


FILTERS: Mapping[str, Callable[..., bool]] = {
    each.__name__: each
    for each in (
        check_reward_nonzero_std,
        check_min_reward,
        check_response_diversity,
        check_reasonable_length,
        check_quality_and_diversity,
    )
}


def named_filter(name: str, **parameters: Any) -> FilterFn:
    """`named_filter("check_min_reward", min_reward=0.2)`; a custom function is `FILE.py:FUNCTION`."""
    if ":" not in name and name not in FILTERS:
        hint = did_you_mean(name, FILTERS, ".")
        raise ValueError(
            f"unknown filter {name!r}{hint} Available: {', '.join(FILTERS)}; a custom filter is FILE.py:FUNCTION"
        )
    function = FILTERS[name] if name in FILTERS else import_object(name)
    if not callable(function):
        raise ValueError(f"{name} is {function!r:.200}, which is not a filter: a function of the rollouts of a prompt")
    positional, *known = inspect.signature(function).parameters or [""]
    if not positional:
        raise ValueError(f"{name} takes no argument; a filter takes the rollouts of a prompt")
    if wrong := [each for each in parameters if each not in known]:
        raise ValueError(f"{name} has no parameter {wrong[0]}; it takes: {', '.join(known) or 'none'}")
    return partial(function, **parameters)


def _rewards(rollouts: Sequence[Rollout]) -> list[float]:
    return [rollout.reward for rollout in rollouts if rollout.reward is not None]
