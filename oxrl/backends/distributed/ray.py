"""The ranks of a backend as Ray actors: the same workers, with a process group among themselves and the driver outside.

`RayRanks` does for the driver what `Ranks` does for rank 0: one call on all ranks, replies put together, the first
cause of a failure told with its rank. Every wait has an end. A rank that was lost is not replaced here: its weights are
gone, so the run goes on from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

from oxrl.backends.distributed.queued import QueuedBackend
from oxrl.backends.distributed.ranked import RankedBackend, RankedWeights
from oxrl.backends.distributed.ranks import (
    TIME_LIMIT,
    Build,
    Command,
    Hosted,
    LostRankError,
    RankError,
    Reply,
    first_line,
    is_lost_peer,
    merge_errors,
    portable,
)
from oxrl.backends.distributed.rpc import Worker, write_adapter_files
from oxrl.backends.local import NonFiniteError
from oxrl.machine.ray_cluster import Bundles, Process, end_actor, import_ray, reserve
from oxrl.types import ImmediateTrainFuture, TrainFuture, Weights
from oxrl.weights.buckets import BUCKET_BYTES, Bucket, in_buckets
from oxrl.weights.checkpoint_names import adapter_files, plain_weights

logger = logging.getLogger(__name__)

CALL_LIMIT = 3600.0  # seconds that one call may take on all ranks, the loading of a model included
_STREAMS = count(1)
WORD_SECONDS = 5.0  # that a rank which lost its peer gives the peer's own failure to arrive first


class RayRanks:
    """`RayRanks(2)`: actors of the Ray cluster that this process is connected to, each with a place of its own.

    `time_limit` bounds a collective among the ranks, and how much later than the first the last of them may answer;
    `call_limit` bounds a whole call. `places` that are given are left to whoever gave them; with `share` less than 1
    an engine can have the rest of each.
    """

    def __init__(
        self,
        world: int,
        *,
        places: Bundles | None = None,
        share: float = 1.0,
        time_limit: float = TIME_LIMIT,
        call_limit: float = CALL_LIMIT,
    ) -> None:
        if world < 1 or (places is not None and len(places) < world):
            raise ValueError(f"{world} ranks do not fit {len(places) if places is not None else 'any'} places")
        ray = import_ray()
        self.world, self.time_limit, self.call_limit = world, time_limit, call_limit
        self.places = places or reserve(world)
        self._own_places = places is None
        self._started = 0
        self._broken: str | None = None
        self._lock = threading.Lock()  # two calls that reach two ranks in another order would wait for each other
        actor = ray.remote(max_restarts=0, max_task_retries=0)(RankActor)
        self._actors = [actor.options(**self.places.options(rank, share)).remote(rank) for rank in range(world)]
        self.processes: list[Process | None] = [None] * world
        try:
            rendezvous = self._gather("start", [self._actors[0].meeting_point.remote()])[0]
            joining = [actor.join.remote(world, *rendezvous, time_limit) for actor in self._actors]
            self.processes = self._gather("join", joining)
        except BaseException:
            self.stop()
            raise

    def start(self, build: Build) -> int:
        """Make a worker on every rank; returns the number to call it by."""
        self._started += 1
        self.call(self._started, "start", build)
        return self._started

    def call(self, target: int, call: str, *arguments: Any) -> list[Any]:
        """What each rank returns, rank 0 first."""
        shared = self._sent(Command(target, call, arguments))
        return self._call_each(call, [shared] * self.world)

    def call_with_shares(self, target: int, call: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """The same call with other arguments on each rank."""
        return self._call_each(call, [self._sent(Command(target, call, arguments)) for arguments in shares])

    def release(self, target: int) -> None:
        if self._broken is None:  # else there is nothing left to free but the actors themselves
            self.call(target, "release")

    def stop(self) -> None:
        """End the actors, and give their places back."""
        self._broken = self._broken or "the ranks were stopped"
        for actor, process in zip(self._actors, self.processes, strict=True):
            end_actor(actor, process)
        if self._own_places:
            self.places.free()

    def _sent(self, command: Command) -> Any:
        try:
            return import_ray().put(command)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{command.call} has an argument that cannot travel to another process ({first_line(error)}); use "
                "functions of a module instead of ones made on the spot"
            ) from error

    def _call_each(self, call: str, commands: Sequence[Any]) -> list[Any]:
        with self._lock:
            if self._broken is not None:
                raise RankError(f"{call} cannot run any more: {self._broken}")
            return self._gather(
                call, [actor.perform.remote(command) for actor, command in zip(self._actors, commands, strict=True)]
            )

    def _gather(self, call: str, references: Sequence[Any]) -> list[Any]:
        """The values of all; or the first cause of a failure, as soon as it is known."""
        asked = time.monotonic()
        replies = self._replies(call, references)
        missing = [rank for rank in range(len(references)) if rank not in replies]
        failed = [(rank, reply.error) for rank, reply in sorted(replies.items()) if reply.error is not None]
        if not failed and not missing:
            return [replies[rank].value for rank in range(len(references))]
        seconds = time.monotonic() - asked
        silent = f"no word from rank {', '.join(map(str, missing))} within {seconds:.0f} s, which died or hangs"
        if not failed:
            error: Exception = LostRankError(f"{call}: {silent}")
        else:
            lost = missing and all(is_lost_peer(each) for _, each in failed)
            error = merge_errors(call, failed, f"; {silent}" if lost else "")
        if isinstance(error, RankError):
            self._broken = str(error)
        raise error from (failed[0][1] if failed else None)

    def _replies(self, call: str, references: Sequence[Any]) -> dict[int, Reply]:
        ray = import_ray()
        waiting = {reference: rank for rank, reference in enumerate(references)}
        replies: dict[int, Reply] = {}
        until = time.monotonic() + self.call_limit
        while waiting:
            ready, _ = ray.wait(list(waiting), num_returns=1, timeout=max(0.0, until - time.monotonic()))
            if not ready:
                return replies
            rank = waiting.pop(ready[0])
            replies[rank] = _reply(call, ready[0])
            until = min(until, time.monotonic() + self._patience(replies[rank].error))
        return replies

    def _patience(self, error: Exception | None) -> float:
        """How long to wait for the others when one has answered."""
        if error is None or isinstance(error, ValueError | NonFiniteError):  # all come out of what is a mistake
            return self.time_limit
        return WORD_SECONDS if is_lost_peer(error) else 0.0


def _reply(call: str, reference: Any) -> Reply:
    from ray.exceptions import RayError

    try:
        value = import_ray().get(reference)
    except RayError as error:
        logger.debug("an actor failed in %s", call, exc_info=True)
        return Reply(error=LostRankError(f"its actor failed ({type(error).__name__}): {first_line(error)}"))
    return value if isinstance(value, Reply) else Reply(value)


class RankActor:
    """One rank, inside of its actor."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._hosted = Hosted(rank, {"put_bucket": self._put_bucket, "read_adapter": read_adapter})
        self._streams: dict[int, Iterator[Bucket]] = {}

    def meeting_point(self) -> tuple[str, int]:
        """Where the ranks find each other: the machine of the first, and a port that is free there."""
        from ray.util import get_node_ip_address

        with socket.socket() as free:
            free.bind(("", 0))
            address: str = get_node_ip_address()
            return address, int(free.getsockname()[1])

    def join(self, world: int, address: str, port: int, time_limit: float) -> Reply:
        """The environment that torchrun would have given this rank, and the process group."""
        import torch
        import torch.distributed as dist

        os.environ |= {
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",  # Ray shows an actor no device but its own
        }
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(0)
        try:
            dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=time_limit))
        except RuntimeError as error:
            return Reply(error=portable(error))
        return Reply(Process.current())

    def perform(self, command: Command) -> Reply:
        return self._hosted.perform(command)

    def _put_bucket(self, worker: Worker, stream: int, most: int, adapter: bool) -> Any:
        """A reference to the next bucket of this stream, from rank 0; None at the end, and from the others."""
        if stream not in self._streams:
            weights = plain_weights(worker.module, worker.full, adapter=adapter)
            self._streams = {stream: in_buckets(weights, most, keep=self.rank == 0)}
        bucket = next(self._streams[stream], None)
        if bucket is None:
            del self._streams[stream]
            return None
        return import_ray().put(bucket) if self.rank == 0 else None


