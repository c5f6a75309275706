"""Held-out items to numbers that can be compared between runs: loss, perplexity, accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oxrl.data.pack import collate, count_units, pack
from oxrl.loops.step import credit_step
from oxrl.tensors import correct
from oxrl.types import Algorithm, Backend, Item, Memory, Read


async def evaluate_offline(
    backend: Backend, algorithm: Algorithm, items: Sequence[Item], budget: int, memory: Memory | None = None
) -> dict[str, float]:
    """The algorithm's loss on `items` without training on them, over all of them at once: `eval_loss`, ..."""
    # Running means are read from a copy: an evaluation must not move them.
    credited = await credit_step(backend, algorithm, items, budget, dict(memory or {}))
    counts = count_units(credited)
    sums: dict[str, float] = {}
    for part in pack(credited, budget, padded=backend.padded):
        batch = collate(part)
        (outputs,) = await backend.logprobs([batch], reads={**algorithm.reads, "correct": Read(correct)})
        losses = algorithm.loss(outputs, batch)
        shares = {name: float(term.total) / counts[term.unit] for name, term in losses.terms.items()}
        reported = {name: float(term.total) / counts[term.unit] for name, term in losses.metrics.items()}
        for name, share in {"loss": sum(shares.values()), **shares, **reported}.items():
            sums[name] = sums.get(name, 0.0) + share
    if "nll" in sums:
        sums["perplexity"] = math.exp(min(sums["nll"], 700.0))
    return {f"eval_{name}": value for name, value in sums.items()}
