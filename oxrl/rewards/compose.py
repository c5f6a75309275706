"""Rewards composed of rewards: weighted sums that keep their parts; clamped, scaled, or normalized within a group."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeAlias

import anyio

from oxrl.rewards.grade import MAX_SCORE, AnyReward, Reward, Ungraded, as_reward
from oxrl.types import Rollout, Sample, Score

Normalizer: TypeAlias = Callable[[Sequence[float]], Sequence[float]]


def weighted(rewards: Mapping[str, float] | Mapping[AnyReward, float]) -> Reward:
    """`weighted({"number_match": 1.0, "tag_format": 0.2})`: the weighted sum; `Score.parts` has the unweighted rewards.

    Keys are names of the table, functions or rewards. A rollout that one of them cannot grade is ungraded. One that
    returned None for it, in a list of scores, is left out of the sum.
    """
    from oxrl.rewards.table import reward as named

    members = [(named(each) if isinstance(each, str) else as_reward(each), float(w)) for each, w in rewards.items()]
    names = [member.name for member, _ in members]
    if not members or len(set(names)) < len(names):
        raise ValueError(f"weighted needs at least one reward and unique names, not {names}")
    if not all(abs(weight) <= MAX_SCORE for _, weight in members):
        raise ValueError(f"weights must be numbers of at most {MAX_SCORE:g}, not {list(rewards.values())}")

    async def outcomes(rollouts: Sequence[Rollout], time_limit: float) -> list[Score | Ungraded]:
        results: dict[str, list[Score | Ungraded]] = {}

        async def grade_with(member: Reward) -> None:
            results[member.name] = await member.outcomes(rollouts, time_limit)

        async with anyio.create_task_group() as tasks:
            for member, _ in members:
                tasks.start_soon(grade_with, member)
        weights = [weight for _, weight in members]
        each = zip(*(results[name] for name in names), strict=True)
        return [_total(names, weights, graded, rollout) for graded, rollout in zip(each, rollouts, strict=True)]

    def check(sample: Sample) -> None:
        for member, _ in members:
            member.check(sample)

    return Reward("+".join(names), outcomes, check)


def _total(
    names: Sequence[str], weights: Sequence[float], outcomes: Sequence[Score | Ungraded], rollout: Rollout
) -> Score | Ungraded:
    """The weighted sum of the rewards that apply; if none does, the rollout is ungraded."""
    applied = [index for index, each in enumerate(outcomes) if isinstance(each, Score) or each.applies]
    kept = applied or range(len(outcomes))
    return _sum([names[i] for i in kept], [weights[i] for i in kept], [outcomes[i] for i in kept], rollout)


def _sum(
    names: Sequence[str], weights: Sequence[float], outcomes: Sequence[Score | Ungraded], rollout: Rollout
) -> Score | Ungraded:
    scores = [outcome for outcome in outcomes if isinstance(outcome, Score)]
    if len(scores) < len(outcomes):
        return next(outcome for outcome in outcomes if isinstance(outcome, Ungraded))
    tokens = sum(len(turn.generation.token_ids) for turn in rollout.turns)
    return Score(
        math.fsum(weight * score.value for weight, score in zip(weights, scores, strict=True)),
        dict(chain.from_iterable(_parts(name, score) for name, score in zip(names, scores, strict=True))),
        _shared(weights, [(score.per_turn, score.value) for score in scores], len(rollout.turns)),
        _shared(weights, [(score.per_token, score.value) for score in scores], tokens),
    )


def _parts(name: str, score: Score) -> list[tuple[str, float]]:
    return [(name, score.value), *((f"{name}.{part}", value) for part, value in score.parts.items())]


def _shared(
    weights: Sequence[float], scores: Sequence[tuple[tuple[float, ...] | None, float]], count: int
) -> tuple[float, ...] | None:
    """Credit per turn or token if some rewards give it; that of the others goes to the last position."""
    if not count or all(shares is None for shares, _ in scores):
        return None
    spread = [shares if shares is not None else (*[0.0] * (count - 1), value) for shares, value in scores]
    return tuple(math.fsum(w * s for w, s in zip(weights, each, strict=True)) for each in zip(*spread, strict=True))


def scale(reward: AnyReward, factor: float) -> Reward:
    """The reward times `factor`; its parts are unchanged."""

    def scaled(score: Score) -> Score:
        return Score(
            score.value * factor,
            score.parts,
            None if score.per_turn is None else tuple(share * factor for share in score.per_turn),
            None if score.per_token is None else tuple(share * factor for share in score.per_token),
        )

    return _then(as_reward(reward), lambda scores: [scaled(score) for score in scores])


def clamp(reward: AnyReward, low: float = -1.0, high: float = 1.0) -> Reward:
    """The reward, limited to the range from `low` to `high`."""
    if not low <= high:
        raise ValueError(f"clamp needs low <= high, not {low} and {high}")
    base = as_reward(reward)
    return _then(
        base, lambda scores: [_revalued(base.name, score, min(max(score.value, low), high)) for score in scores]
    )


def zscore(values: Sequence[float]) -> list[float]:
    """Mean 0 and standard deviation 1; all 0 if all are equal."""
    mean = math.fsum(values) / len(values)
    std = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / len(values))
    return [(value - mean) / std if std > 1e-8 * max(1.0, abs(mean)) else 0.0 for value in values]


def minmax(values: Sequence[float]) -> list[float]:
    """From 0 for the lowest to 1 for the highest; all 0 if all are equal."""
    low, high = min(values), max(values)
    return [(value - low) / (high - low) if high > low else 0.0 for value in values]


NORMALIZERS: Mapping[str, Normalizer] = {"zscore": zscore, "minmax": minmax}


def normalize(reward: AnyReward, normalizer: Normalizer = zscore) -> Reward:
    """The reward relative to the other responses to the same prompt; `parts` keeps the original value."""
    base = as_reward(reward)

    def normalized(scores: Sequence[Score]) -> list[Score | Ungraded]:
        values = normalizer([score.value for score in scores])
        return [_revalued(base.name, score, value) for score, value in zip(scores, values, strict=True)]

    return _then(base, normalized)


def _then(base: Reward, change: Callable[[Sequence[Score]], Sequence[Score | Ungraded]]) -> Reward:
    """`base`, followed by `change` over the graded rollouts of a group."""

    async def outcomes(rollouts: Sequence[Rollout], time_limit: float) -> list[Score | Ungraded]:
        original = await base.outcomes(rollouts, time_limit)
        graded = [outcome for outcome in original if isinstance(outcome, Score)]
        changed = iter(change(graded) if graded else ())
        return [next(changed) if isinstance(outcome, Score) else outcome for outcome in original]

    return replace(base, outcomes=outcomes)


def _revalued(name: str, score: Score, value: float) -> Score | Ungraded:
    if value == score.value:
        return score
    if score.per_turn is not None or score.per_token is not None:
        return Ungraded(f"reward {name} gives credit per turn or token, which cannot be clamped or normalized")
    return Score(value, score.parts or {name: score.value})
