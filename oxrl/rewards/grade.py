"""Grades rollouts: each gets a score, or an error with the reason; a failure is never a reward of 0.

A reward is a function with one of four signatures, sync or async. `as_reward` detects which, `grade` runs it over the
rollouts of one prompt, concurrently and under a time limit.
"""

from __future__ import annotations

import inspect
import math
import re
import traceback
from asyncio import CancelledError
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias, TypeVar

from oxrl.concurrency import in_thread, is_cancelled, task_group
from oxrl.names import error_text
from oxrl.rewards.allowance import Allowance
from oxrl.types import Generation, GroupRewardFn, Media, RewardFn, Rollout, Sample, Score, Turn

F = TypeVar("F", bound=Callable[..., Any])

TOKEN_PARAMETERS = ("prompt_ids", "response_ids", "finish_reason")
TEXT_PARAMETERS = ("prompts", "completions", "completion_ids")
"""What a reward function of TRL gets besides the columns of the rows."""
_MANY_ROLLOUTS = re.compile(r"(?i)(sequence|list|tuple|iterable|collection)\[.*rollout")
_MAX_REASON_LENGTH = 500
MAX_SCORE = 1e15  # the square of a larger one, summed over the rows of a step, is infinite in float32


class Ungraded(NamedTuple):
    """`Ungraded("reward exact_match failed: ValueError: ...")`: the reason why there is no score."""

    reason: str
    applies: bool = True  # False: the reward is for other rows, and the other rewards of the run decide


GradeFn: TypeAlias = Callable[[Sequence[Rollout], float], Awaitable[list[Score | Ungraded]]]
"""Rollouts and a time limit in seconds to an outcome for each."""


def accept_any_sample(sample: Sample) -> None:
    """The `check` of rewards that can grade every sample."""


@dataclass(frozen=True, slots=True)
class Reward:
    """`as_reward(my_function)`: a reward function of any signature, in the form that `grade` runs."""

    name: str
    outcomes: GradeFn
    check: Callable[[Sample], None] = accept_any_sample  # raises a ValueError for a sample that it can never grade
    fallback: bool = False  # for the episodes without a score of an environment that scores its own


AnyReward: TypeAlias = Reward | RewardFn | GroupRewardFn | Callable[..., Any]


def group_reward(function: F) -> F:
    """Mark a function that takes all rollouts of one prompt and returns a float or `Score` for each."""
    function.of_group = True  # type: ignore[attr-defined]
    return function


def reads(*fields: str) -> Callable[[F], F]:
    """Declare the sample fields that a reward reads. It must be pure and fast: each sample is checked before a run."""

    def mark(function: F) -> F:
        function.reads = fields  # type: ignore[attr-defined]
        return function

    return mark


async def grade(rollouts: Sequence[Rollout], reward: AnyReward, *, time_limit: float = 30.0) -> list[Rollout]:
    """Return the rollouts with a score, or with an error if the reward failed or took more than `time_limit` seconds.

    Rollouts that already have an error or a score are returned unchanged. A sync reward that hangs is abandoned in its
    thread; one that hangs inside a single call into C, such as a backtracking regex, blocks the whole process.
    """
    pending = [rollout for rollout in rollouts if rollout.error is None and rollout.score is None]
    if not pending:
        return list(rollouts)
    own = as_reward(reward)
    outcomes = iter(await own.outcomes(pending, time_limit))
    graded = [
        with_outcome(own.name, rollout, next(outcomes)) if rollout.error is None and rollout.score is None else rollout
        for rollout in rollouts
    ]
    assert next(outcomes, None) is None, f"more outcomes than the {len(pending)} pending rollouts"
    return graded


def with_outcome(name: str, rollout: Rollout, outcome: Score | Ungraded) -> Rollout:
    """The rollout with its score, or with an error if there is none or if it is not a valid score."""
    outcome = outcome if isinstance(outcome, Ungraded) else _outcome(name, outcome, rollout)
    if isinstance(outcome, Ungraded):
        return replace(rollout, error=outcome.reason)
    return replace(rollout, score=outcome)


def as_reward(function: AnyReward) -> Reward:
    """Wrap a function of one rollout, of a group, of `(prompt_ids, response_ids, finish_reason)` or of TRL's
    `(prompts, completions, **columns)` as a `Reward`.

    A group function is marked by `@group_reward`, or its first parameter is annotated as a sequence of rollouts or
    named `rollouts`. The other signatures are recognized by their parameter names: TRL's has `completions`.
    """
    if isinstance(function, Reward):
        return function
    name = _name_of(function)
    check = partial(_grade_empty, function) if hasattr(_innermost(function), "reads") else accept_any_sample
    required, first = _required_parameters(function, name)
    if "completions" in inspect.signature(function).parameters:
        return _text_reward(name, function, required)
    if tuple(required) == TOKEN_PARAMETERS:
        return Reward(name, partial(_grade_each, name, partial(_score_tokens, function)), check)
    if len(required) > 1 or first is None:
        raise ValueError(
            f"reward {name} takes {inspect.signature(function)}; a reward takes one rollout, or with @group_reward all "
            f"rollouts of a group, or (prompts, completions, **columns) as in TRL, or ({', '.join(TOKEN_PARAMETERS)}); "
            "other parameters need a default"
        )
    of_group = getattr(_innermost(function), "of_group", False) or first.name == "rollouts"
    if of_group or _MANY_ROLLOUTS.search(str(first.annotation)):
        return Reward(name, partial(_grade_together, name, function), check)
    return Reward(name, partial(_grade_each, name, function), check)


