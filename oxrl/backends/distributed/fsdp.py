"""One model spread over several ranks by FSDP2: each holds a slice of every weight, gradient and optimizer state.

A rank's worker is the local backend over a sharded module: the passes, the loss and the optimizer are the same code.
What differs is here: sharding layer by layer, slices of a model that rank 0 alone has loaded, sums instead of means
over ranks, and bringing a weight together. A model in half precision is kept in float32 slices and computes in its own
precision. Who calls whom is in `ranks`, what a checkpoint holds in `shards`.
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
    load_whole,
    save_shards,
    slice_of,
)
from oxrl.backends.distributed.worker import (
    Broadcast,
    Load,
    RankWorker,
    Settings,
    ShardedModel,
    random_state,
    restore_random_state,
    spread,
    tensors_of,
)
from oxrl.backends.forward import HEADS, LanguageModel
from oxrl.backends.local import copy_parameters
from oxrl.backends.optimizer import create_adamw_optimizer
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
    """The model and what it is compared with, one after the other: no rank has more than one of them whole."""
    trained = spread(load, settings.heads, settings.temperature, place)
    compared = {
        name: spread(each, (), settings.temperature, place, frozen=True).module for name, each in others.items()
    }
    return FSDPWorker(trained, compared, settings, load)


def place(empty: ShardedModel, device: torch.device, bring: Broadcast) -> None:
    """Shard a module, and give each rank its slices, one after the other: each is whole for a moment."""
    module = empty.module
    shard(module, _mesh(device.type), empty.dtype)
    module.to_empty(device=device)
    module.inner.tie_weights()
    for name, tensor in tensors_of(module).items():
        tensor.copy_(slice_of(bring(name, tensor.shape, device), tensor))


def _mesh(device: str) -> DeviceMesh:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(device, (dist.get_world_size(),))


def shard(module: LanguageModel, mesh: DeviceMesh, dtype: torch.dtype) -> None:
    """Slices of each layer and head, then of what is left; inside `forward`, and only there, weights are whole.

    `dtype` is the precision to compute in; slices are kept in float32.
    """
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    layers = _layers(module)
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
    # What the root holds (embedding and projection) stays whole from a forward to its backward, which needs it first.
    fully_shard(module, mesh=mesh, mp_policy=halves, reshard_after_forward=False)
    for part in module.modules():
        if isinstance(part, FSDPModule):
            # The driver's counts are those of the whole step: gradients are summed over ranks, not averaged.
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)


def _layers(module: LanguageModel) -> list[nn.Module]:
    """The blocks that transformers says belong together."""
    blocks = set(module.inner._no_split_modules or ())
    return [part for part in module.inner.modules() if type(part).__name__ in blocks]


class FSDPWorker(RankWorker):
    """One rank's slice."""

    def __init__(
        self, trained: ShardedModel, others: Mapping[str, LanguageModel], settings: Settings, load: Load
    ) -> None:
        options = {name: getattr(settings, name) for name in ("lr", "weight_decay", "betas", "eps")}
        super().__init__(trained, create_adamw_optimizer(trained.module, **options), others, settings, load)

    def _in_one_piece(self, parameter: Tensor) -> Tensor:
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
        """A root without a backward pass stays whole, and would not notice that its weights have changed."""
        for module in (self.module, *self.others.values()):
            module.reshard()  # type: ignore[operator]

    def _clip_gradients(self) -> Tensor:
        norm: Any = super()._clip_gradients()
        whole: Tensor = norm.full_tensor()
        return whole

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        copy_parameters(_sliced(weights, self.model), self.model)
        self.optimizer.take_weights()
        return ImmediateTrainFuture(None)

    @torch.no_grad()
    def load_heads(self, path: Path) -> None:
        heads = Files(path / HEADS)
        for name, weight in self.module.heads.named_parameters():
            weight.copy_(slice_of(heads[name], weight))

    def save_shards(self, path: Path) -> None:
        save_shards(self, path, random_state())

    def load_shards(self, path: Path) -> None:
        """What any number of ranks saved, or one process; only the random numbers of dropout are a rank's own."""
        if has_shards(path):
            random = random_state()
            load_shards(self, path, random, alone=False)
            restore_random_state(random)
        elif (path / OPTIMIZER).is_file():
            load_whole(self, path)
        else:
            raise ValueError(
                f"{path} has neither {SHARDS}/ of this backend nor {OPTIMIZER}: it cannot go on from it; to begin anew "
                "with its weights, name it as the model"
            )


def _sliced(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each weight that the model has; every rank was given all of them."""
    parameters = dict(model.named_parameters())
    return {
        name: slice_of(weight, parameters[name]) if name in parameters else weight for name, weight in weights.items()
    }
