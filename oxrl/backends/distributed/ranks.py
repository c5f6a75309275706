"""The processes of one run and the wire between them: rank 0 runs the loop, the other ranks serve `rpc`.

Rank 0 sends out a command, does its own share of it, and gathers the replies. A verb that fails on a rank says so to
rank 0 at once, which waits beside its own share and not inside it: that one may hang in a collective with the rank that
failed. A rank that died or hangs ends the wait with the time limit at the latest. What is asked for, and what becomes
of the answers, is `ranked`'s affair; no engine is known here.
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

TIME_LIMIT = 600.0  # seconds that one collective of a verb may take
IDLE_LIMIT = 24 * 3600.0  # seconds that a rank waits for the next command, while rank 0 generates and grades
NOTICE_SECONDS = 0.5  # how often rank 0 looks whether another rank has failed
ALIKE = ("ValueError", "NonFiniteError")  # what most often meets all ranks of a call alike
ALIKE_SECONDS = 10.0  # that the others have to come to the same end


class RankError(RuntimeError):
    """A rank failed, died or did not answer in time; the message names it and the call."""


class LostRankError(RankError):
    """It died or did not answer: what it did would do no harm if it were done again."""


class WorkerGroup(Protocol):
    """The processes that a backend is spread over, as its driver calls them; `Ranks` is one."""

    @property
    def world(self) -> int: ...

    def start(self, build: Build) -> int: ...

    def call(self, target: int, call: str, *arguments: Any) -> list[Any]: ...

    def call_with_shares(self, target: int, call: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]: ...

    def release(self, target: int) -> None: ...

    def stop(self) -> None: ...


class Command(NamedTuple):
    """`Command(0, "optim_step", ())`: a function to call on the object with this number."""

    target: int
    call: str
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    value: Any = None
    error: Exception | None = None


Build: TypeAlias = Callable[[], Any]
"""Makes one rank's worker; it travels, so it is a function of a module, or a `partial` of one."""


class Hosted:
    """The workers of one rank. `perform` always answers: whatever goes wrong, the driver has to hear of it.

    `rpc` are those that only this kind of rank has.
    """

    def __init__(self, rank: int, rpc: Mapping[str, Callable[..., Any]] = MappingProxyType({})) -> None:
        self.rank, self.rpc = rank, rpc
        self.workers: dict[int, Any] = {}

    def perform(self, command: Command) -> Reply:
        try:
            return Reply(self._done(command))
        except Exception as error:  # told to the driver
            logger.debug("rank %d failed in %s", self.rank, command.call, exc_info=True)
            return Reply(error=portable(error))

    def _done(self, command: Command) -> Any:
        if command.call == "start":
            self.workers[command.target] = command.arguments[0]()
        elif command.call == "release":
            del self.workers[command.target]
        elif command.call in self.rpc:
            return self.rpc[command.call](self.workers[command.target], *command.arguments)
        else:
            return perform(self.workers[command.target], command.call, command.arguments)
        return None