def _text_reward(name: str, function: Callable[..., Any], required: Sequence[str]) -> Reward:
    """A reward function of TRL: called with keywords, once for the rollouts of a prompt, it returns a list."""
    columns = [each for each in required if each not in TEXT_PARAMETERS]
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())

    def check(sample: Sample) -> None:
        known = _columns_of(sample)
        if missing := [each for each in columns if each not in known]:
            raise ValueError(
                f"reward {name}{inspect.signature(function)} takes the column {missing[0]}, and {sample.id} has "
                f"{', '.join(known) or 'no columns besides its prompt'}"
            )

    def call(rollouts: Sequence[Rollout]) -> Any:
        given = _text_arguments(rollouts)
        return function(**{each: value for each, value in given.items() if takes_all or each in parameters})

    async def outcomes(rollouts: Sequence[Rollout], time_limit: float) -> list[Score | Ungraded]:
        result = await _call(name, call, rollouts, time_limit)
        return _outcomes_of(name, result, rollouts)

    return Reward(name, outcomes, check)


def _columns_of(sample: Sample, media: Sequence[Media] | None = None) -> dict[str, Any]:
    """The columns of a row besides its prompt; `images` and `audios` are its media, or those given."""
    kinds: dict[str, list[Media]] = {}
    for medium in sample.media if media is None else media:
        kinds.setdefault(f"{medium.kind}s", []).append(medium)
    return {**sample.metadata, **kinds, **({} if sample.answer is None else {"answer": sample.answer})}


def _text_arguments(rollouts: Sequence[Rollout]) -> dict[str, list[Any]]:
    """Lists with an entry per rollout. As in TRL, a row with a list of messages has them as prompt and completion."""
    columns = [_columns_of(rollout.sample, rollout.media) for rollout in rollouts]
    named = dict.fromkeys(each for own in columns for each in own)
    return {
        **{each: [own.get(each) for own in columns] for each in named},
        "prompts": [
            [each.to_dict() for each in rollout.prompt_messages or rollout.sample.messages]
            if rollout.sample.conversational
            else rollout.prompt
            for rollout in rollouts
        ],
        "completions": [
            [each.to_dict() for turn in rollout.turns for each in turn.messages]
            if rollout.sample.conversational
            else rollout.response
            for rollout in rollouts
        ],
        "completion_ids": [[token for turn in each.turns for token in turn.generation.token_ids] for each in rollouts],
    }


def _innermost(function: Any) -> Any:
    while isinstance(function, partial):
        function = function.func
    return function


def _name_of(function: Any) -> str:
    inner = _innermost(function)
    return str(getattr(inner, "__name__", None) or type(inner).__name__)


def _required_parameters(function: Any, name: str) -> tuple[list[str], inspect.Parameter | None]:
    """Names of the parameters without a default, and the first positional parameter."""
    if not callable(function):
        raise ValueError(f"{function!r} is not a reward: it is not callable")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise ValueError(f"the signature of reward {name} cannot be read; wrap it in a function") from error
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    return [p.name for p in named if p.default is p.empty], next(iter(positional), None)


def _grade_empty(function: Callable[..., Any], sample: Sample) -> None:
    """Grade an empty response: a sample that cannot be graded at all raises here too."""
    function(Rollout(sample, (Turn((), Generation((), (), "stop")),)))


def _score_tokens(function: Callable[..., Any], rollout: Rollout) -> Score:
    """The score from `(tensor, is_per_token)` for the tokens of the last turn; the reward is the sum."""
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
        result = await _call(name, function, rollouts[index], time_limit)
        outcomes[index] = result if isinstance(result, Ungraded) else _outcome(name, result, rollouts[index])

    async with task_group() as tasks:
        for index in range(len(rollouts)):
            tasks.start_soon(one, index)
    return [outcomes[index] for index in range(len(rollouts))]


async def _grade_together(
    name: str, function: Callable[..., Any], rollouts: Sequence[Rollout], time_limit: float
) -> list[Score | Ungraded]:
    return _outcomes_of(name, await _call(name, function, rollouts, time_limit), rollouts)


