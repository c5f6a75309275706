"""Engines over HTTP: vLLM and SGLang servers as generators, and their weights from files or over the network.

Token ids go in and out, with the log-prob of each sampled token. After each sync an engine says which version it has,
and proves it by the log-probs of a probe sequence. vLLM is tested for real; SGLang is written from its documentation
and tested against a small server that was written from the same, not against SGLang itself.
"""

from __future__ import annotations

import logging
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import anyio
from anyio.lowlevel import RunVar

from oxrl.concurrency import in_thread, task_group
from oxrl.generators.connection import Connection, EngineError
from oxrl.generators.embedded.engine import check_sampling
from oxrl.generators.embedded.sampling import stream_key
from oxrl.generators.probe import Probe, ProbeResult, StaleEngineError
from oxrl.generators.vllm.worker import EXTENSION
from oxrl.types import Generation, GenerationConfig, Rendezvous, Request, Weights, WeightSource
from oxrl.weights.broadcast import TransferError, rendezvous
from oxrl.weights.checkpoint_names import shm_dir, source_of

logger = logging.getLogger(__name__)

_HEALTH_LIMIT = 10.0
_ABORT_LIMIT = 60.0
_WORD_SECONDS = 5.0  # that an engine has to say itself why it lost the sender
_MOST_TRIES = 8  # to ask one request anew, each on an engine that was found to be well
_REASONS = {"stop": "stop", "length": "length", "abort": "aborted"}
_TOKENS = "/inference/v1/generate"
TRANSFERS = ("files", "gloo", "nccl")


class EngineRequest(NamedTuple):
    """One sequence to continue, as every engine understands it."""

    tokens: tuple[int, ...]
    sampling: GenerationConfig
    seed: int  # from 0 to 2**63 - 1
    most: int  # tokens to draw
    ends: tuple[int, ...]


class EngineOutput(NamedTuple):
    """What an engine drew."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[int, ...] = ()  # of the weights that drew each token; (): the engine does not tell


class Facts(NamedTuple):
    """What an engine says about itself: how long a sequence may be, and whose log-probs it returns."""

    longest: int
    logprobs: (
        str  # "processed": at the sampling temperature, over what cut-offs leave; "raw": at temperature 1, over all
    )


class InferenceEngine(Protocol):
    """An engine elsewhere, of which a generator may have several."""

    @property
    def name(self) -> str: ...

    @property
    def recoveries(self) -> int:
        """How often it was found to be well again after it had failed; what failed before can be asked anew then."""
        ...

    async def recovered(self, error: EngineError) -> None:
        """It failed with this: answers when it is well again, and raises where nobody can bring it back."""
        ...

    async def facts(self) -> Facts: ...

    async def complete(self, ask: EngineRequest) -> EngineOutput: ...

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Of each token but the first, at temperature 1."""
        ...

    async def abort(self) -> None: ...

    async def pause(self) -> None: ...

    async def resume(self) -> None: ...

    async def sleep(self) -> None:
        """Give its devices' memory back until `wake_up`; nothing is asked of it meanwhile."""
        ...

    async def wake_up(self) -> None: ...

    async def check_health(self) -> None: ...

    async def update_weights_from_checkpoint(self, checkpoint_path: str, version: int | None = None) -> dict[str, Any]:
        """Speak with these weights from now on; the answer holds the version that the engine has then."""
        ...


@runtime_checkable
class Receiver(Protocol):
    """An engine that also takes weights which a trainer sends it (`oxrl.weights.broadcast`)."""

    @property
    def host(self) -> str: ...

    async def receivers(self) -> int:
        """Processes that take part, each for its share of the model."""
        ...

    async def receive_weights(self, place: Rendezvous, first: int, version: int | None = None) -> dict[str, Any]:
        """Speak with what is sent there from now on; its receivers are those from `first` on."""
        ...


