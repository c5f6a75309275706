"""Seeds that are functions of other numbers, by splitmix64 (Steele, Lea, Flood 2014)."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any, overload

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MASK = 2**64 - 1


@overload
def splitmix64(state: int) -> int: ...


@overload
def splitmix64(state: NDArray[np.uint64]) -> NDArray[np.uint64]: ...


def splitmix64(state: Any) -> Any:
    """The mixing function of splitmix64, for an integer of 64 bits or for each element of an array."""
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
    return state ^ (state >> 31)


def mixed_seed(*numbers: int) -> int:
    """`mixed_seed(42, 3, 0)`: one seed of 63 bits from several numbers."""
    state = 0
    for number in numbers:
        state = splitmix64((state + number + GOLDEN_GAMMA) & MASK)
    return state >> 1


def seed_everything(seed: int, rank: int = 0) -> None:
    """Seed Python, NumPy and PyTorch; each rank above 0 draws other numbers, which follow from the same seed."""
    import numpy as np
    import torch

    own = mixed_seed(seed, rank) if rank else seed
    random.seed(own)
    np.random.seed(own % 2**32)
    torch.manual_seed(own)
