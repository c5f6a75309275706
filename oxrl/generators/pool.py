"""A `Generator` over one or more engines with the same weights: routing, failover, weight sync and its verification.

Token ids go in and out, with the log-prob of each sampled token. After each sync every engine reports its version, and
its log-probs of a probe sequence are compared with the trainer's.
"""

from __future__ import annotations

import inspect
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import anyio
from anyio.lowlevel import RunVar

from oxrl.concurrency import in_thread, run_blocking, task_group
from oxrl.data.processor import MediaProcessor, processor_of
from oxrl.generators.connection import EngineError
from oxrl.generators.embedded.engine import check_sampling
from oxrl.generators.engines import (
    EngineOutput,
    Facts,
    InferenceEngine,
    Receiver,
    WeightLoader,
    as_engine_request,
    as_generation,
)
from oxrl.generators.http import SGLangEngine
from oxrl.generators.probe import Probe, ProbeResult
from oxrl.types import Generation, GenerationConfig, Request, Weights, WeightSource
from oxrl.weights.broadcast import TransferError, rendezvous
from oxrl.weights.checkpoint_names import shm_dir, source_of

logger = logging.getLogger(__name__)

_ABORT_LIMIT = 60.0
_ERROR_GRACE = 5.0  # seconds for an engine to report its own error after a failed broadcast
_MAX_ATTEMPTS = 8  # of one request, each on an engine that is healthy as far as is known
TRANSFERS = ("files", "gloo", "nccl")


async def sync_weights_to_engines(
    engines: Sequence[WeightLoader], checkpoint_path: str, version: int | None = None
) -> list[dict[str, Any]]:
    """Update all engines concurrently and return one result each, in order. The first error cancels the others.

    `version` is passed to engines whose `update_weights_from_checkpoint` takes one.
    """
    results: dict[int, dict[str, Any]] = {}

    async def update(index: int, engine: WeightLoader) -> None:
        load: Callable[..., Awaitable[dict[str, Any]]] = engine.update_weights_from_checkpoint
        versioned = version is not None and "version" in inspect.signature(load).parameters
        results[index] = await load(checkpoint_path, *([version] if versioned else []))

    async with task_group() as tasks:
        for index, engine in enumerate(engines):
            tasks.start_soon(update, index, engine)
    return [results[index] for index in range(len(engines))]


async def sync_by_files(source: WeightSource, engines: Sequence[WeightLoader], version: int, root: Path) -> None:
    """Write the weights to a new folder in `root`, update all engines from it, and remove it."""
    folder = Path(tempfile.mkdtemp(prefix=f"oxrl-weights-{version}-", dir=root))
    try:
        await in_thread(partial(source.write, folder))
        await sync_weights_to_engines(engines, str(folder), version)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


class WeightSync:
    """`WeightSync([engine])`: the part of a `Generator` that the online loop needs if `generate_fn` samples by itself.

    Engines have `update_weights_from_checkpoint(path)`, and nothing else is called. Weights are written to `folder`, by
    default in this machine's memory, and removed after the sync.
    """

    def __init__(self, engines: Sequence[WeightLoader] = (), folder: str | Path | None = None) -> None:
        self.engines, self.version = list(engines), 0
        self._folder = Path(folder) if folder is not None else shm_dir()

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:  # noqa: ARG002
        raise ValueError("these engines only load weights: sample from them in the generate_fn of RolloutConfig")

    async def abort(self) -> None:
        """Do nothing: no request is in flight."""

    async def update_weights(self, weights: Weights) -> None:
        if self.engines:
            await sync_by_files(source_of(weights), self.engines, weights.version, self._folder)
        self.version = weights.version

    async def close(self) -> None:
        """Do nothing: engines are closed by those that opened them."""


