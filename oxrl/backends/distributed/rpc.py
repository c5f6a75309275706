"""What one rank does when it is asked: verbs over its worker, each the same call on all ranks at the same time.

A worker's own verbs are asked for by name; those here are made of them. Who asks, and how, is in `ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from oxrl.backends.distributed.named import NamedAlgorithm
from oxrl.backends.forward import HEADS, LanguageModel
from oxrl.backends.local import Part
from oxrl.data.pack import collate
from oxrl.types import (
    Algorithm,
    Batch,
    Counts,
    ImmediateTrainFuture,
    Layout,
    Outputs,
    Read,
    Rendezvous,
    Row,
    Term,
    TrainFuture,
)
from oxrl.weights.broadcast import TransferError, send
from oxrl.weights.checkpoint_names import adapter_weights, pass_weights, plain_weights, write_adapter, write_weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


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

    def warm_up_memory(self, begin: bool) -> None: ...

    def release_memory(self) -> TrainFuture[None]: ...


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


def send_plain_weights(worker: Worker, place: Rendezvous) -> str:
    """The weights to engines elsewhere, by rank 0; the other ranks bring theirs. Says what went wrong on the way."""
    if not _is_first():
        pass_weights(worker.module, worker.full)
        return ""
    weights, trouble = plain_weights(worker.module, worker.full), ""
    try:
        send(weights, place)
    except TransferError as error:
        trouble = str(error)
        for _ in weights:  # the other ranks go on bringing theirs
            pass
    return trouble


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
        send_plain_weights,
        write_adapter_files,
        write_model_files,
        say_logprobs,
        fill_whole,
    )
}


def _on_cpu(metrics: Mapping[str, Term]) -> dict[str, Term]:
    return {name: Term(torch.as_tensor(total).cpu(), unit) for name, (total, unit) in metrics.items()}
