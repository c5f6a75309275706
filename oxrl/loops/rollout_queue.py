"""The producer of the online loop: batches of rollouts collected ahead of training, bounded by permits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio

from oxrl.concurrency import task_group
from oxrl.rewards.length import sampled_tokens
from oxrl.rollouts.buffer import Group, ReplayBuffer
from oxrl.rollouts.collect import AsyncRolloutManager
from oxrl.types import Backend, Generator


class CollectedBatch(NamedTuple):
    """A batch whose groups are in the buffer: what collecting it cost, and the collector's state after it."""

    groups: int
    counts: Mapping[str, float]
    seconds: float
    after: Mapping[str, Any]


class ReadyBatch(NamedTuple):
    """A batch to train on."""

    groups: list[Group]
    version: int  # of the weights that will be trained on it
    collected: CollectedBatch
    expired: int  # groups of the run so far that were dropped as too old
    waited: float  # seconds that training waited for it

    def costs(self) -> dict[str, float]:
        seconds, drawn = self.collected.seconds, sum(sampled_tokens(each) for group in self.groups for each in group)
        return {
            **self.collected.counts,
            "expired_groups": float(self.expired),
            "generate_seconds": seconds,
            "wait_seconds": self.waited,
            "generated_per_second": drawn / max(seconds, 1e-9),
        }


class RolloutQueue:
    """Batches collected ahead of training, at most `lag + 1` between the first token of a batch and its update.

    `max_age` is how many versions a token may be behind the weights that are trained on it; a step makes `updates`.
    """

    def __init__(
        self,
        manager: AsyncRolloutManager,
        generator: Generator,
        *,
        lag: int,
        max_age: int,
        updates: int,
        shares_weights: bool,
    ) -> None:
        self.manager, self.generator, self.lag = manager, generator, lag
        self.permits = anyio.Semaphore(lag + 1)
        self.max_partial_age = max(0, max_age - lag * updates)  # it will be older by the lag when it is trained on
        # With shared weights, training waits until the producer has used all permits and is idle.
        self.batches_needed = lag + 1 if shares_weights else 1
        self.remaining = self.unreleased = 0
        self.buffer = ReplayBuffer(max_age=max_age)
        self.waiting: deque[CollectedBatch] = deque()
        self.arrived = anyio.Event()

    async def produce(self) -> None:
        while self.remaining:
            await self.permits.acquire()
            started, version = time.monotonic(), self.generator.version
            groups, counts = await self.manager.collect(version, self.max_partial_age)
            self.buffer.add(groups, version)
            self.waiting.append(CollectedBatch(len(groups), counts, time.monotonic() - started, self.manager.state()))
            self.remaining -= 1
            self.arrived.set()

    async def next(self, backend: Backend) -> ReadyBatch:
        started = time.monotonic()
        while len(self.waiting) < self.batches_needed and self.remaining:
            self.arrived = anyio.Event()
            await self.arrived.wait()
        collected, waited = self.waiting.popleft(), time.monotonic() - started
        version = (await backend.get_weights()).version
        groups = self.buffer.take(collected.groups, version)
        if not groups:
            raise RuntimeError(
                f"all {collected.groups} groups of a batch are more than {self.buffer.max_age} versions old: raise lag"
            )
        return ReadyBatch(groups, version, collected, self.buffer.expired, waited)

    def trained(self, *, synced: bool) -> None:
        """A batch was trained on. Others are started once the engine has confirmed a new version, not on an old one."""
        self.unreleased += 1
        if synced:
            for _ in range(self.unreleased):
                self.permits.release()
            self.unreleased = 0

    def state(self, trained: CollectedBatch) -> dict[str, Any]:
        """Batches not trained on yet, and the collector's state; in-flight batches are drawn again."""
        newest = self.waiting[-1] if self.waiting else trained
        waiting = [each._asdict() for each in self.waiting]
        return {"collector": newest.after, "waiting": waiting, "buffer": self.buffer.state()}

    async def restore(self, cursor: Mapping[str, Any]) -> None:
        if len(cursor["waiting"]) > self.lag + 1:
            raise ValueError(
                f"the checkpoint holds {len(cursor['waiting'])} batches that were sampled ahead, but lag={self.lag} "
                f"allows {self.lag + 1}: resume with lag {len(cursor['waiting']) - 1} or more"
            )
        self.manager.restore(cursor["collector"])
        self.buffer.restore(cursor["buffer"])
        for collected in cursor["waiting"]:  # each holds a permit
            await self.permits.acquire()
            self.waiting.append(CollectedBatch(**collected))


@asynccontextmanager
async def prefetching(queue: RolloutQueue, steps: int) -> AsyncIterator[None]:
    """Run the producer for `steps` batches while the block is entered."""
    queue.remaining = steps - len(queue.waiting)
    async with task_group() as tasks:
        tasks.start_soon(queue.produce)
        yield
        tasks.cancel_scope.cancel()
