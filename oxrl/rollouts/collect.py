"""Prompts to a batch of scored groups: over-sampled, filtered, aborted early, without losing finished groups.

A batch is collected in rounds. In a round all prompts are sampled concurrently and each group is graded as soon as it
is complete; when enough groups have finished, the others are aborted. Filters run between rounds, and missing groups
are sampled in the next one. So the result depends on the order in which generations finish and never on the run time
of a reward.
"""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import anyio

from oxrl.concurrency import run_blocking, task_group
from oxrl.names import as_record, kind_of, renamed_keywords
from oxrl.rewards.grade import AnyReward, Reward, grade, with_outcome
from oxrl.rollouts.batches import RolloutBatch, as_rollout, convert_to_batch
from oxrl.rollouts.buffer import Group, LeftOut, age_of
from oxrl.rollouts.envs import PAUSES, GeneratorClient, single_turn
from oxrl.rollouts.episode import EpisodeError, EpisodeTime
from oxrl.rollouts.filters import keep_all
from oxrl.rollouts.record import rollout_from_json, rollout_to_json
from oxrl.seeds import mixed_seed
from oxrl.tracking.activity import Activity
from oxrl.tracking.health import CheckError
from oxrl.types import (
    DataSource,
    EnvFn,
    Episode,
    FilterFn,
    Generation,
    GenerationConfig,
    Generator,
    Message,
    Render,
    Request,
    Rollout,
    Sample,
    Status,
    Weights,
    as_messages,
)

logger = logging.getLogger(__name__)

_OTHER_LIBRARY = ("Task got bad yield", "must be called from async context", "no running event loop")
_WRONG_LIBRARY = (
    "generate_fn awaits trio where asyncio runs, or the other way round. generate_rollout_batches runs on asyncio; "
    "under trio.run, await AsyncRolloutManager(data_buffer, config).generate_batch(). With anyio, it runs on both."
)
_UNGRADED_ROUNDS = 3  # without a single graded group, after which a run ends

GenerateFn: TypeAlias = Callable[[Any], Any]
"""Rollouts of one prompt, some or all without turns -> the same with turns; sync or async. See `RolloutConfig`."""
GradeFn: TypeAlias = Callable[[Group], Awaitable[Sequence[Rollout]]]
Prompt: TypeAlias = Sample | str | Sequence[Message | Mapping[str, Any]]
SelectFn: TypeAlias = Callable[[Sequence[Group], int], Any]
"""(finished groups, number wanted) -> the groups to keep; sync or async."""


NoteFn: TypeAlias = Callable[[str, float], None]
"""(id of a prompt, mean reward of a group of completions): for a source that draws by it."""


def nothing_to_note(id: str, reward: float) -> None:
    """For sources whose order does not depend on rewards."""


async def nothing_to_abort() -> None:
    """For generate functions that cannot be interrupted."""


def first_in_prompt_order(groups: Sequence[Group], count: int) -> Sequence[Group]:
    return groups[:count]


