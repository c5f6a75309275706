"""One model sharded over several ranks by FSDP2: each holds a shard of every weight, gradient and optimizer state.

A rank's worker is the local backend over a sharded module: forward, loss and optimizer are the same code. This module
adds what differs: sharding layer by layer, shards of a model that only rank 0 loads, sums instead of means over ranks,
and gathering a weight. A model in half precision has float32 shards and computes in its own precision. The
communication between ranks is in `ranks`, the checkpoint format in `shards`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oxrl.backends.distributed.ranked import RankedBackend
from oxrl.backends.distributed.ranks import WorkerGroup
from oxrl.backends.distributed.shards import (
    OPTIMIZER,
    SHARDS,
    Files,
    has_shards,
    load_shards,
    load_unsharded,
    local_shard,
    save_shards,
)
from oxrl.backends.distributed.worker import (
    Broadcast,
    Load,
    RankWorker,
    Settings,
    ShardedModel,
    random_state,
    restore_random_state,
    shard_model,
    tensors_of,
)
from oxrl.backends.forward import HEADS, LanguageModel
from oxrl.backends.local import copy_parameters
from oxrl.backends.optimizer import create_adamw_optimizer
from oxrl.tensors import decoder_layers
from oxrl.types import Algorithm, Batch, Counts, ImmediateTrainFuture, Outputs, Read, TrainFuture

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from oxrl.backends.local import Part

logger = logging.getLogger(__name__)


class FSDPTrainingBackend(RankedBackend):
    """`FSDPTrainingBackend(ranks, partial(load_model, "tiny"), lr=1e-4)` on rank 0, while the other ranks serve."""

    def __init__(
        self,
        ranks: WorkerGroup,
        load: Load,
        *,
        others: Mapping[str, Load] = MappingProxyType({}),
        heads: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        chosen = Settings(heads=tuple(heads), **settings)
        super().__init__(ranks, partial(build_worker, load, dict(others), chosen))


def build_worker(load: Load, others: Mapping[str, Load], settings: Settings) -> FSDPWorker:
    """Shard the model and those it is compared with one after the other: rank 0 holds at most one of them in full."""
    trained = shard_model(load, settings.heads, settings.temperature, materialize)
    compared = {
        name: shard_model(each, (), settings.temperature, materialize, frozen=True).module
        for name, each in others.items()
    }
    return FSDPWorker(trained, compared, settings, load)


def materialize(empty: ShardedModel, device: torch.device, broadcast: Broadcast) -> None:
    """Shard a module and give each rank its shards, one weight after the other; each is briefly full on every rank."""
    module = empty.module
    shard(module, _mesh(device.type), empty.dtype)
    module.to_empty(device=device)
    module.inner.tie_weights()
    for name, tensor in tensors_of(module).items():
        tensor.copy_(local_shard(broadcast(name, tensor.shape, device), tensor))


def _mesh(device: str) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (dist.get_world_size(),))


def shard(module: LanguageModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Shard each layer and head, then the rest; weights are full only inside `forward`.

    `dtype` is the precision of the computation; shards are float32.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    layers = decoder_layers(module.inner)
    module.float()
    # Inputs are not cast: a batch carries log-probs and advantages, which stay in float32.
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    halves = policy
    if dtype != torch.float32:
        halves = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for head in module.heads.values():
        fully_shard(head, mesh=mesh, mp_policy=policy)
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=halves)
    # The root's weights (embedding and projection) stay gathered until backward, which needs them first.
    fully_shard(module, mesh=mesh, mp_policy=halves, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # Losses are divided by the counts of the whole step, so gradients are summed over ranks, not averaged.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


class FSDPWorker(RankWorker):
    """One rank's worker."""

    def __init__(
        self, trained: ShardedModel, others: Mapping[str, LanguageModel], settings: Settings, load: Load
    ) -> None:
        options = {name: getattr(settings, name) for name in ("lr", "weight_decay", "betas", "eps")}
        super().__init__(trained, create_adamw_optimizer(trained.module, **options), others, settings, load)

    def _full_tensor(self, parameter: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter

    def logprobs(
        self, batches: Sequence[Batch], which: str = "policy", reads: Mapping[str, Read] = MappingProxyType({})
    ) -> TrainFuture[list[Outputs]]:
        outputs = super().logprobs(batches, which, reads)
        self._reshard()
        return outputs

    def backward(self, batch: Batch, algorithm: Algorithm, counts: Counts, weight: float = 1.0) -> Part:
        part = super().backward(batch, algorithm, counts, weight)
        self._reshard()
        return part

    def _reshard(self) -> None:
        """Reshard all modules: without a backward pass the root stays gathered, and would keep stale weights."""
        for module in (self.module, *self.others.values()):
            module.reshard()  # type: ignore[operator]

    def _clip_gradients(self) -> Tensor:
        norm: Any = super()._clip_gradients()
        full: Tensor = norm.full_tensor()
        return full

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        copy_parameters(_local_shards(weights, self.model), self.model)
        self.optimizer.copy_from_model()
        return ImmediateTrainFuture(None)

    @torch.no_grad()
    def load_heads(self, path: Path) -> None:
        heads = Files(path / HEADS)
        for name, weight in self.module.heads.named_parameters():
            weight.copy_(local_shard(heads[name], weight))

    def save_shards(self, path: Path) -> None:
        save_shards(self, path, random_state())

    def load_shards(self, path: Path) -> None:
        """Load what any number of ranks or one process saved; only the random states are specific to a rank."""
        if has_shards(path):
            random = random_state()
            load_shards(self, path, random)
            restore_random_state(random)
        elif (path / OPTIMIZER).is_file():
            load_unsharded(self, path)
        else:
            raise ValueError(
                f"{path} has neither {SHARDS}/ written by FSDP nor {OPTIMIZER}, so FSDP cannot resume from it: use the "
                "backend that saved it, or start a new run with this folder as the model"
            )


def _local_shards(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return this rank's shard of each weight of the model; every rank has the full weights."""
    parameters = dict(model.named_parameters())
    return {
        name: local_shard(weight, parameters[name]) if name in parameters else weight
        for name, weight in weights.items()
    }