class HTTPGenerator:
    """`HTTPGenerator([VLLMEngine(url)], tokenizer)`: a `Generator` over one or more engines with the same weights.

    A request is sent to the engine with the lowest load; its result depends on its seed, not on the engine. If the
    engine fails, it is retried on another one, or on the same one after a restart (see `servers`). At most
    `concurrency` requests are in flight. New weights are written to a folder that the engines can read (`folder`, by
    default in this machine's memory) and removed after the sync, or, with `transfer` gloo or nccl, sent over the
    network within `time_limit`. Every engine is verified, to `tolerance` per log-prob. `end_token_ids` end a
    completion, in addition to the tokenizer's own.
    """

    _recovers_on_failure = False  # True: a failed request waits for its engine's recovery even if others are healthy

    def __init__(
        self,
        engines: Sequence[InferenceEngine],
        tokenizer: Any,
        *,
        end_token_ids: Sequence[int] = (),
        folder: str | Path | None = None,
        transfer: str = "files",
        time_limit: float = 600.0,
        tolerance: float | None = None,
        concurrency: int = 256,
    ) -> None:
        if not engines or concurrency < 1:
            raise ValueError("a generator over HTTP needs at least one engine, and concurrency of 1 or more")
        if transfer not in TRANSFERS:
            raise ValueError(f"transfer {transfer!r} does not exist: use one of {', '.join(TRANSFERS)}")
        for engine in engines if transfer != "files" else ():
            if not isinstance(engine, Receiver):
                raise ValueError(f"{engine.name} loads weights from files only: remove transfer: {transfer}")
        self._transfer, self._time_limit = transfer, time_limit
        self.engines, self.tokenizer = list(engines), tokenizer
        self.gap = 0.0  # the largest difference to the trainer's log-probs in the last sync
        self._end_token_ids = tuple(sorted({*end_token_ids, tokenizer.eos_token_id} - {None}))
        self._folder = Path(folder) if folder is not None else shm_dir()
        self._tolerance = tolerance
        self._processor = processor_of(tokenizer)
        self._version = 0
        self._facts: dict[int, Facts] = {}
        self._load = [0] * len(self.engines)
        self._probe_results: dict[int, ProbeResult] = {}
        self._failed: dict[int, int] = {}  # engine index to the number of recoveries it had when it failed
        self._waiting: set[anyio.CancelScope] = set()  # requests that wait for an engine to recover
        self._in_flight: set[object] = set()
        self._aborts = 0
        self._asleep = False
        self._concurrency = concurrency
        self._limiters: RunVar[anyio.CapacityLimiter] = RunVar(f"oxrl engines {id(self)}")

    @property
    def version(self) -> int:
        return self._version

    @property
    def restarts(self) -> int:
        """The number of engine restarts so far."""
        return sum(getattr(engine, "restarts", 0) for engine in self.engines)

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        """Return one generation per request, in order. Calls of several tasks share the engines."""
        check_sampling(sampling)
        await self.wake_up()
        await self._load_facts()
        generations: dict[int, Generation] = {}

        async def generate_one(index: int, request: Request) -> None:
            generations[index] = await self._generate_one(request, sampling)

        async with task_group() as tasks:
            for index, request in enumerate(requests):
                tasks.start_soon(generate_one, index, request)
        return [generations[index] for index in range(len(requests))]

    async def _generate_one(self, request: Request, sampling: GenerationConfig) -> Generation:
        token, aborts = object(), self._aborts
        self._in_flight.add(token)
        try:
            async with self._limiter():
                index, version, output = await self._complete(request, sampling, aborts)
        finally:
            self._in_flight.discard(token)
        name, allowed = self.engines[index].name, sampling.allowed_tokens
        return as_generation(name, request.partial, output, version, self._text, allowed)

    async def _complete(
        self, request: Request, sampling: GenerationConfig, aborts: int
    ) -> tuple[int, int, EngineOutput]:
        """Return the engine's index, the version of the weights and the output; no engine is used after `abort`."""
        for attempt in range(_MAX_ATTEMPTS):
            index = min(range(len(self.engines)), key=lambda index: (self._is_down(index), self._load[index]))
            version = self.version
            if self._aborts != aborts:
                break
            recoveries = self.engines[index].recoveries
            try:
                return index, version, await self._complete_on(index, request, sampling)
            except EngineError as error:
                if attempt == _MAX_ATTEMPTS - 1:
                    raise
                if self._aborts == aborts and self.engines[index].recoveries == recoveries:
                    await self._handle_failure(index, error)
        return index, version, EngineOutput((), (), "abort")

    def _is_down(self, index: int) -> bool:
        return self._failed.get(index) == self.engines[index].recoveries

    async def _handle_failure(self, index: int, error: EngineError) -> None:
        """Return when there is an engine to use: another one, or this one after its recovery."""
        if not self._is_down(index):
            self._failed[index] = self.engines[index].recoveries
            logger.warning("%s failed: %s", self.engines[index].name, error)
        if self._healthy() and not self._recovers_on_failure:
            return
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                await self.engines[index].recovered(error)
            except EngineError as failure:
                if not self._healthy():
                    raise
                logger.warning("%s", failure)
            finally:
                self._waiting.discard(scope)

    async def _complete_on(self, index: int, request: Request, sampling: GenerationConfig) -> EngineOutput:
        self._load[index] += 1
        try:
            facts = await self._facts_of(index)
            engine_request = as_engine_request(request, sampling, facts, self._end_token_ids, self._processor)
            if engine_request.max_tokens <= 0:
                return EngineOutput((), (), "length")
            return await self.engines[index].complete(engine_request)
        finally:
            self._load[index] -= 1

    async def _load_facts(self) -> None:
        """Get the facts of each engine once; those of an engine that does not respond are loaded at its first use."""
        missing = [index for index in self._healthy() if index not in self._facts]

        async def load(index: int) -> None:
            with suppress(EngineError):
                self._facts[index] = await self.engines[index].facts()

        async with task_group() as tasks:
            for index in missing:
                tasks.start_soon(load, index)
        lengths = {facts.max_length for facts in self._facts.values()}
        if missing and len(lengths) > 1:
            shortest = min(lengths)
            logger.warning(
                "maximum sequence lengths of engines are %d to %d tokens: using %d", shortest, max(lengths), shortest
            )

    async def _facts_of(self, index: int) -> Facts:
        """Return the engine's facts with the smallest `max_length` of all, so that results do not depend on routing."""
        if index not in self._facts:
            self._facts[index] = await self.engines[index].facts()
        return self._facts[index]._replace(max_length=min(facts.max_length for facts in self._facts.values()))

    def _limiter(self) -> anyio.CapacityLimiter:
        """Return the limiter of this event loop, which all calls share."""
        try:
            return self._limiters.get()
        except LookupError:
            self._limiters.set(anyio.CapacityLimiter(self._concurrency))
            return self._limiters.get()

    async def abort(self) -> None:
        """End all generations in flight; each returns its partial result as "aborted"."""
        self._aborts += 1
        aborted = set(self._in_flight)
        with anyio.move_on_after(_ABORT_LIMIT):
            while aborted & self._in_flight:  # a request may reach its engine after the engine's abort
                for scope in self._waiting:
                    scope.cancel()
                async with task_group() as tasks:
                    for index in self._healthy():
                        tasks.start_soon(self._abort_engine, index)
                await anyio.sleep(0.02)
            return
        left = len(aborted & self._in_flight)
        raise EngineError(f"{left} generations did not end within {_ABORT_LIMIT:g} s of being aborted")

    async def _abort_engine(self, index: int) -> None:
        try:
            await self.engines[index].abort()
        except EngineError as error:  # its requests fail by themselves, and are not retried
            self._failed[index] = self.engines[index].recoveries
            logger.warning("%s failed: %s", self.engines[index].name, error)

    def _healthy(self) -> list[int]:
        return [index for index in range(len(self.engines)) if not self._is_down(index)]

    async def _reachable(self) -> list[int]:
        """Return the engines that can load weights now, including those that failed before and are back."""
        errors: dict[int, EngineError] = {}

        async def check(index: int) -> None:
            try:
                await self.engines[index].check_health()
            except EngineError as error:
                errors[index] = error
                self._failed[index] = self.engines[index].recoveries
                logger.warning("%s is skipped: %s", self.engines[index].name, error)

        async with task_group() as tasks:
            for index in range(len(self.engines)):
                tasks.start_soon(check, index)
        if len(errors) == len(self.engines):
            raise next(iter(errors.values()))
        return [index for index in range(len(self.engines)) if index not in errors]

    async def update_weights(self, weights: Weights) -> None:
        """Send the weights to all reachable engines; return once each is verified to have them."""
        await self.wake_up()
        source = source_of(weights)
        probe = await in_thread(partial(Probe.of, source, self._tolerance, await self._media_probed()))
        reachable = await self._reachable()
        engines = [self.engines[index] for index in reachable]
        if self._transfer == "files":
            await sync_by_files(source, engines, weights.version, self._folder)
        else:
            await self._sync_by_network(source, engines, weights.version)
        await self.verify(probe, weights.version, reachable)
        self._failed = {index: recoveries for index, recoveries in self._failed.items() if index not in reachable}
        self._version = weights.version

    async def _sync_by_network(self, source: WeightSource, engines: Sequence[Any], version: int) -> None:
        """Broadcast in one group of the sender and the workers of all engines."""
        counts = [await engine.receivers() for engine in engines]
        hosts = [engine.host for engine in engines]
        with rendezvous(hosts, sum(counts), self._transfer, self._time_limit) as address:
            async with task_group() as tasks:
                for engine, first in zip(engines, accumulate(counts, initial=1), strict=False):
                    tasks.start_soon(engine.receive_weights, address, first, version)
                try:
                    await in_thread(partial(source.send, address))
                except TransferError as error:
                    await anyio.sleep(_ERROR_GRACE)
                    names = ", ".join(engine.name for engine in engines)
                    raise EngineError(f"weights did not reach {names}: {error}") from error

    async def _media_probed(self) -> MediaProcessor | None:
        """The processor of a model that reads media, if all engines take them; else the probe sequence is text."""
        if self._processor is None:
            return None
        await self._load_facts()
        return self._processor if all(facts.reads_media for facts in self._facts.values()) else None

    async def verify(self, probe: Probe, version: int, indices: Sequence[int] | None = None) -> None:
        """Raise, with the engine's name, if its log-probs of the probe sequence are not the trainer's."""

        async def verify_one(index: int, engine: InferenceEngine) -> None:
            logprobs = await engine.prompt_logprobs(probe.tokens, probe.media)
            self._probe_results[index] = probe.check(engine.name, logprobs, version, self._probe_results.get(index))

        async with task_group() as tasks:
            for index in range(len(self.engines)) if indices is None else indices:
                tasks.start_soon(verify_one, index, self.engines[index])
        self.gap = max(result.gap for result in self._probe_results.values())

    async def sleep(self) -> None:
        """Free the devices' memory for a trainer that shares them; the next call wakes all engines."""
        await self._call_all([engine.sleep for engine in self.engines])
        self._asleep = True

    async def wake_up(self) -> None:
        if self._asleep:
            self._asleep = False
            await self._call_all([engine.wake_up for engine in self.engines])

    async def _call_all(self, calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """Log errors only: a failed engine is detected, and replaced if possible, at the next weight sync."""

        async def call_one(call: Callable[[], Awaitable[None]]) -> None:
            try:
                await call()
            except EngineError as error:
                logger.warning("%s", error)

        async with task_group() as tasks:
            for call in calls:
                tasks.start_soon(call_one, call)

    async def check_health(self) -> None:
        async with task_group() as tasks:
            for engine in self.engines:
                tasks.start_soon(engine.check_health)

    async def close(self) -> None:
        await self.abort()

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


@overload
def sglang_generator(
    urls: str | Sequence[str], tokenizer: Any, *, options: Mapping[str, Any] | None = None, **connection: Any
) -> HTTPGenerator: ...


@overload
def sglang_generator(
    urls: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], config: GenerationConfig
) -> list[Generation]: ...


