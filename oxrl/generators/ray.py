"""vLLM replicas as Ray actors, as one generator: requests go to the replica with the lowest load, weights to all.

Weights are passed as references to buckets in Ray's object store: their holder puts a bucket there, the driver forwards
its reference, every replica reads it; at most a few buckets are in flight. A replica that died or hangs is replaced,
gets the current weights and is verified; its requests are then retried. Tensor parallelism, sleep and replicas on
several machines are written for GPUs and have not been run on any.
"""

from __future__ import annotations

import collections.abc
import logging
import queue
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import anyio

from oxrl.concurrency import in_thread, task_group
from oxrl.data.media import with_bytes
from oxrl.generators.connection import EngineError
from oxrl.generators.engines import EngineOutput, EngineRequest, Facts, MediaPrompt
from oxrl.generators.pool import HTTPGenerator
from oxrl.generators.probe import Probe, StaleEngineError
from oxrl.machine.ray_cluster import Bundles, Process, end_actor, import_ray, reserve
from oxrl.types import Weights, WeightSource
from oxrl.weights.buckets import Bucket, in_buckets
from oxrl.weights.checkpoint_names import (
    StaleWeightsError,
    adapter_files,
    plain_weights,
    read_weights,
    shm_dir,
    source_of,
    write_tensors,
)

logger = logging.getLogger(__name__)

_HEALTH_LIMIT = 10.0
_MAX_RESTARTS = 3  # of one replica, without a completion in between


class ReplicaLostError(EngineError):
    """A replica died, or did not respond in time; the message begins with its name."""


class ReferencedWeights(WeightSource, Protocol):
    """Weights that their holder puts into the object store, so that they do not pass through the driver."""

    def references(self, *, adapter: bool = True) -> Iterator[Any]:
        """Yield a reference to each `Bucket`; an adapter is merged, or excluded."""
        ...

    def adapter_files(self) -> dict[str, bytes]: ...


