"""One model spread over several ranks by FSDP2: each holds a slice of every weight, gradient and optimizer state.

A rank's worker is the local backend over a sharded module: the passes, the loss and the optimizer are the same code.
What differs is here: sharding layer by layer, slices of a model that rank 0 alone has loaded, sums instead of means
over ranks, and bringing a weight together. A model in half precision is kept in float32 slices and computes in its own
precision. Who calls whom is in `ranks`, what a checkpoint holds in `shards`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oxrl.backends._forward import HEADS, LanguageModel, Probed, prepare_layout, register_attention
from oxrl.backends.local import PyTorchTrainingBackend, copy_parameters
from oxrl.backends.optimizer import create_adamw_optimizer, schedule
from oxrl.backends.ranks import Crew, RankedBackend, portable
from oxrl.backends.shards import (
    OPTIMIZER,
    SHARDS,
    Files,
    has_shards,
    load_shards,
    load_whole,
    save_shards,
    slice_of,
)
from oxrl.types import Algorithm, Batch, Counts, ImmediateTrainFuture, Outputs, Read, TrainFuture

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from transformers import PreTrainedModel

    from oxrl.backends.local import Part

logger = logging.getLogger(__name__)

RANDOM = "random:"
T = TypeVar("T")
Load: TypeAlias = Callable[[], Any]
"""Gives a model; it travels: `partial(load_model, "tiny")`. Rank 0 calls it as it is, and every rank once more inside
`torch.device("meta")`, for a model of the same make without weights."""


class FSDPSettings(NamedTuple):
    """What a worker is made of; the same names and defaults as for the local backend."""

    lr: float = 1e-5
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    lr_scheduler: str = "constant"
    num_steps: int = 0
    warmup_steps: int = 0
    max_grad_norm: float = 1.0
    heads: tuple[str, ...] = ()
    temperature: float = 1.0


class FSDPTrainingBackend(RankedBackend):
    """`FSDPTrainingBackend(ranks, partial(load_model, "tiny"), lr=1e-4)` on rank 0, while the other ranks serve."""

    def __init__(
        self,
        ranks: Crew,
        load: Load,
        *,
        others: Mapping[str, Load] = MappingProxyType({}),
        heads: Sequence[str] = (),
        **settings: Any,
    ) -> None:
        chosen = FSDPSettings(heads=tuple(heads), **settings)
        super().__init__(ranks, partial(build_worker, load, dict(others), chosen))


def build_worker(load: Load, others: Mapping[str, Load], settings: FSDPSettings) -> FSDPWorker:
    """The model and what it is compared with, one after the other: no rank has more than one of them whole."""
    trained = spread(load, settings.heads, settings.temperature)
    compared = {name: spread(each, (), settings.temperature, frozen=True).module for name, each in others.items()}
    return FSDPWorker(trained, compared, settings, load)


class Spread(NamedTuple):
    """A module in slices, and the precision that each of its weights was loaded in."""

    module: LanguageModel
    dtypes: Mapping[str, torch.dtype]


class Told(NamedTuple):
    """What rank 0, which has loaded the model, tells the others of it."""

    probed: Probed
    attention: str
    dtypes: Mapping[str, torch.dtype]


def spread(load: Load, heads: Sequence[str], temperature: float, *, frozen: bool = False) -> Spread:
    """Rank 0 loads, and proves the layout on the whole model; all build an empty one and get their slices of it."""
    loaded, module = _all_or_none(partial(_build, load, heads, temperature))
    (told,) = _from_first([_describe(loaded)] if loaded is not None else [None])
    module.layout, module.probed = told.probed.layout, told.probed
    register_attention()
    module.inner.set_attn_implementation(told.attention)
    if frozen:
        module.eval().requires_grad_(False)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shard(module, _mesh(device), told.dtypes[_name_of(module, module.inner.get_input_embeddings().weight)])
    module.to_empty(device=device)
    module.inner.tie_weights()
    _fill(module, loaded, told.dtypes)
    if loaded is not None:
        for name in ("generation_config", "_weight_conversions"):  # which come with weights
            if hasattr(loaded.inner, name):
                setattr(module.inner, name, getattr(loaded.inner, name))
    return Spread(module, told.dtypes)


def _build(load: Load, heads: Sequence[str], temperature: float) -> tuple[LanguageModel | None, LanguageModel]:
    loaded = None
    if dist.get_rank() == 0:
        loaded = LanguageModel(load(), heads, temperature=temperature)
        prepare_layout(loaded)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*which is a no-op")  # nothing shall be copied yet
        return loaded, LanguageModel(load(), heads, temperature=temperature)


def _describe(module: LanguageModel) -> Told:
    assert module.probed is not None, "it was prepared"
    return Told(
        module.probed,
        module.inner.config._attn_implementation,
        {name: tensor.dtype for name, tensor in _tensors(module).items()},
    )


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that no checkpoint has; a tied one once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@torch.no_grad()
def _fill(module: LanguageModel, loaded: LanguageModel | None, dtypes: Mapping[str, torch.dtype]) -> None:
    """One after the other, each whole on every rank for a moment."""
    found = _tensors(loaded) if loaded is not None else {}
    for name, tensor in _tensors(module).items():
        whole = torch.empty(tensor.shape, dtype=dtypes[name], device=tensor.device)
        if found:
            whole.copy_(found[name])
        dist.broadcast(whole, 0)
        tensor.copy_(slice_of(whole, tensor))


def _all_or_none(make: Callable[[], T]) -> T:
    """What each rank makes; where one cannot, its reason on all of them, so that nobody waits for it."""
    made, error = None, None
    try:
        made = make()
    except Exception as caught:  # noqa: BLE001 - raised again below, on every rank
        error = portable(caught)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for failed in (error, *errors):
        if failed is not None:
            raise failed
    assert made is not None, "there was no error"
    return made


def _from_first(values: list[Any]) -> list[Any]:
    dist.broadcast_object_list(values, src=0)
    return values


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


class FSDPWorker(PyTorchTrainingBackend):
    """One rank's slice."""

    def __init__(
        self, trained: Spread, others: Mapping[str, LanguageModel], settings: FSDPSettings, load: Load
    ) -> None:
        module = trained.module
        options = {name: getattr(settings, name) for name in ("lr", "weight_decay", "betas", "eps")}
        super().__init__(
            module,
            create_adamw_optimizer(module, **options),
            schedule(settings.lr_scheduler, settings.num_steps, settings.warmup_steps),
            max_grad_norm=settings.max_grad_norm,
            others=others,
        )
        self.whole: PreTrainedModel | None = None
        self.dtype = trained.dtypes[_name_of(module, module.inner.get_input_embeddings().weight)]
        self._load = load
        self._dtypes = {id(tensor): trained.dtypes[name] for name, tensor in _tensors(module).items()}
        self._rehearsal = ExitStack()

    def full(self, parameter: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        return whole.detach().to(self._dtypes[id(parameter)])

    def fresh(self) -> PreTrainedModel:
        model: PreTrainedModel = self._load()
        return model

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
        save_shards(self, path, _random_state())

    def load_shards(self, path: Path) -> None:
        """What any number of ranks saved, or one process; only the random numbers of dropout are a rank's own."""
        if has_shards(path):
            random = _random_state()
            load_shards(self, path, random, alone=False)
            _restore_random_state(random)
        elif (path / OPTIMIZER).is_file():
            load_whole(self, path)
        else:
            raise ValueError(
                f"{path} has neither {SHARDS}/ of this backend nor {OPTIMIZER}: it cannot go on from it; to begin anew "
                "with its weights, name it as the model"
            )

    def rehearse(self, begin: bool) -> None:
        """The two halves of `rehearsing`, which come as two calls."""
        if begin:
            self._rehearsal.enter_context(self.rehearsing())
        else:
            self._rehearsal.close()


def _random_state() -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()} | (
        {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    )
    return {f"{RANDOM}{dist.get_rank()}:{device}": state for device, state in states.items()}


def _restore_random_state(states: Mapping[str, Tensor]) -> None:
    for key, state in states.items():
        (torch.cuda.set_rng_state if key.endswith("cuda") else torch.set_rng_state)(state)


def _name_of(module: nn.Module, weight: Tensor) -> str:
    return next(name for name, tensor in _tensors(module).items() if tensor is weight)


def _sliced(weights: Mapping[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """This rank's part of each weight that the model has; every rank was given all of them."""
    parameters = dict(model.named_parameters())
    return {
        name: slice_of(weight, parameters[name]) if name in parameters else weight for name, weight in weights.items()
    }
