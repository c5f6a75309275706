"""One backend over several processes: rank 0 runs the loop, the other ranks serve the backend's verbs.

Rank 0 sends out a command, does its own share of it, and gathers the replies; whatever the loop needs (losses, metrics,
log-probs) is put together there, once. Each rank gets whole micro-batches, and all get the same number of them: where a
step does not divide, a rank runs the smallest one again with weight 0, because a pass over a sharded model is a
collective. A verb that fails on a rank says so to rank 0 at once, which waits beside its own share and not inside it:
that one may hang in a collective with the rank that failed. A rank that died or hangs ends the wait with the time limit
at the latest. What a rank does with its share is its worker's affair (`fsdp`); no engine is known here.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from oxrl.backends._forward import HEADS, LanguageModel
from oxrl.backends.local import NonFiniteError, Part, sum_parts
from oxrl.backends.named import NamedAlgorithm
from oxrl.data.pack import collate
from oxrl.processes import MEETING
from oxrl.types import (
    Algorithm,
    Batch,
    Counts,
    ImmediateTrainFuture,
    Layout,
    Outputs,
    Read,
    Row,
    Term,
    TrainFuture,
    Weights,
)
from oxrl.weights import MovedOnError, adapter_weights, pass_weights, write_adapter, write_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


class Worker(Protocol):
    """One rank's part of a backend. Every verb is called on all ranks at once."""

    module: LanguageModel  # sharded
    layout: Layout
    version: int
    dtype: torch.dtype  # that the model was loaded in, and is written in
    whole: PreTrainedModel | None  # on rank 0, once somebody has asked for a copy in one piece; it begins as None

    def full(self, parameter: Tensor) -> Tensor:
        """The whole of one parameter or buffer on every rank, in the precision that the model was loaded in."""
        ...

    def fresh(self) -> PreTrainedModel:
        """An unsharded model of the same make, whose weights do not matter; called on rank 0 alone."""
        ...

    def logprobs(
        self, batches: Sequence[Batch], which: str, reads: Mapping[str, Read]
    ) -> TrainFuture[list[Outputs]]: ...

    def backward(self, batch: Batch, algorithm: Algorithm, counts: Counts, weight: float) -> Part: ...

    def stop_unless_finite(self, parts: Sequence[Part], batches: Sequence[Batch]) -> None: ...

    def optim_step(self) -> TrainFuture[dict[str, float]]: ...

    def set_temperature(self, temperature: float) -> None: ...

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]: ...

    def update_reference(self, decay: float) -> TrainFuture[None]: ...

    def load_heads(self, path: Path) -> None: ...

    def save_shards(self, path: Path) -> None: ...

    def load_shards(self, path: Path) -> None: ...

    def rehearse(self, begin: bool) -> None: ...

    def release_memory(self) -> TrainFuture[None]: ...