class Ranks:
    """The processes of one run, and the wire between them. Rank 0 calls; the others `serve` until it says stop."""

    def __init__(self, *, time_limit: float = TIME_LIMIT, idle_limit: float = IDLE_LIMIT) -> None:
        if not dist.is_initialized():
            raise ValueError("there is no process group: start under torchrun, or use join_ranks()")
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.time_limit = time_limit
        # Rank 0 sends and must not wait long for a rank that takes nothing; the others wait while it does other things.
        patience = idle_limit if self.rank else time_limit
        self._commands = dist.new_group(backend="gloo", timeout=timedelta(seconds=patience))
        self._replies = dist.new_group(backend="gloo", timeout=timedelta(seconds=time_limit))
        self._notices = dist.distributed_c10d._get_default_store()
        self._hosted = Hosted(self.rank)
        self._started = self._calls = 0
        self._broken: str | None = None
        self._aside = _Aside()
        self._one_at_a_time = threading.Lock()  # weights are asked for in threads, beside the loop

    def start(self, build: Build) -> int:
        """Make a worker on every rank; returns the number to call it by."""
        self._started += 1
        self._call_each([Command(self._started, "start", (build,))] * self.world)
        return self._started

    def here(self, target: int) -> Any:
        """This rank's worker."""
        return self._hosted.workers[target]

    def call(self, target: int, call: str, *arguments: Any) -> list[Any]:
        """What each rank returns, rank 0 first."""
        return self._call_each([Command(target, call, arguments)] * self.world)

    def call_with_shares(self, target: int, call: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same call with other arguments on each rank."""
        return self._call_each([Command(target, call, arguments) for arguments in shares])

    def release(self, target: int) -> None:
        self.call(target, "release")

    def stop(self) -> None:
        """Let the other ranks go home."""
        if self._broken is None:
            self._send([Command(0, "stop", ())] * self.world)

    def serve(self) -> None:
        """On every rank but 0: do as told until told to stop."""
        while (command := self._receive()).call != "stop":
            self._calls += 1
            self._perform_and_answer(command)

    def _call_each(self, commands: list[Command]) -> list[Any]:
        with self._one_at_a_time:
            return self._call_each_now(commands)

    def _call_each_now(self, commands: list[Command]) -> list[Any]:
        call = commands[0].call
        if self._broken is not None:
            raise RankError(f"{call} cannot run any more: {self._broken}")
        self._send(commands)
        self._calls += 1
        replies = self._wait(self._aside.submit(partial(self._perform_and_answer, commands[0])))
        failed = [(rank, reply.error) for rank, reply in enumerate(replies) if reply.error is not None]
        if failed:
            lost = all(is_lost_peer(error) for _, error in failed)
            error = merge_errors(call, failed, self._missing() if lost else "")
            if isinstance(error, RankError):
                self._broken = str(error)
            raise error from failed[0][1]
        return [reply.value for reply in replies]

    def _wait(self, replies: Future[list[Reply]]) -> list[Reply]:
        """For the replies of all, or for the first rank that says that it failed.

        Mistakes, and numbers that are none, most often meet all ranks alike, and then all answer; one that met a
        single rank has left the others waiting for it.
        """
        since = None
        while True:
            try:
                return replies.result(timeout=NOTICE_SECONDS)
            except TimeoutError:
                if replies.done():  # it was the call itself that ran into a time limit
                    raise
                if not self._notices.check([self._notice]):
                    continue
                since = since or time.monotonic()
                rank, kind, words = json.loads(self._notices.get(self._notice))
                if kind in ALIKE and time.monotonic() - since < ALIKE_SECONDS:
                    continue
                self._broken = f"rank {rank} failed alone: {words}"
                error = ValueError(words) if kind == "ValueError" else type(kind, (RuntimeError,), {})(words)
                return [Reply(error=error if each == rank else None) for each in range(self.world)]

    @property
    def _notice(self) -> str:
        return f"oxrl: failed in call {self._calls}"

    def _perform_and_answer(self, command: Command) -> list[Reply]:
        reply = self._hosted.perform(command)
        self._notices.set(f"oxrl: rank {self.rank} ended", str(self._calls))
        if reply.error is not None:  # the others may wait for this rank inside a collective
            self._give_notice(reply.error)
        return self._answer(command.call, reply)

    def _give_notice(self, error: Exception) -> None:
        if self._notices.add(f"{self._notice}, ranks", 1) == 1:  # the first cause, not what follows from it
            kind = next((each for each in ALIKE if any(each == base.__name__ for base in type(error).__mro__)), "")
            self._notices.set(self._notice, json.dumps([self.rank, kind or type(error).__name__, str(error)]))

    def _send(self, commands: list[Command]) -> None:
        call = commands[0].call
        try:
            parcels = {id(command): pickle.dumps(command) for command in commands[1:]}
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{call} has an argument that cannot travel to another process ({error}); use functions of "
                "a module instead of ones made on the spot"
            ) from error
        for rank, command in enumerate(commands[1:], 1):  # one by one, so that the one who is gone has a name
            try:
                dist.send_object_list([parcels[id(command)]], dst=rank, group=self._commands)
            except RuntimeError as error:
                self._broken = f"rank {rank} died, or took no command for {self.time_limit:g} s ({first_line(error)})"
                raise LostRankError(f"{call} could not be sent: {self._broken}") from error

    def _receive(self) -> Command:
        received: list[Any] = [None]
        try:
            dist.recv_object_list(received, src=0, group=self._commands)
        except RuntimeError as error:
            raise RankError(
                f"rank {self.rank} lost rank 0 while it waited for a command: {first_line(error)}"
            ) from error
        command: Command = pickle.loads(received[0])  # noqa: S301 - our own
        return command

    def _answer(self, call: str, reply: Reply) -> list[Reply]:
        replies: list[Any] | None = [None] * self.world if self.rank == 0 else None
        try:
            dist.gather_object(reply, replies, dst=0, group=self._replies)
        except RuntimeError as error:
            raise self._lost(call, reply.error or error) from error
        return replies or []

    def _missing(self) -> str:
        """Who has not come to the end of the call, told after those who wait for them have had time to give up too."""
        time.sleep(2 * NOTICE_SECONDS)
        keys = {rank: f"oxrl: rank {rank} ended" for rank in range(self.world)}
        ended = {rank: int(self._notices.get(key)) if self._notices.check([key]) else 0 for rank, key in keys.items()}
        missing = [str(rank) for rank, last in ended.items() if last < self._calls]
        return f"; no word from rank {', '.join(missing)}, which died or hangs" if missing else ""

    def _lost(self, call: str, error: Exception) -> RankError:
        self._broken = (
            f"rank {self.rank}, {call}: another rank died, or did not answer within {self.time_limit:g} s "
            f"({first_line(error)}){self._missing()}"
        )
        return LostRankError(self._broken)


class _Aside:
    """A thread for one call after the other; it is left behind when the process ends, whatever it waits for."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = queue.SimpleQueue()
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None
        threading.Thread(target=self._run, daemon=True, name="oxrl rank").start()

    def submit(self, function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((function, future))
        return future

    def _run(self) -> None:
        if self._device is not None:  # each thread has a current device of its own
            torch.cuda.set_device(self._device)
        while True:
            function, future = self._work.get()
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again by whoever waits
                future.set_exception(error)
            del function, future


def join_ranks(*, time_limit: float = TIME_LIMIT, idle_limit: float = IDLE_LIMIT) -> Ranks:
    """The processes that torchrun or `launch` started, as `Ranks`: NCCL where each has a GPU, else gloo."""
    if "RANK" not in os.environ:
        raise ValueError("this process has no rank: start it with torchrun --nproc-per-node N")
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    where: dict[str, Any] = {}
    if (file := os.environ.get(RENDEZVOUS_FILE)) is not None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        untyped: Any = dist  # whether mypy finds a store in it depends on the order in which it reads torch
        where = {"store": untyped.FileStore(file, world), "rank": rank, "world_size": world}
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=time_limit), **where)
    return Ranks(time_limit=time_limit, idle_limit=idle_limit)


def portable(error: Exception) -> Exception:
    """An exception that survives pickling, as itself or as its text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - reducing an unknown exception may fail in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def merge_errors(call: str, failed: Sequence[tuple[int, Exception]], missing: str = "") -> Exception:
    """One exception for the loop. When several ranks failed, the first cause is not the one that lost its peer."""
    rank, error = min(failed, key=lambda each: is_lost_peer(each[1]))
    where = f"rank {rank}, {call}"
    if isinstance(error, NonFiniteError):
        suspects = [batch for _, each in failed if isinstance(each, NonFiniteError) for batch in each.batches]
        return NonFiniteError(f"{where}: {error.what}", suspects)
    if isinstance(error, ValueError):
        return ValueError(f"{error} ({where})")
    kind = LostRankError if isinstance(error, LostRankError) or is_lost_peer(error) else RankError
    return kind(f"{where}: {type(error).__name__}: {first_line(error)}{missing}")


def is_lost_peer(error: Exception) -> bool:
    words = ("connection", "peer", "timed out", "timeout", "abort")
    return isinstance(error, RuntimeError) and any(word in str(error).lower() for word in words)


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
