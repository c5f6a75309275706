"""Train on sampled rollouts: generate, grade, compute advantages, train, sync weights.

A producer collects batches of graded groups and a consumer trains on them; they share `lag + 1` permits. With `lag=0`
they alternate and every batch is on-policy. With more, an engine with its own weights samples the next batches during
training. The embedded engine samples from the trainer's module, so there the two always alternate.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeAlias

import anyio

from oxrl.algorithms import algorithm as named_algorithm
from oxrl.concurrency import task_group
from oxrl.guard.monitor import UNGUARDED, Guard
from oxrl.loops.callbacks import Callbacks
from oxrl.loops.memory_limits import MemoryLimits, resumed_limits
from oxrl.loops.progress import AlgorithmAt, Progress, SaveFn, algorithm_switch, due, no_checkpoint, reading
from oxrl.loops.rollout_queue import RolloutQueue, prefetching
from oxrl.loops.step import CreditedFn, check_backend, needed_methods, not_recorded, observe_credit, optimizer_steps
from oxrl.loops.step_record import NO_RECORD, NoRecord, TrainedStep
from oxrl.names import renamed_keywords
from oxrl.rewards.primitives import normalize_rewards
from oxrl.rollouts.batches import as_rollout, group_rollouts
from oxrl.rollouts.buffer import Group
from oxrl.rollouts.collect import AsyncRolloutManager
from oxrl.rollouts.report import rollout_metrics
from oxrl.tracking.health import CheckError
from oxrl.tracking.metrics import Sink, log_to_console
from oxrl.types import (
    Algorithm,
    Backend,
    GenerationConfig,
    Generator,
    Item,
    Memory,
    Render,
    Rollout,
    Score,
    SleepingGenerator,
    TrainFuture,
    TrainingState,
)

logger = logging.getLogger(__name__)

EvaluateFn: TypeAlias = Callable[[], Awaitable[Mapping[str, float]]]
ObserveFn: TypeAlias = Callable[[int, Sequence[Group]], None]
"""(step, its groups): for logs of rollouts."""
ShapeFn: TypeAlias = Callable[[Sequence[Group]], Sequence[Group]]
"""The groups of a step with other scores, for a reward that depends on the whole step."""
ReferenceFn: TypeAlias = Callable[[int], Awaitable[None]]
"""(step): updates the reference where it is not fixed."""
OffloadFn: TypeAlias = Callable[[], AbstractAsyncContextManager[None]]
"""Entered while a step trains: for an engine that frees its device memory meanwhile."""


@dataclass(frozen=True, slots=True)
class OnlineConfig:
    """`OnlineConfig(num_steps=100)`; `*_every=0` means never. A step is one batch of rollouts."""

    num_steps: int
    lag: int = 0
    sync_every: int = 1
    iterations: int = 1  # passes over each batch
    mini_batches: int = 1  # optimizer steps per pass
    log_every: int = 1
    checkpoint_every: int = 0
    eval_every: int = 0
    eval_at_start: bool = False  # before the first step, logged as step 0
    patience: int = 0
    micro_batch_tokens: int = 1024
    max_logprob_gap: float = 0.05  # between sampler and trainer, on the same weights
    max_age: int | None = None  # steps between a token and its update; default `lag`

    @property
    def updates(self) -> int:
        """Optimizer steps, and so weight versions, of one step."""
        return self.iterations * self.mini_batches

    @property
    def max_version_age(self) -> int:
        """How many versions a token may be behind the weights that are trained on it."""
        return self.updates * (self.lag if self.max_age is None else self.max_age)

    def __post_init__(self) -> None:
        if self.lag < 0 or min(self.sync_every, self.iterations, self.mini_batches) < 1:
            raise ValueError("lag is 0 or more; sync_every, iterations and mini_batches are 1 or more")
        if self.sync_every > self.lag + 1:
            raise ValueError(
                f"sync_every={self.sync_every} trains on samples that are {self.sync_every - 1} versions old; "
                f"lag={self.lag} does not allow that: raise lag or sync every step"
            )


class _NoText:
    """For algorithms that need sampled tokens only."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError(f"this algorithm renders text ({name}): pass render=Renderer(tokenizer)")


NO_TEXT: Any = _NoText()
NO_UPDATE = {"loss": 0.0, "grad_norm": 0.0, "trained_tokens": 0.0}  # the algorithm made no rows from the batch


async def no_evaluation() -> Mapping[str, float]:
    return {}


async def fixed_reference(step: int) -> None:
    """The reference does not change."""


@asynccontextmanager
async def no_offload() -> AsyncIterator[None]:
    """The engine runs elsewhere, or needs no memory of its own."""
    yield


class SharingBackend(Backend, Protocol):
    def release_memory(self) -> TrainFuture[None]:
        """Free cached device memory for other processes on the same device."""
        ...


@asynccontextmanager
async def sleeping_engine(generator: SleepingGenerator, backend: SharingBackend) -> AsyncIterator[None]:
    """For an engine on the trainer's devices; the next weight update wakes it up."""
    await generator.sleep()
    yield
    await backend.release_memory()


