"""Any backend whose calls are submitted now and done one after the other, in a thread of its own.

Each verb returns a future at once, so the next one can be submitted before the last has finished. After a call that
failed nothing that was submitted behind it runs, because it was meant for another state: those calls fail with the
first cause named, until one of these failures was raised to whoever waits. What a call does is the backend's affair.
"""

from __future__ import annotations

import collections.abc
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import anyio
import torch

from oxrl.concurrency import in_thread
from oxrl.types import (
    Algorithm,
    Batch,
    Counts,
    ImmediateTrainFuture,
    Layout,
    Outputs,
    Read,
    TrainFuture,
    Weights,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

T = TypeVar("T")
TIME_LIMIT = 1800.0  # seconds that one call may run; ranks have shorter limits of their own for each collective


class NotRunError(RuntimeError):
    """A call that never ran, because one that was submitted before it failed: that one is the cause."""


class QueuedBackend:
    """`QueuedBackend(create_pytorch_backend(model))`: the same verbs, whose futures are not done yet.

    Whatever else the backend has (`model`, `module`, `version`, ...) is looked up on it as it is now, whether or not
    calls are under way.
    """

    def __init__(self, backend: Any, *, time_limit: float = TIME_LIMIT) -> None:
        self.backend = backend
        self._calls = _Calls(time_limit)

    def __getattr__(self, name: str) -> Any:
        if name == "backend":  # not made yet: asked for by copy and pickle
            raise AttributeError(name)
        return getattr(self.backend, name)

    @property
    def layout(self) -> Layout:
        layout: Layout = self.backend.layout
        return layout

    @property
    def parallel(self) -> int:
        parallel: int = self.backend.parallel
        return parallel

    def set_temperature(self, temperature: float) -> None:
        self._submit("set_temperature", temperature).wait()

    def logprobs(
        self, batches: Sequence[Batch], which: str = "policy", reads: Mapping[str, Read] = MappingProxyType({})
    ) -> TrainFuture[list[Outputs]]:
        return self._submit("logprobs", batches, which, reads)

    def forward_backward(
        self, batches: Sequence[Batch], algorithm: Algorithm, counts: Counts
    ) -> TrainFuture[dict[str, float]]:
        return self._submit("forward_backward", batches, algorithm, counts)

    def optim_step(self) -> TrainFuture[dict[str, float]]:
        return self._submit("optim_step")

    def get_weights(self) -> TrainFuture[Weights]:
        return self._submit("get_weights")

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        return self._submit("load_weights", weights)

    def update_reference(self, decay: float) -> TrainFuture[None]:
        return self._submit("update_reference", decay)

    def release_memory(self) -> TrainFuture[None]:
        return self._submit("release_memory")

    def save(self, path: Path) -> TrainFuture[None]:
        return self._submit("save", path)

    def load(self, path: Path) -> TrainFuture[None]:
        return self._submit("load", path)

    @contextmanager
    def memory_warm_up(self) -> Iterator[None]:
        """Begun and ended in the thread, behind what was submitted before."""
        rehearsal = self.backend.memory_warm_up()
        self._calls.submit("memory_warm_up", rehearsal.__enter__).wait()
        try:
            yield
        finally:
            # What failed inside is raised by whoever waited for it; the end of the rehearsal has to come in any case.
            self._calls.submit("memory_warm_up", partial(rehearsal.__exit__, None, None, None), always=True).wait()

    def close(self) -> None:
        """Wait for what was submitted, then close the backend if it can be closed."""
        self._calls.close(getattr(self.backend, "close", _nothing))

    def _submit(self, call: str, *arguments: Any) -> QueuedFuture[Any]:
        return self._calls.submit(call, partial(getattr(self.backend, call), *arguments))


class QueuedFuture(TrainFuture[T]):
    """`metrics = await future`, under asyncio and trio; `future.wait()` in plain code."""

    def __init__(self, calls: _Calls, call: _Call) -> None:
        self._calls, self._call = calls, call

    def __await__(self) -> collections.abc.Generator[Any, Any, T]:
        return self.result().__await__()

    async def result(self) -> T:
        """Whoever gives up waiting leaves the call running."""
        return self.wait() if self._call.outcome.done() else await in_thread(self.wait)

    def wait(self) -> T:
        """Blocks. The time limit is that of the call which runs: a long queue that moves is no reason to give up."""
        outcome = self._call.outcome
        while not wait([outcome], timeout=self._calls.patience()).done:
            self._calls.stop_if_overdue(self._call.name)
        if (error := outcome.exception()) is not None:
            self._calls.clear_error(self._call.fate)
            raise error
        value: T = outcome.result()
        return value


@dataclass(slots=True, eq=False)
class _CallChain:
    """Shared by calls of which the later count on the success of the earlier."""

    failed: str = ""
    cause: BaseException | None = None
    raised: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    name: str
    function: Callable[[], Any] | None  # None: the end
    fate: _CallChain
    always: bool = False  # also behind a failure
    outcome: Future[Any] = field(default_factory=Future)


class _Running(NamedTuple):
    name: str
    since: float


class _Calls:
    """A thread that does one call after the other; it is left behind when the process ends, whatever it waits for."""

    def __init__(self, time_limit: float) -> None:
        self.time_limit = time_limit
        self._queue: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._fate = _CallChain()
        self._running: _Running | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, daemon=True, name="oxrl backend")
        self._thread.start()

    def submit(self, name: str, function: Callable[[], Any], *, always: bool = False) -> QueuedFuture[Any]:
        with self._lock:
            if self._closed:
                raise ValueError(f"{name} comes too late: the backend is closed")
            call = _Call(name, function, self._fate, always)
            self._queue.put(call)
        return QueuedFuture(self, call)

    def patience(self) -> float:
        """Seconds until the call that runs has taken too long."""
        running = self._running
        return self.time_limit if running is None else max(0.0, running.since + self.time_limit - time.monotonic())

    def stop_if_overdue(self, waiting_for: str) -> None:
        running = self._running
        if running is None or self.patience() > 0:
            return
        behind = "" if running.name == waiting_for else f", and {waiting_for} waits behind it"
        raise TimeoutError(f"{running.name} did not end within {self.time_limit:g} s{behind}")

    def clear_error(self, fate: _CallChain) -> None:
        """Its failure is known to somebody: what is submitted from now on has a fate of its own."""
        fate.raised = True
        with self._lock:
            if self._fate is fate:
                self._fate = _CallChain()

    def close(self, end: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            fate = self._fate
            last = _Call("close", end, fate, always=True)
            self._queue.put(last)
            self._queue.put(_Call("", None, fate))
        QueuedFuture[None](self, last).wait()
        self._thread.join(self.time_limit)
        if fate.cause is not None and not fate.raised:
            logger.error("%s failed, and nobody waited for it: %s", fate.failed, fate.cause)

    def _run(self) -> None:
        if self._device is not None:  # each thread has a current device of its own
            torch.cuda.set_device(self._device)
        while (call := self._queue.get()).function is not None:
            self._running = _Running(call.name, time.monotonic())
            self._perform(call)
            self._running = None
            del call  # nothing of it stays here while the next one is waited for

    def _perform(self, call: _Call) -> None:
        assert call.function is not None
        fate = call.fate
        if fate.cause is not None and not call.always:
            error = NotRunError(f"{call.name} did not run, because {fate.failed} before it failed: {fate.cause}")
            error.__cause__ = fate.cause
            call.outcome.set_exception(error)
            return
        try:
            call.outcome.set_result(_value(call.function()))
        except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
            if fate.cause is None:
                fate.failed, fate.cause = call.name, error
            call.outcome.set_exception(error)


def _value(result: Any) -> Any:
    if isinstance(result, ImmediateTrainFuture):
        return result.value
    return anyio.run(result.result) if hasattr(result, "__await__") else result


def _nothing() -> None:
    """For backends that hold nothing to be closed."""
