"""The producer of the online loop: batches of rollouts collected ahead of training, bounded by permits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import anyio

from oxrl.concurrency import task_group
from oxrl.rewards.length import sampled_tokens
from oxrl.rollouts.buffer import Group, LeftOut, ReplayBuffer
from oxrl.rollouts.collect import AsyncRolloutManager
from oxrl.rollouts.record import rollout_from_json, rollout_to_json
from oxrl.types import Backend, Generator


class CollectedBatch(NamedTuple):
    """A batch whose groups are in the buffer: what collecting it cost, and the collector's state after it."""

    groups: int
    counts: Mapping[str, float]
    seconds: float
    after: Mapping[str, Any]
    left_out: Sequence[LeftOut] = ()

    def to_json(self) -> dict[str, Any]:
        left_out = [[reason, [rollout_to_json(each) for each in rollouts]] for reason, rollouts in self.left_out]
        return {**self._asdict(), "left_out": left_out}

    @classmethod
    def from_json(cls, raw: Mapping[str, Any]) -> CollectedBatch:
        read = [LeftOut(reason, tuple(map(rollout_from_json, each))) for reason, each in raw.get("left_out", ())]
        return cls(**{**raw, "left_out": read})


class ReadyBatch(NamedTuple):
    """A batch to train on."""

    groups: list[Group]
    version: int  # of the weights that will be trained on it
    collected: CollectedBatch
    expired: int  # groups of the run so far that were dropped as too old
    waited: float  # seconds that training waited for it
    left_out: Sequence[LeftOut] = ()  # sampled for it, and not trained on

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
            groups, counts, left_out = await self.manager.collect(version, self.max_partial_age)
            self.buffer.add(groups, version)
            seconds, after = time.monotonic() - started, self.manager.state()
            self.waiting.append(CollectedBatch(len(groups), counts, seconds, after, left_out))
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
        left_out = [*collected.left_out, *(LeftOut("expired", group) for group in self.buffer.dropped)]
        return ReadyBatch(groups, version, collected, self.buffer.expired, waited, left_out)

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
        waiting = [each.to_json() for each in self.waiting]
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
            self.waiting.append(CollectedBatch.from_json(collected))


@asynccontextmanager
async def prefetching(queue: RolloutQueue, steps: int) -> AsyncIterator[None]:
    """Run the producer for `steps` batches while the block is entered."""
    queue.remaining = steps - len(queue.waiting)
    async with task_group() as tasks:
        tasks.start_soon(queue.produce)
        yield
        tasks.cancel_scope.cancel()
