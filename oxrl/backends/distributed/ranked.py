"""A `Backend` over several processes: divides a step's micro-batches over ranks, and merges their results.

All ranks get the same number of micro-batches: where a step does not divide evenly, a rank runs the smallest one again
with weight 0, because a pass over a sharded model is a collective. The processes are a `WorkerGroup` (`ranks`, or the
actors of `ray`); what a rank does with its share is defined by its worker (`fsdp`, `deepspeed`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from oxrl.backends.distributed.named import NamedAlgorithm
from oxrl.backends.distributed.ranks import Build, RankError, Ranks, WorkerGroup
from oxrl.backends.distributed.rpc import Facts
from oxrl.backends.local import sum_parts
from oxrl.types import (
    Algorithm,
    Batch,
    Counts,
    ImmediateTrainFuture,
    Layout,
    Media,
    Outputs,
    Read,
    Rendezvous,
    TrainFuture,
    Weights,
)
from oxrl.weights.broadcast import TransferError
from oxrl.weights.checkpoint_names import StaleWeightsError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Share(NamedTuple):
    """The micro-batches that a rank runs, and how many extra passes it makes to match the other ranks."""

    indices: tuple[int, ...]
    fillers: int


def divide(sizes: Sequence[int], ranks: int) -> list[Share]:
    """Assign the largest first, each to the rank with the smallest load; no rank gets more than its share by number."""
    limit = -(-len(sizes) // ranks)
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        free = [rank for rank in range(ranks) if len(assigned[rank]) < limit]
        rank = min(free, key=lambda rank: loads[rank])
        assigned[rank].append(index)
        loads[rank] += sizes[index]
    return [Share(tuple(sorted(indices)), limit - len(indices)) for indices in assigned]


class RankedWeights:
    """The weights of all ranks at one version, for engines in other processes: a `WeightSource`."""

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
        """Write the files on rank 0, to a folder of its machine."""
        self._call("write_plain_files", folder)

    def write_base(self, folder: Path) -> None:
        self._call("write_plain_files", folder, False)

    def write_adapter(self, folder: Path) -> None:
        self._call("write_adapter_files", folder)

    def send(self, rendezvous: Rendezvous) -> None:
        """Send from rank 0; its machine must be able to reach this process at the rendezvous address."""
        if message := self._call("send_plain_weights", rendezvous):
            raise TransferError(message)

    def logprobs(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> tuple[float, ...]:
        logprobs: tuple[float, ...] = self._call("sequence_logprobs", tuple(tokens), tuple(media))
        return logprobs

    def _call(self, call: str, *arguments: Any) -> Any:
        self._check_version()
        result = self._backend.call(call, *arguments)
        self._check_version()  # an optimizer step that was submitted before may have run meanwhile
        return result

    def _check_version(self) -> None:
        if self._backend.version != self._facts.version:
            raise StaleWeightsError(
                f"version {self._facts.version} of the weights was requested, but the ranks have version "
                f"{self._backend.version}: sync the engines before the next optimizer step"
            )


class RankedBackend:
    """A `Backend` whose model is sharded over all ranks, by workers that `build` creates."""

    def __init__(self, ranks: WorkerGroup, build: Build) -> None:
        self.ranks = ranks
        self._number = ranks.start(build)
        self.facts: Facts = self.call("facts")
        self._full_model: PreTrainedModel | None = None
        self._full_version: int | None = None  # None: all of its weights are outdated, frozen ones too

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
        """An unsharded copy, where rank 0 is this process; created on first access, then kept."""
        if self._full_model is None:
            if not isinstance(self.ranks, Ranks):
                raise ValueError(
                    "the model is sharded over other processes, and this process has no copy: sample with an engine "
                    "that has its own weights (vllm or http), not with the embedded one"
                )
            self.call("update_full_model", True)
            self._full_model = self.ranks.here(self._number).full_model
            self._full_version = self.version
        assert self._full_model is not None, "created by rank 0"
        return self._full_model

    def set_temperature(self, temperature: float) -> None:
        self.call("set_temperature", temperature)

    def logprobs(
        self, batches: Sequence[Batch], which: str = "policy", reads: Mapping[str, Read] = MappingProxyType({})
    ) -> TrainFuture[list[Outputs]]:
        shares = divide([batch.num_tokens for batch in batches], self.ranks.world)
        arguments = [(own, which, dict(reads)) for own in _filled(batches, shares)]
        replies = self.ranks.call_with_shares(self._number, "logprobs", arguments)
        found = {
            index: outputs
            for share, reply in zip(shares, replies, strict=True)
            for index, outputs in zip(share.indices, reply, strict=False)  # without the outputs of fillers
        }
        return ImmediateTrainFuture([found[index] for index in range(len(batches))])

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
        metrics, version = self.call("optim_step")
        self.facts = self.facts._replace(version=version)
        return ImmediateTrainFuture(metrics)

    def get_weights(self) -> TrainFuture[Weights]:
        if self._full_model is not None and self._full_version != self.version:
            self.call("update_full_model", self._full_version is None)
            self._full_version = self.version
        return ImmediateTrainFuture(Weights(self._full_model, self.version, RankedWeights(self)))

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        self.call("load_weights", {name: tensor.detach().cpu() for name, tensor in weights.items()})
        self._full_version = None
        return ImmediateTrainFuture(None)

    def update_reference(self, decay: float) -> TrainFuture[None]:
        self.call("update_reference", decay)
        return ImmediateTrainFuture(None)

    def release_memory(self) -> TrainFuture[None]:
        """Return torch's cached memory to the ranks' devices, for other processes on them."""
        self.call("release_memory")
        return ImmediateTrainFuture(None)

    def save(self, path: Path) -> TrainFuture[None]:
        """Write plain weights to `path`, and each rank's part of the training state next to them."""
        self.call("write_model_files", path)
        self.call("save_shards", path)
        return ImmediateTrainFuture(None)

    def load(self, path: Path) -> TrainFuture[None]:
        self.call("load_shards", path)
        self.facts = self.call("facts")
        self._full_version = None
        return ImmediateTrainFuture(None)

    def load_heads(self, path: Path) -> None:
        """Load the heads of a model that was trained with heads."""
        self.call("load_heads", path)

    @contextmanager
    def memory_warm_up(self) -> Iterator[None]:
        """Allocate gradients and optimizer state on every rank inside the block; free them afterwards."""
        self.call("warm_up_memory", True)
        with ExitStack() as stack:
            stack.callback(self.call, "warm_up_memory", False)
            try:
                yield
            except RankError:
                stack.pop_all()  # ranks that failed can run no more calls, and this error must not be hidden
                raise

    def close(self) -> None:
        """Free this model on the ranks; they keep serving others."""
        self.ranks.release(self._number)

    def call(self, call: str, *arguments: Any) -> Any:
        """Call a handler on all ranks, and return the result of rank 0."""
        return self.ranks.call(self._number, call, *arguments)[0]


def _filled(batches: Sequence[Batch], shares: Sequence[Share]) -> list[list[Batch]]:
    """Return each rank's micro-batches; the smallest of the step is the filler."""
    smallest = min(batches, key=lambda batch: batch.num_tokens)
    return [[*(batches[index] for index in share.indices), *[smallest] * share.fillers] for share in shares]
