"""Rollouts become graded rollouts: a score, or an error that says why there is none; never a 0 for a failure.

A reward is a plain function in one of three shapes, sync or async; `as_reward` tells which, `grade` runs it over the
answers to one prompt, all at once and under a time limit. What an answer is worth is not known here.
"""

from __future__ import annotations

import inspect
import math
import re
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

import anyio

from oxrl.concurrency import in_thread, task_group
from oxrl.types import Generation, GroupRewardFn, RewardFn, Rollout, Sample, Score, Turn

F = TypeVar("F", bound=Callable[..., Any])

OLDER_PARAMETERS = ("prompt_ids", "response_ids", "finish_reason")
_MANY_ROLLOUTS = re.compile(r"(?i)(sequence|list|tuple|iterable|collection)\[.*rollout")
_LONGEST_REASON = 500


class Ungraded(NamedTuple):
    """`Ungraded("reward exact_match failed: ValueError: ...")`: why there is no score."""

    reason: str


GradeFn: TypeAlias = Callable[[Sequence[Rollout], float], Awaitable[list[Score | Ungraded]]]
"""Rollouts and a time limit in seconds to an outcome for each."""


def no_demands(sample: Sample) -> None:
    """For rewards that can grade answers to anything."""


@dataclass(frozen=True, slots=True)
class Reward:
    """`as_reward(my_function)`: whatever shape a reward has, as one thing that `grade` can run and others compose."""

    name: str
    outcomes: GradeFn
    check: Callable[[Sample], None] = no_demands  # raises a ValueError for a sample that it could never grade


AnyReward: TypeAlias = Reward | RewardFn | GroupRewardFn | Callable[..., Any]


def group_reward(function: F) -> F:
    """Marks a function that is given all answers to one prompt and returns a float or `Score` for each."""
    function.of_group = True  # type: ignore[attr-defined]
    return function


def reads(*fields: str) -> Callable[[F], F]:
    """Says what a reward reads of a sample, and that it is pure and quick: it is tried on each before a run."""

    def mark(function: F) -> F:
        function.reads = fields  # type: ignore[attr-defined]
        return function

    return mark


async def grade(rollouts: Sequence[Rollout], reward: AnyReward, *, time_limit: float = 30.0) -> list[Rollout]:
    """The same rollouts with a score, or with an error where the reward failed or took more than `time_limit` seconds.

    Those that have an error or a score already stay as they are. A sync reward that is stuck is left behind in its
    thread; one that is stuck inside a single call into C, such as a regex that backtracks for ever, stops everybody.
    """
    waiting = [rollout for rollout in rollouts if rollout.error is None and rollout.score is None]
    if not waiting:
        return list(rollouts)
    outcomes = iter(await as_reward(reward).outcomes(waiting, time_limit))
    graded = [
        _with_outcome(rollout, next(outcomes)) if rollout.error is None and rollout.score is None else rollout
        for rollout in rollouts
    ]
    assert next(outcomes, None) is None, f"more outcomes than the {len(waiting)} rollouts that waited for one"
    return graded


def _with_outcome(rollout: Rollout, outcome: Score | Ungraded) -> Rollout:
    if isinstance(outcome, Ungraded):
        return replace(rollout, error=outcome.reason)
    return replace(rollout, score=outcome)


def as_reward(function: AnyReward) -> Reward:
    """A function of one rollout, of a group, or of `(prompt_ids, response_ids, finish_reason)`, as a `Reward`.

    A group function is marked by `@group_reward`, has a first parameter that is annotated as a sequence of rollouts,
    or calls it `rollouts`. The older shape is told by the names of its three parameters.
    """
    if isinstance(function, Reward):
        return function
    name = _name_of(function)
    check = partial(_try_without_answer, function) if hasattr(_innermost(function), "reads") else no_demands
    required, first = _required_parameters(function, name)
    if tuple(required) == OLDER_PARAMETERS:
        return Reward(name, partial(_grade_each, name, partial(_from_older, function)), check)
    if len(required) > 1 or first is None:
        raise ValueError(
            f"reward {name} takes ({', '.join(required)}); a reward takes one rollout, or with @group_reward all "
            f"rollouts of a group, or ({', '.join(OLDER_PARAMETERS)}); anything else needs a default"
        )
    of_group = getattr(_innermost(function), "of_group", False) or first.name == "rollouts"
    if of_group or _MANY_ROLLOUTS.search(str(first.annotation)):
        return Reward(name, partial(_grade_together, name, function), check)
    return Reward(name, partial(_grade_each, name, function), check)


