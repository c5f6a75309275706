"""Checkpoints for any number of ranks: slices (`shards/`, by `torch.distributed.checkpoint`), or one process's files.

What is in it has names, not places: what two ranks saved, three read, or one process does; and every rank can read its
slices out of what one process saved. Plain weights for everybody lie beside it and are the backends' affair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from oxrl.backends.forward import HEADS
from oxrl.weights.checkpoint_names import ADAPTER_WEIGHTS, plain_names

if TYPE_CHECKING:
    from oxrl.backends.local import PyTorchTrainingBackend

SHARDS = "shards"
OPTIMIZER = "optimizer.safetensors"
REFERENCE = "reference.safetensors"
_MARK = ".metadata"  # what torch.distributed.checkpoint writes last


def has_shards(path: Path) -> bool:
    return (path / SHARDS / _MARK).is_file()


def save_shards(backend: PyTorchTrainingBackend, path: Path, own: Mapping[str, Tensor]) -> None:
    """Each rank writes its slices: what it takes to go on to the bit, and nothing that is frozen; `own` is its own."""
    from torch.distributed.checkpoint.state_dict_saver import save

    save({**_state(backend, backend.optimizer.tensors()), **own}, checkpoint_id=path / SHARDS)


def load_shards(backend: PyTorchTrainingBackend, path: Path, own: Mapping[str, Tensor], *, alone: bool) -> None:
    """Take back what any number of ranks saved; of `own`, what such a rank had. `alone`: no other rank takes part."""
    from torch.distributed.checkpoint import filesystem, state_dict_loader

    known = filesystem.FileSystemReader(path / SHARDS).read_metadata().state_dict_metadata
    optimizer = {key: tensor for key, tensor in _blank(backend).items() if f"optimizer:{key}" in known}
    backend.reference_moved = any(key.startswith("reference:") for key in known)
    state = _state(backend, optimizer)
    foreign = {key for key in known if key.startswith("random:")}
    if strangers := sorted((known.keys() ^ state.keys()) - foreign):
        raise ValueError(f"the checkpoint in {path} is of another model or optimizer: {strangers[0]} is not in both")
    state |= {key: tensor for key, tensor in own.items() if key in known}
    state_dict_loader.load(state, checkpoint_id=path / SHARDS, no_dist=alone)
    backend.version = int(state["version"])
    backend.optimizer.restore(optimizer)
    backend.optimizer.give_weights()


def _state(backend: PyTorchTrainingBackend, optimizer: Mapping[str, Tensor]) -> dict[str, Any]:
    """By name, as the tensors that training uses: loading writes into them."""
    state: dict[str, Any] = {
        f"optimizer:{key}": value for key, value in optimizer.items() if not key.endswith(":master")
    }
    state |= {f"weight:{name}": weight.detach() for name, weight in backend.optimizer.masters.items()}
    if backend.reference_moved:
        moved = backend.reference_weights()
        state |= {f"reference:model.{name}": weight.detach() for name, weight in moved.items()}
    return state | {"version": torch.tensor(backend.version)}


def _blank(backend: PyTorchTrainingBackend) -> dict[str, Tensor]:
    blank: dict[str, Tensor] = {}
    for name, master in backend.optimizer.masters.items():
        blank[f"{name}:step"] = torch.zeros((), dtype=torch.float32)
        blank[f"{name}:exp_avg"] = torch.zeros_like(master.detach())
        blank[f"{name}:exp_avg_sq"] = torch.zeros_like(master.detach())
    return blank


@torch.no_grad()
def load_whole(backend: PyTorchTrainingBackend, path: Path) -> None:
    """What one process saved: each weight is read where it is needed, and this rank keeps its slice."""
    optimizer, weights, masters = Files(path / OPTIMIZER), _weights(backend, path), backend.optimizer.masters
    for name, master in masters.items():
        saved = optimizer[f"{name}:master"] if f"{name}:master" in optimizer else weights[name]
        master.copy_(slice_of(saved, master))
    state = {key: optimizer[key] for key in optimizer.where if not key.endswith(":master")}
    backend.version = int(state.pop("backend:version"))
    for key, value in state.items():
        name, _, part = key.rpartition(":")
        if name in masters and part != "step":
            state[key] = slice_of(value, masters[name])
    backend.optimizer.restore(state)
    backend.reference_moved = (path / REFERENCE).exists()
    if backend.reference_moved:
        reference, here = Files(path / REFERENCE), backend.reference_weights()
        check_reference(reference.where, here, path)
        for name, weight in here.items():
            weight.copy_(slice_of(reference[name], weight))


def check_reference(saved: Iterable[str], here: Iterable[str], path: Path) -> None:
    """A reference that has moved can be gone on with only where there is one of the same make."""
    if strangers := sorted(set(saved) ^ set(here)):
        raise ValueError(
            f"the reference in {path} is not the one of this run, {strangers[0]} is not in both: is model.ref_update "
            "as it was?"
        )


class Files:
    """The tensors of some safetensors files by name, read one at a time."""

    def __init__(self, *files: Path, names: Mapping[str, str] | None = None) -> None:
        from safetensors import safe_open

        opened: list[Any] = [safe_open(file, framework="pt") for file in files if file.is_file()]
        self.files = files
        self.where: dict[str, Any] = {key: file for file in opened for key in file.keys()}  # noqa: SIM118 - not a mapping
        self.names = names  # under which they are asked for, where these are others than in the files

    def __contains__(self, name: str) -> bool:
        return (name if self.names is None else self.names.get(name)) in self.where

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise ValueError(f"the checkpoint in {self.files[0].parent} is of another model: it has no {name}")
        key = name if self.names is None else self.names[name]
        tensor: Tensor = self.where[key].get_tensor(key)
        return tensor


def _weights(backend: PyTorchTrainingBackend, path: Path) -> Files:
    """What a local backend wrote of the weights: plain ones or an adapter, and heads; under their names in training."""
    names = plain_names(backend.module)
    if hasattr(backend.model, "peft_config"):  # PEFT leaves the adapter's name out of its files
        names = {f"model.{name}": name.replace(".default", "") for name, _ in backend.model.named_parameters()}
    names |= {f"heads.{name}": name for name, _ in backend.module.heads.named_parameters()}
    return Files(*sorted(path.glob("model*.safetensors")), path / ADAPTER_WEIGHTS, path / HEADS, names=names)


def slice_of(whole: Tensor, like: Tensor) -> Tensor:
    """This rank's part of a weight that every rank has, in the precision that slices are kept in."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    here = whole.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return here
    return distribute_tensor(here, like.device_mesh, like.placements, src_data_rank=None)
