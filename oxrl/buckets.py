"""Weights on their way between processes: tensors by name, in flat pieces that are neither many nor large."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

BUCKET_BYTES = 256 * 2**20
_ALIGNMENT = 64  # bytes: every dtype begins where it may


class Slot(NamedTuple):
    """`Slot("model.norm.weight", "bfloat16", (2048,), 4096)`: one tensor, and where in its bucket it begins."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int


class Bucket(NamedTuple):
    """Tensors as one array of bytes, which processes of one machine can share without a copy."""

    slots: tuple[Slot, ...]
    data: np.ndarray[Any, np.dtype[np.uint8]]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Copies on the CPU, which whoever gets them may keep."""
        import torch

        for slot in self.slots:
            dtype = getattr(torch, slot.dtype)
            end = slot.start + int(np.prod(slot.shape)) * dtype.itemsize
            flat = torch.from_numpy(self.data[slot.start : end].copy())
            yield slot.name, flat.view(dtype).reshape(slot.shape)


def in_buckets(
    weights: Iterable[tuple[str, Tensor]], most: int = BUCKET_BYTES, *, keep: bool = True
) -> Iterator[Bucket]:
    """In order. A bucket holds `most` bytes, or a single tensor that has more.

    Ranks that bring weights together for another one do not `keep` them: their buckets are empty, and as many.
    """
    waiting: list[tuple[str, Tensor]] = []
    number = size = 0
    for name, tensor in weights:
        if number and size + tensor.nbytes > most:
            yield as_bucket(waiting)
            waiting, number, size = [], 0, 0
        if keep:
            waiting.append((name, tensor))
        number, size = number + 1, size + tensor.nbytes
    if number:
        yield as_bucket(waiting)


def as_bucket(weights: Iterable[tuple[str, Tensor]]) -> Bucket:
    import torch

    slots: list[Slot] = []
    pieces: list[tuple[int, np.ndarray[Any, np.dtype[np.uint8]]]] = []
    end = 0
    for name, tensor in weights:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        slots.append(Slot(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), start))
        pieces.append((start, flat))
        end = start + len(flat)
    data = np.zeros(end, dtype=np.uint8)
    for start, flat in pieces:
        data[start : start + len(flat)] = flat
    return Bucket(tuple(slots), data)