def unchanged_rewards(groups: Sequence[Group]) -> Sequence[Group]:
    return groups


def normalised(groups: Sequence[Group]) -> Sequence[Group]:
    """Rewards with mean 0 and standard deviation 1 over the whole step."""
    values = normalize_rewards([rollout.reward for group in groups for rollout in group])
    left = iter(values)
    return [tuple(_rescored(rollout, next(left)) for rollout in group) for group in groups]


def _rescored(rollout: Rollout, value: float | None) -> Rollout:
    if rollout.score is None or value is None:
        return rollout
    if rollout.score.per_turn is not None or rollout.score.per_token is not None:
        raise ValueError("rewards by turn or token cannot be normalised over a step: set reward.normalize: none")
    return replace(rollout, score=rollout.score._replace(value=value))


def no_observer(step: int, groups: Sequence[Group]) -> None:
    """For runs that log no rollouts."""


@renamed_keywords(taking_turns="shares_weights", engine_aside="offload_engine")
async def run_online(
    backend: Backend,
    algorithm: Algorithm | AlgorithmAt,
    manager: AsyncRolloutManager,
    generators: Sequence[Generator],
    render: Render,
    config: OnlineConfig,
    *,
    state: TrainingState = TrainingState(),  # noqa: B008 - immutable
    shares_weights: bool = True,
    shape: ShapeFn = unchanged_rewards,
    evaluate: EvaluateFn = no_evaluation,
    move_reference: ReferenceFn = fixed_reference,
    offload_engine: OffloadFn = no_offload,
    observe: ObserveFn = no_observer,
    recorder: NoRecord = NO_RECORD,
    guard: Guard = UNGUARDED,
    log: Sink = log_to_console,
    save: SaveFn = no_checkpoint,
    limits: MemoryLimits | None = None,
    callbacks: Callbacks = Callbacks(),  # noqa: B008 - nothing changes it
) -> list[dict[str, float]]:
    """Train from `state` to `config.num_steps` and return what was logged. `algorithm` may be a function of the step.

    `shares_weights`: the generator samples from the trainer's own module. Otherwise, with `lag`, sampling and training
    overlap as far as the backend's calls leave this thread alone (`QueuedBackend`). `offload_engine` is for an engine
    on the trainer's devices, lag 0: `partial(sleeping_engine, engine, backend)`. `limits`: if others share them.
    """
    if shares_weights and config.sync_every > 1:
        raise ValueError("an engine that samples from the trainer's own module is always in sync: set sync_every to 1")
    algorithm_at: AlgorithmAt = (lambda _: algorithm) if isinstance(algorithm, Algorithm) else algorithm
    check_backend(backend, needed_methods(algorithm_at(state.step + 1)) | {"get_weights"})
    with reading(state):
        limits = limits or resumed_limits(config.micro_batch_tokens, state, backend)
        limits.restore_slots(state, generators)
        progress = Progress(config, state, log, save, limits, callbacks)
        queue = await _opened_queue(manager, generators[0], config, state, shares_weights=shares_weights)
    await _sync(backend, generators)
    async with progress.failures_annotated():
        await progress.evaluate_at_start(evaluate)
    sampling: GenerationConfig | None = getattr(manager.config.generate_fn, "sampling", None)
    steps = config.num_steps - state.step
    async with guard.explaining(), progress.failures_annotated(), prefetching(queue, steps):
        for step in range(state.step + 1, config.num_steps + 1):
            current = algorithm_at(step)
            async with progress.saved_if_interrupted():
                batch = await queue.next(backend)
            metrics = rollout_metrics(batch.groups, batch.version) | batch.costs()
            guard.begin(step)
            items = rollout_items(current, shape(batch.groups), render)
            guard.sampled(batch.groups, batch.left_out, items, render)
            await guard.probe(backend, generators[0], sampling, updated=False)
            with anyio.CancelScope(shield=True):  # an interrupt between an update and its record would lose the update
                recorder.begin()
                async with offload_engine():
                    on_credit = partial(observe_credit, recorder, guard, backend, current, limits)
                    metrics |= await train_batch(backend, current, items, config, progress.memory, limits, on_credit)
                    _check_gap(metrics, config.max_logprob_gap)
                    guard.updated(metrics)
                    await move_reference(step)
                synced = due(step, config.sync_every) or step == config.num_steps
                if synced:
                    metrics |= await _sync(backend, generators)
                    await guard.probe(backend, generators[0], sampling)
                metrics |= await progress.evaluate(step, evaluate, lambda found: -found["eval_reward"])
                queue.trained(synced=synced)
                metrics |= algorithm_switch(step, algorithm_at)
                observe(step, batch.groups)
                version = (await backend.get_weights()).version
                limits.note_slots(generators)
                sampled = TrainedStep(step, current, batch.version, metrics, batch.groups, batch.left_out)
                metrics |= recorder.record(sampled) | guard.costs()
                await progress.record(step, metrics, version, queue.state(batch.collected))
            if progress.finished:
                break
    return progress.history