class _Server:
    """What servers of every kind have in common."""

    kind = ""

    def __init__(self, url: str, *, time_limit: float = 600.0, retries: int = 4, backoff: float = 0.5) -> None:
        self._connection = Connection(url, time_limit, retries, backoff).checked()

    @property
    def name(self) -> str:
        return f"the {self.kind} server at {self._connection.url}"

    @property
    def recoveries(self) -> int:
        return 0

    async def recovered(self, error: EngineError) -> None:
        """Whoever started it must start it again."""
        raise error

    @property
    def host(self) -> str:
        return self._connection.host

    async def check_health(self) -> None:
        """At most twice: one that is gone is asked at every sync."""
        once_more = self._connection._replace(retries=min(1, self._connection.retries))
        await once_more.get("/health", time_limit=_HEALTH_LIMIT)

    async def sleep(self) -> None:
        raise ValueError(f"{self.name} is not known to sleep: give it devices of its own")

    async def wake_up(self) -> None:
        """It never slept."""


class VLLMEngine(_Server):
    """`VLLMEngine("http://127.0.0.1:8000")`: a vLLM server (0.32) that was started with `VLLM_SERVER_DEV_MODE=1`.

    Weights can be changed while sequences are under way: they are held, and go on with the new ones through a fresh
    prefill. Which token was drawn before and which after is told by servers with `--enable-scale-out`; by others the
    whole answer counts as the older. Models with tied weights need `--worker-extension-cls` as in `vllm_worker` on a
    CPU. `server` starts so.
    """

    kind = "vLLM"
    _model = ""  # told by `facts`, as the next four are
    _workers = _copies = 1
    _extended = False
    _tells_versions = False

    async def facts(self) -> Facts:
        (model, *_) = (await self._connection.get("/v1/models"))["data"]
        self._model = model["id"]
        info = await self._connection.get("/server_info?config_format=json")
        parallel = info["vllm_config"]["parallel_config"]
        self._workers, self._copies = int(parallel["world_size"]), int(parallel["data_parallel_size"])
        self._extended = parallel["worker_extension_cls"] == EXTENSION
        self._tells_versions = await self._has(_TOKENS)
        mode = str(info["vllm_config"]["model_config"]["logprobs_mode"])
        if not mode.endswith("_logprobs"):
            raise ValueError(f"{self.name} returns {mode}: start it with --logprobs-mode processed_logprobs")
        return Facts(int(model["max_model_len"]), mode.removesuffix("_logprobs"))

    async def complete(self, ask: EngineRequest) -> EngineOutput:
        model, sampling = await self._name_of_model(), ask.sampling
        wanted = {
            "max_tokens": ask.most,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "min_p": sampling.min_p,
            # Whatever the model's own generation_config may say about these.
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": list(sampling.stop),
            "stop_token_ids": list(ask.ends),
            "seed": ask.seed,
            "logprobs": 0,
        }
        if self._tells_versions:
            return await self._tokens({"model": model, "token_ids": list(ask.tokens), "sampling_params": wanted})
        body = {"model": model, "prompt": list(ask.tokens), "return_token_ids": True, **wanted}
        (choice,) = (await self._connection.post("/v1/completions", body))["choices"]
        logprobs = choice["logprobs"]["token_logprobs"] if choice["logprobs"] else ()
        return EngineOutput(tuple(choice["token_ids"]), tuple(logprobs), str(choice["finish_reason"]))

    async def _tokens(self, body: Mapping[str, Any]) -> EngineOutput:
        """By the endpoint that also says with which weights each token was drawn."""
        (choice,) = (await self._connection.post(_TOKENS, body))["choices"]
        drawn = (choice["logprobs"] or {}).get("content") or ()
        spans = choice["weight_versions"] or ()
        versions = [span["version"] for span in spans for _ in range(span["start"], span["end"])]
        told = all(version.isdecimal() for version in versions)  # before the first update it has a name of its own
        return EngineOutput(
            tuple(choice["token_ids"] or ()),
            tuple(each["logprob"] for each in drawn),
            str(choice["finish_reason"]),
            tuple(map(int, versions)) if told else (),
        )

    async def _has(self, path: str) -> bool:
        try:
            return path in (await self._connection.get("/openapi.json"))["paths"]
        except EngineError:  # a server may be started without its description
            return False

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        body = {"model": await self._name_of_model(), "prompt": list(tokens), "max_tokens": 1, "prompt_logprobs": 0}
        (choice,) = (await self._connection.post("/v1/completions", body))["choices"]
        said = choice["prompt_logprobs"][1:]
        return tuple(float(each[str(token)]["logprob"]) for each, token in zip(said, tokens[1:], strict=True))

    async def abort(self) -> None:
        await self._connection.post("/abort_requests")

    async def pause(self) -> None:
        """Hold everything under way until `resume`."""
        await self._connection.post("/pause", query={"mode": "keep"})

    async def resume(self) -> None:
        await self._connection.post("/resume")

    async def sleep(self) -> None:
        """On a GPU the server needs `--enable-sleep-mode`; on a CPU it holds still, and its memory stays its own."""
        await self._connection.post("/sleep", query={"level": "1"})

    async def wake_up(self) -> None:
        await self._connection.post("/wake_up")

    async def reset_prefix_cache(self) -> None:
        """Forget what was computed with other weights, also for the sequences under way."""
        reply = await self._connection.post("/reset_prefix_cache", query={"reset_running_requests": "true"})
        if not reply["success"]:
            raise EngineError(f"{self.name} did not give up its prefix cache, which belongs to older weights")

    async def update_weights_from_checkpoint(self, checkpoint_path: str, version: int | None = None) -> dict[str, Any]:
        await self._name_of_model()
        if self._extended:
            return await self._change_weights({"method": "take_weights", "args": [str(checkpoint_path)]}, version)
        body = {"method": "reload_weights", "kwargs": {"weights_path": str(checkpoint_path)}}
        return await self._change_weights(body, version)

    async def receivers(self) -> int:
        await self._name_of_model()
        if not self._extended:
            raise ValueError(f"{self.name} cannot receive weights: start it with --worker-extension-cls {EXTENSION}")
        if self._copies > 1:
            raise ValueError(f"{self.name} has {self._copies} copies of the model: start a server for each instead")
        return self._workers

    async def receive_weights(self, place: Rendezvous, first: int, version: int | None = None) -> dict[str, Any]:
        return await self._change_weights({"method": "receive_weights", "args": [list(place), first]}, version)

    async def _change_weights(self, body: Mapping[str, Any], version: int | None) -> dict[str, Any]:
        """Through `/collective_rpc`. An engine where this fails stays paused: start it anew."""
        started = time.monotonic()
        await self.pause()
        await self._connection.post("/collective_rpc", body, once=True)
        await self.reset_prefix_cache()
        if version is not None:
            await self._connection.post("/update_weight_version", {"new_version": str(version)})
        await self.resume()
        told = (await self._connection.get("/weight_info"))["weight_version"]
        return _confirmed(self.name, told, version, started)

    async def _name_of_model(self) -> str:
        if not self._model:
            await self.facts()
        return self._model


