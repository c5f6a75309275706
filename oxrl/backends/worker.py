"""What one rank's part of a backend has, whatever engine shards its model: the local backend, and what it was made of.

An engine's file says how weights are sharded, brought together, updated and saved (`fsdp`, `deepspeed`); the verbs that
all ranks do together are in `ranks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn

from oxrl.backends._forward import LanguageModel
from oxrl.backends.local import PyTorchTrainingBackend
from oxrl.backends.optimizer import schedule

if TYPE_CHECKING:
    from transformers import PreTrainedModel

RANDOM = "random:"
Load: TypeAlias = Callable[[], Any]
"""Gives a model; it travels: `partial(load_model, "tiny")`. Rank 0 calls it as it is; where every rank is to get its
slices from there (`fsdp`), all call it once more inside `torch.device("meta")`, for the same model without weights."""


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


def dtypes_of(module: LanguageModel) -> dict[str, torch.dtype]:
    """Of every weight by name; an engine may keep it in another precision than it was loaded in."""
    return {name: tensor.dtype for name, tensor in tensors_of(module).items()}


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, also those that no checkpoint has; a tied one once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


class RankWorker(PyTorchTrainingBackend):
    """The local backend over a sharded module; `dtypes` are those that its weights were loaded in."""

    def __init__(
        self,
        module: LanguageModel,
        optimizer: Any,
        others: Mapping[str, LanguageModel],
        settings: Settings,
        load: Load,
        dtypes: Mapping[str, torch.dtype],
    ) -> None:
        super().__init__(
            module,
            optimizer,
            schedule(settings.lr_scheduler, settings.num_steps, settings.warmup_steps),
            max_grad_norm=settings.max_grad_norm,
            others=others,
        )
        tensors = tensors_of(module)
        embedding = module.inner.get_input_embeddings().weight
        self.whole: PreTrainedModel | None = None
        self.dtype = next(dtypes[name] for name, tensor in tensors.items() if tensor is embedding)
        self._dtypes = {id(tensor): dtypes[name] for name, tensor in tensors.items()}
        self._load = load
        self._rehearsal = ExitStack()

    def full(self, parameter: Tensor) -> Tensor:
        return self._in_one_piece(parameter).detach().to(self._dtypes[id(parameter)])

    def _in_one_piece(self, parameter: Tensor) -> Tensor:
        raise NotImplementedError("this is where engines differ")

    def fresh(self) -> PreTrainedModel:
        model: PreTrainedModel = self._load()
        return model

    def rehearse(self, begin: bool) -> None:
        """The two halves of `rehearsing`, which come as two calls."""
        if begin:
            self._rehearsal.enter_context(self.rehearsing())
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