class RayWeights(RankedWeights):
    """The weights that actors hold at one version; who samples gets references to them, and the driver no more."""

    def references(self, most: int = BUCKET_BYTES, *, adapter: bool = True) -> Iterator[Any]:
        """To one `Bucket` after the other, each put into the object store by rank 0 when it is asked for."""
        stream = next(_STREAMS)
        while (reference := self._ask("put_bucket", stream, most, adapter)) is not None:
            yield reference

    def adapter_files(self) -> dict[str, bytes]:
        files: dict[str, bytes] = self._ask("read_adapter")
        return files


def read_adapter(worker: Worker) -> dict[str, bytes]:
    """The files of an adapter, by name, from rank 0: they are small."""
    return adapter_files(partial(write_adapter_files, worker))


class RayBackend(RankedBackend):
    """A `Backend` whose workers are actors."""

    def get_weights(self) -> TrainFuture[Weights]:
        return ImmediateTrainFuture(Weights(None, self.version, RayWeights(self)))


def create_ray_backend(ranks: RayRanks, build: Build, *, time_limit: float | None = None) -> QueuedBackend:
    """A backend whose workers are actors and whose calls are futures that are not done yet.

    `create_ray_backend(RayRanks(2), partial(fsdp.build_worker, load, {}, Settings(lr=1e-4)))`.
    """
    # Several calls of the ranks can be one call of the backend, as in `save`.
    limit = 4 * ranks.call_limit if time_limit is None else time_limit
    return QueuedBackend(RayBackend(ranks, build), time_limit=limit)