@dataclass(frozen=True, slots=True)
class RolloutConfig:
    """`RolloutConfig(batch_size=8, n_samples_per_prompt=4, generate_fn=..., reward_fn=...)`.

    `over_sampling_factor` 1.5 starts 12 prompts for a batch of 8 and aborts the slowest 4. Aborted groups restart in
    the next batch, or, with `partial_rollouts`, resume, as long as no token is older than `max_age` versions. What is
    kept are the first 8 groups that pass `filter_fn`, in prompt order, not the best 8: training on the best biases the
    policy gradient. A `select_fn` of (groups, number) can keep the best, with a warning; all 12 are then completed.
    `max_draws` limits the number of prompts per batch when `filter_fn` rejects groups. `filter_fn` None keeps all.

    `generate_fn` gets the rollouts of one prompt, or, if its first parameter is called `prompts`, a prompt for each of
    them. It returns them with turns, or a `Sample(prompt=..., tokens=..., loss_mask=...)` for each, sync or async.
    """

    batch_size: int
    n_samples_per_prompt: int = 1
    over_sampling_factor: float = 1.0
    generate_fn: GenerateFn | None = None
    reward_fn: AnyReward | None = None
    filter_fn: FilterFn | None = keep_all
    select_fn: SelectFn = first_in_prompt_order
    greedy: bool = False
    min_group_size: int = 1
    max_draws: int | None = None
    partial_rollouts: bool = False
    max_age: int = 0
    reward_time_limit: float = 30.0

    def __post_init__(self) -> None:
        if self.filter_fn is None:
            object.__setattr__(self, "filter_fn", keep_all)
        if self.select_fn is not first_in_prompt_order:
            logger.warning("select_fn biases training towards the groups that it selects")
        if self.batch_size < 1 or self.n_samples_per_prompt < 1:
            raise ValueError("batch_size and n_samples_per_prompt must be 1 or more")
        if self.n_samples_per_prompt < self.min_group_size:
            raise ValueError(
                f"the algorithm compares at least {self.min_group_size} completions of a prompt; "
                f"n_samples_per_prompt (rollout.n_samples) is {self.n_samples_per_prompt}"
            )
        if not (math.isfinite(self.over_sampling_factor) and self.over_sampling_factor >= 1):
            raise ValueError(f"over_sampling_factor is {self.over_sampling_factor}; it must be 1 or more")

    @property
    def most_draws(self) -> int:
        return self.max_draws or 10 * math.ceil(self.batch_size * self.over_sampling_factor)


class Collected(NamedTuple):
    """A batch: groups in prompt order, without ungraded rollouts, the counts of the collection, and the rest of it."""

    groups: list[Group]
    counts: Mapping[str, float]
    left_out: Sequence[LeftOut] = ()


