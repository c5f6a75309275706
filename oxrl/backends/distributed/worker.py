"""One rank's worker, whichever engine shards the model: the local backend over a shard of the model that rank 0 loaded.

Rank 0 loads the model; every rank builds it empty and receives its shard weight by weight; then all ranks check that
the sharded model has the log-probs of the loaded one. How shards are stored, gathered, updated and saved is defined per
engine (`fsdp`, `deepspeed`); the calls that all ranks execute are in `rpc`.
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

from oxrl.backends.distributed.ranks import Build, portable
from oxrl.backends.distributed.rpc import value_of
from oxrl.backends.forward import LanguageModel, Probed, attention_of, register_attention, set_attention
from oxrl.backends.layout import prepare_layout, probe_batch, relative_gap, rounding
from oxrl.backends.local import PyTorchTrainingBackend, on_device
from oxrl.backends.optimizer import schedule
from oxrl.data.media_features import media_towers
from oxrl.seeds import seed_everything

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oxrl.types import Batch

RANDOM = "random:"
LOAD_LIMIT = 3600.0  # seconds that ranks wait for each other while rank 0 loads a model
T = TypeVar("T")
Load: TypeAlias = Callable[[], Any]
"""Returns a model; it is pickled: `partial(load_model, "tiny")`. Rank 0 calls it, and every rank calls it inside
`torch.device("meta")`, for a model of the same architecture without weights."""


class Settings(NamedTuple):
    """Training settings of a worker, with the names and defaults of the local backend."""

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
    compiles: bool | None = False
    expected_tokens: float = 0.0


class Probe(NamedTuple):
    """Some rows, and the log-probs of their tokens by the unsharded model on rank 0."""

    batch: Batch
    logprobs: Tensor


class ShardedModel(NamedTuple):
    """This rank's shard of a module, and the precision in which each of its weights was loaded."""

    module: LanguageModel
    dtypes: Mapping[str, torch.dtype]
    probe: Probe

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the model: that of its input embedding."""
        embedding = self.module.inner.get_input_embeddings().weight
        return self.dtypes[next(name for name, tensor in tensors_of(self.module).items() if tensor is embedding)]


class LoadedModel(NamedTuple):
    """What rank 0 broadcasts about the model that it loaded."""

    probed: Probed
    attention: str
    dtypes: Mapping[str, torch.dtype]
    probe: Probe


class Broadcast(Protocol):
    """Returns one full weight that rank 0 loaded, on every rank. A collective: all ranks call it in the same order."""

    def __call__(self, name: str, shape: torch.Size, device: torch.device) -> Tensor: ...


Materialize: TypeAlias = Callable[[ShardedModel, torch.device, Broadcast], Any]
"""Gives an empty module its weights on a device; each rank keeps its shard."""


def build_seeded(seed: int, build: Build) -> Any:
    """Create this rank's worker after seeding the rank, so that dropout is the same in every launch."""
    seed_everything(seed, dist.get_rank())
    return build()


def shard_model(
    load: Load, heads: Sequence[str], temperature: float, materialize: Materialize, *, frozen: bool = False
) -> ShardedModel:
    """Load on rank 0 and choose the layout there; build an empty model on all ranks, which `materialize` fills."""
    loaded, module = _on_all_ranks(partial(_build, load, heads, temperature))
    (described,) = _from_rank_0([_describe(loaded)] if loaded is not None else [None])
    module.layout, module.probed = described.probed.layout, described.probed
    register_attention()
    set_attention(module.inner, described.attention)
    if (towers := media_towers(module.inner)) is not None:
        towers.agree = _most_of_any_rank
    if frozen:
        module.eval().requires_grad_(False)
    sharded = ShardedModel(module, described.dtypes, described.probe)
    weights = tensors_of(loaded) if loaded is not None else {}
    with torch.no_grad():
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        materialize(sharded, device, partial(_broadcast, weights, described.dtypes))
    if loaded is not None:
        for name in ("generation_config", "_weight_conversions"):  # set when weights are loaded
            if hasattr(loaded.inner, name):
                setattr(module.inner, name, getattr(loaded.inner, name))
    return sharded


def _most_of_any_rank(passes: list[int]) -> list[int]:
    """A pass over a sharded tower is a collective: ranks whose rows have fewer media make it over an example."""
    counts = torch.tensor(passes, device="cuda" if torch.cuda.is_available() else "cpu")
    dist.all_reduce(counts, dist.ReduceOp.MAX)
    most: list[int] = counts.tolist()
    return most