class RayGenerator(HTTPGenerator):
    """`await ray_generator(folder, tokenizer, replicas=2, dtype="float32")`: a `Generator` over actors.

    `update_weights` returns once every replica is verified to have the new version. `sleep` frees the devices for a
    trainer that shares them; the next call wakes the replicas.
    """

    engines: list[RayReplica]  # type: ignore[assignment]
    _recovers_on_failure = True  # no task watches the actors

    def __init__(
        self, replicas: Sequence[RayReplica], tokenizer: Any, *, own_bundles: Bundles | None, **rest: Any
    ) -> None:
        super().__init__(replicas, tokenizer, **rest)
        self._own_bundles = own_bundles
        self._current: Weights | None = None
        self._new_weights = threading.Event()  # set when the next weights arrive
        for replica in replicas:
            replica.refresh = partial(self._refresh, replica)

    async def update_weights(self, weights: Weights) -> None:
        await self.wake_up()
        self._current = weights
        self._new_weights.set()
        self._new_weights = threading.Event()
        probe = await self._probe(weights)
        lost = await self._send_weights({replica: replica.engine for replica in self.engines}, weights, probe)
        for replica, engine in lost.items():
            await replica.replaced(engine)
        self._failed.clear()
        self.gap = max(result.gap for result in self._probe_results.values())
        self._version = weights.version

    async def _probe(self, weights: Weights) -> Probe:
        return await in_thread(partial(Probe.of, source_of(weights), self._tolerance, await self._media_probed()))

    async def _send_weights(self, engines: Engines, weights: Weights, probe: Probe) -> Engines:
        """Send weights to these engines concurrently and verify them; return those that were lost meanwhile.

        Where only an adapter is sent, an engine gets its base first, unless it has it.
        """
        source, lost = source_of(weights), Engines()
        adapter_only = source.adapted and bool(self.engines[0].lora)
        full = {replica: engine for replica, engine in engines.items() if not (adapter_only and engine.has_base)}
        if full:
            with closing(_references(weights, source, adapter=not adapter_only)) as references:
                await _stream(full, references, weights.version, lost)
            for engine in full.values():
                engine.has_base = adapter_only
        if adapter_only:
            files = await in_thread(partial(_adapter_files, source))
            await _call_engines(engines, lost, "take_adapter", files, weights.version)
        async with task_group() as tasks:
            for replica in engines.keys() - lost.keys():
                tasks.start_soon(self._verify_replica, replica, engines[replica], probe, weights.version, lost)
        return lost

    async def _verify_replica(
        self, replica: RayReplica, engine: EngineHandle, probe: Probe, version: int, lost: Engines
    ) -> None:
        try:
            reported = await engine.call("version", limit=replica.time_limit)
            logprobs = await engine.call("prompt_logprobs", probe.tokens, probe.media, limit=replica.time_limit)
        except ReplicaLostError:
            lost[replica] = engine
            return
        if reported != version:
            raise StaleEngineError(f"{replica.name} reports version {reported} of the weights, expected {version}")
        index = self.engines.index(replica)
        self._probe_results[index] = probe.check(replica.name, logprobs, version, self._probe_results.get(index))

    async def _refresh(self, replica: RayReplica, engine: EngineHandle) -> None:
        """Send the current weights to a replacement before it gets requests."""
        self._probe_results.pop(self.engines.index(replica), None)
        sent: Weights | None = None
        while self._current is not None and sent is not self._current:
            sent, arrived = self._current, self._new_weights
            try:
                probe = await self._probe(sent)
            except StaleWeightsError:  # the trainer no longer has the weights of the others, and sends its next soon
                if not await in_thread(partial(arrived.wait, replica.time_limit)):
                    raise EngineError(f"no weights for {replica.name} within {replica.time_limit:g} s") from None
                continue
            try:
                lost = await self._send_weights({replica: engine}, sent, probe)
            except StaleWeightsError as error:
                raise ReplicaLostError(f"{replica.name} has only a part of its weights: {error}") from error
            if lost:
                raise ReplicaLostError(f"{replica.name} was lost again while it received its weights")

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            async with task_group() as tasks:
                for replica in self.engines:
                    tasks.start_soon(replica.close)
            if self._own_bundles is not None:
                await in_thread(self._own_bundles.free)


async def ray_generator(
    model: str | Path,
    tokenizer: Any,
    *,
    replicas: int = 1,
    tensor_parallel_size: int = 1,
    bundles: Bundles | None = None,
    share: float = 1.0,
    lora: int = 0,
    time_limit: float = 600.0,
    start_limit: float = 600.0,
    engine_options: dict[str, Any] | None = None,
    **options: Any,
) -> RayGenerator:
    """Start replicas on the Ray cluster that this process is connected to, and wait until all are ready.

    `bundles` that are passed (the trainer's, with a `share` less than 1 for each, if both are colocated) are not freed
    by `close`. `engine_options` go to vLLM, `options` to the generator (`end_token_ids`, `tolerance`, ...).
    """
    if replicas < 1 or tensor_parallel_size < 1:
        raise ValueError("replicas and tensor_parallel_size must be at least 1")
    if bundles is not None and (tensor_parallel_size > 1 or len(bundles) < replicas):
        raise ValueError(
            f"{replicas} replicas of {tensor_parallel_size} devices do not fit {len(bundles)} bundles of one device: "
            "leave bundles out, so that the replicas get separate ones"
        )
    given = dict(engine_options or {})
    if tensor_parallel_size > 1:
        given = {"tensor_parallel_size": tensor_parallel_size, "distributed_executor_backend": "mp", **given}
    own = await in_thread(partial(reserve, replicas, gpus_each=tensor_parallel_size)) if bundles is None else None
    used = own or bundles
    assert used is not None
    actor = import_ray().remote(max_restarts=0, max_task_retries=0)(EngineActor)
    created: list[RayReplica] = []
    for index in range(replicas):
        start = partial(
            actor.options(**used.options(index, share)).remote, str(model), tokenizer, lora, given, time_limit
        )
        created.append(
            RayReplica(f"vLLM replica {index}", start, lora=lora, time_limit=time_limit, start_limit=start_limit)
        )
    generator = RayGenerator(created, tokenizer, own_bundles=own, **options)
    try:
        async with task_group() as tasks:
            for replica in created:
                tasks.start_soon(replica.facts)
    except BaseException:
        await generator.close()
        raise
    return generator


