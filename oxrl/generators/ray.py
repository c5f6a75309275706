"""vLLM replicas as Ray actors, as one generator: requests go to the one with least to do, weights to all of them.

Weights travel as references to buckets in Ray's object store: whoever has them puts a bucket there, the driver passes
its reference on, every replica reads it; at most a few buckets are under way. A replica that died or hangs is replaced,
gets the weights that all have, proves them, and is asked again what was lost. Tensor parallelism, sleep and replicas on
several machines are written for GPUs and were not run on any.
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
from oxrl.generators.connection import EngineError
from oxrl.generators.pool import EngineOutput, EngineRequest, Facts, HTTPGenerator
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
_MOST_RESTARTS = 3  # of one replica, without an answer in between


class ReplicaLostError(EngineError):
    """A replica that died, or did not answer in time; the message begins with its name."""


class ReferencedWeights(WeightSource, Protocol):
    """Weights that their holder puts into the object store itself, so that they do not pass through the driver."""

    def references(self, *, adapter: bool = True) -> Iterator[Any]:
        """To one `Bucket` after the other; an adapter is merged, or left out."""
        ...

    def adapter_files(self) -> dict[str, bytes]: ...


class RayGenerator(HTTPGenerator):
    """`await ray_generator(folder, tokenizer, replicas=2, dtype="float32")`: a `Generator` over actors.

    `update_weights` answers once every replica has proved that it speaks with the new version. `sleep` gives the
    devices to a trainer that shares them; whoever asks for something next wakes the replicas.
    """

    engines: list[RayReplica]  # type: ignore[assignment]

    def __init__(
        self, replicas: Sequence[RayReplica], tokenizer: Any, *, own_places: Bundles | None, **rest: Any
    ) -> None:
        super().__init__(replicas, tokenizer, **rest)
        self._own_places = own_places
        self._current: Weights | None = None
        self._news = threading.Event()  # set when other weights come
        for replica in replicas:
            replica.refresh = partial(self._refresh, replica)

    async def update_weights(self, weights: Weights) -> None:
        await self.wake_up()
        self._current = weights
        self._news.set()
        self._news = threading.Event()
        probe = await self._probe(weights)
        lost = await self._give({replica: replica.engine for replica in self.engines}, weights, probe)
        for replica, engine in lost.items():
            await replica.replaced(engine)
        self.gap = max(heard.gap for heard in self._heard.values())
        self._version = weights.version

    async def _probe(self, weights: Weights) -> Probe:
        return await in_thread(partial(Probe.of, source_of(weights), self._tolerance))

    async def _give(self, engines: Engines, weights: Weights, probe: Probe) -> Engines:
        """Weights to all of these side by side, and their proof; returns those that were lost on the way.

        Where an adapter travels alone, an engine gets its base first, unless it has it.
        """
        source, lost = source_of(weights), Engines()
        alone = source.adapted and bool(self.engines[0].lora)
        whole = {replica: engine for replica, engine in engines.items() if not (alone and engine.has_base)}
        if whole:
            with closing(_references(weights, source, adapter=not alone)) as references:
                await _stream(whole, references, weights.version, lost)
            for engine in whole.values():
                engine.has_base = alone
        if alone:
            files = await in_thread(partial(_adapter_files, source))
            await _to_all(engines, lost, "take_adapter", files, weights.version)
        async with task_group() as tasks:
            for replica in engines.keys() - lost.keys():
                tasks.start_soon(self._prove, replica, engines[replica], probe, weights.version, lost)
        return lost

    async def _prove(
        self, replica: RayReplica, engine: EngineHandle, probe: Probe, version: int, lost: Engines
    ) -> None:
        try:
            told = await engine.ask("version", limit=replica.time_limit)
            said = await engine.ask("prompt_logprobs", probe.tokens, limit=replica.time_limit)
        except ReplicaLostError:
            lost[replica] = engine
            return
        if told != version:
            raise StaleEngineError(f"{replica.name} has version {told} of the weights, and was given {version}")
        place = self.engines.index(replica)
        self._heard[place] = probe.check(replica.name, said, version, self._heard.get(place))

    async def _refresh(self, replica: RayReplica, engine: EngineHandle) -> None:
        """What a replica that was started anew has to get before it is asked anything."""
        self._heard.pop(self.engines.index(replica), None)
        given: Weights | None = None
        while self._current is not None and given is not self._current:
            given, news = self._current, self._news
            try:
                probe = await self._probe(given)
            except (
                StaleWeightsError
            ):  # the trainer has no more what the others speak with, and hands over its next soon
                if not await in_thread(partial(news.wait, replica.time_limit)):
                    raise EngineError(f"no weights came for {replica.name} within {replica.time_limit:g} s") from None
                continue
            try:
                lost = await self._give({replica: engine}, given, probe)
            except StaleWeightsError as error:
                raise ReplicaLostError(f"{replica.name} has half of its weights: {error}") from error
            if lost:
                raise ReplicaLostError(f"{replica.name} was lost again while it got its weights")

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            async with task_group() as tasks:
                for replica in self.engines:
                    tasks.start_soon(replica.close)
            if self._own_places is not None:
                await in_thread(self._own_places.free)


async def ray_generator(
    model: str | Path,
    tokenizer: Any,
    *,
    replicas: int = 1,
    tensor_parallel_size: int = 1,
    places: Bundles | None = None,
    share: float = 1.0,
    lora: int = 0,
    time_limit: float = 600.0,
    start_limit: float = 600.0,
    engine_options: dict[str, Any] | None = None,
    **options: Any,
) -> RayGenerator:
    """Replicas on the Ray cluster that this process is connected to, each with its place, and all of them ready.

    `places` that are given (the trainer's, with a `share` less than 1 for each, when both are colocated) stay those of
    whoever gave them. `engine_options` go to vLLM, `options` to the generator (`end_token_ids`, `tolerance`, ...).
    """
    if replicas < 1 or tensor_parallel_size < 1:
        raise ValueError("there must be at least one replica, on at least one device")
    if places is not None and (tensor_parallel_size > 1 or len(places) < replicas):
        raise ValueError(
            f"{replicas} replicas of {tensor_parallel_size} devices do not fit {len(places)} places of one device: "
            "give them places of their own"
        )
    given = dict(engine_options or {})
    if tensor_parallel_size > 1:
        given = {"tensor_parallel_size": tensor_parallel_size, "distributed_executor_backend": "mp", **given}
    own = await in_thread(partial(reserve, replicas, gpus_each=tensor_parallel_size)) if places is None else None
    found = own or places
    assert found is not None
    actor = import_ray().remote(max_restarts=0, max_task_retries=0)(EngineActor)
    made: list[RayReplica] = []
    for index in range(replicas):
        start = partial(
            actor.options(**found.options(index, share)).remote, str(model), tokenizer, lora, given, time_limit
        )
        made.append(
            RayReplica(f"vLLM replica {index}", start, lora=lora, time_limit=time_limit, start_limit=start_limit)
        )
    generator = RayGenerator(made, tokenizer, own_places=own, **options)
    try:
        async with task_group() as tasks:
            for replica in made:
                tasks.start_soon(replica.facts)
    except BaseException:
        await generator.close()
        raise
    return generator


class RayReplica:
    """One place among the engines; the actor that fills it can change. An `InferenceEngine`."""

    def __init__(
        self, name: str, start: Callable[[], Any], *, lora: int = 0, time_limit: float, start_limit: float
    ) -> None:
        self.name, self.lora = name, lora
        self.time_limit, self.start_limit = time_limit, start_limit
        self.recoveries = 0
        self.refresh: Callable[[EngineHandle], Awaitable[None]] = _nothing
        self._start = start
        self.engine = EngineHandle(name, start())
        self._facts: Facts | None = None
        self._replacing: anyio.Event | None = None
        self.restarts = 0  # in the whole run
        self._restarts = self._aborts = 0
        self._waiting: set[anyio.CancelScope] = set()

    async def facts(self) -> Facts:
        """Answers when the engine is ready; those of one replica do not change."""
        if self._facts is None:
            self._facts = await self.engine.ready(self.start_limit)
        return self._facts

    async def complete(self, ask: EngineRequest) -> EngineOutput:
        """What is lost with its engine is asked again of the one that takes its place."""
        aborts = self._aborts
        while self._aborts == aborts:
            engine = self.engine
            try:
                said: EngineOutput = await engine.ask("complete", ask, limit=self.time_limit)
            except ReplicaLostError as error:
                logger.warning("%s; another one takes its place", error)
            else:
                self._restarts = 0
                return said
            with anyio.CancelScope() as scope:
                self._waiting.add(scope)
                try:
                    if self._aborts == aborts:
                        await self.replaced(engine)
                finally:
                    self._waiting.discard(scope)
        return EngineOutput((), (), "abort")

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        said: tuple[float, ...] = await self.engine.ask("prompt_logprobs", tuple(tokens), limit=self.time_limit)
        return said

    async def abort(self) -> None:
        self._aborts += 1
        for scope in self._waiting:
            scope.cancel()
        try:
            await self.engine.ask("abort", limit=_HEALTH_LIMIT)
        except ReplicaLostError as error:  # what is under way there ends with it, and is not asked again
            logger.warning("%s", error)
            self.engine.kill()

    async def pause(self) -> None:
        """Nothing to do: an engine takes weights between two of its steps."""

    async def resume(self) -> None:
        """Nothing was held."""

    async def sleep(self) -> None:
        await self.engine.ask("sleep", limit=self.time_limit)

    async def wake_up(self) -> None:
        await self.engine.ask("wake_up", limit=self.time_limit)

    async def check_health(self) -> None:
        await self.engine.ask("version", limit=_HEALTH_LIMIT)

    async def update_weights_from_checkpoint(self, checkpoint_path: str, version: int | None = None) -> dict[str, Any]:
        """From a folder that the replica's machine can read."""
        number = await self.engine.ask("version", limit=_HEALTH_LIMIT) + 1 if version is None else version
        await self.engine.ask("refresh", checkpoint_path, number, limit=self.time_limit)
        return {"engine": self.name, "version": await self.engine.ask("version", limit=_HEALTH_LIMIT)}

    async def recovered(self, error: EngineError) -> None:
        """Has another one take its place, whoever of several asks for it first."""
        logger.warning("%s; another one takes its place", error)
        await self.replaced(self.engine)

    async def replaced(self, lost: EngineHandle) -> None:
        """Answers when another engine is in its place and has the weights that all have."""
        while self.engine is lost:
            if self._replacing is not None:
                await self._replacing.wait()
                continue
            try:
                await self._replace()
            except ReplicaLostError as error:  # tried again; not for ever
                logger.warning("%s", error)

    async def _replace(self) -> None:
        self._restarts += 1
        self.restarts += 1
        if self._restarts > _MOST_RESTARTS:
            raise EngineError(f"{self.name} was lost {self._restarts} times in a row")
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
    """An actor with an engine, asked from any event loop; every answer has a time limit."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name, self._actor = name, actor
        self.process: Process | None = None  # once it is ready
        self.has_base = False  # of the adapter that travels alone

    async def ready(self, limit: float) -> Facts:
        facts: Facts = await self.ask("facts", limit=limit)
        self.process = await self.ask("process", limit=limit)
        return facts

    async def ask(self, method: str, *arguments: Any, limit: float) -> Any:
        from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

        ray = import_ray()
        reference = getattr(self._actor, method).remote(*arguments)
        answered = False
        try:
            answer = await in_thread(partial(ray.get, reference, timeout=limit))
            answered = True
        except GetTimeoutError as error:
            raise ReplicaLostError(f"{self.name}: {method} did not end within {limit:g} s") from error
        except RayActorError as error:
            answered = True
            raise ReplicaLostError(f"{self.name} died in {method} ({type(error).__name__})") from error
        except RayTaskError as error:
            answered = True
            raise _as_raised_there(self.name, error) from error
        finally:
            if not answered:  # nobody waits for it any more: what it draws would be in vain
                ray.cancel(reference)
        return answer

    def kill(self) -> None:
        end_actor(self._actor, self.process)

    async def end(self, patience: float = 0.0) -> None:
        if patience:
            try:
                await self.ask("close", limit=patience)
            except EngineError as error:
                logger.debug("%s", error)
        self.kill()


def _as_raised_there(name: str, error: Any) -> Exception:
    cause = error.cause
    if isinstance(cause, EngineError) and not isinstance(cause, ReplicaLostError):
        return ReplicaLostError(f"{name}: {cause}")
    return cause if isinstance(cause, Exception) else EngineError(f"{name}: {error}")


class EngineActor:
    """An engine inside of its actor; its methods are coroutines, so that many requests are under way at once."""

    def __init__(self, model: str, tokenizer: Any, lora: int, options: dict[str, Any], time_limit: float) -> None:
        from oxrl.generators.vllm.engine import VLLMRolloutEngine

        self.engine = VLLMRolloutEngine(model, tokenizer, lora=lora, time_limit=time_limit, **options)
        self._alone = int(options.get("tensor_parallel_size", 1)) == 1
        self._time_limit = time_limit
        self._buckets: queue.Queue[Bucket | None] = queue.Queue(1)
        self._taking = False

    async def facts(self) -> Facts:
        return self.engine.facts

    async def version(self) -> int:
        return self.engine.version

    async def process(self) -> Process:
        return Process.current()

    async def complete(self, ask: EngineRequest) -> EngineOutput:
        return await self.engine.complete(ask)

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        return await self.engine.prompt_logprobs(tokens)

    async def abort(self) -> None:
        await self.engine.abort()

    async def begin(self) -> None:
        self._buckets = queue.Queue(1)
        self._taking = True

    async def feed(self, bucket: Bucket | None) -> None:
        """The next bucket; waits until the one before is being taken."""
        await in_thread(partial(self._put, self._buckets, bucket))

    def _put(self, buckets: queue.Queue[Bucket | None], bucket: Bucket | None) -> None:
        until = time.monotonic() + self._time_limit
        while self._taking:  # why it ended, the one who takes tells
            try:
                buckets.put(bucket, timeout=0.5)
                return
            except queue.Full:
                if time.monotonic() > until:
                    raise EngineError(f"a bucket of weights was not taken within {self._time_limit:g} s") from None

    async def take(self, version: int) -> None:
        """All that is fed, to the end."""
        try:
            await self._take(self._arriving(self._buckets), version)
        finally:
            self._taking = False

    async def _take(self, arriving: Iterator[tuple[str, Any]], version: int) -> None:
        if self._alone:
            await self.engine.take_weights(arriving, version)
            return
        # Workers in processes of their own read files.
        with tempfile.TemporaryDirectory(prefix="oxrl-weights-", dir=shm_dir()) as folder:
            await in_thread(partial(write_tensors, arriving, Path(folder)))
            await self.engine.refresh_model(folder, version)

    def _arriving(self, buckets: queue.Queue[Bucket | None]) -> Iterator[tuple[str, Any]]:
        while True:
            try:
                bucket = buckets.get(timeout=self._time_limit)
            except queue.Empty:
                raise EngineError(f"no more weights came within {self._time_limit:g} s") from None
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
    """One bucket after the other to all of these, while they take them."""
    for engine in engines.values():
        engine.has_base = False
    await _to_all(engines, lost, "begin")
    async with task_group() as tasks:
        tasks.start_soon(_to_all, engines, lost, "take", version)
        while (reference := await in_thread(partial(next, references, None))) is not None:
            await _to_all(engines, lost, "feed", reference)
        await _to_all(engines, lost, "feed", None)


async def _to_all(engines: Engines, lost: Engines, *call: Any) -> None:
    """The same call on all but the lost, of which there may be more then."""

    async def to_one(replica: RayReplica, engine: EngineHandle) -> None:
        try:
            await engine.ask(*call, limit=replica.time_limit)
        except ReplicaLostError as error:
            logger.warning("%s", error)
            lost[replica] = engine

    async with task_group() as tasks:
        for replica in engines.keys() - lost.keys():
            tasks.start_soon(to_one, replica, engines[replica])


def _references(
    weights: Weights, source: WeightSource | ReferencedWeights, *, adapter: bool
) -> collections.abc.Generator[Any, None, None]:
    """By whoever has the weights, if it can; else from here, where they are or come to."""
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


async def _nothing(_: EngineHandle) -> None:
    """For a replica whose weights are those that it was started with."""
