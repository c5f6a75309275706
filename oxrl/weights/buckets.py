"""Weights in buckets of limited size, for transfer between processes and for files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 64  # bytes; sufficient for every dtype


class Slot(NamedTuple):
    """`Slot("model.norm.weight", "bfloat16", (2048,), 4096)`: one tensor, and its offset in the bucket."""

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
        """Return the bytes of this slot as a tensor."""
        import torch

        return piece.view(getattr(torch, self.dtype)).reshape(self.shape)


class Bucket(NamedTuple):
    """Tensors as one array of bytes, which processes on one machine can share without a copy."""

    slots: tuple[Slot, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield copies of the tensors on the CPU, by name."""
        import torch

        for slot in self.slots:
            yield slot.name, slot.shaped(torch.from_numpy(self.data[slot.start : slot.end].copy()))


def in_buckets(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int = BUCKET_BYTES, *, keep: bool = True
) -> Iterator[Bucket]:
    """Yield buckets of at most `max_bytes`, or of a single larger tensor, in order.

    Ranks that only take part in gathering do not `keep` the weights: they yield the same number of empty buckets.
    """
    return map(as_bucket, grouped(weights, max_bytes, keep=keep))


def grouped(
    weights: Iterable[tuple[str, Tensor]], max_bytes: int = BUCKET_BYTES, *, keep: bool = True
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield the tensors of each bucket, as `in_buckets` divides them."""
    bucket: list[tuple[str, Tensor]] = []
    number = size = 0
    for name, tensor in weights:
        if number and size + tensor.nbytes > max_bytes:
            yield bucket
            bucket, number, size = [], 0, 0
        if keep:
            bucket.append((name, tensor))
        number, size = number + 1, size + tensor.nbytes
    if number:
        yield bucket


def as_bucket(weights: Iterable[tuple[str, Tensor]]) -> Bucket:
    slots, flat = flattened(weights)
    return Bucket(slots, flat.numpy())


def flattened(
    weights: Iterable[tuple[str, Tensor]], device: torch.device | str = "cpu"
) -> tuple[tuple[Slot, ...], Tensor]:
    """Return slots and the concatenated bytes of the tensors on a device."""
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
