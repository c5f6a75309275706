"""Weights on their way between processes: tensors by name, in flat pieces that are neither many nor large."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 64  # bytes: every dtype begins where it may


class Slot(NamedTuple):
    """`Slot("model.norm.weight", "bfloat16", (2048,), 4096)`: one tensor, and where in its bucket it begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def end(self) -> int:
        import torch

        size: int = getattr(torch, self.dtype).itemsize
        return self.start + math.prod(self.shape) * size

    def shaped(self, piece: Tensor) -> Tensor:
        """The tensor that these bytes, from start to end, are."""
        import torch

        return piece.view(getattr(torch, self.dtype)).reshape(self.shape)


class Bucket(NamedTuple):
    """Tensors as one array of bytes, which processes of one machine can share without a copy."""

    slots: tuple[Slot, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Copies on the CPU, which whoever gets them may keep."""
        import torch

        for slot in self.slots:
            yield slot.name, slot.shaped(torch.from_numpy(self.data[slot.start : slot.end].copy()))


def in_buckets(
    weights: Iterable[tuple[str, Tensor]], most: int = BUCKET_BYTES, *, keep: bool = True
) -> Iterator[Bucket]:
    """In order. A bucket holds `most` bytes, or a single tensor that has more.

    Ranks that bring weights together for another one do not `keep` them: their buckets are empty, and as many.
    """
    return map(as_bucket, grouped(weights, most, keep=keep))


def grouped(
    weights: Iterable[tuple[str, Tensor]], most: int = BUCKET_BYTES, *, keep: bool = True
) -> Iterator[list[tuple[str, Tensor]]]:
    """What becomes one bucket each."""
    waiting: list[tuple[str, Tensor]] = []
    number = size = 0
    for name, tensor in weights:
        if number and size + tensor.nbytes > most:
            yield waiting
            waiting, number, size = [], 0, 0
        if keep:
            waiting.append((name, tensor))
        number, size = number + 1, size + tensor.nbytes
    if number:
        yield waiting


def as_bucket(weights: Iterable[tuple[str, Tensor]]) -> Bucket:
    slots, flat = flattened(weights)
    return Bucket(slots, flat.numpy())


def flattened(
    weights: Iterable[tuple[str, Tensor]], device: torch.device | str = "cpu"
) -> tuple[tuple[Slot, ...], Tensor]:
    """Their bytes one after the other on a device, and where each begins."""
    import torch

    weights = list(weights)
    slots: list[Slot] = []
    end = 0
    for name, tensor in weights:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        slots.append(Slot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start))
        end = start + tensor.nbytes
    flat = torch.zeros(end, dtype=torch.uint8, device=device)
    for slot, (_, tensor) in zip(slots, weights, strict=True):
        flat[slot.start : slot.end] = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return tuple(slots), flat
