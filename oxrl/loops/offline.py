"""Rows that lie ready to new weights: supervised and preference learning are this one loop with another algorithm."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import anyio
import anyio.lowlevel

from oxrl.algorithms import algorithm as named_algorithm
from oxrl.data.buffer import DataBuffer
from oxrl.data.render import Renderer
from oxrl.loops.step import train_step
from oxrl.tracking.metrics import Sink, log_to_console
from oxrl.types import Algorithm, Backend, DataSource, Item, Memory, Row, Sample, TrainingState

logger = logging.getLogger(__name__)

EvaluateFn: TypeAlias = Callable[[Memory], Awaitable[Mapping[str, float]]]
AlgorithmAt: TypeAlias = Callable[[int], Algorithm]
SaveFn: TypeAlias = Callable[[TrainingState, int | None], Awaitable[Any]]
"""(state to save, the step of the best evaluation so far or None)."""


@dataclass(frozen=True, slots=True)
class OfflineConfig:
    """`OfflineConfig(num_steps=100, batch_size=8, eval_every=20)`; `*_every=0` means never."""

    num_steps: int
    batch_size: int
    log_every: int = 1
    checkpoint_every: int = 0
    eval_every: int = 0
    patience: int = 0  # evaluations without a new best before the run stops; 0: never
    micro_batch_tokens: int = 1024


SFTTrainingConfig = OfflineConfig


class Best(NamedTuple):
    """The lowest evaluation loss so far, where it was, and how many evaluations have passed since."""

    best_loss: float | None = None
    best_step: int | None = None
    evaluations_since: int = 0

    @classmethod
    def of(cls, state: TrainingState) -> Best:
        """As a checkpoint remembers it."""
        return cls(**{name: state.cursor[name] for name in cls._fields}) if state.cursor else cls()

    def after(self, loss: float, step: int) -> Best:
        if self.best_loss is None or loss < self.best_loss:
            return Best(loss, step)
        return self._replace(evaluations_since=self.evaluations_since + 1)


async def no_evaluation(memory: Memory) -> Mapping[str, float]:  # noqa: ARG001 - one signature for all
    return {}


async def no_checkpoint(state: TrainingState, best_step: int | None) -> None:
    """For runs whose weights stay in memory."""


def scheduled(table: Mapping[int, Algorithm]) -> AlgorithmAt:
    """`scheduled({1: algorithm("sft"), 100: algorithm("dpo")})`: each from its step on."""
    if 1 not in table:
        raise ValueError(f"a schedule says what step 1 does; this one begins at {min(table, default='nothing')}")
    if len({each.assemble for each in table.values()}) > 1:
        names = ", ".join(each.name for each in table.values())
        raise ValueError(f"{names} learn from different kinds of rows, so one run cannot switch between them")
    return lambda step: table[max(start for start in table if start <= step)]


async def run_offline(
    backend: Backend,
    algorithm: Algorithm | AlgorithmAt,
    source: DataSource[Item],
    config: OfflineConfig,
    *,
    state: TrainingState = TrainingState(),  # noqa: B008 - immutable
    evaluate: EvaluateFn = no_evaluation,
    log: Sink = log_to_console,
    save: SaveFn = no_checkpoint,
) -> list[dict[str, float]]:
    """Train from `state` to `config.num_steps`; returns what was logged. A function of the step switches algorithms."""
    algorithm_at: AlgorithmAt = (lambda _: algorithm) if isinstance(algorithm, Algorithm) else algorithm
    history: list[dict[str, float]] = []
    best, memory = Best.of(state), dict(state.cursor.get("memory", {}))
    if state.cursor:
        source.restore(state.cursor["data"])
    reached = state
    for step in range(state.step + 1, config.num_steps + 1):
        async with saved_if_interrupted(reached, state, best, save):
            pass
        with anyio.CancelScope(shield=True):  # a backend elsewhere is waited for: also then, only between steps
            items = source.get_prompts(config.batch_size)
            current = algorithm_at(step)
            metrics = await train_step(backend, current, items, config.micro_batch_tokens, memory)
            if step > 1 and differs(current, algorithm_at(step - 1)):
                logger.info("step %d: from here on %s %s", step, current.name, dict(current.parameters))
                metrics["algorithm_switched"] = 1.0
            if metrics["grad_norm"] == 0:
                logger.warning("step %d taught nothing: its gradient is zero (are all rewards of a group equal?)", step)
            last = step == config.num_steps
            if due(step, config.eval_every) or (last and config.eval_every):
                metrics |= await evaluate(memory)
                if current.eval_metric is not None:
                    best = best.after(metrics[f"eval_{current.eval_metric}"], step)
                last = last or 0 < config.patience <= best.evaluations_since
            if last or due(step, config.log_every) or "eval_loss" in metrics or "algorithm_switched" in metrics:
                log(step, metrics)
                history.append({"step": step, **metrics})
            cursor = {"data": source.state(), "memory": memory, "finished": last, **best._asdict()}
            reached = TrainingState(step, state.version + step - state.step, state.seed, cursor)
            if last or due(step, config.checkpoint_every) or best.best_step == step:
                await save(reached, best.best_step)
        if last:
            break
    return history


@asynccontextmanager
async def saved_if_interrupted(
    reached: TrainingState, start: TrainingState, best: Best, save: SaveFn
) -> AsyncIterator[None]:
    """Between two steps is the moment to be interrupted: nothing is half done, and what is done is saved."""
    try:
        await anyio.lowlevel.checkpoint()
        yield
    except anyio.get_cancelled_exc_class():
        if reached.step > start.step:
            with anyio.CancelScope(shield=True):
                await save(reached, best.best_step)
        raise


def differs(one: Algorithm, other: Algorithm) -> bool:
    return (one.name, one.parameters) != (other.name, other.parameters)


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


async def run_sft_training(
    backend: Backend,
    samples: Sequence[Sample | Row],
    config: SFTTrainingConfig,
    metrics_logger: Sink = log_to_console,
    *,
    tokenizer: Any = None,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Supervised fine-tuning on rows, or on samples together with their tokenizer."""
    algorithm = named_algorithm("sft")
    items: list[Item] = []
    for sample in samples:
        if isinstance(sample, Row):
            items.append((sample,))
        elif tokenizer is None:
            raise ValueError("samples are text: pass tokenizer=..., or rows that are tokenised already")
        else:
            items.extend(algorithm.assemble(sample, Renderer(tokenizer)))
    return await run_offline(backend, algorithm, DataBuffer(items, seed=seed), config, log=metrics_logger)
