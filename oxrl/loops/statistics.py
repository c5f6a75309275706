"""Statistics of rewards: a mean with its confidence interval, pass@k, and the comparison of two models.

The unit is a prompt: the rewards of several responses to one prompt are averaged first, as they are not independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Z95 = 1.959964  # of the normal distribution: 95 % lie within +-Z95
Z80 = 0.841621  # 80 % lie below Z80: the usual power
NOISE = 0.05  # the least p-value that counts as noise
FLIPS = 20_000  # sign flips sampled where there are too many to enumerate


class Estimate(NamedTuple):
    """`Estimate(0.8, 0.49, 0.94)`: a mean and its 95 % confidence interval."""

    mean: float
    low: float
    high: float


def estimate(rewards: Sequence[float]) -> Estimate:
    return Estimate(math.fsum(rewards) / len(rewards), *confidence_interval(rewards))


def confidence_interval(rewards: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of the mean, for rewards from 0 to 1, else in the observed range.

    Wilson's interval (1927) with the observed variance: for rewards of 0 or 1 it is Wilson's, for many rewards the
    normal approximation. Like Wilson's it adds z²/2 rewards at each end of the range, so that a few equal rewards do
    not give an interval of zero width.
    """
    values = np.asarray(rewards, dtype=float)
    if not len(values):
        raise ValueError("a confidence interval needs at least one reward")
    lowest, highest = _range_of(values)
    count, z2 = len(values), Z95 * Z95
    centre = (values.sum() + z2 * (lowest + highest) / 2) / (count + z2)
    half = Z95 / (count + z2) * math.sqrt(count * values.var() + z2 * (highest - lowest) ** 2 / 4)
    return max(lowest, float(centre - half)), min(highest, float(centre + half))


def _range_of(values: Sequence[float] | NDArray[np.float64]) -> tuple[float, float]:
    """0 to 1 for values inside of it; else from what was observed to 0: nothing more is known of the reward."""
    lowest, highest = float(min(values)), float(max(values))
    return (0.0, 1.0) if lowest >= 0 and highest <= 1 else (min(0.0, lowest), max(0.0, highest))


def ratio_estimate(
    totals: Sequence[float] | NDArray[np.float64], counts: Sequence[float] | NDArray[np.float64]
) -> Estimate:
    """sum(totals) / sum(counts) over rows, as of a mean per token, with its 95 % interval over rows (linearised)."""
    total, count = np.asarray(totals, dtype=float), np.asarray(counts, dtype=float)
    mean = float(total.sum() / count.sum())
    rows = len(total)
    spread = float(np.square(total - mean * count).sum()) * rows / max(1, rows - 1)
    half = Z95 * math.sqrt(spread) / float(count.sum()) if rows > 1 else math.inf
    return Estimate(mean, mean - half, mean + half)


def pass_at_k(answers: int, solved: int, k: int) -> float:
    """The probability that at least one of `k` drawn from `answers`, of which `solved` are correct, is correct.

    1 - C(n - c, k) / C(n, k), unbiased (Chen et al. 2021, arXiv:2107.03374).
    """
    if not 1 <= k <= answers or not 0 <= solved <= answers:
        raise ValueError(
            f"pass@{k} of {answers} answers, {solved} of them correct: k must be 1 to the number of answers"
        )
    return 1.0 - math.comb(answers - solved, k) / math.comb(answers, k)


class Comparison(NamedTuple):
    """Two models on the same prompts: `Comparison(gain=Estimate(0.125, 0.04, 0.21), p=0.003, rows=100, ...)`."""

    gain: Estimate  # of the first over the second, in mean reward
    p: float
    rows: int
    better: int
    worse: int
    rows_needed: int | None  # to detect a gain of this size with 80 % power; None for a gain of 0
    in_points: bool  # rewards are in [0, 1] and are shown in points, hundredths

    @property
    def is_noise(self) -> bool:
        return self.p >= NOISE or self.gain.low <= 0.0 <= self.gain.high

    def to_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "gain": self.gain._asdict(), "is_noise": self.is_noise}

    def __str__(self) -> str:
        if not self.better and not self.worse:
            limit = self._with_unit(self.gain.high)
            return f"the same reward on all {self.rows} rows; a difference below {limit} is unlikely to be detected"
        word = "gain" if self.gain.mean > 0 else "loss" if self.gain.mean < 0 else "no difference:"
        low, high = sorted((-self.gain.low, -self.gain.high)) if word == "loss" else self.gain[1:]
        text = (
            f"{word} {self._with_unit(abs(self.gain.mean))} (95%: {self._number(low)} to {self._number(high)}), "
            f"{_p(self.p)}, better on {self.better} rows and worse on {self.worse}: "
        )
        if not self.is_noise:
            return text + "not noise"
        text += f"not distinguishable from noise with {self.rows} rows"
        if self.rows_needed is None:
            return text
        more = f"about {self.rows_needed:,} rows would be needed to detect a {word} of this size"
        return f"{text}; {more}" if self.rows_needed > self.rows else text

    def _with_unit(self, value: float) -> str:
        return f"{self._number(value)} points" if self.in_points else self._number(value)

    def _number(self, value: float) -> str:
        return f"{100 * value:.1f}" if self.in_points else f"{value:.3g}"