class SGLangEngine(_Server):
    """`SGLangEngine("http://127.0.0.1:30000")`: an SGLang server, by its native protocol.

    Written from its documentation, and not yet run against SGLang itself. Seeds count only where the server was started
    with `--enable-deterministic-inference`. Its log-probs are those at the sampling temperature, over all tokens. It
    does not say which token of an answer was drawn after an update: such an answer counts as of the older weights.
    """

    kind = "SGLang"

    async def facts(self) -> Facts:
        info = await self._connection.get("/get_server_info")
        longest = info.get("context_length") or info.get("max_total_num_tokens")
        if longest is None:
            raise EngineError(f"{self.name} does not say how long a sequence may be")
        return Facts(int(longest), "full")

    async def complete(self, ask: EngineRequest) -> EngineOutput:
        sampling = ask.sampling
        parameters = {
            "max_new_tokens": ask.most,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1,
            "min_p": sampling.min_p,
            "stop": list(sampling.stop),
            "stop_token_ids": list(ask.ends),
            "sampling_seed": ask.seed,
        }
        body = {"input_ids": list(ask.tokens), "sampling_params": parameters, "return_logprob": True}
        reply = await self._connection.post("/generate", body)
        about = reply["meta_info"]
        drawn = about.get("output_token_logprobs") or ()
        reason = (about["finish_reason"] or {}).get("type", "none")
        return EngineOutput(tuple(token for _, token, *_ in drawn), tuple(logprob for logprob, *_ in drawn), reason)

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        parameters = {"max_new_tokens": 1, "temperature": 1.0}
        body = {
            "input_ids": list(tokens),
            "sampling_params": parameters,
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        said = (await self._connection.post("/generate", body))["meta_info"]["input_token_logprobs"]
        return tuple(float(logprob) for logprob, *_ in said[1:])

    async def abort(self) -> None:
        await self._connection.post("/abort_request", {"rid": "", "abort_all": True})

    async def pause(self) -> None:
        """Hold everything under way until `resume`, to go on with it through a fresh prefill."""
        await self._connection.post("/pause_generation", {"mode": "retract"})

    async def resume(self) -> None:
        await self._connection.post("/continue_generation", {})

    async def reset_prefix_cache(self) -> None:
        await self._connection.post("/flush_cache")

    async def update_weights_from_checkpoint(self, checkpoint_path: str, version: int | None = None) -> dict[str, Any]:
        started = time.monotonic()
        await self.pause()
        body: dict[str, Any] = {"model_path": str(checkpoint_path), "flush_cache": True}
        if version is not None:
            body["weight_version"] = str(version)
        reply = await self._connection.post("/update_weights_from_disk", body, once=True)
        if not reply.get("success"):
            raise EngineError(f"{self.name} did not take the weights: {reply.get('message')}")
        await self.reset_prefix_cache()
        await self.resume()
        told = (await self._connection.get("/get_weight_version"))["weight_version"]
        return _confirmed(self.name, told, version, started)


def _confirmed(name: str, told: object, version: int | None, started: float) -> dict[str, Any]:
    if version is not None and str(told) != str(version):
        raise StaleEngineError(f"{name} says that it has version {told} of the weights, and was given {version}")
    return {"engine": name, "version": told, "seconds": time.monotonic() - started}


async def sync_weights_to_engines(
    engines: Sequence[InferenceEngine], checkpoint_path: str, version: int | None = None
) -> list[dict[str, Any]]:
    """All engines side by side; one answer each, in order. The first that fails stops the others and is raised."""
    answers: dict[int, dict[str, Any]] = {}

    async def one(index: int, engine: InferenceEngine) -> None:
        answers[index] = await engine.update_weights_from_checkpoint(checkpoint_path, version)

    async with task_group() as tasks:
        for index, engine in enumerate(engines):
            tasks.start_soon(one, index, engine)
    return [answers[index] for index in range(len(engines))]


class HTTPGenerator:
    """`HTTPGenerator([VLLMEngine(url)], tokenizer)`: a `Generator` over one or more engines with the same weights.

    A request goes to the engine that has least to do; what it draws depends on its seed, not on where. So it is asked
    again elsewhere if its engine fails, or at the same one if that recovers (`fleet` starts engines that do). At most
    `concurrency` requests are sent at a time. New weights are written to a folder that the engines can read (`folder`,
    by default in this machine's memory) and removed when they have them, or, with `transfer` gloo or nccl, sent to them
    over the network within `time_limit`. Every engine proves that it has them, to `tolerance` per log-prob.
    `end_token_ids` end an answer beside the tokenizer's own.
    """

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
            raise ValueError(f"there is no transfer {transfer!r}: weights go by {', '.join(TRANSFERS)}")
        for engine in engines if transfer != "files" else ():
            if not isinstance(engine, Receiver):
                raise ValueError(f"{engine.name} takes weights from files only: leave transfer: {transfer} out")
        self._transfer, self._time_limit = transfer, time_limit
        self.engines, self.tokenizer = list(engines), tokenizer
        self.gap = 0.0  # the largest difference to the trainer's log-probs that the last sync showed
        self._ends = tuple(sorted({*end_token_ids, tokenizer.eos_token_id} - {None}))
        self._folder = Path(folder) if folder is not None else shm_dir()
        self._tolerance = tolerance
        self._version = 0
        self._facts: dict[int, Facts] = {}
        self._load = [0] * len(self.engines)
        self._heard: dict[int, ProbeResult] = {}
        self._lost: dict[int, int] = {}  # engines that failed, and how many recoveries they had then
        self._waiting: set[anyio.CancelScope] = set()
        self._under_way: set[object] = set()
        self._aborts = 0
        self._asleep = False
        self._concurrency = concurrency
        self._places: RunVar[anyio.CapacityLimiter] = RunVar(f"oxrl engines {id(self)}")

    @property
    def version(self) -> int:
        return self._version

    @property
    def restarts(self) -> int:
        """How often engines were started again so far."""
        return sum(getattr(engine, "restarts", 0) for engine in self.engines)

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        """One generation per request, in order. Calls of several tasks share the engines."""
        check_sampling(sampling)
        await self.wake_up()
        await self._learn()
        answers: dict[int, Generation] = {}

        async def one(index: int, request: Request) -> None:
            answers[index] = await self._one(request, sampling)

        async with task_group() as tasks:
            for index, request in enumerate(requests):
                tasks.start_soon(one, index, request)
        return [answers[index] for index in range(len(requests))]

    async def _one(self, request: Request, sampling: GenerationConfig) -> Generation:
        mark, aborts = object(), self._aborts
        self._under_way.add(mark)
        try:
            async with self._turn():
                place, version, said = await self._somewhere(request, sampling, aborts)
        finally:
            self._under_way.discard(mark)
        return as_generation(self.engines[place].name, request.begun, said, version, self._text)

    async def _somewhere(
        self, request: Request, sampling: GenerationConfig, aborts: int
    ) -> tuple[int, int, EngineOutput]:
        """Who answered, with which version, and what; nobody is asked once `abort` was called."""
        for tried in range(_MOST_TRIES):
            place = min(range(len(self.engines)), key=lambda place: (self._is_lost(place), self._load[place]))
            version = self.version
            if self._aborts != aborts:
                break
            try:
                return place, version, await self._ask(place, request, sampling)
            except EngineError as error:
                if tried == _MOST_TRIES - 1:
                    raise
                if self._aborts == aborts:
                    await self._do_without(place, error)
        return place, version, EngineOutput((), (), "abort")

    def _is_lost(self, place: int) -> bool:
        return self._lost.get(place) == self.engines[place].recoveries

    async def _do_without(self, place: int, error: EngineError) -> None:
        """Answers when there is somebody to ask: another engine, or this one once it is well again."""
        if not self._is_lost(place):
            self._lost[place] = self.engines[place].recoveries
            logger.warning("%s does not answer: %s", self.engines[place].name, error)
        if not all(self._is_lost(other) for other in range(len(self.engines))):
            return
        with anyio.CancelScope() as scope:
            self._waiting.add(scope)
            try:
                await self.engines[place].recovered(error)
            finally:
                self._waiting.discard(scope)

    async def _ask(self, place: int, request: Request, sampling: GenerationConfig) -> EngineOutput:
        self._load[place] += 1
        try:
            ask = as_engine_request(request, sampling, await self._facts_at(place), self._ends)
            return await self.engines[place].complete(ask) if ask.most > 0 else EngineOutput((), (), "length")
        finally:
            self._load[place] -= 1

    async def _learn(self) -> None:
        """What engines say about themselves, once; one that does not answer is asked when its turn comes."""
        asked = [place for place in self._present() if place not in self._facts]

        async def one(place: int) -> None:
            with suppress(EngineError):
                self._facts[place] = await self.engines[place].facts()

        async with task_group() as tasks:
            for place in asked:
                tasks.start_soon(one, place)
        lengths = {facts.longest for facts in self._facts.values()}
        if asked and len(lengths) > 1:
            logger.warning("engines take sequences of %d to %d tokens: the least holds", min(lengths), max(lengths))

    async def _facts_at(self, place: int) -> Facts:
        """The engine's, but for the length, which is the least of all: what is drawn does not depend on where."""
        if place not in self._facts:
            self._facts[place] = await self.engines[place].facts()
        return self._facts[place]._replace(longest=min(facts.longest for facts in self._facts.values()))

    def _turn(self) -> anyio.CapacityLimiter:
        """One limit per event loop, which all calls share."""
        try:
            return self._places.get()
        except LookupError:
            self._places.set(anyio.CapacityLimiter(self._concurrency))
            return self._places.get()

    async def abort(self) -> None:
        """Everything under way returns now, as "aborted", with what it has."""
        self._aborts += 1
        meant = set(self._under_way)
        with anyio.move_on_after(_ABORT_LIMIT):
            while meant & self._under_way:  # a request may reach its engine after the word to abort
                for scope in self._waiting:
                    scope.cancel()
                async with task_group() as tasks:
                    for place in self._present():
                        tasks.start_soon(self._abort_at, place)
                await anyio.sleep(0.02)
            return
        left = len(meant & self._under_way)
        raise EngineError(f"{left} generations did not end within {_ABORT_LIMIT:g} s of being aborted")

    async def _abort_at(self, place: int) -> None:
        try:
            await self.engines[place].abort()
        except EngineError as error:  # what is under way there ends by itself, and is not asked again
            self._lost[place] = self.engines[place].recoveries
            logger.warning("%s does not answer: %s", self.engines[place].name, error)

    def _present(self) -> list[int]:
        return [place for place in range(len(self.engines)) if not self._is_lost(place)]

    async def _reachable(self) -> list[int]:
        """The engines that can take weights now, those that failed before and are back among them."""
        errors: dict[int, EngineError] = {}

        async def one(place: int) -> None:
            try:
                await self.engines[place].check_health()
            except EngineError as error:
                errors[place] = error
                self._lost[place] = self.engines[place].recoveries
                logger.warning("%s is left out: %s", self.engines[place].name, error)

        async with task_group() as tasks:
            for place in range(len(self.engines)):
                tasks.start_soon(one, place)
        if len(errors) == len(self.engines):
            raise next(iter(errors.values()))
        return [place for place in range(len(self.engines)) if place not in errors]

    async def update_weights(self, weights: Weights) -> None:
        """Write, sync, prove: answers once every engine speaks with these."""
        await self.wake_up()
        source = source_of(weights)
        probe = await in_thread(partial(Probe.of, source, self._tolerance))
        places = await self._reachable()
        hand_over = self._by_files if self._transfer == "files" else self._by_network
        await hand_over(source, [self.engines[place] for place in places], weights.version)
        await self.verify(probe, weights.version, places)
        self._lost = {place: recoveries for place, recoveries in self._lost.items() if place not in places}
        self._version = weights.version

    async def _by_files(self, source: WeightSource, engines: Sequence[InferenceEngine], version: int) -> None:
        folder = Path(tempfile.mkdtemp(prefix=f"oxrl-weights-{version}-", dir=self._folder))
        try:
            await in_thread(partial(source.write, folder))
            await sync_weights_to_engines(engines, str(folder), version)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _by_network(self, source: WeightSource, engines: Sequence[Any], version: int) -> None:
        """One group of the sender and all engines' workers."""
        numbers = [await engine.receivers() for engine in engines]
        hosts = [engine.host for engine in engines]
        with rendezvous(hosts, sum(numbers), self._transfer, self._time_limit) as place:
            async with task_group() as tasks:
                for engine, first in zip(engines, accumulate(numbers, initial=1), strict=False):
                    tasks.start_soon(engine.receive_weights, place, first, version)
                try:
                    await in_thread(partial(source.send, place))
                except TransferError as error:
                    await anyio.sleep(_WORD_SECONDS)
                    named = ", ".join(engine.name for engine in engines)
                    raise EngineError(f"weights did not reach {named}: {error}") from error

    async def verify(self, probe: Probe, version: int, places: Sequence[int] | None = None) -> None:
        """Stop, with its name, at an engine whose log-probs of the probe sequence are not the trainer's."""

        async def one(place: int, engine: InferenceEngine) -> None:
            said = await engine.prompt_logprobs(probe.tokens)
            self._heard[place] = probe.check(engine.name, said, version, self._heard.get(place))

        async with task_group() as tasks:
            for place in range(len(self.engines)) if places is None else places:
                tasks.start_soon(one, place, self.engines[place])
        self.gap = max(heard.gap for heard in self._heard.values())

    async def sleep(self) -> None:
        """Give the devices' memory to a trainer that shares them; whoever asks for something next wakes all."""
        await self._tell_all([engine.sleep for engine in self.engines])
        self._asleep = True

    async def wake_up(self) -> None:
        if self._asleep:
            self._asleep = False
            await self._tell_all([engine.wake_up for engine in self.engines])

    async def _tell_all(self, calls: Sequence[Callable[[], Awaitable[None]]]) -> None:
        """An engine that was lost is found out, and replaced where that can be, when it gets weights."""

        async def one(call: Callable[[], Awaitable[None]]) -> None:
            try:
                await call()
            except EngineError as error:
                logger.warning("%s", error)

        async with task_group() as tasks:
            for call in calls:
                tasks.start_soon(one, call)

    async def check_health(self) -> None:
        async with task_group() as tasks:
            for engine in self.engines:
                tasks.start_soon(engine.check_health)

    async def close(self) -> None:
        await self.abort()

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def sglang_generator(
    urls: Sequence[str], tokenizer: Any, *, options: Mapping[str, Any] | None = None, **connection: Any
) -> HTTPGenerator:
    """A generator over SGLang servers: `sglang_generator(["http://127.0.0.1:30000"], tokenizer, retries=2)`."""
    return HTTPGenerator([SGLangEngine(url, **connection) for url in urls], tokenizer, **dict(options or {}))


def as_engine_request(request: Request, sampling: GenerationConfig, facts: Facts, ends: Sequence[int]) -> EngineRequest:
    """A request as an engine gets it; what it cannot do as asked is refused."""
    begun = request.begun.token_ids if request.begun is not None else ()
    if request.begun is not None and request.begun.finish_reason != "aborted":
        raise ValueError(
            f"only an aborted generation can be gone on with, not one that ended by {request.begun.finish_reason}"
        )
    if request.media:
        raise ValueError("the request has media, and engines get token ids only here")
    tokens = (*map(int, request.tokens), *begun)
    if not request.tokens:
        raise ValueError("there is nothing to continue: every prompt needs at least one token")
    if len(request.tokens) >= facts.longest:
        raise ValueError(
            f"the prompt has {len(request.tokens)} tokens, and prompt and answer together may have {facts.longest}"
        )
    check_logprobs(sampling, facts)
    most = min(sampling.max_new_tokens, facts.longest - len(request.tokens)) - len(begun)
    # An engine counts its random numbers from the first token that it draws itself.
    seed = stream_key(stream_key(sampling.seed, request.seed), len(begun)) >> 1
    return EngineRequest(tokens, sampling, seed, most, (*ends, *sampling.stop_token_ids))


def check_logprobs(sampling: GenerationConfig, facts: Facts) -> None:
    """Log-probs must be those of the full softmax at the sampling temperature, or a ratio to them means nothing."""
    cuts = sampling.top_p < 1 or sampling.top_k > 0 or sampling.min_p > 0
    if sampling.temperature == 0 or facts.logprobs == "full":
        return
    if facts.logprobs == "processed" and cuts:
        raise ValueError(
            "the engine's log-probs would be those after top_p, top_k and min_p, which are not the policy's: "
            "leave the cut-offs out, or use temperature 1 and start the engine with --logprobs-mode raw_logprobs"
        )
    if facts.logprobs == "raw" and sampling.temperature != 1:
        raise ValueError(
            f"the engine's log-probs would be those at temperature 1, not {sampling.temperature:g}: "
            "start it with --logprobs-mode processed_logprobs"
        )


def as_generation(name: str, begun: Generation | None, said: EngineOutput, version: int, text: Any) -> Generation:
    """What was drawn before and now, as one; an answer that cannot be trusted is an error.

    `version` is that of the weights when it was asked for, and so of its tokens where the engine does not tell.
    """
    begun = begun or Generation((), (), "aborted", version)
    if said.finish_reason not in _REASONS:
        raise EngineError(f"{name} ended a generation by {said.finish_reason!r}")
    fine = all(isinstance(each, float | int) and -9999 < each <= 1e-3 for each in said.logprobs)
    if len(said.token_ids) != len(said.logprobs) or not fine:
        raise EngineError(f"{name} returned {len(said.token_ids)} tokens whose log-probs are missing or not finite")
    ids, logprobs = (*begun.token_ids, *said.token_ids), (*begun.logprobs, *said.logprobs)
    reason: Any = _REASONS[said.finish_reason]
    if said.versions and len(said.versions) != len(said.token_ids):
        raise EngineError(f"{name} returned {len(said.token_ids)} tokens with versions of {len(said.versions)}")
    versions = (*begun.token_versions, *(said.versions or (version,) * len(said.token_ids)))
    return Generation(ids, logprobs, reason, version, text(ids)).with_versions(versions)