class RayReplica:
    """An `InferenceEngine` whose actor is replaced when it is lost."""

    def __init__(
        self, name: str, start: Callable[[], Any], *, lora: int = 0, time_limit: float, start_limit: float
    ) -> None:
        self.name, self.lora = name, lora
        self.time_limit, self.start_limit = time_limit, start_limit
        self.recoveries = 0
        self.refresh: Callable[[EngineHandle], Awaitable[None]] = _no_refresh
        self._start = start
        self.engine = EngineHandle(name, start())
        self._facts: Facts | None = None
        self._replacing: anyio.Event | None = None
        self.restarts = 0  # in the whole run
        self._restarts = 0  # since the last completion

    async def facts(self) -> Facts:
        """Wait until the engine is ready; the facts of one replica do not change."""
        if self._facts is None:
            self._facts = await self.engine.ready(self.start_limit)
        return self._facts

    async def complete(self, request: EngineRequest) -> EngineOutput:
        if request.media is not None:  # the actor's machine may not have the files
            media = await in_thread(partial(_with_bytes, request.media))
            request = request._replace(media=media)
        output: EngineOutput = await self.engine.call("complete", request, limit=self.time_limit)
        self._restarts = 0
        return output

    async def prompt_logprobs(self, tokens: Sequence[int], media: MediaPrompt | None = None) -> tuple[float, ...]:
        call = "prompt_logprobs", tuple(tokens), media
        logprobs: tuple[float, ...] = await self.engine.call(*call, limit=self.time_limit)
        return logprobs

    async def abort(self) -> None:
        try:
            await self.engine.call("abort", limit=_HEALTH_LIMIT)
        except ReplicaLostError as error:  # its requests end with it, and are not retried
            logger.warning("%s", error)
            self.engine.kill()

    async def pause(self) -> None:
        """Do nothing: an engine loads weights between two steps."""

    async def resume(self) -> None:
        """Do nothing: `pause` does nothing."""

    async def sleep(self) -> None:
        await self.engine.call("sleep", limit=self.time_limit)

    async def wake_up(self) -> None:
        await self.engine.call("wake_up", limit=self.time_limit)

    async def check_health(self) -> None:
        await self.engine.call("version", limit=_HEALTH_LIMIT)

    async def update_weights_from_checkpoint(self, checkpoint_path: str, version: int | None = None) -> dict[str, Any]:
        """Load the weights from a folder that the replica's machine can read."""
        new = await self.engine.call("version", limit=_HEALTH_LIMIT) + 1 if version is None else version
        await self.engine.call("refresh", checkpoint_path, new, limit=self.time_limit)
        return {"engine": self.name, "version": await self.engine.call("version", limit=_HEALTH_LIMIT)}

    async def recovered(self, error: EngineError) -> None:  # noqa: ARG002 - the interface's
        """Replace the actor, once for all callers."""
        await self.replaced(self.engine)

    async def replaced(self, lost: EngineHandle) -> None:
        """Wait until this actor is replaced by one that has the current weights."""
        while self.engine is lost:
            if self._replacing is not None:
                await self._replacing.wait()
                continue
            try:
                await self._replace()
            except ReplicaLostError as error:  # retried, up to `_MAX_RESTARTS`
                logger.warning("%s", error)

    async def _replace(self) -> None:
        self._restarts += 1
        self.restarts += 1
        if self._restarts > _MAX_RESTARTS:
            raise EngineError(f"{self.name} was lost {self._restarts} times in a row")
        logger.warning("%s: replacing its actor (restart %d)", self.name, self.restarts)
        lost, done = self.engine, anyio.Event()
        self._replacing = done
        fresh: EngineHandle | None = None
        try:
            await lost.end()
            fresh = EngineHandle(self.name, self._start())
            await fresh.ready(self.start_limit)
            await self.refresh(fresh)
            self.engine = fresh
            self.recoveries += 1
        finally:
            if self.engine is lost and fresh is not None:
                fresh.kill()
            self._replacing = None
            done.set()

    async def close(self) -> None:
        await self.engine.end(patience=30.0)