def _p(p: float) -> str:
    return "p < 0.001" if p < 0.001 else f"p = {p:.3f}" if p < 0.1 else f"p = {p:.2f}"


def compare(first: Sequence[float], second: Sequence[float], *, seed: int = 0) -> Comparison:
    """Compare the rewards of two models; rewards at the same index are of the same prompt."""
    if len(first) != len(second) or not len(first):
        raise ValueError(f"cannot pair {len(first)} rewards with {len(second)}; evaluate both models on the same rows")
    gains = np.asarray(first, dtype=float) - np.asarray(second, dtype=float)
    both = (*first, *second)
    in_points = min(both) >= 0 and max(both) <= 1
    return Comparison(
        gain=_gain_interval(gains) if in_points else ratio_estimate(gains, np.ones(len(gains))),
        p=sign_flip_test(gains.tolist(), seed=seed),
        rows=len(gains),
        better=int((gains > 0).sum()),
        worse=int((gains < 0).sum()),
        rows_needed=_rows_needed(gains),
        in_points=in_points,
    )


def _gain_interval(gains: NDArray[np.float64]) -> Estimate:
    """Of rewards from 0 to 1: Agresti and Min (2005), who add half a row of each sign and one without a difference."""
    count = len(gains) + 2
    mean = gains.sum() / count
    variance = (np.square(gains).sum() + 1.0) / count - mean * mean
    half = Z95 * math.sqrt(variance / count)
    return Estimate(float(gains.mean()), float(mean - half), float(mean + half))


def sign_flip_test(gains: Sequence[float], *, seed: int = 0) -> float:
    """Two-sided p-value: how often the sum of gains with random signs is at least as far from 0 as the observed sum.

    If all gains are of one size, as with rewards of 0 or 1, this is the exact sign test, which is McNemar's. Up to 14
    flips are enumerated; more are sampled.
    """
    sizes = np.abs(np.asarray([gain for gain in gains if gain], dtype=float))
    if not len(sizes):
        return 1.0
    if np.allclose(sizes, sizes[0]):
        return sign_test(sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains))
    observed = abs(math.fsum(gains)) * (1 - 1e-9)
    if len(sizes) <= 14:
        every = (np.arange(2 ** len(sizes))[:, None] >> np.arange(len(sizes))) & 1
        return float(np.mean(np.abs((2 * every - 1) @ sizes) >= observed))
    rng = np.random.default_rng(seed)
    hits = sum(bool(abs(rng.choice((-1.0, 1.0), len(sizes)) @ sizes) >= observed) for _ in range(FLIPS))
    return (hits + 1) / (FLIPS + 1)


def sign_test(better: int, worse: int) -> float:
    """Two-sided, exact p-value: how often `better + worse` tosses of a fair coin are at least this far from even."""
    tosses = better + worse
    tail = sum(math.comb(tosses, heads) for heads in range(min(better, worse) + 1))
    p: float = 2 * tail / 2**tosses
    return min(1.0, p)


def _rows_needed(gains: NDArray[np.float64]) -> int | None:
    """For a power of 80 % at a level of 5 %, with the observed gain and variance (Connor 1987)."""
    mean = float(gains.mean())
    if mean == 0.0:
        return None
    null_std, std = math.sqrt(float(np.square(gains).mean())), float(gains.std())
    return math.ceil(((Z95 * null_std + Z80 * std) / mean) ** 2)