def _build(load: Load, heads: Sequence[str], temperature: float) -> tuple[LanguageModel | None, LanguageModel]:
    loaded = None
    if dist.get_rank() == 0:
        loaded = LanguageModel(load(), heads, temperature=temperature)
        prepare_layout(loaded)
    with torch.device("meta"), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*which is a no-op")  # no weight is copied yet
        return loaded, LanguageModel(load(), heads, temperature=temperature)


@torch.no_grad()
def _describe(module: LanguageModel) -> LoadedModel:
    assert module.probed is not None, "prepare_layout was called"
    batch = probe_batch(module.inner)
    return LoadedModel(
        module.probed,
        attention_of(module.inner),
        {name: tensor.dtype for name, tensor in tensors_of(module).items()},
        Probe(on_device(batch, torch.device("cpu")), module.eval()(batch).logprob.cpu()),
    )


def _broadcast(
    weights: Mapping[str, Tensor],
    dtypes: Mapping[str, torch.dtype],
    name: str,
    shape: torch.Size,
    device: torch.device,
) -> Tensor:
    full = torch.empty(shape, dtype=dtypes[name], device=device)
    if weights:
        full.copy_(weights[name])
    dist.broadcast(full, 0)
    return full


def _on_all_ranks(function: Callable[[], T]) -> T:
    """Return `function()`; if it fails on any rank, raise that error on all of them, so that none waits for it."""
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=LOAD_LIMIT))
    result, error = None, None
    try:
        result = function()
    except Exception as caught:  # noqa: BLE001 - raised again below, on every rank
        error = portable(caught)
    errors: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error, group=group)
    dist.destroy_process_group(group)
    for failed in (error, *errors):
        if failed is not None:
            raise failed
    assert result is not None, "there was no error"
    return result


def _from_rank_0(values: list[Any]) -> list[Any]:
    dist.broadcast_object_list(values, src=0)
    return values


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name, non-persistent buffers included; tied ones once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class RankWorker(PyTorchTrainingBackend):
    """The local backend over this rank's shard of a module."""

    def __init__(
        self, trained: ShardedModel, optimizer: Any, others: Mapping[str, LanguageModel], settings: Settings, load: Load
    ) -> None:
        super().__init__(
            trained.module,
            optimizer,
            schedule(settings.lr_scheduler, settings.num_steps, settings.warmup_steps),
            max_grad_norm=settings.max_grad_norm,
            others=others,
            compiles=settings.compiles,
            expected_tokens=settings.expected_tokens,
        )
        self.full_model: PreTrainedModel | None = None
        self.dtype = trained.dtype
        self._load = load
        self._dtypes = {id(tensor): trained.dtypes[name] for name, tensor in tensors_of(trained.module).items()}
        self._warm_up = ExitStack()
        self._check_logprobs(trained.probe)

    def _check_logprobs(self, probe: Probe) -> None:
        """Raise unless the sharded model has the log-probs of the unsharded one."""
        (outputs,) = value_of(self.logprobs([probe.batch]))
        gap, allowed = relative_gap(outputs.logprob, probe.logprobs), rounding(self.dtype)
        if not gap <= allowed:
            raise RuntimeError(
                f"sharded over {dist.get_world_size()} ranks, the log-probs of the model differ from the unsharded "
                f"model's by {gap:.1e}, where rounding explains {allowed:.0e}; nothing was trained"
            )

    def full(self, parameter: Tensor) -> Tensor:
        return self._full_tensor(parameter).detach().to(self._dtypes[id(parameter)])

    def _full_tensor(self, parameter: Tensor) -> Tensor:
        raise NotImplementedError("defined per engine")

    def fresh(self) -> PreTrainedModel:
        model: PreTrainedModel = self._load().to(self.device)
        return model

    def warm_up_memory(self, begin: bool) -> None:
        """Enter (`begin`) or leave `memory_warm_up`: the driver makes two calls."""
        if begin:
            self._warm_up.enter_context(self.memory_warm_up())
        else:
            self._warm_up.close()


def random_state() -> dict[str, Tensor]:
    """Return this rank's random states, under keys that contain the rank."""
    states = {"cpu": torch.get_rng_state()} | (
        {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {}
    )
    return {f"{RANDOM}{dist.get_rank()}:{device}": state for device, state in states.items()}


def restore_random_state(states: Mapping[str, Tensor]) -> None:
    for key, state in states.items():
        (torch.cuda.set_rng_state if key.endswith("cuda") else torch.set_rng_state)(state)
