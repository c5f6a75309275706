"""Rewards to what may be said about them: a mean with its interval, pass@k, and whether two models differ.

A prompt is the unit throughout: several answers to one prompt are one number, so that they do not count as evidence
twice. Where rewards come from is not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959964  # of the normal distribution: 95 % lie within
Z80 = 0.841621  # 80 % lie below: the usual power
NOISE = 0.05  # a p-value from here on is noise
FLIPS = 20_000  # sign flips drawn where there are too many to count


class Estimate(NamedTuple):
    """`Estimate(0.8, 0.49, 0.94)`: a mean and where the truth lies with 95 %."""

    mean: float
    low: float
    high: float


def estimate(rewards: Sequence[float]) -> Estimate:
    return Estimate(math.fsum(rewards) / len(rewards), *confidence_interval(rewards))


def confidence_interval(rewards: Sequence[float]) -> tuple[float, float]:
    """95 %, for rewards from 0 to 1, or as far as they were seen to go beyond.

    Wilson's interval (1927) with the variance that was seen: for rewards that are 0 or 1 it is his own, for many
    rewards the normal approximation. As his it adds z²/2 rewards at each end of the range: a few equal ones are no
    proof.
    """
    values = np.asarray(rewards, dtype=float)
    if not len(values):
        raise ValueError("no reward has no confidence interval")
    least, most = min(0.0, float(values.min())), max(1.0, float(values.max()))
    count, z2 = len(values), Z95 * Z95
    centre = (values.sum() + z2 * (least + most) / 2) / (count + z2)
    half = Z95 / (count + z2) * math.sqrt(count * values.var() + z2 * (most - least) ** 2 / 4)
    return max(least, float(centre - half)), min(most, float(centre + half))


def pass_at_k(answers: int, solved: int, k: int) -> float:
    """The chance that one of `k` answers drawn from `answers`, of which `solved` are right, is right.

    1 - C(n - c, k) / C(n, k), unbiased (Chen et al. 2021, arXiv:2107.03374).
    """
    if not 1 <= k <= answers or not 0 <= solved <= answers:
        raise ValueError(
            f"pass@{k} of {answers} answers, {solved} of them right: k goes from 1 to the answers there are"
        )
    return 1.0 - math.comb(answers - solved, k) / math.comb(answers, k)


class Comparison(NamedTuple):
    """Two models on the same prompts: `Comparison(gain=Estimate(0.125, 0.04, 0.21), p=0.003, rows=100, ...)`."""

    gain: Estimate  # of the first over the second, in mean reward
    p: float
    rows: int
    better: int
    worse: int
    rows_needed: int | None  # to see a gain of this size four times in five; None where none was seen
    in_points: bool  # rewards go from 0 to 1, so that a hundredth is a point

    @property
    def is_noise(self) -> bool:
        return self.p >= NOISE or self.gain.low <= 0.0 <= self.gain.high

    def __str__(self) -> str:
        if not self.better and not self.worse:
            hidden = self._written(self.gain.high)
            return f"the same reward on all {self.rows} rows; a difference below {hidden} would hardly show"
        word = "gain" if self.gain.mean > 0 else "loss" if self.gain.mean < 0 else "no difference:"
        low, high = sorted((-self.gain.low, -self.gain.high)) if word == "loss" else self.gain[1:]
        told = (
            f"{word} {self._written(abs(self.gain.mean))} (95%: {self._number(low)} to {self._number(high)}), "
            f"{_p(self.p)}, better on {self.better} rows and worse on {self.worse}: "
        )
        if not self.is_noise:
            return told + "not noise"
        told += f"cannot be told from noise with {self.rows} rows"
        if self.rows_needed is None:
            return told
        more = f"about {self.rows_needed:,} rows would be needed to see a {word} of this size"
        return f"{told}; {more}" if self.rows_needed > self.rows else told

    def _written(self, value: float) -> str:
        return f"{self._number(value)} points" if self.in_points else self._number(value)

    def _number(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.in_points else f"{value:.3g}"


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def compare(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Comparison:
    """Whether the first model earns more than the second; place by place they answered the same prompt."""
    if len(first) != len(second) or not len(first):
        raise ValueError(f"{len(first)} rewards cannot be paired with {len(second)}")
    gains = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    both = (*first, *second)
    reach = max(1.0, max(both) - min(both))
    return Comparison(
        gain=_gain_interval(gains, reach),
        p=sign_flip_test(gains.tolist(), seed=seed),
        rows=len(gains),
        better=int((gains > 0).sum()),
        worse=int((gains < 0).sum()),
        rows_needed=_rows_needed(gains),
        in_points=min(both) >= 0 and max(both) <= 1,
    )


def _gain_interval(gains: NDArray[np.float64], reach: float) -> Estimate:
    """Agresti and Min (2005): two more rows, half of one at each end and the rest without a difference."""
    count = len(gains) + 2
    mean = gains.sum() / count
    variance = (np.square(gains).sum() + reach * reach) / count - mean * mean
    half = Z95 * math.sqrt(variance / count)
    return Estimate(float(gains.mean()), float(mean - half), float(mean + half))


def sign_flip_test(gains: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p-value: how often would gains that may as well be losses add up to this much, either way?

    Where all gains are of one size, as with rewards of 0 or 1, this is the exact sign test, which is McNemar's; flips
    are counted out up to 14 of them and drawn beyond that.
    """
    sizes = np.abs(np.asarray([gain for gain in gains if gain], dtype=float))
    if not len(sizes):
        return 1.0
    if np.allclose(sizes, sizes[0]):
        return sign_test(sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains))
    seen = abs(math.fsum(gains)) * (1 - 1e-9)
    if len(sizes) <= 14:
        every = (np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes))) & 1
        return float(np.mean(np.abs((2 * every - 1) @ sizes) >= seen))
    chance = np.random.default_rng(seed)
    hits = sum(bool(abs(chance.choice((-1.0, 1.0), len(sizes)) @ sizes) >= seen) for _ in range(FLIPS))
    return (hits + 1) / (FLIPS + 1)


def sign_test(better: int, worse: int) -> float:
    """Two-sided and exact: a fair coin, thrown `better + worse` times, would be this far from even so often."""
    thrown = better + worse
    tail = sum(math.comb(thrown, heads) for heads in range(min(better, worse) + 1))
    p: float = 2 * tail / 2**thrown
    return min(1.0, p)


def _rows_needed(gains: NDArray[np.float64]) -> int | None:
    """For a power of 80 % at 5 %, if gain and spread are as they were seen (Connor 1987)."""
    mean = float(gains.mean())
    if mean == 0.0:
        return None
    by_chance, as_seen = math.sqrt(float(np.square(gains).mean())), float(gains.std())
    return math.ceil(((Z95 * by_chance + Z80 * as_seen) / mean) ** 2)
