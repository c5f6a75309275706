"""A `Backend` over several processes: a step's micro-batches divided over ranks, and what they say put together, once.

Each rank gets whole micro-batches, and all get the same number of them: where a step does not divide, a rank runs the
smallest one again with weight 0, because a pass over a sharded model is a collective. The processes are a `WorkerGroup`
(`ranks`, or `ray`'s actors); what a rank does with its share is its worker's affair (`fsdp`, `deepspeed`).
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
from oxrl.backends.distributed.ranks import Build, Ranks, WorkerGroup
from oxrl.backends.distributed.rpc import Facts
from oxrl.backends.local import sum_parts
from oxrl.types import (
    Algorithm,
    Batch,
    Counts,
    ImmediateTrainFuture,
    Layout,
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

    def send(self, place: Rendezvous) -> None:
        """By rank 0; the meeting's address must lead to this process from its machine too."""
        if trouble := self._ask("send_plain_weights", place):
            raise TransferError(trouble)

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
            raise StaleWeightsError(
                f"version {self._facts.version} of the weights was asked for, and the ranks have moved on to "
                f"{self._backend.version}: hand weights over before the next optimizer step"
            )


class RankedBackend:
    """A `Backend` whose model is spread over all ranks, by workers that `build` makes."""

    def __init__(self, ranks: WorkerGroup, build: Build) -> None:
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
    def memory_warm_up(self) -> Iterator[None]:
        """Inside, every rank's memory is as full as in later steps; then all is as it was."""
        self.ask("warm_up_memory", True)
        with ExitStack() as afterwards:
            afterwards.callback(self.ask, "warm_up_memory", False)
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
