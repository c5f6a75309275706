"""What one rank's part of a backend has, whatever engine shards its model: the local backend, over what rank 0 loaded.

Rank 0 loads, every rank builds the same model empty, and gets its part weight by weight; then all prove together that
they speak as the whole did. An engine's file says how a part is kept, brought together, updated and saved (`fsdp`,
`deepspeed`); the verbs that all ranks do are in `ranks`.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oxrl.backends.distributed.ranks import portable
from oxrl.backends.distributed.rpc import value_of
from oxrl.backends.forward import (
    LanguageModel,
    Probed,
    prepare_layout,
    probe_batch,
    register_attention,
    relative_gap,
    rounding,
)
from oxrl.backends.local import PyTorchTrainingBackend, on_device
from oxrl.backends.optimizer import schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oxrl.types import Batch

RANDOM = "random:"
LOAD_LIMIT = 3600.0  # seconds that ranks wait for each other while a model is read, which no other call takes
T = TypeVar("T")
Load: TypeAlias = Callable[[], Any]
"""Gives a model; it travels: `partial(load_model, "tiny")`. Rank 0 calls it as it is, and every rank once more inside
`torch.device("meta")`, for a model of the same make without weights."""


class Settings(NamedTuple):
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


class Probe(NamedTuple):
    """Some rows, and the log-probs that the whole model gave their tokens where it was loaded."""

    batch: Batch
    said: Tensor


class ShardedModel(NamedTuple):
    """A module in this rank's part, and the precision that each of its weights was loaded in."""

    module: LanguageModel
    dtypes: Mapping[str, torch.dtype]
    probe: Probe

    @property
    def dtype(self) -> torch.dtype:
        """Of the model as a whole."""
        embedding = self.module.inner.get_input_embeddings().weight
        return self.dtypes[next(name for name, tensor in tensors_of(self.module).items() if tensor is embedding)]


class Told(NamedTuple):
    """What rank 0, which has loaded the model, tells the others of it."""

    probed: Probed
    attention: str
    dtypes: Mapping[str, torch.dtype]
    probe: Probe


class Broadcast(Protocol):
    """The whole of one weight that rank 0 has loaded, on every rank: all ask for the same ones in the same order."""

    def __call__(self, name: str, shape: torch.Size, device: torch.device) -> Tensor: ...


Materialize: TypeAlias = Callable[[ShardedModel, torch.device, Broadcast], Any]
"""Gives an empty module weights on a device, of which each rank keeps its part."""


def spread(
    load: Load, heads: Sequence[str], temperature: float, place: Materialize, *, frozen: bool = False
) -> ShardedModel:
    """Rank 0 loads, and proves the layout on the whole model; all build an empty one, for `place` to fill."""
    loaded, module = _all_or_none(partial(_build, load, heads, temperature))
    (told,) = _from_first([_describe(loaded)] if loaded is not None else [None])
    module.layout, module.probed = told.probed.layout, told.probed
    register_attention()
    module.inner.set_attn_implementation(told.attention)
    if frozen:
        module.eval().requires_grad_(False)
    made = ShardedModel(module, told.dtypes, told.probe)
    found = tensors_of(loaded) if loaded is not None else {}
    with torch.no_grad():
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        place(made, device, partial(_broadcast, found, told.dtypes))
    if loaded is not None:
        for name in ("generation_config", "_weight_conversions"):  # which come with weights
            if hasattr(loaded.inner, name):
                setattr(module.inner, name, getattr(loaded.inner, name))
    return made


def _build(load: Load, heads: Sequence[str], temperature: float) -> tuple[LanguageModel | None, LanguageModel]:
    loaded = None
    if dist.get_rank() == 0:
        loaded = LanguageModel(load(), heads, temperature=temperature)
        prepare_layout(loaded)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*which is a no-op")  # nothing shall be copied yet
        return loaded, LanguageModel(load(), heads, temperature=temperature)


@torch.no_grad()
def _describe(module: LanguageModel) -> Told:
    assert module.probed is not None, "it was prepared"
    batch = probe_batch(module.inner)
    return Told(
        module.probed,
        module.inner.config._attn_implementation,
        {name: tensor.dtype for name, tensor in tensors_of(module).items()},
        Probe(on_device(batch, torch.device("cpu")), module.eval()(batch).logprob.cpu()),
    )


def _broadcast(
    found: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    name: str,
    shape: torch.Size,
    device: torch.device,
) -> Tensor:
    whole = torch.empty(shape, dtype=dtypes[name], device=device)
    if found:
        whole.copy_(found[name])
    dist.broadcast(whole, 0)
    return whole


def _all_or_none(make: Callable[[], T]) -> T:
    """What each rank makes; where one cannot, its reason on all of them, so that nobody waits for it."""
    patient = dist.new_group(backend="gloo", timeout=timedelta(seconds=LOAD_LIMIT))
    made, error = None, None
    try:
        made = make()
    except Exception as caught:  # noqa: BLE001 - raised again below, on every rank
        error = portable(caught)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=patient)
    dist.destroy_process_group(patient)
    for failed in (error, *errors):
        if failed is not None:
            raise failed
    assert made is not None, "there was no error"
    return made


def _from_first(values: list[Any]) -> list[Any]:
    dist.broadcast_object_list(values, src=0)
    return values


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that no checkpoint has; a tied one once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class RankWorker(PyTorchTrainingBackend):
    """The local backend over a module of which this rank has a part."""

    def __init__(
        self, trained: ShardedModel, optimizer: Any, others: Mapping[str, LanguageModel], settings: Settings, load: Load
    ) -> None:
        super().__init__(
            trained.module,
            optimizer,
            schedule(settings.lr_scheduler, settings.num_steps, settings.warmup_steps),
            max_grad_norm=settings.max_grad_norm,
            others=others,
        )
        self.whole: PreTrainedModel | None = None
        self.dtype = trained.dtype
        self._load = load
        self._dtypes = {id(tensor): trained.dtypes[name] for name, tensor in tensors_of(trained.module).items()}
        self._rehearsal = ExitStack()
        self._prove(trained.probe)

    def _prove(self, probe: Probe) -> None:
        """All parts together, on their devices, speak as the whole model did."""
        (outputs,) = value_of(self.logprobs([probe.batch]))
        gap, allowed = relative_gap(outputs.logprob, probe.said), rounding(self.dtype)
        if not gap <= allowed:
            raise RuntimeError(
                f"spread over {dist.get_world_size()} ranks, the model gives other log-probs than in one piece: they "
                f"differ by {gap:.1e}, and rounding explains {allowed:.0e}; nothing was trained"
            )

    def full(self, parameter: Tensor) -> Tensor:
        return self._in_one_piece(parameter).detach().to(self._dtypes[id(parameter)])

    def _in_one_piece(self, parameter: Tensor) -> Tensor:
        raise NotImplementedError("this is where engines differ")

    def fresh(self) -> PreTrainedModel:
        model: PreTrainedModel = self._load().to(self.device)
        return model

    def warm_up_memory(self, begin: bool) -> None:
        """The two halves of `memory_warm_up`, which come as two calls."""
        if begin:
            self._rehearsal.enter_context(self.memory_warm_up())
        else:
            self._rehearsal.close()


def random_state() -> dict[str, Tensor]:
    """Of this rank, by names that are its own."""
    states = {"cpu": torch.get_rng_state()} | (
        {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    )
    return {f"{RANDOM}{dist.get_rank()}:{device}": state for device, state in states.items()}


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    for key, state in states.items():
        (torch.cuda.set_rng_state if key.endswith("cuda") else torch.set_rng_state)(state)