@dataclass
class AsyncRolloutManager:
    """`await AsyncRolloutManager(DataBuffer(samples), config).collect()`: one batch per call, resumable.

    The buffer has samples, texts or lists of messages.
    `partial_samples` are groups that earlier calls started and did not use; they are scheduled first.
    """

    data_buffer: DataSource[Prompt]
    config: RolloutConfig
    partial_samples: list[Group] = field(default_factory=list)
    abort: Callable[[], Awaitable[None]] = nothing_to_abort
    drawn: int = 0  # prompts so far; the next one gets this number
    activity: Activity = field(default_factory=Activity, repr=False, compare=False)
    note: NoteFn = nothing_to_note
    report: Callable[[], Mapping[str, float]] = dict
    _warned_of_scores: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self.config = as_record(RolloutConfig, self.config, "config")

    async def collect(self, version: int = 0, max_age: int | None = None) -> Collected:
        """Return the next batch, for weights of this version; `max_age` overrides the config's if it is lower."""
        config = self.config
        oldest = config.max_age if max_age is None else min(max_age, config.max_age)
        tally = dict.fromkeys(("drawn", "filtered_groups", "ungraded", "ungraded_groups", "expired", "wasted"), 0.0)
        left_out = self._restart_expired(version, oldest, tally)
        accepted: list[Group] = []
        failures: list[str] = []
        rounds = 0
        while (missing := config.batch_size - len(accepted)) > 0:
            wanted = min(math.ceil(missing * config.over_sampling_factor), config.most_draws - int(tally["drawn"]))
            if wanted < 1:
                break
            groups = self._next_groups(wanted)
            tally["drawn"] += len(groups)
            for group in await self._round(groups, missing, version):
                if _unfinished(group):
                    self.partial_samples.append(group)
                elif (graded := await self._accepted(group, tally, failures, left_out)) is not None:
                    accepted.append(graded)
            rounds += 1
            if not accepted and tally["ungraded_groups"] == tally["drawn"]:
                if rounds == _UNGRADED_ROUNDS:
                    break  # the reward itself fails
                logger.warning("none of %d prompts could be graded, others are drawn: %s", len(groups), failures[0])
        accepted.sort(key=lambda group: group[0].group)
        chosen = list(await _resolved(config.select_fn(accepted, config.batch_size)))
        if config.select_fn is first_in_prompt_order:  # groups that a selection rejected are not reused
            self.partial_samples += accepted[config.batch_size :]
        else:
            kept = {id(group) for group in chosen}
            left_out += [LeftOut("not selected", group) for group in accepted if id(group) not in kept]
        self._check_enough(chosen, tally, failures)
        left_out += [LeftOut("carried", group) for group in self.partial_samples]
        return Collected(chosen, {**tally, "carried": float(len(self.partial_samples)), **self.report()}, left_out)

    async def _round(self, groups: Sequence[Group], missing: int, version: int) -> list[Group]:
        """Sample and grade all groups; abort the rest once `missing` of them have finished."""
        results: dict[int, Group] = {}
        finished = 0
        stop_early = self.config.select_fn is first_in_prompt_order and missing < len(groups)

        async def run_group(index: int, group: Group) -> None:
            nonlocal finished
            if stop_early and finished >= missing:
                results[index] = group
                return
            generated = await self._generate(group, version)
            results[index] = generated
            if _unfinished(generated):
                return
            finished += 1
            if stop_early and finished == missing:
                await self.abort()
            results[index] = tuple(await self._grade(generated))

        self.activity.start("answers", sum(map(_count_unfinished, groups)))
        async with task_group() as tasks:
            for index, group in enumerate(groups):
                tasks.start_soon(run_group, index, group)
        self.activity.end()
        return [results[index] for index in range(len(groups))]

    async def _generate(self, group: Group, version: int) -> Group:
        """Retry failures after growing pauses; the last failure becomes the error of the group's rollouts."""
        generate = self.config.generate_fn
        if generate is None:
            raise ValueError(
                "RolloutConfig needs generate_fn: a function of prompts that returns a Sample with tokens for each"
            )
        if not _unfinished(group):
            return group
        asked: Any = [_prompt_of(rollout.sample) for rollout in group] if _takes_prompts(generate) else group
        for pause in (*PAUSES, None):
            try:
                generated = _as_group(group, await _resolved(generate(asked)), version)
                self._warn_of_scores(generated)
                return generated
            except (RuntimeError, OSError) as error:
                if any(text in str(error) for text in _OTHER_LIBRARY):
                    raise ValueError(f"{_WRONG_LIBRARY} The error was: {error}") from error
                if pause is None:
                    return tuple(replace(rollout, error=_generation_failed(error)) for rollout in group)
            await anyio.sleep(pause)
        raise AssertionError("the last try returns")

    def _warn_of_scores(self, group: Group) -> None:
        reward_fn = self.config.reward_fn
        expected = reward_fn is None or (isinstance(reward_fn, Reward) and reward_fn.fallback)
        if self._warned_of_scores or expected or all(rollout.score is None for rollout in group):
            return
        self._warned_of_scores = True
        logger.warning(
            "reward_fn is not called for completions that have a score already: from an environment that scores its "
            "episodes (gym_env), or from generate_fn (Sample(reward=...))"
        )

    async def _grade(self, group: Group) -> Sequence[Rollout]:
        if self.config.reward_fn is None:
            return group
        return await grade(group, self.config.reward_fn, time_limit=self.config.reward_time_limit)

    async def _accepted(
        self, group: Group, tally: dict[str, float], failures: list[str], left_out: list[LeftOut]
    ) -> Group | None:
        """Return the graded rollouts of the group; None if there are too few or the filter rejects it."""
        graded = tuple(rollout for rollout in group if rollout.error is None)
        left_out += [LeftOut(f"ungraded: {each.error}", (each,)) for each in group if each.error is not None]
        failures += [rollout.error for rollout in group if rollout.error is not None]
        tally["ungraded"] += len(group) - len(graded)
        sampled = [rollout for rollout in graded if not rollout.greedy]
        if rewards := [rollout.reward for rollout in sampled if rollout.reward is not None]:
            self.note(sampled[0].sample.id, math.fsum(rewards) / len(rewards))
        if len(sampled) < self.config.min_group_size or (len(sampled) == len(graded) and self.config.greedy):
            tally["ungraded_groups"] += 1
            left_out.append(LeftOut("too few graded answers", graded))
            return None
        assert self.config.filter_fn is not None, "None is replaced when the config is created"
        if not await _resolved(self.config.filter_fn(sampled)):
            tally["filtered_groups"] += 1
            left_out.append(LeftOut(f"filtered: {_name_of(self.config.filter_fn)}", graded))
            return None
        return graded

    def _next_groups(self, count: int) -> list[Group]:
        """Return partial groups first, then new prompts."""
        waiting, self.partial_samples = self.partial_samples[:count], self.partial_samples[count:]
        fresh = self.data_buffer.get_prompts(count - len(waiting))
        groups = waiting + [self._new_group(self.drawn + index, sample) for index, sample in enumerate(fresh)]
        self.drawn += len(fresh)
        return groups

    def _new_group(self, number: int, prompt: Prompt) -> Group:
        sample = prompt if isinstance(prompt, Sample) else _as_sample(prompt, number)
        count = self.config.n_samples_per_prompt
        sampled = tuple(Rollout(sample, group=number, index=index) for index in range(count))
        return (*sampled, Rollout(sample, group=number, index=count, greedy=True)) if self.config.greedy else sampled

    def _restart_expired(self, version: int, oldest: int, tally: dict[str, float]) -> list[LeftOut]:
        """Restart groups sampled with other weights, unless partial rollouts are on and they are young enough."""
        restarted = []
        for index, group in enumerate(self.partial_samples):
            started = [rollout for rollout in group if rollout.turns]
            if not started or age_of(started, version) == 0:
                continue
            too_old = age_of(started, version) > oldest
            if too_old or not self.config.partial_rollouts:
                tally["expired"] += too_old and self.config.partial_rollouts
                tally["wasted"] += sum(len(turn.generation.token_ids) for each in started for turn in each.turns)
                restarted.append(LeftOut("expired", group))
                self.partial_samples[index] = self._new_group(group[0].group, group[0].sample)
        return restarted

    def _check_enough(self, chosen: Sequence[Group], tally: Mapping[str, float], failures: Sequence[str]) -> None:
        if failures:
            logger.warning("%d rollouts ungraded; the first: %s", len(failures), failures[0])
        if len(chosen) >= self.config.batch_size:
            return
        why = f"{tally['filtered_groups']:.0f} were filtered out, {tally['ungraded_groups']:.0f} could not be graded"
        if not chosen:
            first = f"; the first failure: {failures[0]}" if failures else ""
            message = f"none of {tally['drawn']:.0f} prompts yielded a group to train on: {why}{first}"
            if failures and failures[0].startswith("reward "):
                raise CheckError("reward_errors", message)
            raise RuntimeError(message)
        logger.warning(
            "only %d of %d groups after %d prompts: %s", len(chosen), self.config.batch_size, tally["drawn"], why
        )

    async def generate_batch(self, reward_fn: AnyReward | None = None) -> RolloutBatch:
        """Return the next batch as plain lists."""
        if reward_fn is not None:
            self.config = replace(self.config, reward_fn=reward_fn)
        return convert_to_batch([rollout for group in (await self.collect()).groups for rollout in group])

    def state(self) -> dict[str, Any]:
        carried = [[rollout_to_json(rollout) for rollout in group] for group in self.partial_samples]
        return {"data": self.data_buffer.state(), "drawn": self.drawn, "partial": carried}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.data_buffer.restore(state["data"])
        self.drawn = state["drawn"]
        self.partial_samples = [tuple(rollout_from_json(raw) for raw in group) for group in state["partial"]]


