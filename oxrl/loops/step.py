"""Items to one update of the weights: counted over the whole step, packed, run, stepped."""

from __future__ import annotations

import time
from collections.abc import Sequence

from oxrl.data.pack import collate, count_units, pack
from oxrl.metrics import memory_gib
from oxrl.types import Algorithm, Backend, Item


async def train_step(backend: Backend, algorithm: Algorithm, items: Sequence[Item], budget: int) -> dict[str, float]:
    """One optimizer step over `items`. How they are split into micro-batches does not change the result."""
    started = time.monotonic()
    credited = algorithm.credit(list(items))
    counts = count_units(credited)
    if not counts["token"]:
        raise ValueError(f"none of the {len(items)} items of this step has a trained token: the loss mask is empty")
    batches = [collate(part) for part in pack(credited, budget, padded=backend.padded)]
    metrics = await backend.forward_backward(batches, algorithm, counts)
    metrics |= await backend.optim_step()
    seconds = time.monotonic() - started
    return metrics | {
        "tokens": float(sum(batch.num_tokens for batch in batches)),
        "trained_tokens": counts["token"],
        "tokens_per_second": sum(batch.num_tokens for batch in batches) / seconds,
        "step_seconds": seconds,
        "memory_gib": memory_gib(),
    }
