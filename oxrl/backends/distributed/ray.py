"""The ranks of a backend as Ray actors: the same workers in one process group, with the driver outside of it.

`RayRanks` does for the driver what `Ranks` does for rank 0: one call on all ranks, merged replies, and an error that
names the rank that failed first. Every wait has a time limit. A lost rank is not replaced: its shard is gone, so the
run resumes from its last checkpoint.
"""

from __future__ import annotations

import logging
import os
import pickle
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
    LostRankError,
    RankError,
    Reply,
    WorkerHost,
    first_cause,
    first_line,
    is_lost_peer,
    merge_errors,
    portable,
)
from oxrl.backends.distributed.rpc import Worker, write_adapter_files
from oxrl.backends.local import NonFiniteError
from oxrl.machine.processes import LOOPBACK_INTERFACE
from oxrl.machine.ray_cluster import Bundles, Process, end_actor, import_ray, reserve
from oxrl.types import ImmediateTrainFuture, TrainFuture, Weights
from oxrl.weights.broadcast import listening_store
from oxrl.weights.buckets import BUCKET_BYTES, Bucket, in_buckets
from oxrl.weights.checkpoint_names import adapter_files, plain_weights

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
CALL_LIMIT = 3600.0  # seconds that one call may take on all ranks, including loading a model
_STREAMS = count(1)
PEER_ERROR_SECONDS = 5.0  # to wait for a rank's own error after another reported a lost connection to it