def _outcomes_of(name: str, result: Any, rollouts: Sequence[Rollout]) -> list[Score | Ungraded]:
    """An outcome per rollout from the list that a function returned for all of them."""
    if isinstance(result, Ungraded):
        return [result] * len(rollouts)
    scores = result.tolist() if hasattr(result, "tolist") else result
    if not isinstance(scores, Sequence) or isinstance(scores, str | bytes):
        return [_failed(name, f"it returned {_kind(result)} and not a list of scores")] * len(rollouts)
    if len(scores) != len(rollouts):
        return [_failed(name, f"it returned {len(scores)} scores for {len(rollouts)} rollouts")] * len(rollouts)
    return [
        Ungraded(f"reward {name} returned None: it does not apply to {rollout.sample.id}", applies=False)
        if score is None
        else _outcome(name, score, rollout)
        for score, rollout in zip(scores, rollouts, strict=True)
    ]


async def _call(name: str, function: Callable[..., Any], argument: Any, time_limit: float) -> Any | Ungraded:
    """The return value of the function, or why there is none."""
    outcome: Any | Ungraded = _failed(name, f"no result within {time_limit:g} s")
    allowance = Allowance(time_limit)
    async with task_group() as tasks:
        tasks.start_soon(allowance.cancel_at_end, tasks.cancel_scope)
        try:
            in_its_thread = partial(allowance.call, function, argument)
            result = function(argument) if _is_async(function) else await in_thread(in_its_thread)
            outcome = await result if inspect.isawaitable(result) else result
        except (Exception, SystemExit, CancelledError) as error:  # a function may raise anything; errors are data
            if isinstance(error, CancelledError) and is_cancelled():
                raise
            outcome = _failed(name, f"{error_text(error)}{_location_of(error)}")
        tasks.cancel_scope.cancel()
    return outcome


def _is_async(function: Any) -> bool:
    inner = _innermost(function)
    return inspect.iscoroutinefunction(inner) or inspect.iscoroutinefunction(getattr(inner, "__call__", None))  # noqa: B004


def _location_of(error: BaseException) -> str:
    """File and line where a user's function failed."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""


def _failed(name: str, reason: str) -> Ungraded:
    return Ungraded(f"reward {name} failed: {reason}"[:_MAX_REASON_LENGTH])


def _outcome(name: str, result: Any, rollout: Rollout) -> Score | Ungraded:
    try:
        return as_score(result, rollout)
    except (TypeError, ValueError) as error:
        return _failed(name, str(error))
    except Exception as error:  # noqa: BLE001 - a result may be any object
        return _failed(name, f"its result cannot be read: {error_text(error)}")


def as_score(result: Any, rollout: Rollout) -> Score:
    """The return value of a reward as a `Score` of finite floats; values per turn and token must fit the rollout."""
    if not isinstance(result, Score):
        return Score(_number(result, "the score"))
    value = _number(result.value, "the score")
    parts = {str(part): _number(number, f"part {part}") for part, number in result.parts.items()}
    sampled = sum(len(turn.generation.token_ids) for turn in rollout.turns)
    return Score(
        value,
        parts,
        _shares(result.per_turn, value, "turn", len(rollout.turns)),
        _shares(result.per_token, value, "token", sampled),
    )


def _shares(shares: Sequence[Any] | None, value: float, of: str, count: int) -> tuple[float, ...] | None:
    if shares is None:
        return None
    if len(shares) != count:
        raise ValueError(f"it returned {len(shares)} scores per {of} for {count} {of}s")
    numbers = tuple(_number(share, f"a score per {of}") for share in shares)
    if not math.isclose(math.fsum(numbers), value, rel_tol=1e-4, abs_tol=1e-4):
        raise ValueError(f"its scores per {of} add up to {math.fsum(numbers):g} and not to {value:g}")
    return numbers


def _number(value: Any, what: str) -> float:
    if not isinstance(value, Real) and getattr(value, "ndim", None) == 0:
        value = value.item()  # a tensor or array with one number
    if not isinstance(value, Real):
        raise TypeError(f"{what} is {_kind(value)} and not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not abs(number) <= MAX_SCORE:
        raise ValueError(f"{what} is {number:g}; a score is a number of at most {MAX_SCORE:g}")
    return number


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def check_samples(reward: AnyReward, samples: Sequence[Sample]) -> None:
    """Raise a ValueError that names samples which the reward can never grade; needs no model."""
    checked = as_reward(reward)
    problems: list[str] = []
    for sample in samples:
        try:
            checked.check(sample)
        except ValueError as error:
            problems.append(str(error))
        except SystemExit as error:
            problems.append(f"sample {sample.id}: {error_text(error)}")
    if problems:
        more = f" (and {len(problems) - 3} more)" if len(problems) > 3 else ""
        raise ValueError(
            f"reward {checked.name} cannot grade {len(problems)} of {len(samples)} samples: "
            f"{'; '.join(problems[:3])}{more}"
        )


def reads_of(function: Callable[..., Any]) -> tuple[str, ...]:
    """`("answer",)`: the sample fields that a reward declares to read."""
    fields: tuple[str, ...] = getattr(_innermost(function), "reads", ())
    return fields


def defaults_of(function: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The keyword-only parameters of a reward: its configuration schema."""
    parameters = inspect.signature(function).parameters
    return {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
