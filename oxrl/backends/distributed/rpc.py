"""RPC handlers of one rank: functions over its worker, each called on all ranks at the same time.

A worker's methods can be called by name; the handlers here combine them. How calls are sent is in `ranks`.
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
    Media,
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
    """One rank's part of a backend. Every method is called on all ranks at the same time."""

    module: LanguageModel  # sharded
    layout: Layout
    version: int
    dtype: torch.dtype  # in which the model was loaded, and is saved
    full_model: PreTrainedModel | None  # an unsharded copy on rank 0, created by `update_full_model`; None before

    def full(self, parameter: Tensor) -> Tensor:
        """Return one full parameter or buffer on every rank, in the precision in which it was loaded."""
        ...

    def fresh(self) -> PreTrainedModel:
        """Return an unsharded model of the same architecture with any weights; called on rank 0 only."""
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
    """Call a handler of this module, or a method of the worker."""
    handler = HANDLERS.get(call)
    return value_of(handler(worker, *arguments) if handler else getattr(worker, call)(*arguments))


def value_of(result: Any) -> Any:
    """Return the value of a worker's result; its futures are always done."""
    return result.value if isinstance(result, ImmediateTrainFuture) else result


def add_gradients(
    worker: Worker, batches: Sequence[Batch], fillers: int, named: NamedAlgorithm, counts: Counts
) -> list[Part]:
    """Accumulate gradients of a rank's micro-batches; the last `fillers` of them have weight 0."""
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
    """What a driver needs to know about a model that it does not hold."""

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
    """Step, and return metrics and the new version."""
    metrics: dict[str, float] = value_of(worker.optim_step())
    return metrics, worker.version


def write_plain_files(worker: Worker, folder: Path, adapter: bool = True) -> None:
    """Write the weights as an engine loads them, on rank 0; the other ranks take part in gathering."""
    if _is_rank_0():
        write_weights(worker.module, folder, worker.full, adapter=adapter)
    else:
        pass_weights(worker.module, worker.full, adapter=adapter)


def send_plain_weights(worker: Worker, rendezvous: Rendezvous) -> str:
    """Send the weights to remote engines, from rank 0; the others take part in gathering. Return an error message."""
    if not _is_rank_0():
        pass_weights(worker.module, worker.full)
        return ""
    weights, message = plain_weights(worker.module, worker.full), ""
    try:
        send(weights, rendezvous)
    except TransferError as error:
        message = str(error)
        for _ in weights:  # the other ranks still gather
            pass
    return message


def write_adapter_files(worker: Worker, folder: Path) -> None:
    weights = adapter_weights(worker.module, worker.full)
    if _is_rank_0():
        write_adapter(worker.module, folder, weights)


def write_model_files(worker: Worker, folder: Path) -> None:
    """Write files that transformers or PEFT can load: plain weights or the adapter alone; and the heads."""
    if hasattr(worker.module.model, "peft_config"):
        write_adapter_files(worker, folder)
    else:
        write_plain_files(worker, folder)
    heads = {name: worker.full(weight) for name, weight in worker.module.heads.state_dict(keep_vars=True).items()}
    if not _is_rank_0():
        return
    if heads:
        save_file({name: weight.cpu().contiguous() for name, weight in heads.items()}, folder / HEADS)
    inner = worker.module.inner
    if not hasattr(worker.module.model, "peft_config") and inner.can_generate():
        inner.generation_config.save_pretrained(folder)


def sequence_logprobs(worker: Worker, tokens: Sequence[int], media: Sequence[Media] = ()) -> tuple[float, ...]:
    """Return log-probs of each token but the first at temperature 1, by one pass of the sharded model."""
    mask = np.arange(len(tokens)) > 0
    before = worker.module.temperature
    worker.set_temperature(1.0)
    try:
        row = Row("probe", np.array(tokens), mask, media=tuple(media))
        (outputs,) = value_of(worker.logprobs([collate([(row,)])], "policy", {}))
    finally:
        worker.set_temperature(before)
    return tuple(outputs.logprob[1:].tolist())


@torch.no_grad()
def update_full_model(worker: Worker, everything: bool) -> None:
    """Update rank 0's unsharded copy, or create it; without `everything`, only the trained weights."""
    if _is_rank_0() and worker.full_model is None:
        worker.full_model = worker.fresh()
    targets = dict(worker.full_model.named_parameters()) if worker.full_model is not None else {}
    for name, parameter in worker.module.model.named_parameters():
        if everything or parameter.requires_grad:
            weight = worker.full(parameter)
            if targets:
                targets[name].copy_(weight)


def _is_rank_0() -> bool:
    return dist.get_rank() == 0


HANDLERS: Mapping[str, Callable[..., Any]] = {
    handler.__name__: handler
    for handler in (
        add_gradients,
        facts,
        optim_step,
        write_plain_files,
        send_plain_weights,
        write_adapter_files,
        write_model_files,
        sequence_logprobs,
        update_full_model,
    )
}


def _on_cpu(metrics: Mapping[str, Term]) -> dict[str, Term]:
    return {name: Term(torch.as_tensor(total).cpu(), unit) for name, (total, unit) in metrics.items()}
