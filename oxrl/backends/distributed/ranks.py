"""The processes of one run and the communication between them: rank 0 runs the loop, the other ranks serve `rpc`.

Rank 0 sends a command, executes its own share of it in a thread, and gathers the replies. A rank that fails reports it
through the store immediately: rank 0 polls the store, because its own share may hang in a collective with the failed
rank. A rank that died or hangs is detected after the time limit at the latest, rank 0 too: while it has no command for
the others, a thread sends them pings. Commands and results are defined in `ranked`; this module knows no engine.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
import torch.distributed as dist

from oxrl.backends.distributed.rpc import perform
from oxrl.backends.local import NonFiniteError
from oxrl.machine.processes import RENDEZVOUS_FILE

logger = logging.getLogger(__name__)

TIME_LIMIT = 600.0  # seconds that one collective of a call may take
PINGS = 4  # within a time limit, from rank 0 while it generates and grades
POLL_SECONDS = 0.5  # interval at which rank 0 checks whether another rank has failed
COMMON_ERRORS = ("ValueError", "NonFiniteError")  # errors that usually occur on all ranks of a call
COMMON_ERROR_SECONDS = 10.0  # that the other ranks have to raise the same error


class RankError(RuntimeError):
    """A rank failed, died or did not reply in time; the message names the rank and the call."""


class LostRankError(RankError):
    """A rank died or did not reply: the run can be resumed from its last checkpoint."""


class WorkerGroup(Protocol):
    """The processes that a model is sharded over, as the driver calls them; `Ranks` is one implementation."""

    @property
    def world(self) -> int: ...

    def start(self, build: Build) -> int: ...

    def call(self, target: int, call: str, *arguments: Any) -> list[Any]: ...

    def call_with_shares(self, target: int, call: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]: ...

    def release(self, target: int) -> None: ...

    def stop(self) -> None: ...


class Command(NamedTuple):
    """`Command(0, "optim_step", ())`: a call on the worker with this number."""

    target: int
    call: str
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    value: Any = None
    error: Exception | None = None


Build: TypeAlias = Callable[[], Any]
"""Creates one rank's worker; it is pickled, so it must be a module-level function, or a `partial` of one."""


class WorkerHost:
    """The workers of one rank. `perform` always returns a reply: errors are reported to the driver.

    `handlers` are RPC handlers that only this kind of rank has.
    """

    def __init__(self, rank: int, handlers: Mapping[str, Callable[..., Any]] = MappingProxyType({})) -> None:
        self.rank, self.handlers = rank, handlers
        self.workers: dict[int, Any] = {}

    def perform(self, command: Command) -> Reply:
        try:
            return Reply(self._execute(command))
        except Exception as error:  # reported to the driver
            logger.debug("rank %d failed in %s", self.rank, command.call, exc_info=True)
            return Reply(error=portable(error))

    def _execute(self, command: Command) -> Any:
        if command.call == "start":
            self.workers[command.target] = command.arguments[0]()
        elif command.call == "release":
            del self.workers[command.target]
        elif command.call in self.handlers:
            return self.handlers[command.call](self.workers[command.target], *command.arguments)
        else:
            return perform(self.workers[command.target], command.call, command.arguments)
        return None


