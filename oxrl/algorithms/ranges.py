"""The allowed values of parameters, by name.

Most names mean the same in every loss; a key `algorithm.parameter` is for that algorithm alone. All numbers must be
finite. A name that is not here may be any number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from oxrl.algorithms.credit import BASELINES
from oxrl.algorithms.policy_recipes import CORRECTIONS, KL_TERMS
from oxrl.algorithms.preference import DIVERGENCES, MARGIN_LOSSES
from oxrl.algorithms.supervised import TEACHER_DIVERGENCES


class Allowed(NamedTuple):
    """`Allowed("above 0", lambda x: x > 0)`."""

    description: str
    holds: Callable[[Any], bool]


def one_of(names: Iterable[Any]) -> Allowed:
    known = tuple(names)
    return Allowed("one of " + ", ".join(map(str, known)), lambda name: name in known)


ABOVE_ZERO = Allowed("above 0", lambda x: x > 0)
ABOVE_ONE = Allowed("above 1", lambda x: x > 1)
FROM_ZERO = Allowed("at least 0", lambda x: x >= 0)
FROM_ONE = Allowed("at least 1", lambda x: x >= 1)
SHARE = Allowed("0 to 1", lambda x: 0 <= x <= 1)
PART = Allowed("above 0 and at most 1", lambda x: 0 < x <= 1)
INSIDE = Allowed("above 0 and below 1", lambda x: 0 < x < 1)
BELOW_HALF = Allowed("at least 0 and below 0.5", lambda x: 0 <= x < 0.5)

RANGES: Mapping[str, Allowed] = {
    "alpha": FROM_ZERO,
    "alphapo.alpha": Allowed("any number", lambda _: True),
    "baseline": one_of(BASELINES),
    "beta": ABOVE_ZERO,
    "beta_prime": ABOVE_ZERO,
    "bpo.alpha": PART,
    "centre": FROM_ZERO,
    "clip_high": FROM_ZERO,
    "clip_low": FROM_ZERO,
    "correction": one_of(CORRECTIONS),
    "desirable_weight": FROM_ZERO,
    "fdpo.alpha": PART,
    "fdpo.divergence": one_of(DIVERGENCES),
    "dual_clip": ABOVE_ONE,
    "entropy_coef": FROM_ZERO,
    "eps": FROM_ZERO,
    "exo.label_smoothing": Allowed("above 0 and below 0.5", lambda x: 0 < x < 0.5),
    "function": one_of(MARGIN_LOSSES),
    "gamma": FROM_ZERO,
    "gjs_beta": INSIDE,
    "kd.divergence": one_of(TEACHER_DIVERGENCES),
    "kd_weight": SHARE,
    "kl_coef": FROM_ZERO,
    "kl_estimator": one_of(KL_TERMS),
    "kl_in_reward": FROM_ZERO,
    "label_smoothing": BELOW_HALF,
    "lam": SHARE,
    "lambda_": FROM_ZERO,
    "length_penalty": FROM_ZERO,
    "max_length": FROM_ONE,
    "nll_weight": FROM_ZERO,
    "overlong_buffer": FROM_ZERO,
    "ppo.gamma": SHARE,
    "r_max": ABOVE_ZERO,
    "reinforce_pp.gamma": SHARE,
    "tau": ABOVE_ZERO,
    "temperature": ABOVE_ZERO,
    "threshold": Allowed("any number", lambda _: True),
    "undesirable_weight": FROM_ZERO,
    "value_clip": ABOVE_ZERO,
    "value_coef": FROM_ZERO,
    "version": one_of((1, 2)),
}


def allowed(algorithm: str, parameter: str) -> Allowed | None:
    """Return what `algorithm` allows for `parameter`; None: any value of its type."""
    return RANGES.get(f"{algorithm}.{parameter}", RANGES.get(parameter))


def check_value(algorithm: str, parameter: str, value: Any, default: Any, *, in_range: bool = True) -> None:
    """Raise ValueError for a value of another type than its default, not finite, or (`in_range`) out of its range."""
    wanted: tuple[type, ...] = {bool: (bool,), int: (int,), str: (str,)}.get(type(default), (float, int))
    if default is None and value is None:
        return
    if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool):
        raise ValueError(f"{algorithm}: {parameter} must be like its default {default!r}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{algorithm}: {parameter} is {value}; give a finite number")
    range_of = allowed(algorithm, parameter) if in_range else None
    if range_of is not None and not range_of.holds(value):
        raise ValueError(f"{algorithm}: {parameter} is {value!r}; it must be {range_of.description}")
