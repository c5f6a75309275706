"""What both loops do after the update of a step: evaluate, track the best step, log, and save a checkpoint."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias

import anyio
import anyio.lowlevel

from oxrl.loops.callbacks import Callbacks
from oxrl.loops.memory_limits import CURSOR, MemoryLimits
from oxrl.loops.step import annotate
from oxrl.tracking.catalogue import ordered
from oxrl.tracking.metrics import Sink
from oxrl.types import Algorithm, Memory, TrainingState

logger = logging.getLogger(__name__)

AlgorithmAt: TypeAlias = Callable[[int], Algorithm]
"""(step) to the algorithm of that step."""
SaveFn: TypeAlias = Callable[[TrainingState, int | None], Awaitable[Any]]
"""(state to save, the step of the best evaluation so far or None)."""


class Intervals(Protocol):
    """The part of a loop's config that this module reads; `*_every=0` means never."""

    @property
    def num_steps(self) -> int: ...
    @property
    def log_every(self) -> int: ...
    @property
    def eval_every(self) -> int: ...
    @property
    def eval_at_start(self) -> bool: ...
    @property
    def checkpoint_every(self) -> int: ...
    @property
    def patience(self) -> int: ...  # evaluations without a new best before the run stops; 0: never


class Best(NamedTuple):
    """The lowest evaluation loss so far, its step, and the number of evaluations since."""

    best_loss: float | None = None
    best_step: int | None = None
    evaluations_since: int = 0

    @classmethod
    def of(cls, state: TrainingState) -> Best:
        """As a checkpoint recorded it."""
        return cls(**{name: state.cursor[name] for name in cls._fields}) if state.cursor else cls()

    def after(self, loss: float, step: int) -> Best:
        if self.best_loss is None or loss < self.best_loss:
            return Best(loss, step)
        return self._replace(evaluations_since=self.evaluations_since + 1)


@contextmanager
def reading(state: TrainingState) -> Iterator[None]:
    """A state that was read from a file may contain anything: raise a ValueError where it cannot be used."""
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        if not state.cursor:
            raise
        raise ValueError(
            f"the training state of step {state.step} is not what a run writes ({type(error).__name__} {error}): "
            "resume from another checkpoint, or start a new run with this one as the model"
        ) from error


class Progress:
    """The progress of one run from `state` on: `history` is what was logged, `finished` ends the loop."""

    def __init__(
        self,
        config: Intervals,
        state: TrainingState,
        log: Sink,
        save: SaveFn,
        limits: MemoryLimits,
        callbacks: Callbacks = Callbacks(),  # noqa: B008 - nothing changes it
    ) -> None:
        self.callbacks = callbacks
        self.config, self.start, self.log, self.save, self.limits = config, state, log, save, limits
        self.best, self.reached = Best.of(state), state
        self.memory: Memory = dict(state.cursor.get("memory", {}))
        self.history: list[dict[str, float]] = []
        self.finished = False
        self._logged_limits = limits.metrics
        self._warned_of_gradient = False

    @asynccontextmanager
    async def failures_annotated(self) -> AsyncIterator[None]:
        """Attach the current step to an exception."""
        try:
            yield
        except Exception as error:
            annotate(error, step=self.reached.step + 1)
            raise

    @asynccontextmanager
    async def saved_if_interrupted(self) -> AsyncIterator[None]:
        """Between two steps nothing is half done: an interrupt here saves what was trained, and is raised again."""
        try:
            await anyio.lowlevel.checkpoint()
            yield
        except anyio.get_cancelled_exc_class():
            if self.reached.step > self.start.step:
                with anyio.CancelScope(shield=True):
                    await self.save(self.reached, self.best.best_step)
            raise

    async def evaluate_at_start(self, evaluate: Callable[[], Awaitable[Mapping[str, float]]]) -> None:
        """Log an evaluation as step 0, the baseline of all curves. It never decides on the best step: no checkpoint
        has these weights. A resumed run has logged it.
        """
        if self.config.eval_at_start and not self.start.step:
            self._log(0, await evaluate())

    async def evaluate(
        self,
        step: int,
        evaluate: Callable[[], Awaitable[Mapping[str, float]]],
        loss: Callable[[Mapping[str, float]], float | None],
    ) -> Mapping[str, float]:
        """The metrics of an evaluation that is due. `loss` decides on the best step; None where nothing does."""
        self.finished = step == self.config.num_steps
        if not (due(step, self.config.eval_every) or (self.finished and self.config.eval_every)):
            return {}
        metrics = await evaluate()
        if (value := loss(metrics)) is not None:
            self.best = self.best.after(value, step)
        self.finished = self.finished or 0 < self.config.patience <= self.best.evaluations_since
        self.finished |= await self.callbacks("on_evaluate", step, metrics)
        return metrics

    async def record(self, step: int, metrics: Mapping[str, float], version: int, cursor: Mapping[str, Any]) -> None:
        """Log the step, and save a checkpoint that is due; `cursor` is the loop's own part of what a resume needs."""
        self.finished |= await self.callbacks("on_step", step, metrics)
        lowered = self.limits.metrics
        notable = "algorithm_switched" in metrics or any(name.startswith("eval_") for name in metrics)
        if self.finished or notable or lowered != self._logged_limits or due(step, self.config.log_every):
            self._log(step, {**metrics, **lowered})
            self._logged_limits = lowered
        self._warn_of_gradient(step, metrics["grad_norm"])
        full = {**cursor, "memory": self.memory, "finished": self.finished, **self.best._asdict()}
        if self.limits.lowered:
            full[CURSOR] = {key: list(values) for key, values in self.limits.lowered.items()}
        self.reached = TrainingState(step, version, self.start.seed, full)
        if self.finished or due(step, self.config.checkpoint_every) or self.best.best_step == step:
            await self.save(self.reached, self.best.best_step)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        shown = ordered(metrics)
        self.log(step, shown)
        self.history.append({"step": step, **shown})

    def _warn_of_gradient(self, step: int, norm: float) -> None:
        """Once per run; `tracking.health` finds out whether it stays so."""
        if norm == 0 and not self._warned_of_gradient:
            self._warned_of_gradient = True
            logger.warning(
                "step %d: the gradient is zero, so nothing was learned (are all rewards of a group equal?)", step
            )


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def algorithm_switch(step: int, algorithm_at: AlgorithmAt) -> dict[str, float]:
    """Log a switch of algorithms, and return it as a metric."""
    current, before = algorithm_at(step), algorithm_at(max(1, step - 1))
    if (current.name, current.parameters) == (before.name, before.parameters):
        return {}
    logger.info("step %d: switching to %s %s", step, current.name, dict(current.parameters))
    return {"algorithm_switched": 1.0}


async def no_checkpoint(state: TrainingState, best_step: int | None) -> None:
    """For runs whose weights stay in memory."""


def scheduled(table: Mapping[int, Algorithm]) -> AlgorithmAt:
    """`scheduled({1: algorithm("sft"), 100: algorithm("dpo")})`: each from its step on."""
    if 1 not in table:
        raise ValueError(f"a schedule needs an entry for step 1; this one starts at {min(table, default='nothing')}")
    if len({each.assemble for each in table.values()}) > 1:
        names = ", ".join(each.name for each in table.values())
        raise ValueError(f"{names} train on different kinds of rows, so one run cannot switch between them")
    return lambda step: table[max(start for start in table if start <= step)]
