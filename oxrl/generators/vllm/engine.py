"""vLLM in this process: requests to generations, and weights from the trainer without the disk.

A dedicated thread holds the engine and steps it. Callers wait for it in threads, so that loops stay on anyio although
vLLM needs asyncio. Engines in separate processes are in `http`.
"""

from __future__ import annotations

import os
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

import anyio

from oxrl.concurrency import in_thread
from oxrl.data.processor import processor_of
from oxrl.generators.connection import EngineError
from oxrl.generators.embedded.engine import check_sampling
from oxrl.generators.engines import EngineOutput, EngineRequest, Facts, MediaPrompt, as_engine_request, as_generation
from oxrl.generators.probe import Probe, ProbeResult
from oxrl.generators.vllm.server import CPU_SETTINGS
from oxrl.generators.vllm.worker import EXTENSION
from oxrl.machine.packages import missing_message
from oxrl.types import Generation, GenerationConfig, Request, Weights
from oxrl.weights.checkpoint_names import plain_weights, read_weights, shm_dir, source_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
NAME = "vLLM in this process"
_ADAPTER_ID = 1
_START_LIMIT = 3600.0  # seconds, for a model of any size from any disk


class VLLMRolloutEngine:
    """`VLLMRolloutEngine(folder, tokenizer, dtype="float32")`: a `Generator` by vLLM (0.32).

    `options` go to vLLM: `tensor_parallel_size`, `gpu_memory_utilization`, `max_model_len`, `enforce_eager` and so on.
    With `lora`, the maximum rank of an adapter, the base of a model with an adapter is loaded once, and after that only
    the adapter; without it the adapter is merged into the weights that are sent. A call raises if the engine makes no
    progress for `time_limit` seconds: inside of this process it cannot be restarted. Construction takes many seconds:
    `create_vllm_engine` does it in a thread.
    """

    def __init__(
        self,
        model: str | Path,
        tokenizer: PreTrainedTokenizerBase | Any,
        *,
        end_token_ids: Sequence[int] = (),
        lora: int = 0,
        tolerance: float | None = None,
        time_limit: float = 600.0,
        **options: Any,
    ) -> None:
        self.tokenizer = tokenizer
        self.gap = 0.0  # the largest difference to the trainer's log-probs in the last sync
        self._end_token_ids = tuple(sorted({*end_token_ids, tokenizer.eos_token_id} - {None}))
        self._lora = lora
        self._tolerance = tolerance
        self._version = 0
        self._has_weights = False  # of a trainer; before that it has those that it was started with
        self._asleep = self._has_base = False  # base: of the adapter in use
        self._probe_result: ProbeResult | None = None
        self._processor = processor_of(tokenizer)
        self._worker = _Worker(partial(_open_engine, str(model), lora, dict(options)), time_limit)

    @property
    def version(self) -> int:
        return self._version

    @property
    def facts(self) -> Facts:
        return self._worker.facts

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        """Return one generation per request, in order. Calls of several tasks share the engine."""
        check_sampling(sampling)
        await self.wake_up()
        convert = partial(as_engine_request, end_token_ids=self._end_token_ids, processor=self._processor)
        jobs = [_Job(convert(request, sampling, self._worker.facts)) for request in requests]
        version = self.version
        pairs = zip(requests, await self._run(jobs), strict=True)
        allowed = sampling.allowed_tokens
        return [as_generation(NAME, request.partial, output, version, self._text, allowed) for request, output in pairs]

    async def complete(self, request: EngineRequest) -> EngineOutput:
        """Continue one sequence, as `InferenceEngine.complete`."""
        (output,) = await self._run([_Job(request)])
        return output

    async def _run(self, jobs: Sequence[_Job]) -> list[EngineOutput]:
        try:
            await self._on_worker(partial(self._worker.add, [job for job in jobs if job.request.max_tokens > 0]))
            return await in_thread(lambda: [job.output(self._worker.wait) for job in jobs])
        finally:
            self._worker.submit(partial(self._worker.drop, jobs))

    async def abort(self) -> None:
        """End all generations in flight; each returns its partial result as "aborted"."""
        await self._on_worker(self._worker.abort)

    async def update_weights(self, weights: Weights) -> None:
        """Load the trainer's weights or its adapter; requests in flight continue after a fresh prefill."""
        await self.wake_up()
        source = source_of(weights)
        probe = await in_thread(partial(Probe.of, source, self._tolerance, self._processor))
        adapter_only = bool(self._lora) and source.adapted
        with tempfile.TemporaryDirectory(prefix="oxrl-weights-", dir=shm_dir()) as name:
            changes = []
            if not (adapter_only and self._has_base):
                self._has_base = False
                changes.append(await self._full_reload(weights, Path(name), adapter=not adapter_only))
            if adapter_only:
                await in_thread(partial(source.write_adapter, Path(name)))
                changes.append(partial(self._worker.load_adapter, Path(name)))
            await self._on_worker(partial(self._worker.change, changes, weights.version))
        self._has_base = adapter_only
        await self.verify(probe, weights.version)
        self._version, self._has_weights = weights.version, True

    async def _full_reload(self, weights: Weights, folder: Path, *, adapter: bool) -> Callable[[], None]:
        """Return a function that loads all weights, with or without the adapter: from the module, or from files."""
        if weights.module is not None:
            return partial(self._worker.reload, weights_iterator=plain_weights(weights.module, adapter=adapter))
        source = source_of(weights)
        await in_thread(partial(source.write if adapter else source.write_base, folder))
        return partial(self._worker.reload, weights_iterator=read_weights(folder))

    async def refresh_model(self, model_path: str | Path, version: int) -> bool:
        """Load a checkpoint on disk; return False if the engine has that version already. Not verified."""
        if version == self.version and self._has_weights:
            return False
        if not Path(model_path).is_dir():
            raise ValueError(f"no checkpoint folder {model_path}")
        await self._change(partial(self._worker.take_files, str(model_path)), version)
        return True

    async def take_weights(self, weights: Iterator[tuple[str, Any]], version: int) -> None:
        """Load weights (name, tensor) from an iterator. Not verified."""
        await self._change(partial(self._worker.reload, weights_iterator=weights), version)

    async def take_adapter(self, folder: Path, version: int) -> None:
        """Load an adapter from its files, on top of the current base. Not verified."""
        await self._change(partial(self._worker.load_adapter, folder), version)

    async def _change(self, change: Callable[[], None], version: int) -> None:
        self._has_base = False  # not known here
        await self._on_worker(partial(self._worker.change, [change], version))
        self._version, self._has_weights = version, True

    async def verify(self, probe: Probe, version: int) -> None:
        """Raise if the engine's log-probs of the probe sequence are not the trainer's."""
        logprobs = await self.prompt_logprobs(probe.tokens, probe.media)
        self._probe_result = probe.check(NAME, logprobs, version, self._probe_result)
        self.gap = self._probe_result.gap

    async def prompt_logprobs(self, tokens: Sequence[int], media: MediaPrompt | None = None) -> tuple[float, ...]:
        """Return the log-prob of each token but the first, at temperature 1."""
        job = _Job(EngineRequest(tuple(tokens), GenerationConfig(), 0, 1, (), media), probing=True)
        # vLLM (0.32) fails on prompt log-probs in one batch with other sequences and an adapter: wait until those end.
        deadline = time.monotonic() + self._worker.time_limit
        while not await self._on_worker(partial(self._worker.probe, job, alone=bool(self._lora))):
            if time.monotonic() > deadline:
                raise EngineError(f"{NAME} still had other sequences in flight after {self._worker.time_limit:g} s")
            await anyio.sleep(0.05)
        await in_thread(partial(job.output, self._worker.wait))
        return job.prompt_logprobs

    async def sleep(self) -> None:
        """Free the device's memory, weights included, for a trainer that shares it; the next call wakes it.

        Needs `enable_sleep_mode`, which vLLM has for GPUs; on a CPU it only pauses, and frees no memory.
        """
        await self._on_worker(self._worker.sleep)
        self._asleep = True

    async def wake_up(self) -> None:
        if self._asleep:
            self._asleep = False
            await self._on_worker(self._worker.wake_up)

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            await in_thread(self._worker.close)

    async def _on_worker(self, function: Callable[[], T]) -> T:
        return await in_thread(partial(self._worker.wait, self._worker.submit(function)))

    def _text(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


async def create_vllm_engine(model: str | Path, tokenizer: Any, **options: Any) -> VLLMRolloutEngine:
    """Build a `VLLMRolloutEngine` in a thread: `await create_vllm_engine(folder, tokenizer, dtype="float32")`."""
    return await in_thread(partial(VLLMRolloutEngine, model, tokenizer, **options))


@dataclass(slots=True, eq=False)
class _Job:
    """A sequence in flight and its tokens so far."""

    request: EngineRequest
    probing: bool = False
    redraws: int = 0  # of placeholders that were sampled
    id: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: tuple[float, ...] = ()
    reason: Future[str] = field(default_factory=Future)

    @property
    def remaining(self) -> EngineRequest:
        """What the engine is asked for: all of it, or the rest after a placeholder that was sampled."""
        return self.request.redraw(self.tokens, self.redraws) if self.redraws else self.request

    def output(self, wait: Callable[[Future[str]], str]) -> EngineOutput:
        """Block until it has finished."""
        reason = wait(self.reason) if self.request.max_tokens > 0 else "length"
        return EngineOutput(tuple(self.tokens), tuple(self.logprobs), reason, tuple(self.versions))

    def append(self, output: Any, version: int) -> None:
        """Add the tokens of one of vLLM's request outputs."""
        (new,) = output.outputs
        if output.prompt_logprobs and not self.prompt_logprobs:
            pairs = zip(output.prompt_logprobs[1:], self.request.tokens[1:], strict=True)
            self.prompt_logprobs = tuple(float(each[token].logprob) for each, token in pairs)
        self.tokens += new.token_ids
        self.versions += [version] * len(new.token_ids)
        for token, each in zip(new.token_ids, new.logprobs or (), strict=False):
            self.logprobs.append(float(each[token].logprob))
        if self.tokens and self.tokens[-1] in self.request.placeholders:
            del self.tokens[-1], self.versions[-1], self.logprobs[-1:]
            self.redraws += 1
        elif output.finished and not self.reason.done():
            self.reason.set_result(str(new.finish_reason))


class _Worker:
    """The only thread that uses the engine: it runs submitted functions between steps, and steps while there is work.

    An error inside of a step fails all sequences and ends the engine, whose state is unknown then.
    """

    def __init__(self, open_engine: Callable[[], Any], time_limit: float = 600.0) -> None:
        self.time_limit = time_limit
        self._last_progress = time.monotonic()
        self._commands: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._jobs: dict[str, _Job] = {}
        self._count = 0
        self._version = 0
        self._adapter: Any = None
        self._engine: Any = None
        self._broken: BaseException | None = None
        self._ended: EngineError | None = None
        self._lock = threading.Lock()
        ready: Future[Facts] = Future()
        self._thread = threading.Thread(target=self._run, args=(open_engine, ready), name="oxrl vllm", daemon=True)
        self._thread.start()
        wait_for([ready], timeout=_START_LIMIT)
        if not ready.done():
            raise EngineError(f"{NAME} was not ready after {_START_LIMIT:g} s")
        self.facts = ready.result()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run the function on the thread, between two steps."""
        future: Future[T] = Future()
        with self._lock:
            if self._ended is None:
                self._commands.put((function, future))
            else:
                future.set_exception(self._ended)
        return future

    def wait(self, future: Future[T]) -> T:
        """Block until it is done; raise if the engine makes no progress for `time_limit`."""
        since = time.monotonic()
        while not future.done():
            wait_for([future], timeout=1.0)
            if time.monotonic() - max(since, self._last_progress) > self.time_limit and not future.done():
                raise EngineError(f"{NAME} hangs: no progress for {self.time_limit:g} s")
        return future.result()

    def close(self) -> None:
        self._commands.put(None)
        self._thread.join(60)

    def add(self, jobs: Sequence[_Job]) -> None:
        from vllm.exceptions import VLLMValidationError

        for job in jobs:
            self._count += 1
            job.id = f"oxrl-{self._count}"
            request = job.remaining
            try:
                prompt, parameters = self._prompt(request), _sampling_params(request, job.probing)
                self._engine.add_request(job.id, prompt, parameters, lora_request=self._adapter)
            except VLLMValidationError as error:
                raise ValueError(f"{NAME} rejected the request: {error}") from error
            self._jobs[job.id] = job

    def _prompt(self, request: EngineRequest) -> Any:
        """Return vLLM's prompt; one with media is expanded by vLLM's own processor, to the same ids."""
        if request.media is None:
            return {"prompt_token_ids": list(request.tokens)}
        media: dict[str, list[Any]] = {}
        for kind, value in request.media.decoded():
            media.setdefault(kind, []).append(value if kind == "image" else (value, request.media.sampling_rate))
        prompt = {"prompt_token_ids": list(request.media.tokens), "multi_modal_data": media}
        (expanded,) = self._engine.renderer.render_cmpl([prompt])
        request.media.check_expanded(NAME, expanded["prompt_token_ids"], request.tokens)
        return expanded

    def probe(self, job: _Job, *, alone: bool) -> bool:
        """Start it. With `alone`, finish it before returning, or return False while other sequences are in flight."""
        if alone and self._jobs:
            return False
        self.add([job])
        while alone and not job.reason.done():
            self._step()
        return True

    def abort(self) -> None:
        self.drop(list(self._jobs.values()))

    def drop(self, jobs: Sequence[_Job]) -> None:
        """Abort those of these jobs that have not finished."""
        unfinished = [job for job in jobs if self._jobs.pop(job.id, None) is not None]
        if unfinished and self._broken is None:
            self._engine.abort_request([job.id for job in unfinished])
        for job in unfinished:
            if not job.reason.done():
                job.reason.set_result("abort")

    def change(self, changes: Sequence[Callable[[], None]], version: int) -> None:
        for change in changes:
            change()
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError(f"{NAME} did not reset its prefix cache, which belongs to older weights")
        self._engine.reset_encoder_cache()  # features of media by the towers' older weights
        self._engine.set_weight_version(str(version))
        self._version = version

    def reload(self, **source: Any) -> None:
        self._engine.collective_rpc("reload_weights", kwargs=source)
        self._engine.collective_rpc("tie_head_again")
        self._adapter = None

    def take_files(self, folder: str) -> None:
        """The engine's workers, which may be several processes, read the files."""
        self._engine.collective_rpc("take_weights", args=(folder,))
        self._adapter = None

    def load_adapter(self, folder: Path) -> None:
        """vLLM loads adapters from files; the new one replaces the old one under the same id."""
        from vllm.lora.request import LoRARequest

        if not self._engine.add_lora(LoRARequest("policy", _ADAPTER_ID, str(folder), load_inplace=True)):
            raise EngineError(f"{NAME} did not load the adapter")
        self._adapter = LoRARequest("policy", _ADAPTER_ID, "loaded before")

    def sleep(self) -> None:
        self._engine.sleep(level=1)  # weights are moved to host memory, and are back after `wake_up`

    def wake_up(self) -> None:
        self._engine.wake_up()

    def _run(self, open_engine: Callable[[], Any], ready: Future[Facts]) -> None:
        try:
            self._engine = open_engine()
            model = self._engine.vllm_config.model_config
            logprobs = str(model.logprobs_mode).removesuffix("_logprobs")
            ready.set_result(Facts(int(model.max_model_len), logprobs, bool(model.is_multimodal_model)))
        except BaseException as error:  # noqa: BLE001 - raised again by the caller that waits for it
            ready.set_exception(error)
            return
        try:
            while self._run_commands():
                self._step()
        except BaseException as error:  # noqa: BLE001 - raised by every waiting call
            self._broken = error
        self._end()

    def _step(self) -> None:
        outputs = self._engine.step()
        self._last_progress = time.monotonic()
        for output in outputs:
            if (job := self._jobs.get(output.request_id)) is not None:
                redraws = job.redraws
                job.append(output, self._version)
                if output.finished:
                    del self._jobs[job.id]
                if job.redraws > redraws:
                    self._draw_again(job)

    def _draw_again(self, job: _Job) -> None:
        try:
            self.add([job])
        except (EngineError, ValueError) as error:
            job.reason.set_exception(error)

    def _run_commands(self) -> bool:
        """Run the submitted functions, waiting for one while there is nothing to step; return False at the end."""
        while True:
            try:
                command = self._commands.get(block=not self._engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if command is None:
                return False
            function, future = command
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again by the caller that waits
                future.set_exception(error)
            self._last_progress = time.monotonic()

    def _end(self) -> None:
        error = EngineError(f"{NAME} has ended{f': {self._broken}' if self._broken else ''}")
        with self._lock:  # `submit` adds nothing after this
            self._ended = error
        for job in self._jobs.values():
            if not job.reason.done():
                job.reason.set_exception(error)
        self._jobs.clear()
        with suppress(queue.Empty):
            while command := self._commands.get_nowait():
                command[1].set_exception(error)
        self._engine.engine_core.shutdown()


def _open_engine(model: str, lora: int, options: dict[str, Any]) -> Any:
    import torch

    if not torch.cuda.is_available():
        for name, value in CPU_SETTINGS.items():
            os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # its log would bury the log of the run
    # Read by vLLM at import. In a separate process the engine could not read the trainer's tensors.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm import EngineArgs, LLMEngine
    except ImportError as error:
        raise ValueError(missing_message("vllm")) from error

    given = {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
        **options,
    }
    if lora:
        given |= {"enable_lora": True, "max_lora_rank": _max_lora_rank(lora), "max_loras": 1}
    return LLMEngine.from_engine_args(EngineArgs(model=model, **given))


def _max_lora_rank(rank: int) -> int:
    """Return the smallest of vLLM's maximum ranks that the adapter fits."""
    from vllm.config.lora import MaxLoRARanks

    ranks: tuple[int, ...] = get_args(MaxLoRARanks)
    if rank > max(ranks):
        raise ValueError(
            f"vLLM supports adapters up to rank {max(ranks)}, and this one has {rank}: merge it, or lower r"
        )
    return min(each for each in ranks if each >= rank)


def _sampling_params(request: EngineRequest, probing: bool) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        max_tokens=request.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        stop_token_ids=request.stop_token_ids,
        logit_bias=dict(request.logit_bias) or None,
        seed=request.seed,
        allowed_token_ids=list(sampling.allowed_tokens) or None,
        logprobs=0,
        prompt_logprobs=0 if probing else None,
        output_kind=RequestOutputKind.DELTA,
    )