def _innermost(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _name_of(function: Any) -> str:
    inner = _innermost(function)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def _required_parameters(function: Any, name: str) -> tuple[list[str], inspect.Parameter | None]:
    """Names that have no default, and the first parameter."""
    if not callable(function):
        raise ValueError(f"{function!r} is no reward: it cannot be called")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ValueError(f"reward {name} does not say which parameters it takes; wrap it in a function") from error
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_place = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    return [p.name for p in named if p.default is p.empty], next(iter(by_place), None)


def _try_without_answer(function: Callable[..., Any], sample: Sample) -> None:
    """What a reward cannot grade at all, it cannot grade for an empty answer either."""
    function(Rollout(sample, (Turn((), Generation((), (), "stop")),)))


def _from_older(function: Callable[..., Any], rollout: Rollout) -> Score:
    """`(tensor, is_per_token)` for the tokens of the last turn; its sum is what the rollout is worth."""
    turn = rollout.turns[-1]
    returned = function(list(turn.prompt_ids), list(turn.generation.token_ids), turn.generation.finish_reason)
    if not (isinstance(returned, tuple) and len(returned) == 2):
        raise TypeError(f"it returned {_kind(returned)} and not (rewards, is_per_token)")
    rewards, is_per_token = returned
    given = [float(each) for each in (rewards.tolist() if hasattr(rewards, "tolist") else rewards)]
    total = math.fsum(given)
    if not is_per_token:
        return Score(total)
    earlier = sum(len(turn.generation.token_ids) for turn in rollout.turns[:-1])
    return Score(total, per_token=(*[0.0] * earlier, *given))


async def _grade_each(
    name: str, function: Callable[..., Any], rollouts: Sequence[Rollout], time_limit: float
) -> list[Score | Ungraded]:
    outcomes: dict[int, Score | Ungraded] = {}

    async def one(index: int) -> None:
        said = await _call(name, function, rollouts[index], time_limit)
        outcomes[index] = said if isinstance(said, Ungraded) else _outcome(name, said, rollouts[index])

    async with task_group() as tasks:
        for index in range(len(rollouts)):
            tasks.start_soon(one, index)
    return [outcomes[index] for index in range(len(rollouts))]


async def _grade_together(
    name: str, function: Callable[..., Any], rollouts: Sequence[Rollout], time_limit: float
) -> list[Score | Ungraded]:
    said = await _call(name, function, rollouts, time_limit)
    if isinstance(said, Ungraded):
        return [said] * len(rollouts)
    scores = said.tolist() if hasattr(said, "tolist") else said
    if not isinstance(scores, Sequence) or isinstance(scores, str | bytes):
        return [_failed(name, f"it returned {_kind(said)} and not a list of scores")] * len(rollouts)
    if len(scores) != len(rollouts):
        return [_failed(name, f"it returned {len(scores)} scores for {len(rollouts)} rollouts")] * len(rollouts)
    return [_outcome(name, score, rollout) for score, rollout in zip(scores, rollouts, strict=True)]


async def _call(name: str, function: Callable[..., Any], given: Any, time_limit: float) -> Any | Ungraded:
    """What the function says, or why it says nothing."""
    with anyio.move_on_after(time_limit) as scope:
        try:
            said = function(given) if _is_async(function) else await in_thread(partial(function, given))
            return await said if inspect.isawaitable(said) else said
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a user's function may raise anything: that is data here
            return _failed(name, f"{type(error).__name__}: {error}{_place_of(error)}")
    assert scope.cancelled_caught, "a call that was not cut short has returned"
    return _failed(name, f"no answer within {time_limit:g} s")


def _is_async(function: Any) -> bool:
    inner = _innermost(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def _place_of(error: BaseException) -> str:
    """Where a user's function failed, for the user to look."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _failed(name: str, why: str) -> Ungraded:
    return Ungraded(f"reward {name} failed: {why}"[:_LONGEST_REASON])


def _outcome(name: str, said: Any, rollout: Rollout) -> Score | Ungraded:
    try:
        return as_score(said, rollout)
    except (TypeError, ValueError) as error:
        return _failed(name, str(error))


def as_score(said: Any, rollout: Rollout) -> Score:
    """What a reward returned as a `Score` of finite floats whose parts per turn and token fit the rollout."""
    if not isinstance(said, Score):
        return Score(_number(said, "the score"))
    value = _number(said.value, "the score")
    parts = {str(part): _number(worth, f"part {part}") for part, worth in said.parts.items()}
    sampled = sum(len(turn.generation.token_ids) for turn in rollout.turns)
    return Score(
        value,
        parts,
        _shares(said.per_turn, value, "turn", len(rollout.turns)),
        _shares(said.per_token, value, "token", sampled),
    )


def _shares(shares: Sequence[Any] | None, value: float, of: str, count: int) -> tuple[float, ...] | None:
    if shares is None:
        return None
    if len(shares) != count:
        raise ValueError(f"it gave {len(shares)} scores per {of} for {count} {of}s")
    numbers = tuple(_number(share, f"a score per {of}") for share in shares)
    if not math.isclose(math.fsum(numbers), value, rel_tol=1e-4, abs_tol=1e-4):
        raise ValueError(f"its scores per {of} add up to {math.fsum(numbers):g} and not to {value:g}")
    return numbers


def _number(said: Any, what: str) -> float:
    if not isinstance(said, Real) and getattr(said, "ndim", None) == 0:
        said = said.item()  # a tensor or array that is a number
    if not isinstance(said, Real):
        raise TypeError(f"{what} is {_kind(said)} and not a number")
    if not math.isfinite(said):
        raise ValueError(f"{what} is {float(said)}")
    return float(said)


def _kind(said: Any) -> str:
    return "None" if said is None else f"a {type(said).__name__}"


def check_samples(reward: AnyReward, samples: Sequence[Sample]) -> None:
    """Raise a ValueError that names the samples which the reward could never grade; needs no model."""
    checked = as_reward(reward)
    problems: list[str] = []
    for sample in samples:
        try:
            checked.check(sample)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(
            f"reward {checked.name} cannot grade {len(problems)} of {len(samples)} samples: "
            f"{'; '.join(problems[:3])}{more}"
        )


def reads_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """`("answer",)`: what a reward says that it reads of a sample."""
    fields: tuple[str, ...] = getattr(_innermost(function), "reads", ())
    return fields


def defaults_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The keyword-only parameters of a reward, which are its schema."""
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