class Ranks:
    """The processes of one run. Rank 0 calls; the others `serve` until they receive the command to stop.

    `owns_group`: the default process group belongs to this object and is closed with it.
    """

    def __init__(self, *, time_limit: float = TIME_LIMIT, owns_group: bool = False) -> None:
        if not dist.is_initialized():
            raise ValueError("there is no process group: start with torchrun, or call join_ranks()")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.time_limit, self._owns_group = time_limit, owns_group
        limit = timedelta(seconds=time_limit)
        self._commands, self._replies = (dist.new_group(backend="gloo", timeout=limit) for _ in range(2))
        self._store = dist.distributed_c10d._get_default_store()
        self._host = WorkerHost(self.rank)
        self._started = self._calls = 0
        self._broken: str | None = None
        self._thread = _CallThread()
        self._lock = threading.Lock()  # weights are requested by other threads than the loop's
        self._sending = threading.Lock()
        if self.rank == 0:
            threading.Thread(target=self._ping, daemon=True, name="oxrl pings").start()

    def start(self, build: Build) -> int:
        """Create a worker on every rank; return its number, for calls."""
        self._started += 1
        self._call_each([Command(self._started, "start", (build,))] * self.world)
        return self._started

    def here(self, target: int) -> Any:
        """Return this rank's worker."""
        return self._host.workers[target]

    def call(self, target: int, call: str, *arguments: Any) -> list[Any]:
        """Return the result of each rank, rank 0 first."""
        return self._call_each([Command(target, call, arguments)] * self.world)

    def call_with_shares(self, target: int, call: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Make the same call with different arguments on each rank; return the result of each."""
        return self._call_each([Command(target, call, arguments) for arguments in shares])

    def release(self, target: int) -> None:
        self.call(target, "release")

    def stop(self) -> None:
        """Let the other ranks leave `serve`, and close the process groups."""
        with self._sending:
            if self._broken is None:
                self._send([Command(0, "stop", ())] * self.world)
                self._broken = "the ranks were stopped"
                self._close_groups()

    def serve(self) -> None:
        """Execute commands until the one to stop; for every rank but 0."""
        while (command := self._receive()).call != "stop":
            if command.call != "ping":
                self._calls += 1
                self._perform_and_reply(command)
        self._close_groups()

    def _close_groups(self) -> None:
        """PyTorch may abort a process that exits with open groups. A group that the caller opened stays open."""
        if self._owns_group:
            dist.destroy_process_group()
        else:
            for group in (self._commands, self._replies):
                dist.destroy_process_group(group)

    def _ping(self) -> None:
        """Show the ranks that wait for a command that rank 0 is alive: they give up after the time limit."""
        while self._broken is None:
            time.sleep(self.time_limit / PINGS)
            with self._lock, self._sending, suppress(LostRankError):  # raised by the next call
                if self._broken is None:
                    self._send([Command(0, "ping", ())] * self.world)

    def _call_each(self, commands: list[Command]) -> list[Any]:
        with self._lock:
            return self._call_each_now(commands)

    def _call_each_now(self, commands: list[Command]) -> list[Any]:
        call = commands[0].call
        if self._broken is not None:
            raise RankError(f"{call} cannot run after a failure: {self._broken}")
        with self._sending:
            self._send(commands)
        self._calls += 1
        replies = self._wait(self._thread.submit(partial(self._perform_and_reply, commands[0])))
        failed = [(rank, reply.error) for rank, reply in enumerate(replies) if reply.error is not None]
        if failed:
            lost = all(is_lost_peer(error) for _, error in failed)
            error = merge_errors(call, failed, self._missing() if lost else "")
            if isinstance(error, RankError):
                self._broken = str(error)
            raise error from first_cause(failed)[1]
        return [reply.value for reply in replies]

    def _wait(self, replies: Future[list[Reply]]) -> list[Reply]:
        """Return the replies of all ranks, or the error of the first rank that reports a failure.

        User errors and non-finite numbers usually occur on all ranks, and then all reply; an error on a single rank
        leaves the others waiting for it in a collective.
        """
        since = None
        while True:
            try:
                return replies.result(timeout=POLL_SECONDS)
            except TimeoutError:
                if replies.done():  # the call itself raised TimeoutError
                    raise
                if not self._store.check([self._failure_key]):
                    continue
                since = since or time.monotonic()
                rank, kind, message = json.loads(self._store.get(self._failure_key))
                if kind in COMMON_ERRORS and time.monotonic() - since < COMMON_ERROR_SECONDS:
                    continue
                self._broken = f"only rank {rank} failed: {message}"
                error = ValueError(message) if kind == "ValueError" else type(kind, (RuntimeError,), {})(message)
                return [Reply(error=error if each == rank else None) for each in range(self.world)]

    @property
    def _failure_key(self) -> str:
        return f"oxrl: failed in call {self._calls}"

    def _perform_and_reply(self, command: Command) -> list[Reply]:
        reply = self._host.perform(command)
        self._store.set(f"oxrl: rank {self.rank} ended", str(self._calls))
        if reply.error is not None:  # other ranks may wait for this one inside a collective
            self._report_failure(reply.error)
        return self._gather_replies(command.call, reply)

    def _report_failure(self, error: Exception) -> None:
        if self._store.add(f"{self._failure_key}, ranks", 1) == 1:  # the first failure, not those it causes
            names = {base.__name__ for base in type(error).__mro__}
            kind = next((each for each in COMMON_ERRORS if each in names), type(error).__name__)
            self._store.set(self._failure_key, json.dumps([self.rank, kind, str(error)]))

    def _send(self, commands: list[Command]) -> None:
        call = commands[0].call
        try:
            pickled = {id(command): pickle.dumps(command) for command in commands[1:]}
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{call} has an argument that cannot be pickled ({error}): use module-level functions instead of "
                "lambdas and local functions"
            ) from error
        for rank, command in enumerate(commands[1:], 1):  # one by one, so that the error names the lost rank
            try:
                dist.send_object_list([pickled[id(command)]], dst=rank, group=self._commands)
            except RuntimeError as error:
                self._broken = (
                    f"rank {rank} died, or accepted no command for {self.time_limit:g} s ({first_line(error)})"
                )
                raise LostRankError(f"{call} could not be sent: {self._broken}") from error

    def _receive(self) -> Command:
        received: list[Any] = [None]
        try:
            dist.recv_object_list(received, src=0, group=self._commands)
        except RuntimeError as error:
            lost = f"rank {self.rank} lost rank 0, which ended or was silent for {self.time_limit:g} s"
            raise LostRankError(f"{lost} ({first_line(error)})") from error
        command: Command = pickle.loads(received[0])  # noqa: S301 - sent by rank 0
        return command

    def _gather_replies(self, call: str, reply: Reply) -> list[Reply]:
        replies: list[Any] | None = [None] * self.world if self.rank == 0 else None
        try:
            dist.gather_object(reply, replies, dst=0, group=self._replies)
        except RuntimeError as error:
            raise self._lost(call, reply.error or error) from error
        return replies or []

    def _missing(self) -> str:
        """Describe the ranks that have not finished the call; waits until those that wait for them give up too."""
        time.sleep(2 * POLL_SECONDS)
        keys = {rank: f"oxrl: rank {rank} ended" for rank in range(self.world)}
        ended = {rank: int(self._store.get(key)) if self._store.check([key]) else 0 for rank, key in keys.items()}
        missing = [str(rank) for rank, last in ended.items() if last < self._calls]
        return f"; no reply from rank {', '.join(missing)}, which died or hangs" if missing else ""

    def _lost(self, call: str, error: Exception) -> RankError:
        self._broken = (
            f"rank {self.rank}, {call}: another rank died, or did not reply within {self.time_limit:g} s "
            f"({first_line(error)}){self._missing()}"
        )
        return LostRankError(self._broken)


class _CallThread:
    """A daemon thread that executes one call after the other; it does not keep the process alive."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threading.Thread(target=self._run, daemon=True, name="oxrl rank").start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((function, future))
        return future

    def _run(self) -> None:
        if self._device is not None:  # the current device is per thread
            torch.cuda.set_device(self._device)
        while True:
            function, future = self._work.get()
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again by the waiting caller
                future.set_exception(error)
            del function, future


def join_ranks(*, time_limit: float = TIME_LIMIT) -> Ranks:
    """Connect the processes that torchrun or `launch` started: NCCL where each has a GPU, else gloo."""
    if "RANK" not in os.environ:
        raise ValueError("RANK is not set: start this process with torchrun --nproc-per-node N")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    rendezvous: dict[str, Any] = {}
    if (file := os.environ.get(RENDEZVOUS_FILE)) is not None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        untyped: Any = dist  # mypy finds FileStore in it or not, depending on the import order
        rendezvous = {"store": untyped.FileStore(file, world), "rank": rank, "world_size": world}
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=time_limit), **rendezvous)
    return Ranks(time_limit=time_limit, owns_group=True)