async def _opened_queue(
    manager: AsyncRolloutManager,
    generator: Generator,
    config: OnlineConfig,
    state: TrainingState,
    *,
    shares_weights: bool,
) -> RolloutQueue:
    bounds = {"lag": config.lag, "max_age": config.max_version_age, "updates": config.updates}
    queue = RolloutQueue(manager, generator, shares_weights=shares_weights, **bounds)
    if state.cursor:
        await queue.restore(state.cursor)
    return queue


async def _sync(backend: Backend, generators: Sequence[Generator]) -> dict[str, float]:
    """Update the weights of every engine; return once all have confirmed them, with metrics of the sync.

    `engine_gap` is the largest difference between an engine's and the trainer's log-probs of the probe sequence after
    the update (engines with their own weights only); `engine_restarts` counts engines that were restarted.
    """
    started = time.monotonic()
    weights = await backend.get_weights()
    async with task_group() as tasks:
        for generator in generators:
            tasks.start_soon(generator.update_weights, weights)
    verified = [generator for generator in generators if hasattr(generator, "gap")]
    if not verified:
        return {}
    return {
        "sync_seconds": time.monotonic() - started,
        "engine_gap": max(float(getattr(generator, "gap", 0.0)) for generator in verified),
        "engine_restarts": float(sum(getattr(generator, "restarts", 0) for generator in verified)),
    }


def rollout_items(algorithm: Algorithm, groups: Sequence[Group], render: Render) -> list[Item]:
    if algorithm.online is None:
        raise ValueError(f"{algorithm.name} learns from files; it cannot learn from its own samples")
    items = [item for group in groups for item in algorithm.online.items(group, render)]
    if items and not any(row.mask.any() for item in items for row in item):
        raise CheckError("mask", f"{algorithm.name} found nothing to train on in the {len(groups)} groups of this step")
    return items


async def train_batch(
    backend: Backend,
    algorithm: Algorithm,
    items: Sequence[Item],
    config: OnlineConfig,
    memory: Memory,
    limits: MemoryLimits | None = None,
    on_credit: CreditedFn = not_recorded,
) -> dict[str, float]:
    """Compute advantages once over the whole batch, then take one or more optimizer steps. Gaps are of the first."""
    check_reuse(algorithm, config.updates)
    if not items:
        return NO_UPDATE
    started = time.monotonic()
    taken = await optimizer_steps(
        backend,
        algorithm,
        items,
        limits or config.micro_batch_tokens,
        memory,
        iterations=config.iterations,
        mini_batches=config.mini_batches,
        on_credit=on_credit,
    )
    metrics: dict[str, float] = {}
    for latest in taken:
        first_seen = {name: metrics[name] for name in ("logprob_gap",) if name in metrics}
        metrics |= latest | first_seen
    return metrics | {"train_seconds": time.monotonic() - started}


def check_reuse(algorithm: Algorithm, updates: int) -> None:
    if updates > 1 and not (algorithm.online and algorithm.online.reuses):
        raise ValueError(
            f"{algorithm.name} is exact for fresh samples only, so it takes one optimizer step per batch: set "
            "iterations and mini_batches to 1, or choose an algorithm with a ratio, such as grpo"
        )


def _check_gap(metrics: Mapping[str, float], allowed: float) -> None:
    """On the same weights, sampler and trainer must agree; otherwise every importance ratio of the run is wrong."""
    gap = metrics.get("logprob_gap", 0.0)
    if metrics["age"] == 0 and not gap <= allowed:
        raise CheckError(
            "logprob_gap",
            f"logprob_gap: sampler and trainer differ by {gap:.3g} in a token's log-prob on the same weights, and "
            f"{allowed:g} is allowed (train.max_logprob_gap); the engine has other weights, another precision or "
            "another temperature (`oxrl mismatch RUN` shows which)",
        )


@dataclass(frozen=True, slots=True)
class RLTrainingConfig:
    """`RLTrainingConfig(num_steps=100, baseline=0.5)`: the policy gradient with the advantage reward - `baseline`."""

    num_steps: int
    sync_every: int = 1
    baseline: float = 0.0
    log_every: int = 1
    checkpoint_every: int = 0


def against_baseline(baseline: float) -> Algorithm:
    """REINFORCE with the advantage reward - `baseline`."""
    from oxrl.algorithms.advantages import group_credit

    return replace(named_algorithm("reinforce"), credit=group_credit(lambda rewards: rewards - baseline))


def prepare_grpo_batch(
    rollouts: Sequence[Rollout], rewards: Sequence[float] | None = None, *, baseline: float | None = None
) -> list[Item]:
    """Graded rollouts, or rollouts and their rewards, to rows with advantages: GRPO's within each group, or reward -
    `baseline`.
    """
    algorithm = named_algorithm("grpo") if baseline is None else against_baseline(baseline)
    if rewards is not None:
        if len(rewards) != len(rollouts):
            raise ValueError(f"{len(rewards)} rewards for {len(rollouts)} rollouts; give one for each")
        rollouts = [
            replace(as_rollout(each), score=Score(float(reward)))
            for each, reward in zip(rollouts, rewards, strict=True)
        ]
    return algorithm.credit(rollout_items(algorithm, group_rollouts(rollouts), NO_TEXT), {})
