"""Checks of a run while it trains: does it diverge, collapse, or learn nothing? Pure functions of its logged metrics.

A check compares the last rows of metrics with the first one. It is reported once, at the step at which it first holds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

logger = logging.getLogger(__name__)

Row: TypeAlias = Mapping[str, Any]
Test: TypeAlias = Callable[[Row, Sequence[Row]], str | None]
"""(the first row, the last rows) -> what is wrong, with numbers; None if nothing is."""

LOSSES = ("objective", "nll", "preference", "judged", "ranking")  # that measure quality
FAR_ABOVE = 2.0  # a loss has diverged above this factor of its first value, and by this much
LITTLE_ENTROPY = 0.01  # nats per token
MUCH_KL = 0.5  # a KL term of the loss, above which it outweighs most policy terms
FAST_FALL = 20.0  # nats by which the log-prob of chosen responses has at least fallen, and by its first value again


class Check(NamedTuple):
    """One check: what holds over the last `steps` rows, and the remedy; or, over all `evaluations` so many or more."""

    name: str
    proves: str
    test: Test
    steps: int
    when: str
    remedy: str
    evaluations: bool = False
    samples: bool = False  # of runs that sample only
    reads: tuple[str, ...] = ()  # a run that logs none of these metrics cannot be checked


class CheckError(RuntimeError):
    """A fault that ends a run, with the name of the check that found it (docs/checks.md)."""

    def __init__(self, check: str, message: str) -> None:
        super().__init__(message)
        self.check = check

    def __reduce__(self) -> tuple[type[CheckError], tuple[str, str]]:
        return CheckError, (self.check, str(self))


class HealthWarning(NamedTuple):
    """`HealthWarning(12, "diverged", "the loss is 41, ...", "lower train.lr ...")`."""

    step: int
    name: str
    problem: str
    remedy: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.problem}; {self.remedy}"


def _diverged(first: Row, last: Sequence[Row]) -> str | None:
    """Only of losses that measure quality: the surrogate of a policy gradient may have any value."""
    name = next((name for name in LOSSES if name in first), None)
    if name is None or "reward" in first or not _numbers([first, *last], name):
        return None
    start = first[name]
    if all(row[name] > max(FAR_ABOVE * start, start + FAR_ABOVE) for row in last):
        return f"{name} is {last[-1][name]:.4g}, far above the {start:.4g} of the first step: the run diverges"
    return None


def _no_entropy(first: Row, last: Sequence[Row]) -> str | None:
    if not _numbers([first, *last], "entropy") or first["entropy"] < 10 * LITTLE_ENTROPY:
        return None
    if all(row["entropy"] < LITTLE_ENTROPY for row in last):
        return f"the entropy fell from {first['entropy']:.3g} to {last[-1]['entropy']:.2g}: the policy has collapsed"
    return None


def _worse_than_before(first: Row, last: Sequence[Row]) -> str | None:
    """Of evaluations: the one before the first step, and all since."""
    for name, better, sign in (("eval_reward", max, 1), ("eval_loss", min, -1)):
        if first["step"] == 0 and _numbers([first, *last], name):
            best = better(row[name] for row in last)
            by_chance = f"{name}_low" in first and best >= first[f"{name}_low"]  # inside of its interval
            if sign * (first[name] - best) > 0.02 * abs(first[name]) and not by_chance:
                return f"{name} was {first[name]:.4g} before training, and {best:.4g} in the best evaluation since then"
            return None
    return None


def _all_truncated(_: Row, last: Sequence[Row]) -> str | None:
    if all(row.get("truncated") == 1.0 for row in last):
        return f"all responses of {len(last)} steps are cut off at the token limit"
    return None


def _all_empty(_: Row, last: Sequence[Row]) -> str | None:
    if all(row.get("longest", math.inf) <= 1 for row in last):
        return f"all responses of {len(last)} steps are empty"
    return None


def _constant_reward(_: Row, last: Sequence[Row]) -> str | None:
    flat = _numbers(last, "reward_std") and all(row["reward_std"] == 0 for row in last)
    if flat and len({row["reward"] for row in last}) == 1:
        return f"every reward of {len(last)} steps is {last[-1]['reward']:.4g}: there is nothing to learn from"
    return None


def _no_gradient(_: Row, last: Sequence[Row]) -> str | None:
    if all(row.get("grad_norm") == 0 for row in last):
        return f"the gradient of {len(last)} steps is zero: nothing was learned"
    return None


def _chosen_falls(first: Row, last: Sequence[Row]) -> str | None:
    if not _numbers([first, *last], "chosen_logprob"):
        return None
    start = first["chosen_logprob"]
    if all(row["chosen_logprob"] < start - max(FAST_FALL, abs(start)) for row in last):
        return f"the log-prob of chosen responses fell from {start:.4g} to {last[-1]['chosen_logprob']:.4g}"
    return None


def _length_collapsed(first: Row, last: Sequence[Row]) -> str | None:
    """What a reward pays for is not a collapse: shorter responses that earn more are learning."""
    if not _numbers([first, *last], "length") or first["length"] < 8:
        return None
    if not all(row["length"] < first["length"] / 8 for row in last):
        return None
    if _numbers([first, *last], "reward"):
        earned = sum(row["reward"] for row in last) / len(last)
        if earned > first["reward"] + 0.05 * max(1.0, abs(first["reward"])):
            return None
    return f"the length of responses fell from {first['length']:.4g} to {last[-1]['length']:.4g} tokens"


def _kl_runs_away(first: Row, last: Sequence[Row]) -> str | None:
    if not _numbers([first, *last], "kl"):
        return None
    limit = max(MUCH_KL, 10 * first["kl"])
    if all(row["kl"] > limit for row in last) and last[-1]["kl"] > last[0]["kl"]:
        return f"the KL term grew from {first['kl']:.3g} to {last[-1]['kl']:.3g}: the policy leaves its reference"
    return None


def _only_training_reward_rises(first: Row, since: Sequence[Row]) -> str | None:
    """By the intervals of the evaluations: the last two are below the best one before them."""
    rows = [first, *since]
    if not _numbers(rows, "eval_reward_low") or not _numbers(rows, "eval_reward_high"):
        return None
    best = max(rows[:-2], key=lambda row: row["eval_reward_low"])
    at_best = best if "reward" in best else since[0]
    if not _numbers([at_best, *rows[-2:]], "reward"):
        return None
    fell = all(row["eval_reward_high"] < best["eval_reward_low"] for row in rows[-2:])
    if fell and all(row["reward"] > at_best["reward"] for row in rows[-2:]):
        return (
            f"the reward rose from {at_best['reward']:.4g} to {rows[-1]['reward']:.4g}, and the held-out reward fell "
            f"from {best['eval_reward']:.4g} at step {best['step']} to {rows[-1]['eval_reward']:.4g}"
        )
    return None


def _numbers(rows: Sequence[Row], name: str) -> bool:
    """Whether every row has a finite value; a value that is not finite is null in a file."""
    return all(row.get(name) is not None and math.isfinite(row[name]) for row in rows)


CHECKS: tuple[Check, ...] = (
    Check(
        "diverged",
        "the loss stays near its first values, or falls",
        _diverged,
        3,
        "the loss of 3 steps is more than twice its first value, and more than 2 above it",
        "lower train.lr, raise train.warmup_steps_ratio, or look at the rows (`oxrl data show`)",
        reads=LOSSES,
    ),
    Check(
        "chosen_falls",
        "the log-prob of chosen responses does not collapse",
        _chosen_falls,
        3,
        "the log-prob of chosen responses fell by its first value and by at least 20, for 3 steps",
        "lower train.lr, raise beta, or choose a loss with an NLL term (dpnll, cpo)",
        reads=("chosen_logprob",),
    ),
    Check(
        "entropy",
        "the policy keeps its entropy",
        _no_entropy,
        5,
        "the entropy of 5 steps is below 0.01, and was above 0.1",
        "lower train.lr, or set kl_coef or entropy_coef in train.alg_params",
        samples=True,
        reads=("entropy",),
    ),
    Check(
        "truncated",
        "responses end by themselves",
        _all_truncated,
        5,
        "every response of 5 steps is cut off",
        "raise rollout.max_tokens, or reward responses that end",
        samples=True,
        reads=("truncated",),
    ),
    Check(
        "empty",
        "responses are not empty",
        _all_empty,
        3,
        "every response of 3 steps is empty",
        "check the chat template and the reward",
        samples=True,
        reads=("longest",),
    ),
    Check(
        "constant_reward",
        "rewards differ",
        _constant_reward,
        5,
        "all rewards of 5 steps are equal",
        "check the reward (`oxrl rewards test`), use easier or harder prompts, or a higher rollout.temperature",
        samples=True,
        reads=("reward",),
    ),
    Check(
        "no_gradient",
        "there is a gradient",
        _no_gradient,
        3,
        "the gradient of 3 steps is zero",
        "RL: responses to a prompt need different rewards; else check which tokens are trained (`oxrl data show`)",
        reads=("grad_norm",),
    ),
    Check(
        "worse_than_before",
        "an evaluation is as good as the one before training",
        _worse_than_before,
        3,
        "of 3 or more evaluations, none is nearly as good as the one before the first step",
        "lower train.lr; the model before training is better than every checkpoint so far",
        evaluations=True,
    ),
    Check(
        "length",
        "responses keep their length, unless shorter ones earn more",
        _length_collapsed,
        5,
        "the responses of 5 steps have less than an eighth of their first length, and earn no more",
        "check how the reward treats short responses (`oxrl rewards test`), lower train.lr, or set kl_coef",
        samples=True,
        reads=("length",),
    ),
    Check(
        "kl",
        "the policy stays near its reference where the loss has a KL term",
        _kl_runs_away,
        5,
        "the KL term of 5 steps is above 0.5, ten times its first value, and grows",
        "lower train.lr, raise kl_coef, or update the reference (model.ref_update)",
        samples=True,
        reads=("kl",),
    ),
    Check(
        "held_out",
        "a rising reward is not bought with worse answers to held-out prompts",
        _only_training_reward_rises,
        3,
        "the reward rises while the held-out reward of two evaluations is below an earlier one's interval",
        "stop at the best checkpoint (train.patience), use more prompts, or look for a way to cheat the reward",
        evaluations=True,
        samples=True,
    ),
)


class HealthMonitor:
    """A sink that logs each warning once. `past` are the rows of a resumed run, whose warnings were logged before."""

    def __init__(self, past: Sequence[Row] = ()) -> None:
        self.first: Row | None = None
        self.recent: list[Row] = []
        self.evaluations: list[Row] = []
        self.warnings: list[HealthWarning] = []
        for row in past:
            self.note(row)

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        for warning in self.note({"step": step, **metrics}):
            logger.warning("%s", warning)

    def note(self, row: Row) -> list[HealthWarning]:
        """Take over a row, and return the warnings that it gives rise to."""
        if "eval_reward" in row or "eval_loss" in row:
            self.evaluations.append(row)
        if "loss" in row:  # else an evaluation alone
            self.first = self.first or row
            self.recent = [*self.recent, row][-max(check.steps for check in CHECKS) :]
        known = {warning.name for warning in self.warnings}
        found = [
            HealthWarning(int(row["step"]), check.name, problem, check.remedy)
            for check in CHECKS
            if check.name not in known and (problem := self._problem(check)) is not None
        ]
        self.warnings += found
        return found

    def judged(self) -> list[str]:
        """The names of the checks that had enough rows so far."""
        return [check.name for check in CHECKS if self._has_enough(check) and not self._lacks(check)]

    def missing(self) -> dict[str, tuple[str, ...]]:
        """The checks that cannot be made, with the metrics of which they need one."""
        return {check.name: check.reads for check in CHECKS if self._lacks(check)}

    def _lacks(self, check: Check) -> bool:
        logged = self.recent[-1] if self.recent else {}
        return bool(logged and check.reads) and not any(name in logged for name in check.reads)

    def _has_enough(self, check: Check) -> bool:
        if check.evaluations:
            return len(self.evaluations) > check.steps
        return self.first is not None and len(self.recent) >= check.steps

    def _problem(self, check: Check) -> str | None:
        if not self._has_enough(check):
            return None
        if check.evaluations:
            return check.test(self.evaluations[0], self.evaluations[1:])
        assert self.first is not None, "there are rows"
        return check.test(self.first, self.recent[-check.steps :])


def find_warnings(rows: Sequence[Row]) -> list[HealthWarning]:
    """The warnings of a run, from its history or its `metrics.jsonl`."""
    return HealthMonitor(rows).warnings
