"""Limits of a run that are lowered where memory runs out, so that it continues: smaller micro-batches, fewer slots.

`MemoryLimits.fit` repeats what ran out of memory with half of `train.micro_batch_tokens`; once a micro-batch is a
single item, with gradient checkpointing. `rollout.slots` are lowered by the embedded engine itself. What was lowered is
logged, is a metric of every later step, and is part of the checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol, TypeAlias, TypeVar, cast

from oxrl.data.pack import micro_batch_size
from oxrl.machine.out_of_memory import free_memory_of, ran_out_of_memory
from oxrl.types import Backend, Generator, Item, Layout, TrainFuture, TrainingState

logger = logging.getLogger(__name__)

T = TypeVar("T")
TOKENS, CHECKPOINTING, SLOTS = "train.micro_batch_tokens", "model.gradient_checkpointing", "rollout.slots"
BY_ROW = "logprobs.by_row"  # not a setting: log-prob passes over single rows instead of groups and pairs
CURSOR = "memory_limits"


class RestartableBackend(Backend, Protocol):
    """A backend that can repeat a `forward_backward` that failed; without these methods, out of memory ends a run."""

    def discard_gradients(self) -> bool:
        """Undo a `forward_backward` that failed: its gradients and random numbers. False if that is not possible."""
        ...

    def enable_gradient_checkpointing(self) -> bool:
        """Recompute activations in the backward pass from now on; False if that is so already, or not supported."""
        ...

    def release_memory(self) -> TrainFuture[None]: ...


class Sizes(NamedTuple):
    """Tokens of the largest micro-batch of a call and of its largest item, and what else can be lowered there."""

    micro_batch: int
    item: int
    by_row: bool  # items of several rows can be run row by row
    trains: bool  # activations are kept for a backward pass


@contextmanager
def sized(
    parts: Sequence[Sequence[Item]], layout: Layout, *, by_row: bool = False, trains: bool = False
) -> Iterator[None]:
    """Attach the sizes of these micro-batches to an out-of-memory error: without them, nothing can be lowered."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if ran_out_of_memory(error):
            items = [item for part in parts for item in part]
            error.__dict__["oxrl_sizes"] = Sizes(
                max(micro_batch_size(part, layout) for part in parts),
                max(micro_batch_size([item], layout) for item in items),
                by_row and any(len(item) > 1 for item in items),
                trains,
            )
        raise


class MemoryLimits:
    """`MemoryLimits(1024)`: the limits of a run, which live as long as it. `lowered` is `{key: [configured, now]}`."""

    def __init__(self, micro_batch_tokens: int) -> None:
        self.micro_batch_tokens = micro_batch_tokens
        self.by_row = False
        self.lowered: dict[str, list[int]] = {}
        self._configured_slots = 0

    @property
    def metrics(self) -> dict[str, float]:
        """`{"micro_batch_tokens": 512.0}`: what was lowered, and nothing else."""
        return {key.rpartition(".")[2]: float(now) for key, (_, now) in self.lowered.items()}

    async def fit(self, backend: Backend, attempt: Callable[[], Awaitable[T]]) -> T:
        """Return `await attempt()`; where a micro-batch runs out of memory, lower these limits and repeat it."""
        while True:
            try:
                return await attempt()
            except (RuntimeError, MemoryError) as error:
                sizes: Sizes | None = error.__dict__.get("oxrl_sizes")
                if sizes is None or not hasattr(backend, "discard_gradients"):
                    raise
                restartable = cast(RestartableBackend, backend)
                if not restartable.discard_gradients() or not (change := self._lower(restartable, sizes)):
                    raise
                logger.warning(
                    "memory ran out in a micro-batch of %d tokens (%s); the step is repeated. %s",
                    sizes.micro_batch,
                    str(error).partition("\n")[0],
                    change,
                )
                free_memory_of(error)
            await restartable.release_memory()

    def _lower(self, backend: RestartableBackend, sizes: Sizes) -> str:
        """Lower one limit, and return the message to log; empty if nothing is left to lower."""
        if sizes.micro_batch > sizes.item:
            tokens = self.micro_batch_tokens // 2
            while tokens >= sizes.micro_batch:  # a limit that no micro-batch reaches changes nothing
                tokens //= 2
            self._note(TOKENS, self.micro_batch_tokens, tokens)
            self.micro_batch_tokens = tokens
            return f"Micro-batches have at most {tokens} tokens from now on: set {TOKENS}: {tokens} for the next run"
        if sizes.by_row:
            self._note(BY_ROW, False, True)
            self.by_row = True
            return "Log-probs of a group are computed row by row from now on"
        if sizes.trains and backend.enable_gradient_checkpointing():
            self._note(CHECKPOINTING, False, True)
            return f"Gradient checkpointing is on from now on: set {CHECKPOINTING}: true for the next run"
        return ""

    def _note(self, key: str, before: int, now: int) -> None:
        self.lowered[key] = [self.lowered.get(key, [before])[0], now]

    def restore(self, state: TrainingState, backend: Backend) -> None:
        """Lower what was lowered before a checkpoint, unless the setting was changed since."""
        saved: Mapping[str, list[int]] = state.cursor.get(CURSOR, {})
        if (tokens := self._restored(saved, TOKENS, self.micro_batch_tokens)) is not None:
            self.micro_batch_tokens = tokens
        self.by_row = bool(self._restored(saved, BY_ROW, False))
        if CHECKPOINTING in saved:
            if not hasattr(backend, "enable_gradient_checkpointing"):
                logger.warning("memory ran out before: set %s: true", CHECKPOINTING)
            elif cast(RestartableBackend, backend).enable_gradient_checkpointing():
                self._restored(saved, CHECKPOINTING, False)

    def restore_slots(self, state: TrainingState, generators: Sequence[Generator]) -> None:
        """The same for the slots of engines that lower them."""
        for generator in limited(generators):
            self._configured_slots = generator.slots
            if (slots := self._restored(state.cursor.get(CURSOR, {}), SLOTS, generator.slots)) is not None:
                generator.slots = slots

    def note_slots(self, generators: Sequence[Generator]) -> None:
        """Take over what an engine has lowered."""
        for generator in limited(generators):
            if generator.slots < self._configured_slots:
                self._note(SLOTS, self._configured_slots, generator.slots)

    def _restored(self, saved: Mapping[str, list[int]], key: str, configured: int) -> int | None:
        if key not in saved or saved[key][0] != configured:
            return None
        self.lowered[key] = [*saved[key]]
        _, now = saved[key]
        logger.warning("resuming with %s: %s instead of %s, because memory ran out before", key, now, configured)
        return now


class LimitedGenerator(Generator, Protocol):
    slots: int  # sequences in flight; lowered where memory runs out


def limited(generators: Sequence[Generator]) -> list[LimitedGenerator]:
    return [cast(LimitedGenerator, generator) for generator in generators if hasattr(generator, "slots")]


Budget: TypeAlias = int | MemoryLimits
"""Tokens per micro-batch: a number for one call, or the limits of a run."""


def limits_of(budget: Budget) -> MemoryLimits:
    return budget if isinstance(budget, MemoryLimits) else MemoryLimits(budget)


def resumed_limits(micro_batch_tokens: int, state: TrainingState, backend: Backend) -> MemoryLimits:
    """The limits of a run that starts from `state`."""
    limits = MemoryLimits(micro_batch_tokens)
    limits.restore(state, backend)
    return limits
