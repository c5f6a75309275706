"""A queue in front of any backend: calls return futures immediately, and run one after the other in a thread.

The next call can be submitted before the last has finished. After a failed call, none of the calls submitted behind it
runs, because they were meant for another state: they fail with the first cause, until one of these errors has been
raised to a caller that waits.
"""

from __future__ import annotations

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

import torch

from oxrl.concurrency import in_thread, run_blocking
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
TIME_LIMIT = 1800.0  # seconds that one call may run; each collective of ranks has a shorter limit


class NotRunError(RuntimeError):
    """A call that did not run, because a call submitted before it failed; `__cause__` is that failure."""


class QueuedBackend:
    """`QueuedBackend(create_pytorch_backend(model))`: the same methods, with futures that are not done yet.

    Other attributes (`model`, `module`, `version`, ...) are read from the backend immediately, without waiting for
    queued calls.
    """

    def __init__(self, backend: Any, *, time_limit: float = TIME_LIMIT) -> None:
        self.backend = backend
        self._calls = _Calls(time_limit)

    def __getattr__(self, name: str) -> Any:
        if name == "backend":  # not set yet: copy and pickle look it up
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
        """Enter and leave the backend's warm-up in the thread, after the calls submitted before."""
        warm_up = self.backend.memory_warm_up()
        self._calls.submit("memory_warm_up", warm_up.__enter__).wait()
        try:
            yield
        finally:
            # An error inside is raised to the caller that waits for it; the warm-up must be left in any case.
            self._calls.submit("memory_warm_up", partial(warm_up.__exit__, None, None, None), always=True).wait()

    def close(self) -> None:
        """Wait for the queued calls, then close the backend if it has `close`."""
        self._calls.close(getattr(self.backend, "close", _nothing))

    def _submit(self, call: str, *arguments: Any) -> QueuedFuture[Any]:
        return self._calls.submit(call, partial(getattr(self.backend, call), *arguments))


class QueuedFuture(TrainFuture[T]):
    """`metrics = await future`, under asyncio and trio; `future.wait()` in plain code."""

    def __init__(self, calls: _Calls, call: _Call) -> None:
        self._calls, self._call, self._outcome = calls, call, call.outcome

    async def result(self) -> T:
        """Wait for the result; if the wait is cancelled, the call still runs."""
        return self.wait() if self._call.outcome.done() else await in_thread(self.wait)

    def wait(self) -> T:
        """Block until the result is there. The time limit is that of the running call, not of the whole queue."""
        outcome = self._call.outcome
        while not wait([outcome], timeout=self._calls.seconds_left()).done:
            self._calls.raise_if_overdue(self._call.name)
        if (error := outcome.exception()) is not None:
            self._calls.clear_error(self._call.chain)
            raise error
        value: T = outcome.result()
        return value


@dataclass(slots=True, eq=False)
class _CallChain:
    """Shared by calls that depend on the success of the calls before them."""

    failed: str = ""
    cause: BaseException | None = None
    raised: bool = False


@dataclass(slots=True, eq=False)
class _Call:
    name: str
    function: Callable[[], Any] | None  # None: the thread ends
    chain: _CallChain
    always: bool = False  # run also after a failure
    outcome: Future[Any] = field(default_factory=Future)


class _Running(NamedTuple):
    name: str
    since: float


class _Calls:
    """A daemon thread that executes one call after the other; it does not keep the process alive."""

    def __init__(self, time_limit: float) -> None:
        self.time_limit = time_limit
        self._queue: queue.SimpleQueue[_Call] = queue.SimpleQueue()
        self._chain = _CallChain()
        self._running: _Running | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self._thread = threading.Thread(target=self._run, daemon=True, name="oxrl backend")
        self._thread.start()

    def submit(self, name: str, function: Callable[[], Any], *, always: bool = False) -> QueuedFuture[Any]:
        with self._lock:
            if self._closed:
                raise ValueError(f"{name} was called after the backend was closed")
            call = _Call(name, function, self._chain, always)
            self._queue.put(call)
        return QueuedFuture(self, call)

    def seconds_left(self) -> float:
        """Return the seconds until the running call exceeds the time limit."""
        running = self._running
        return self.time_limit if running is None else max(0.0, running.since + self.time_limit - time.monotonic())

    def raise_if_overdue(self, waiting_for: str) -> None:
        running = self._running
        if running is None or self.seconds_left() > 0:
            return
        behind = "" if running.name == waiting_for else f", and {waiting_for} is queued behind it"
        raise TimeoutError(f"{running.name} did not finish within {self.time_limit:g} s{behind}")

    def clear_error(self, chain: _CallChain) -> None:
        """Start a new chain: the failure has been raised, and calls submitted from now on run again."""
        chain.raised = True
        with self._lock:
            if self._chain is chain:
                self._chain = _CallChain()

    def close(self, end: Callable[[], None]) -> None:
        with self._lock:
            if self._closed:
                return
            self._closed = True
            chain = self._chain
            last = _Call("close", end, chain, always=True)
            self._queue.put(last)
            self._queue.put(_Call("", None, chain))
        QueuedFuture[None](self, last).wait()
        self._thread.join(self.time_limit)
        if chain.cause is not None and not chain.raised:
            logger.error("%s failed, and its result was never awaited: %s", chain.failed, chain.cause)

    def _run(self) -> None:
        if self._device is not None:  # the current device is per thread
            torch.cuda.set_device(self._device)
        while (call := self._queue.get()).function is not None:
            self._running = _Running(call.name, time.monotonic())
            self._perform(call)
            self._running = None
            del call  # free its arguments while waiting for the next one

    def _perform(self, call: _Call) -> None:
        assert call.function is not None
        chain = call.chain
        if chain.cause is not None and not call.always:
            error = NotRunError(f"{call.name} did not run, because {chain.failed} before it failed: {chain.cause}")
            error.__cause__ = chain.cause
            call.outcome.set_exception(error)
            return
        try:
            call.outcome.set_result(_value(call.function()))
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting caller
            if chain.cause is None:
                chain.failed, chain.cause = call.name, error
            call.outcome.set_exception(error)


def _value(result: Any) -> Any:
    if isinstance(result, ImmediateTrainFuture):
        return result.value
    return run_blocking(result.result) if hasattr(result, "__await__") else result


def _nothing() -> None:
    """The `close` of backends without one."""