class EngineHandle:
    """An actor with an engine, callable from any event loop; every call has a time limit."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self._actor = name, actor
        self.process: Process | None = None  # once it is ready
        self.has_base = False  # of the adapter that is sent alone

    async def ready(self, limit: float) -> Facts:
        facts: Facts = await self.call("facts", limit=limit)
        self.process = await self.call("process", limit=limit)
        return facts

    async def call(self, method: str, *arguments: Any, limit: float) -> Any:
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        ray = import_ray()
        reference = getattr(self._actor, method).remote(*arguments)
        done = False
        try:
            result = await in_thread(partial(ray.get, reference, timeout=limit))
            done = True
        except GetTimeoutError as error:
            raise ReplicaLostError(f"{self.name}: {method} did not end within {limit:g} s") from error
        except RayActorError as error:
            done = True
            raise ReplicaLostError(f"{self.name} died in {method} ({type(error).__name__})") from error
        except RayTaskError as error:
            done = True
            raise _remote_error(self.name, error) from error
        finally:
            if not done:  # no caller waits for it any more
                ray.cancel(reference)
        return result

    def kill(self) -> None:
        end_actor(self._actor, self.process)

    async def end(self, patience: float = 0.0) -> None:
        if patience:
            try:
                await self.call("close", limit=patience)
            except EngineError as error:
                logger.debug("%s", error)
        self.kill()


def _remote_error(name: str, error: Any) -> Exception:
    cause = error.cause
    if isinstance(cause, EngineError) and not isinstance(cause, ReplicaLostError):
        return ReplicaLostError(f"{name}: {cause}")
    return cause if isinstance(cause, Exception) else EngineError(f"{name}: {error}")


class EngineActor:
    """An engine inside of its actor; its methods are coroutines, so that many requests run concurrently."""

    def __init__(self, model: str, tokenizer: Any, lora: int, options: dict[str, Any], time_limit: float) -> None:
        from oxrl.generators.vllm.engine import VLLMRolloutEngine

        self.engine = VLLMRolloutEngine(model, tokenizer, lora=lora, time_limit=time_limit, **options)
        self._single_process = int(options.get("tensor_parallel_size", 1)) == 1
        self._time_limit = time_limit
        self._buckets: queue.Queue[Bucket | None] = queue.Queue(1)
        self._taking = False

    async def facts(self) -> Facts:
        return self.engine.facts

    async def version(self) -> int:
        return self.engine.version

    async def process(self) -> Process:
        return Process.current()

    async def complete(self, request: EngineRequest) -> EngineOutput:
        return await self.engine.complete(request)

    async def prompt_logprobs(self, tokens: Sequence[int], media: MediaPrompt | None = None) -> tuple[float, ...]:
        return await self.engine.prompt_logprobs(tokens, media)

    async def abort(self) -> None:
        await self.engine.abort()

    async def begin(self) -> None:
        self._buckets = queue.Queue(1)
        self._taking = True

    async def feed(self, bucket: Bucket | None) -> None:
        """Queue the next bucket; wait until the one before is being loaded."""
        await in_thread(partial(self._put, self._buckets, bucket))

    def _put(self, buckets: queue.Queue[Bucket | None], bucket: Bucket | None) -> None:
        until = time.monotonic() + self._time_limit
        while self._taking:  # `take` raises the reason why it ended
            try:
                buckets.put(bucket, timeout=0.5)
                return
            except queue.Full:
                if time.monotonic() > until:
                    raise EngineError(f"a bucket of weights was not loaded within {self._time_limit:g} s") from None

    async def take(self, version: int) -> None:
        """Load all buckets that are fed, until the final None."""
        try:
            await self._take(self._arriving(self._buckets), version)
        finally:
            self._taking = False

    async def _take(self, arriving: Iterator[tuple[str, Any]], version: int) -> None:
        if self._single_process:
            await self.engine.take_weights(arriving, version)
            return
        # Workers in separate processes read files.
        with tempfile.TemporaryDirectory(prefix="oxrl-weights-", dir=shm_dir()) as folder:
            await in_thread(partial(write_tensors, arriving, Path(folder)))
            await self.engine.refresh_model(folder, version)

    def _arriving(self, buckets: queue.Queue[Bucket | None]) -> Iterator[tuple[str, Any]]:
        while True:
            try:
                bucket = buckets.get(timeout=self._time_limit)
            except queue.Empty:
                raise EngineError(f"no more weights received within {self._time_limit:g} s") from None
            if bucket is None:
                return
            yield from bucket.tensors()

    async def take_adapter(self, files: dict[str, bytes], version: int) -> None:
        with tempfile.TemporaryDirectory(prefix="oxrl-adapter-", dir=shm_dir()) as name:
            for file, content in files.items():
                (Path(name) / file).write_bytes(content)
            await self.engine.take_adapter(Path(name), version)

    async def refresh(self, folder: str, version: int) -> None:
        await self.engine.refresh_model(folder, version)

    async def sleep(self) -> None:
        await self.engine.sleep()

    async def wake_up(self) -> None:
        await self.engine.wake_up()

    async def close(self) -> None:
        await self.engine.close()


Engines: TypeAlias = dict[RayReplica, EngineHandle]


async def _stream(engines: Engines, references: Iterator[Any], version: int, lost: Engines) -> None:
    """Send one bucket after the other to these engines while they load them."""
    for engine in engines.values():
        engine.has_base = False
    await _call_engines(engines, lost, "begin")
    async with task_group() as tasks:
        tasks.start_soon(_call_engines, engines, lost, "take", version)
        while (reference := await in_thread(partial(next, references, None))) is not None:
            await _call_engines(engines, lost, "feed", reference)
        await _call_engines(engines, lost, "feed", None)


async def _call_engines(engines: Engines, lost: Engines, *call: Any) -> None:
    """Make the same call on all engines but the lost ones; add those that fail to `lost`."""

    async def call_one(replica: RayReplica, engine: EngineHandle) -> None:
        try:
            await engine.call(*call, limit=replica.time_limit)
        except ReplicaLostError as error:
            logger.warning("%s", error)
            lost[replica] = engine

    async with task_group() as tasks:
        for replica in engines.keys() - lost.keys():
            tasks.start_soon(call_one, replica, engines[replica])


def _references(
    weights: Weights, source: WeightSource | ReferencedWeights, *, adapter: bool
) -> collections.abc.Generator[Any, None, None]:
    """Yield references to buckets: put there by the holder of the weights if it can, else by this process."""
    if hasattr(source, "references"):
        yield from source.references(adapter=adapter)
        return
    ray = import_ray()
    if weights.module is not None:
        yield from map(ray.put, in_buckets(plain_weights(weights.module, adapter=adapter)))
        return
    with tempfile.TemporaryDirectory(prefix="oxrl-weights-", dir=shm_dir()) as folder:
        (source.write if adapter else source.write_base)(Path(folder))
        yield from map(ray.put, in_buckets(read_weights(Path(folder))))


def _adapter_files(source: WeightSource | ReferencedWeights) -> dict[str, bytes]:
    if hasattr(source, "adapter_files"):
        files: dict[str, bytes] = source.adapter_files()
        return files
    return adapter_files(source.write_adapter)


def _with_bytes(prompt: MediaPrompt) -> MediaPrompt:
    return prompt._replace(media=tuple(map(with_bytes, prompt.media)))


async def _no_refresh(_: EngineHandle) -> None:
    """For a replica that keeps the weights it was started with."""