class RayRanks:
    """`RayRanks(2)`: actors of the Ray cluster that this process is connected to, each in its own bundle.

    `time_limit` bounds a collective among the ranks, and the time between the first and the last reply; `call_limit`
    bounds a call. `bundles` that are passed in are not freed here; with `share` below 1 an engine can use the rest of
    each.
    """

    def __init__(
        self,
        world: int,
        *,
        bundles: Bundles | None = None,
        share: float = 1.0,
        time_limit: float = TIME_LIMIT,
        call_limit: float = CALL_LIMIT,
    ) -> None:
        if world < 1 or (bundles is not None and len(bundles) < world):
            raise ValueError(f"{world} ranks do not fit into {len(bundles) if bundles is not None else 'any'} bundles")
        ray = import_ray()
        self.world, self.time_limit, self.call_limit = world, time_limit, call_limit
        self.bundles = bundles or reserve(world)
        self._owns_bundles = bundles is None
        self._started = 0
        self._broken: str | None = None
        self._lock = threading.Lock()  # two calls that reach two ranks in different orders would deadlock
        actor = ray.remote(max_restarts=0, max_task_retries=0)(RankActor)
        self._actors = [actor.options(**self.bundles.options(rank, share)).remote(rank) for rank in range(world)]
        self.processes: list[Process | None] = [None] * world
        try:
            hosts = self._gather("start", [actor.host.remote() for actor in self._actors])
            host = hosts[0] if len(set(hosts)) > 1 else LOOPBACK
            (port,) = self._gather("listen", [self._actors[0].listen.remote(host, time_limit)])
            joining = [actor.join.remote(world, host, port, time_limit) for actor in self._actors]
            self.processes = self._gather("join", joining)
        except BaseException:
            self.stop()
            raise

    def start(self, build: Build) -> int:
        """Create a worker on every rank; return its number, for calls."""
        self._started += 1
        self.call(self._started, "start", build)
        return self._started

    def call(self, target: int, call: str, *arguments: Any) -> list[Any]:
        """Return the result of each rank, rank 0 first."""
        command = self._put(Command(target, call, arguments))
        return self._call_each(call, [command] * self.world)

    def call_with_shares(self, target: int, call: str, shares: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Make the same call with different arguments on each rank; return the result of each."""
        return self._call_each(call, [self._put(Command(target, call, arguments)) for arguments in shares])

    def release(self, target: int) -> None:
        if self._broken is None:  # else only the actors are left to free
            self.call(target, "release")

    def stop(self) -> None:
        """End the actors, and free their bundles if they were reserved here."""
        self._broken = self._broken or "the ranks were stopped"
        for actor, process in zip(self._actors, self.processes, strict=True):
            end_actor(actor, process)
        if self._owns_bundles:
            self.bundles.free()

    def _put(self, command: Command) -> Any:
        try:
            return import_ray().put(command)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{command.call} has an argument that cannot be pickled ({first_line(error)}): use module-level "
                "functions instead of lambdas and local functions"
            ) from error

    def _call_each(self, call: str, commands: Sequence[Any]) -> list[Any]:
        with self._lock:
            if self._broken is not None:
                raise RankError(f"{call} cannot run after a failure: {self._broken}")
            return self._gather(
                call, [actor.perform.remote(command) for actor, command in zip(self._actors, commands, strict=True)]
            )

    def _gather(self, call: str, references: Sequence[Any]) -> list[Any]:
        """Return the values of all ranks; raise the first cause of a failure as soon as it is known."""
        started = time.monotonic()
        replies = self._replies(call, references)
        missing = [rank for rank in range(len(references)) if rank not in replies]
        failed = [(rank, reply.error) for rank, reply in sorted(replies.items()) if reply.error is not None]
        if not failed and not missing:
            return [replies[rank].value for rank in range(len(references))]
        seconds = time.monotonic() - started
        no_reply = f"no reply from rank {', '.join(map(str, missing))} within {seconds:.0f} s, which died or hangs"
        if not failed:
            error: Exception = LostRankError(f"{call}: {no_reply}")
        else:
            lost = missing and all(is_lost_peer(each) for _, each in failed)
            error = merge_errors(call, failed, f"; {no_reply}" if lost else "")
        if isinstance(error, RankError):
            self._broken = str(error)
        raise error from (first_cause(failed)[1] if failed else None)

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
            until = min(until, time.monotonic() + self._seconds_to_wait(replies[rank].error))
        return replies

    def _seconds_to_wait(self, error: Exception | None) -> float:
        """Return how long to wait for the other ranks after one has replied."""
        if error is None or isinstance(error, ValueError | NonFiniteError):  # usually on all ranks: all reply
            return self.time_limit
        return PEER_ERROR_SECONDS if is_lost_peer(error) else 0.0


def _reply(call: str, reference: Any) -> Reply:
    from ray.exceptions import RayError

    try:
        value = import_ray().get(reference)
    except RayError as error:
        logger.debug("an actor failed in %s", call, exc_info=True)
        return Reply(error=LostRankError(f"its actor failed ({type(error).__name__}): {first_line(error)}"))
    return value if isinstance(value, Reply) else Reply(value)


class RankActor:
    """One rank, inside its actor."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._host = WorkerHost(rank, {"put_bucket": self._put_bucket, "read_adapter": read_adapter})
        self._streams: dict[int, Iterator[Bucket]] = {}
        self._store: Any = None  # of rank 0

    def host(self) -> str:
        """Return the address at which the other machines of the cluster reach this one."""
        from ray.util import get_node_ip_address

        address: str = get_node_ip_address()
        return address

    def listen(self, host: str, time_limit: float) -> int:
        """Open the store of the process group, on rank 0; return its port."""
        self._store = listening_store(host, time_limit)
        return int(self._store.port)

    def join(self, world: int, host: str, port: int, time_limit: float) -> Reply:
        """Set the environment as torchrun does, and join the process group."""
        import torch
        import torch.distributed as dist

        os.environ |= {
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
            "RANK": str(self.rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": "0",  # Ray makes only its own device visible to an actor
        }
        if host == LOOPBACK:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", LOOPBACK_INTERFACE)
        on_gpu, limit = torch.cuda.is_available(), timedelta(seconds=time_limit)
        if on_gpu:
            torch.cuda.set_device(0)
        untyped: Any = dist  # mypy finds TCPStore in it or not, depending on the import order
        try:
            store = self._store or untyped.TCPStore(host, port, is_master=False, timeout=limit)
            backend = "nccl" if on_gpu else "gloo"
            dist.init_process_group(backend, timeout=limit, store=store, rank=self.rank, world_size=world)
        except RuntimeError as error:
            return Reply(error=portable(error))
        return Reply(Process.current())

    def perform(self, command: Command) -> Reply:
        return self._host.perform(command)

    def _put_bucket(self, worker: Worker, stream: int, max_bytes: int, adapter: bool) -> Any:
        """Return a reference to the next bucket of this stream on rank 0; None at the end, and on other ranks."""
        if stream not in self._streams:
            weights = plain_weights(worker.module, worker.full, adapter=adapter)
            self._streams = {stream: in_buckets(weights, max_bytes, keep=self.rank == 0)}
        bucket = next(self._streams[stream], None)
        if bucket is None:
            del self._streams[stream]
            return None
        return import_ray().put(bucket) if self.rank == 0 else None


class RayWeights(RankedWeights):
    """The weights of the actors at one version; engines get references to them, which bypass the driver."""

    def references(self, max_bytes: int = BUCKET_BYTES, *, adapter: bool = True) -> Iterator[Any]:
        """Yield references to one `Bucket` after the other; rank 0 puts each into the object store on demand."""
        stream = next(_STREAMS)
        while (reference := self._call("put_bucket", stream, max_bytes, adapter)) is not None:
            yield reference

    def adapter_files(self) -> dict[str, bytes]:
        files: dict[str, bytes] = self._call("read_adapter")
        return files


def read_adapter(worker: Worker) -> dict[str, bytes]:
    """Return the files of the adapter by name, on rank 0."""
    return adapter_files(partial(write_adapter_files, worker))


class RayBackend(RankedBackend):
    """A `Backend` whose workers are actors."""

    def get_weights(self) -> TrainFuture[Weights]:
        return ImmediateTrainFuture(Weights(None, self.version, RayWeights(self)))


def create_ray_backend(ranks: RayRanks, build: Build, *, time_limit: float | None = None) -> QueuedBackend:
    """Create a backend whose workers are actors and whose calls return futures that are not done yet.

    `create_ray_backend(RayRanks(2), partial(fsdp.build_worker, load, {}, Settings(lr=1e-4)))`.
    """
    # One call of the backend can be several calls of the ranks, as in `save`.
    limit = 4 * ranks.call_limit if time_limit is None else time_limit
    return QueuedBackend(RayBackend(ranks, build), time_limit=limit)