def generate_rollout_batches(
    data_buffer: DataSource[Prompt], config: RolloutConfig, **rollout_kwargs: Any
) -> Iterator[RolloutBatch]:
    """Yield batches endlessly; `rollout_kwargs` are passed to `config.generate_fn`."""
    config = as_record(RolloutConfig, config, "config")
    generate = config.generate_fn
    bound = replace(config, generate_fn=partial(generate, **rollout_kwargs)) if generate and rollout_kwargs else config
    manager = AsyncRolloutManager(data_buffer, bound)
    while True:
        yield run_blocking(manager.generate_batch)


def _as_sample(prompt: Any, number: int) -> Sample:
    if isinstance(prompt, Rollout) or is_dataclass(prompt):
        return as_rollout(prompt).sample
    return Sample(f"prompt:{number}", as_messages(prompt))


def _prompt_of(sample: Sample) -> str | list[dict[str, Any]]:
    """A single message as text, a longer prompt as a list of messages."""
    alone = len(sample.messages) == 1 and sample.messages[0].role == "user"
    return sample.messages[0].text if alone else [message.to_dict() for message in sample.messages]


def _takes_prompts(generate: GenerateFn) -> bool:
    return next(iter(inspect.signature(generate).parameters), "") == "prompts"


def _as_group(asked: Group, returned: Sequence[Rollout], version: int) -> Group:
    """What `generate_fn` returned; samples recorded by it get the prompt, number and version of what was asked for."""
    given: tuple[Any, ...] = tuple(returned) if isinstance(returned, Iterable) else (returned,)
    if wrong := next((each for each in given if isinstance(each, Sample) or not is_dataclass(each)), None):
        raise ValueError(
            f"generate_fn returned {kind_of(wrong)}; return the rollouts with their turns, or for each of them a "
            "Sample(prompt=..., tokens=..., loss_mask=...)"
        )
    generated = tuple(as_rollout(each) for each in given)
    own = {rollout.sample.id for rollout in asked}
    if all(rollout.sample.id in own for rollout in generated):
        return generated
    if len(generated) != len(asked):
        raise ValueError(f"generate_fn returned {len(generated)} samples for {len(asked)} prompts; return one for each")
    if any(not recorded.tokens and recorded.error is None for recorded in generated):
        raise ValueError(
            "generate_fn returned a completion without tokens; what was sampled is trained on token by token: return "
            "Sample(prompt=..., tokens=..., loss_mask=...)"
        )
    return tuple(
        replace(
            recorded,
            sample=rollout.sample,
            group=rollout.group,
            index=rollout.index,
            greedy=rollout.greedy,
            turns=tuple(turn._replace(generation=turn.generation._replace(version=version)) for turn in recorded.turns),
        )
        for rollout, recorded in zip(asked, generated, strict=True)
    )


