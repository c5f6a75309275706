"""Train on recorded rows: supervised fine-tuning and preference learning are this loop with different algorithms."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import anyio

from oxrl.guard.monitor import UNGUARDED, Guard
from oxrl.loops.callbacks import Callbacks
from oxrl.loops.memory_limits import MemoryLimits, resumed_limits
from oxrl.loops.progress import AlgorithmAt, Progress, SaveFn, algorithm_switch, no_checkpoint, reading
from oxrl.loops.step import check_backend, needed_methods, observe_credit, train_step
from oxrl.loops.step_record import NO_RECORD, NoRecord, TrainedStep
from oxrl.tracking.metrics import Sink, log_to_console
from oxrl.types import Algorithm, Backend, DataSource, Item, Memory, TrainingState

EvaluateFn: TypeAlias = Callable[[Memory], Awaitable[Mapping[str, float]]]


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    """`OfflineConfig(num_steps=100, batch_size=8, eval_every=20)`; `*_every=0` means never."""

    num_steps: int
    batch_size: int
    log_every: int = 1
    checkpoint_every: int = 0
    eval_every: int = 0
    eval_at_start: bool = False  # before the first step, logged as step 0
    patience: int = 0  # evaluations without a new best before the run stops; 0: never
    micro_batch_tokens: int = 1024


SFTTrainingConfig = OfflineConfig


async def no_evaluation(memory: Memory) -> Mapping[str, float]:  # noqa: ARG001 - one signature for all
    return {}


async def run_offline(
    backend: Backend,
    algorithm: Algorithm | AlgorithmAt,
    source: DataSource[Item],
    config: OfflineConfig,
    *,
    state: TrainingState = TrainingState(),  # noqa: B008 - immutable
    evaluate: EvaluateFn = no_evaluation,
    recorder: NoRecord = NO_RECORD,
    guard: Guard = UNGUARDED,
    log: Sink = log_to_console,
    save: SaveFn = no_checkpoint,
    limits: MemoryLimits | None = None,
    callbacks: Callbacks = Callbacks(),  # noqa: B008 - nothing changes it
) -> list[dict[str, float]]:
    """Train from `state` to `config.num_steps` and return what was logged. `algorithm` can be a function of it.

    `limits` are those of `state` if a memory warm-up or an evaluation shares them, else they are created here.
    """
    algorithm_at: AlgorithmAt = (lambda _: algorithm) if isinstance(algorithm, Algorithm) else algorithm
    check_backend(backend, needed_methods(algorithm_at(state.step + 1)))
    with reading(state):
        limits = limits or resumed_limits(config.micro_batch_tokens, state, backend)
        progress = Progress(config, state, log, save, limits, callbacks)
        if state.cursor:
            source.restore(state.cursor["data"])
    async with guard.explaining(), progress.failures_annotated():
        await progress.evaluate_at_start(partial(evaluate, progress.memory))
        for step in range(state.step + 1, config.num_steps + 1):
            async with progress.saved_if_interrupted():
                pass
            with anyio.CancelScope(shield=True):  # a cancelled call to a remote backend would leave a step half done
                current, items = algorithm_at(step), source.get_prompts(config.batch_size)
                recorder.begin()
                guard.begin(step)
                on_credit = partial(observe_credit, recorder, guard, backend, current, limits)
                metrics = await train_step(backend, current, items, limits, progress.memory, on_credit)
                guard.updated(metrics)
                metrics |= algorithm_switch(step, algorithm_at)
                metrics |= await progress.evaluate(
                    step, partial(evaluate, progress.memory), partial(_eval_loss, current)
                )
                version = state.version + step - state.step
                metrics |= recorder.record(TrainedStep(step, current, version - 1, metrics)) | guard.costs()
                await progress.record(step, metrics, version, {"data": source.state()})
            if progress.finished:
                break
    return progress.history


def _eval_loss(algorithm: Algorithm, metrics: Mapping[str, float]) -> float | None:
    return None if algorithm.eval_metric is None else metrics[f"eval_{algorithm.eval_metric}"]
