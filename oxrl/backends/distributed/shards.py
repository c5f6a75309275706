"""Checkpoints for any number of ranks: shards (`shards/`, by `torch.distributed.checkpoint`), or one process's files.

Entries are keyed by parameter name, not by rank: what two ranks saved, three ranks or one process can load, and every
rank can read its shards from what one process saved. The plain weights next to it are written by the backends.
"""

from __future__ import annotations

import errno
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
INDEX = ".metadata"  # the file that torch.distributed.checkpoint writes last


def has_shards(path: Path) -> bool:
    return (path / SHARDS / INDEX).is_file()


def save_shards(backend: PyTorchTrainingBackend, path: Path, own: Mapping[str, Tensor]) -> None:
    """Write this rank's shards of the state that a bit-exact resume needs (no frozen weights); `own` is per rank."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    try:
        save({**_state(backend, backend.optimizer.tensors()), **own}, checkpoint_id=path / SHARDS)
    except CheckpointException as error:  # neither an Exception nor short: it contains the stack traces of all ranks
        rank, (cause, _) = min(error.failures.items())
        # A write that fails inside of torch's archives is reported as a wrong position in the file.
        message = f"rank {rank} could not write its shard to {path / SHARDS}: {cause}"
        if isinstance(cause, OSError) or "inline_container" in str(cause):
            raise OSError(getattr(cause, "errno", None) or errno.EIO, message) from None
        raise RuntimeError(message) from cause


def load_shards(
    backend: PyTorchTrainingBackend, path: Path, own: Mapping[str, Tensor], *, distributed: bool = True
) -> None:
    """Restore what any number of ranks saved, and of `own` the entries that exist; `distributed`: on all ranks."""
    from torch.distributed.checkpoint import state_dict_loader

    from oxrl.backends.distributed.shard_reader import ShardReader

    reader = ShardReader(path / SHARDS)
    known = reader.read_metadata().state_dict_metadata
    optimizer = {key: tensor for key, tensor in _empty_state(backend).items() if f"optimizer:{key}" in known}
    backend.reference_moved = any(key.startswith("reference:") for key in known)
    state = _state(backend, optimizer)
    random = {key for key in known if key.startswith("random:")}
    if different := sorted((known.keys() ^ state.keys()) - random):
        raise ValueError(f"the checkpoint in {path} is of another model or optimizer: {different[0]} is not in both")
    state |= {key: tensor for key, tensor in own.items() if key in known}
    state_dict_loader.load(state, storage_reader=reader, no_dist=not distributed)
    backend.version = int(state["version"])
    backend.optimizer.restore(optimizer)
    backend.optimizer.copy_to_model()


def _state(backend: PyTorchTrainingBackend, optimizer: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state by name, as the tensors that training uses: loading writes into them."""
    state: dict[str, Any] = {
        f"optimizer:{key}": value for key, value in optimizer.items() if not key.endswith(":master")
    }
    state |= {f"weight:{name}": weight.detach() for name, weight in backend.optimizer.masters.items()}
    if backend.reference_moved:
        moved = backend.reference_weights()
        state |= {f"reference:model.{name}": weight.detach() for name, weight in moved.items()}
    return state | {"version": torch.tensor(backend.version)}


def _empty_state(backend: PyTorchTrainingBackend) -> dict[str, Tensor]:
    state: dict[str, Tensor] = {}
    for name, master in backend.optimizer.masters.items():
        state[f"{name}:step"] = torch.zeros((), dtype=torch.float32)
        state[f"{name}:exp_avg"] = torch.zeros_like(master.detach())
        state[f"{name}:exp_avg_sq"] = torch.zeros_like(master.detach())
    return state


@torch.no_grad()
def load_unsharded(backend: PyTorchTrainingBackend, path: Path) -> None:
    """Restore what one process saved: weights are read one at a time, and this rank keeps its shard of each."""
    optimizer, weights, masters = Files(path / OPTIMIZER), _weights(backend, path), backend.optimizer.masters
    for name, master in masters.items():
        saved = optimizer[f"{name}:master"] if f"{name}:master" in optimizer else weights[name]
        master.copy_(local_shard(saved, master))
    state = {key: optimizer[key] for key in optimizer.where if not key.endswith(":master")}
    backend.version = int(state.pop("backend:version"))
    for key, value in state.items():
        name, _, part = key.rpartition(":")
        if name in masters and part != "step":
            state[key] = local_shard(value, masters[name])
    backend.optimizer.restore(state)
    backend.reference_moved = (path / REFERENCE).exists()
    if backend.reference_moved:
        reference, expected = Files(path / REFERENCE), backend.reference_weights()
        check_reference(reference.where, expected, path)
        for name, weight in expected.items():
            weight.copy_(local_shard(reference[name], weight))


def check_reference(saved: Iterable[str], expected: Iterable[str], path: Path) -> None:
    """Raise unless the saved reference has the weights of this run's reference."""
    if different := sorted(set(saved) ^ set(expected)):
        raise ValueError(
            f"the reference in {path} is not the one of this run, {different[0]} is not in both: set model.ref_update "
            "as in the run that saved it"
        )


class Files:
    """Tensors of several safetensors files by name, read one at a time."""

    def __init__(self, *files: Path, names: Mapping[str, str] | None = None) -> None:
        from safetensors import safe_open

        opened: list[Any] = [safe_open(file, framework="pt") for file in files if file.is_file()]
        self.files = files
        self.where: dict[str, Any] = {key: file for file in opened for key in file.keys()}  # noqa: SIM118 - not a mapping
        self.names = names  # lookup name -> name in the files; None: the same names

    def __contains__(self, name: str) -> bool:
        return (name if self.names is None else self.names.get(name)) in self.where

    def __getitem__(self, name: str) -> Tensor:
        if name not in self:
            raise ValueError(f"the checkpoint in {self.files[0].parent} is of another model: it has no weight {name}")
        key = name if self.names is None else self.names[name]
        tensor: Tensor = self.where[key].get_tensor(key)
        return tensor


def _weights(backend: PyTorchTrainingBackend, path: Path) -> Files:
    """Return the weights that a local backend saved (plain or adapter, and heads), by their names in training."""
    names = plain_names(backend.module)
    if hasattr(backend.model, "peft_config"):  # PEFT omits the adapter's name in its files
        names = {f"model.{name}": name.replace(".default", "") for name, _ in backend.model.named_parameters()}
    names |= {f"heads.{name}": name for name, _ in backend.module.heads.named_parameters()}
    return Files(*sorted(path.glob("model*.safetensors")), path / ADAPTER_WEIGHTS, path / HEADS, names=names)


def local_shard(full: Tensor, like: Tensor) -> Tensor:
    """Return this rank's shard of a weight that every rank has in full, in the precision of `like`."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    converted = full.to(like.device, like.dtype)
    if not isinstance(like, DTensor):
        return converted
    return distribute_tensor(converted, like.device_mesh, like.placements, src_data_rank=None)