class Crew(Protocol):
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

    `verbs` are those that only this kind of rank has.
    """

    def __init__(self, rank: int, verbs: Mapping[str, Callable[..., Any]] = MappingProxyType({})) -> None:
        self.rank, self.verbs = rank, verbs
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
        elif command.call in self.verbs:
            return self.verbs[command.call](self.workers[command.target], *command.arguments)
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
            error = told(call, failed, self._missing() if lost else "")
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
    if (file := os.environ.get(MEETING)) is not None:
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        where = {"store": dist.FileStore(file, world), "rank": rank, "world_size": world}
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(seconds=time_limit), **where)
    return Ranks(time_limit=time_limit, idle_limit=idle_limit)


def perform(worker: Any, call: str, arguments: tuple[Any, ...]) -> Any:
    """A verb of this file (they are made of a worker's), or one that the worker has as it is."""
    verb = VERBS.get(call)
    return value_of(verb(worker, *arguments) if verb else getattr(worker, call)(*arguments))


def value_of(result: Any) -> Any:
    """What a worker answered; its futures are always done."""
    return result.value if isinstance(result, ImmediateTrainFuture) else result


def add_gradients(
    worker: Worker, batches: Sequence[Batch], fillers: int, named: NamedAlgorithm, counts: Counts
) -> list[Part]:
    """One rank's micro-batches, the last `fillers` of which only keep step with the other ranks."""
    algorithm = named.rebuilt()
    real = len(batches) - fillers
    weights = [1.0] * real + [0.0] * fillers
    parts = [worker.backward(batch, algorithm, counts, weight) for batch, weight in zip(batches, weights, strict=True)][
        :real
    ]
    if parts:
        worker.stop_unless_finite(parts, batches[:real])
    return [Part({name: value.cpu() for name, value in part.shares.items()}, _on_cpu(part.metrics)) for part in parts]


class Facts(NamedTuple):
    """What a driver needs to know of a model that it does not have."""

    layout: Layout
    version: int
    dtype: torch.dtype
    vocabulary: int
    adapted: bool


def facts(worker: Worker) -> Facts:
    model = worker.module.model
    vocabulary = int(worker.module.inner.config.get_text_config().vocab_size)
    return Facts(worker.layout, worker.version, worker.dtype, vocabulary, hasattr(model, "peft_config"))


def optim_step(worker: Worker) -> tuple[dict[str, float], int]:
    """Also says which version it led to."""
    metrics: dict[str, float] = value_of(worker.optim_step())
    return metrics, worker.version


def write_plain_files(worker: Worker, folder: Path, adapter: bool = True) -> None:
    """The weights as an engine loads them, by rank 0; the other ranks bring theirs."""
    if _is_first():
        write_weights(worker.module, folder, worker.full, adapter=adapter)
    else:
        pass_weights(worker.module, worker.full, adapter=adapter)


def write_adapter_files(worker: Worker, folder: Path) -> None:
    weights = adapter_weights(worker.module, worker.full)
    if _is_first():
        write_adapter(worker.module, folder, weights)


def write_model_files(worker: Worker, folder: Path) -> None:
    """What everybody can load: the adapter alone or plain weights, and the heads beside them."""
    if hasattr(worker.module.model, "peft_config"):
        write_adapter_files(worker, folder)
    else:
        write_plain_files(worker, folder)
    heads = {name: worker.full(weight) for name, weight in worker.module.heads.state_dict(keep_vars=True).items()}
    if not _is_first():
        return
    if heads:
        save_file({name: weight.cpu().contiguous() for name, weight in heads.items()}, folder / HEADS)
    inner = worker.module.inner
    if not hasattr(worker.module.model, "peft_config") and inner.can_generate():
        inner.generation_config.save_pretrained(folder)


def say_logprobs(worker: Worker, tokens: Sequence[int]) -> tuple[float, ...]:
    """Of each token but the first, at temperature 1: one pass of the sharded model, the same on all ranks."""
    mask = np.arange(len(tokens)) > 0
    before = worker.module.temperature
    worker.set_temperature(1.0)
    try:
        (outputs,) = value_of(worker.logprobs([collate([(Row("probe", np.array(tokens), mask),)])], "policy", {}))
    finally:
        worker.set_temperature(before)
    return tuple(outputs.logprob[1:].tolist())


@torch.no_grad()
def fill_whole(worker: Worker, everything: bool) -> None:
    """Bring rank 0's copy in one piece up to date, or make one; only what is trained changes by training."""
    if _is_first() and worker.whole is None:
        worker.whole = worker.fresh()
    targets = dict(worker.whole.named_parameters()) if worker.whole is not None else {}
    for name, parameter in worker.module.model.named_parameters():
        if everything or parameter.requires_grad:
            whole = worker.full(parameter)
            if targets:
                targets[name].copy_(whole)


def _is_first() -> bool:
    return dist.get_rank() == 0


VERBS: Mapping[str, Callable[..., Any]] = {
    verb.__name__: verb
    for verb in (
        add_gradients,
        facts,
        optim_step,
        write_plain_files,
        write_adapter_files,
        write_model_files,
        say_logprobs,
        fill_whole,
    )
}


class Share(NamedTuple):
    """Which micro-batches a rank runs, and how many more it runs to keep step."""

    places: tuple[int, ...]
    fillers: int


def divide(sizes: Sequence[int], ranks: int) -> list[Share]:
    """The largest first, each to the rank with the least to do; no rank gets more than its number of them."""
    most = -(-len(sizes) // ranks)
    places: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for place in sorted(range(len(sizes)), key=lambda place: -sizes[place]):
        free = [rank for rank in range(ranks) if len(places[rank]) < most]
        rank = min(free, key=lambda rank: loads[rank])
        places[rank].append(place)
        loads[rank] += sizes[place]
    return [Share(tuple(sorted(own)), most - len(own)) for own in places]


class RankedWeights:
    """The weights that all ranks hold at one version, for who samples elsewhere: a `WeightSource`."""

    def __init__(self, backend: RankedBackend) -> None:
        self._backend = backend
        self._facts = backend.facts

    @property
    def vocabulary(self) -> int:
        return self._facts.vocabulary

    @property
    def dtype(self) -> torch.dtype:
        return self._facts.dtype

    @property
    def adapted(self) -> bool:
        return self._facts.adapted

    def write(self, folder: Path) -> None:
        """By rank 0, into a folder of its machine."""
        self._ask("write_plain_files", folder)

    def write_base(self, folder: Path) -> None:
        self._ask("write_plain_files", folder, False)

    def write_adapter(self, folder: Path) -> None:
        self._ask("write_adapter_files", folder)

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        said: tuple[float, ...] = self._ask("say_logprobs", tuple(tokens))
        return said

    def _ask(self, call: str, *arguments: Any) -> Any:
        self._stop_if_moved_on()
        said = self._backend.ask(call, *arguments)
        self._stop_if_moved_on()  # a step that was submitted before may have been under way
        return said

    def _stop_if_moved_on(self) -> None:
        if self._backend.version != self._facts.version:
            raise MovedOnError(
                f"version {self._facts.version} of the weights was asked for, and the ranks have moved on to "
                f"{self._backend.version}: hand weights over before the next optimizer step"
            )


class RankedBackend:
    """A `Backend` whose model is spread over all ranks, by workers that `build` makes."""

    def __init__(self, ranks: Crew, build: Build) -> None:
        self.ranks = ranks
        self._number = ranks.start(build)
        self.facts: Facts = self.ask("facts")
        self._whole: PreTrainedModel | None = None
        self._whole_version: int | None = None  # None: it differs in all weights, frozen ones too

    @property
    def layout(self) -> Layout:
        return self.facts.layout

    @property
    def version(self) -> int:
        return self.facts.version

    @property
    def parallel(self) -> int:
        return self.ranks.world

    @property
    def model(self) -> PreTrainedModel:
        """A copy in one piece, where rank 0 is this process; made when first asked for, and kept from then on."""
        if self._whole is None:
            if not isinstance(self.ranks, Ranks):
                raise ValueError(
                    "the model is spread over other processes, and there is no copy of it here: sample with an engine "
                    "that has weights of its own (vllm or http), not with the embedded one"
                )
            self.ask("fill_whole", True)
            self._whole = self.ranks.here(self._number).whole
            self._whole_version = self.version
        assert self._whole is not None, "rank 0 has made it"
        return self._whole

    def set_temperature(self, temperature: float) -> None:
        self.ask("set_temperature", temperature)

    def logprobs(
        self, batches: Sequence[Batch], which: str = "policy", reads: Mapping[str, Read] = MappingProxyType({})
    ) -> TrainFuture[list[Outputs]]:
        shares = divide([batch.num_tokens for batch in batches], self.ranks.world)
        arguments = [(own, which, dict(reads)) for own in _filled(batches, shares)]
        replies = self.ranks.call_with_shares(self._number, "logprobs", arguments)
        found = {
            place: outputs
            for share, reply in zip(shares, replies, strict=True)
            for place, outputs in zip(share.places, reply, strict=False)  # what fillers said is left out
        }
        return ImmediateTrainFuture([found[place] for place in range(len(batches))])

    def forward_backward(
        self, batches: Sequence[Batch], algorithm: Algorithm, counts: Counts
    ) -> TrainFuture[dict[str, float]]:
        named = NamedAlgorithm.of(algorithm)
        shares = divide([batch.num_tokens for batch in batches], self.ranks.world)
        arguments = [
            (own, share.fillers, named, dict(counts))
            for own, share in zip(_filled(batches, shares), shares, strict=True)
        ]
        replies = self.ranks.call_with_shares(self._number, "add_gradients", arguments)
        return ImmediateTrainFuture(sum_parts([part for reply in replies for part in reply], counts))

    def optim_step(self) -> TrainFuture[dict[str, float]]:
        metrics, version = self.ask("optim_step")
        self.facts = self.facts._replace(version=version)
        return ImmediateTrainFuture(metrics)

    def get_weights(self) -> TrainFuture[Weights]:
        if self._whole is not None and self._whole_version != self.version:
            self.ask("fill_whole", self._whole_version is None)
            self._whole_version = self.version
        return ImmediateTrainFuture(Weights(self._whole, self.version, RankedWeights(self)))

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        self.ask("load_weights", {name: tensor.detach().cpu() for name, tensor in weights.items()})
        self._whole_version = None
        return ImmediateTrainFuture(None)

    def update_reference(self, decay: float) -> TrainFuture[None]:
        self.ask("update_reference", decay)
        return ImmediateTrainFuture(None)

    def release_memory(self) -> TrainFuture[None]:
        """Leave to others on the ranks' devices what torch keeps for later."""
        self.ask("release_memory")
        return ImmediateTrainFuture(None)

    def save(self, path: Path) -> TrainFuture[None]:
        """Plain weights for everybody in `path`, and each rank's part of the training state beside them."""
        self.ask("write_model_files", path)
        self.ask("save_shards", path)
        return ImmediateTrainFuture(None)

    def load(self, path: Path) -> TrainFuture[None]:
        self.ask("load_shards", path)
        self.facts = self.ask("facts")
        self._whole_version = None
        return ImmediateTrainFuture(None)

    def load_heads(self, path: Path) -> None:
        """A model that was trained with heads goes on with them."""
        self.ask("load_heads", path)

    @contextmanager
    def rehearsing(self) -> Iterator[None]:
        """Inside, every rank's memory is as full as in later steps; then all is as it was."""
        self.ask("rehearse", True)
        with ExitStack() as afterwards:
            afterwards.callback(self.ask, "rehearse", False)
            yield

    def close(self) -> None:
        """Free what the ranks hold of this model; they go on serving others."""
        self.ranks.release(self._number)

    def ask(self, call: str, *arguments: Any) -> Any:
        """What rank 0 says; for calls of which all ranks know the same."""
        return self.ranks.call(self._number, call, *arguments)[0]


def _filled(batches: Sequence[Batch], shares: Sequence[Share]) -> list[list[Batch]]:
    """Each rank's micro-batches; the smallest of the step fills up."""
    smallest = min(batches, key=lambda batch: batch.num_tokens)
    return [[*(batches[place] for place in share.places), *[smallest] * share.fillers] for share in shares]


def _on_cpu(metrics: Mapping[str, Term]) -> dict[str, Term]:
    return {name: Term(torch.as_tensor(total).cpu(), unit) for name, (total, unit) in metrics.items()}


def portable(error: Exception) -> Exception:
    """An exception that survives pickling, as itself or as its text."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - reducing an unknown exception may fail in any way
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def told(call: str, failed: Sequence[tuple[int, Exception]], missing: str = "") -> Exception:
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