def sglang_generator(
    urls: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]] | None = None,
    config: GenerationConfig | None = None,
    *,
    options: Mapping[str, Any] | None = None,
    **connection: Any,
) -> HTTPGenerator | list[Generation]:
    """A generator over SGLang servers: `sglang_generator(["http://127.0.0.1:30000"], tokenizer, retries=2)`.

    With prompts (token ids) and a config it samples, with the seed of a prompt its index: as a `generator=` of the
    primitives, which pass what they got as the model: the address of a server.
    """
    addresses = [urls] if isinstance(urls, str) else urls
    if not isinstance(addresses, Sequence) or not all(isinstance(url, str) and "://" in url for url in addresses):
        shown = urls if isinstance(urls, str) else type(urls).__name__
        raise ValueError(
            f"SGLang samples in servers, and {shown} is not the address of one: start one with `python -m "
            "sglang.launch_server --model-path MODEL`, and pass generator=sglang_generator(ADDRESS, tokenizer), with "
            "an address such as http://127.0.0.1:30000"
        )
    generator = HTTPGenerator([SGLangEngine(url, **connection) for url in addresses], tokenizer, **dict(options or {}))
    if prompts is None:
        return generator
    requests = [Request(tuple(prompt), seed=index) for index, prompt in enumerate(prompts)]
    return run_blocking(generator.generate, requests, config or GenerationConfig())