def portable(error: Exception) -> Exception:
    """Return the exception if it can be pickled, else a RuntimeError with its text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - pickled here
    except Exception:  # noqa: BLE001 - reducing an unknown exception may fail in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def first_cause(failed: Sequence[tuple[int, Exception]]) -> tuple[int, Exception]:
    """Return a rank and its error; a rank that lost its connection to another one did not fail first."""
    return min(failed, key=lambda each: is_lost_peer(each[1]))


def merge_errors(call: str, failed: Sequence[tuple[int, Exception]], missing: str = "") -> Exception:
    """Return one exception for the loop; errors of lost connections to other ranks are reported last."""
    rank, error = first_cause(failed)
    where = f"rank {rank}, {call}"
    if isinstance(error, NonFiniteError):
        suspects = [batch for _, each in failed if isinstance(each, NonFiniteError) for batch in each.batches]
        return NonFiniteError(f"{where}: {error.what}", suspects)
    if isinstance(error, ValueError):
        return ValueError(f"{error} ({where})")
    kind = LostRankError if isinstance(error, LostRankError) or is_lost_peer(error) else RankError
    return kind(f"{where}: {type(error).__name__}: {first_line(error)}{missing}")


def is_lost_peer(error: Exception) -> bool:
    hints = ("connection", "peer", "timed out", "timeout", "abort")
    return isinstance(error, RuntimeError) and any(hint in str(error).lower() for hint in hints)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
