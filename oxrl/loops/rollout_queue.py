"""Batches of rollouts that are collected before they are needed: the producer of the online loop, and its permits."""

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
    """What a batch took to collect, and the collector's state behind it; its groups wait in the buffer."""

    groups: int
    counts: Mapping[str, float]
    seconds: float
    after: Mapping[str, Any]


class Ready(NamedTuple):
    """A batch to train on: groups, their age, and what it took to collect them."""

    groups: list[Group]
    version: int
    produced: CollectedBatch
    expired: int  # groups of the run so far that grew too old
    waited: float  # seconds that training stood still for it

    def costs(self) -> dict[str, float]:
        seconds, drawn = self.produced.seconds, sum(sampled_tokens(each) for group in self.groups for each in group)
        return {
            **self.produced.counts,
            "expired_groups": float(self.expired),
            "generate_seconds": seconds,
            "wait_seconds": self.waited,
            "generated_per_second": drawn / max(seconds, 1e-9),
        }


class RolloutQueue:
    """Batches that were collected before they are needed: at most `lag + 1` between the first token and its update.

    `oldest` is how many versions a token may be behind the weights that learn from it; a step makes `updates` of them.
    """

    def __init__(
        self,
        manager: AsyncRolloutManager,
        generator: Generator,
        *,
        lag: int,
        oldest: int,
        updates: int,
        shares_weights: bool,
    ) -> None:
        self.manager, self.generator, self.lag = manager, generator, lag
        self.permits = anyio.Semaphore(lag + 1)
        self.oldest_begun = max(0, oldest - lag * updates)  # it will be older by the lag when its turn comes
        # Who trains on the weights that the producer speaks with waits until it has used up its permits and rests.
        self.enough = lag + 1 if shares_weights else 1
        self.to_come = 0
        self.buffer = ReplayBuffer(max_age=oldest)
        self.waiting: deque[CollectedBatch] = deque()
        self.arrived = anyio.Event()

    async def produce(self) -> None:
        while self.to_come:
            await self.permits.acquire()
            started, version = time.monotonic(), self.generator.version
            groups, counts = await self.manager.collect(version, self.oldest_begun)
            self.buffer.add(groups, version)
            self.waiting.append(CollectedBatch(len(groups), counts, time.monotonic() - started, self.manager.state()))
            self.to_come -= 1
            self.arrived.set()

    async def next(self, backend: Backend) -> Ready:
        started = time.monotonic()
        while len(self.waiting) < self.enough and self.to_come:
            self.arrived = anyio.Event()
            await self.arrived.wait()
        produced, waited = self.waiting.popleft(), time.monotonic() - started
        version = (await backend.get_weights()).version
        groups = self.buffer.take(produced.groups, version)
        if not groups:
            raise RuntimeError(
                f"all {produced.groups} groups of a batch are more than {self.buffer.max_age} versions old: raise lag"
            )
        return Ready(groups, version, produced, self.buffer.expired, waited)

    def release(self) -> None:
        """The engine has confirmed a new version: another batch may be begun."""
        self.permits.release()

    def state(self, trained: CollectedBatch) -> dict[str, Any]:
        """What is collected but not trained on yet, and where to go on collecting; what is in flight is drawn again."""
        newest = self.waiting[-1] if self.waiting else trained
        waiting = [each._asdict() for each in self.waiting]
        return {"collector": newest.after, "waiting": waiting, "buffer": self.buffer.state()}

    async def restore(self, cursor: Mapping[str, Any]) -> None:
        if len(cursor["waiting"]) > self.lag + 1:
            raise ValueError(
                f"the checkpoint holds {len(cursor['waiting'])} batches that were sampled ahead, and lag={self.lag} "
                f"has room for {self.lag + 1}: resume with lag {len(cursor['waiting'])} or more"
            )
        self.manager.restore(cursor["collector"])
        self.buffer.restore(cursor["buffer"])
        for produced in cursor["waiting"]:  # their permits are taken
            await self.permits.acquire()
            self.waiting.append(CollectedBatch(**produced))


@asynccontextmanager
async def prefetching(ahead: RolloutQueue, steps: int) -> AsyncIterator[None]:
    ahead.to_come = steps - len(ahead.waiting)
    async with task_group() as tasks:
        tasks.start_soon(ahead.produce)
        yield
        tasks.cancel_scope.cancel()