def _unfinished(group: Group) -> bool:
    return _count_unfinished(group) > 0


def _count_unfinished(group: Group) -> int:
    return sum(rollout.status in (Status.PENDING, Status.ABORTED) for rollout in group)


def _generation_failed(error: Exception) -> str:
    return f"generation failed: {type(error).__name__}: {error}"


async def _resolved(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _name_of(function: EnvFn | FilterFn) -> str:
    if isinstance(function, partial):
        return _name_of(function.func)
    return str(getattr(function, "__qualname__", type(function).__name__))


class RolloutSampler:
    """Samples rollouts with a generator in an environment: the default `generate_fn`, with its `abort`.

    `RolloutSampler(generator, render, GenerationConfig(max_new_tokens=64), env=single_turn, seed=42)`
    Each sampled answer advances `activity`. An episode has at most `max_turns` generations, `max_tokens` tokens in all,
    and `env_seconds` in its environment, without the time of generation; one that takes longer, or whose environment
    raises, is an error.
    """

    def __init__(
        self,
        generator: Generator,
        render: Render,
        sampling: GenerationConfig,
        *,
        env: EnvFn = single_turn,
        seed: int = 0,
        activity: Activity | None = None,
        max_tokens: int | None = None,
        max_turns: int | None = None,
        env_seconds: float = math.inf,
    ) -> None:
        self.generator, self.render, self.sampling, self.env, self.seed = generator, render, sampling, env, seed
        self.max_tokens, self.max_turns, self.env_seconds = max_tokens, max_turns, env_seconds
        self.activity = activity or Activity()
        self._generator = AbortableGenerator(generator)

    async def __call__(self, group: Group) -> Group:
        if self._generator.closed:  # the first call after an abort starts a new round
            self._generator = AbortableGenerator(self.generator)
        generator, rollouts = self._generator, list(group)

        async def fill(index: int) -> None:
            rollouts[index] = await self._sample(rollouts[index], generator)
            self.activity.advance()

        async with task_group() as tasks:
            for index, rollout in enumerate(group):
                if rollout.status in (Status.PENDING, Status.ABORTED):
                    tasks.start_soon(fill, index)
        return tuple(rollouts)

    async def _sample(self, rollout: Rollout, generator: Generator) -> Rollout:
        sampling = self.sampling._replace(temperature=0.0) if rollout.greedy else self.sampling
        seed = mixed_seed(self.seed, rollout.group, rollout.index)
        media = rollout.sample.media
        time = EpisodeTime(self.env_seconds)
        limits: dict[str, Any] = {"max_tokens": self.max_tokens, "max_turns": self.max_turns, "time": time}
        policy = GeneratorClient(generator, self.render, sampling, seed, rollout.turns, media=media, **limits)
        episode: Any = None
        try:
            with time:
                episode = await _resolved(self.env(rollout.sample, policy))
        except EpisodeError as error:
            return replace(rollout, error=str(error))
        except (RuntimeError, OSError) as error:  # the engine failed after all retries: an error, never a reward
            return replace(rollout, error=_generation_failed(error))
        if time.expired:
            return replace(rollout, error=f"the environment took longer than {self.env_seconds:g} s")
        if not isinstance(episode, Episode):
            raise ValueError(
                f"the environment {_name_of(self.env)} returned {episode!r:.100}; return an Episode(turns)"
            )
        turns = episode.turns
        if not turns:
            return replace(rollout, error="the environment returned no turn")
        if len(turns) == 1 and turns[0].generation.finish_reason == "aborted" and not turns[0].generation.token_ids:
            turns = ()  # aborted before it was scheduled
        sampled = replace(
            rollout, turns=turns, metadata=dict(episode.metadata), prompt_messages=episode.prompt_messages
        )
        return sampled if episode.score is None else with_outcome("of the environment", sampled, episode.score)

    async def abort(self) -> None:
        """Make all in-flight generations return their partial output, and start no new ones in this round."""
        self._generator.closed = True
        await self.generator.abort()


class AbortableGenerator:
    """A generator that, once closed, immediately returns partial or empty generations as "aborted"."""

    def __init__(self, generator: Generator) -> None:
        self.generator, self.closed = generator, False

    @property
    def version(self) -> int:
        return self.generator.version

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        if not self.closed:
            return await self.generator.generate(requests, sampling)
        return [request.partial or Generation((), (), "aborted", self.version) for request in requests]

    async def abort(self) -> None:
        await self.generator.abort()

    async def update_weights(self, weights: Weights) -> None:
        await self.generator.update_weights(weights)

    async def close(self) -> None:
        await self.generator.close()


@renamed_keywords(answers="sampler")
def sampling_manager(
    source: DataSource[Sample], sampler: RolloutSampler, config: RolloutConfig, activity: Activity | None = None
) -> AsyncRolloutManager:
    """Return a manager that collects rollouts of `source`'s prompts with `sampler`, which advances `activity`."""
    config = replace(config, generate_fn=sampler)
    memory: dict[str, Any] = {name: getattr(source, name) for name in ("note", "report") if hasattr(source, name)}
    return AsyncRolloutManager(source, config, abort=sampler.abort, activity=activity or Activity(), **memory)
