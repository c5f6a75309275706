"""Held-out items to numbers that can be compared between runs: loss, perplexity, token accuracy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oxrl.data.pack import collate, count_units, pack
from oxrl.types import Algorithm, Backend, Item


async def evaluate_offline(
    backend: Backend, algorithm: Algorithm, items: Sequence[Item], budget: int
) -> dict[str, float]:
    """The algorithm's loss on `items` without training on them, over all of them at once: `eval_loss`, ..."""
    counts = count_units(items)
    sums: dict[str, float] = {}
    for part in pack(items, budget, padded=backend.padded):
        batch = collate(part)
        (outputs,) = await backend.logprobs([batch], reads=(*algorithm.reads, "correct"))
        losses = algorithm.loss(outputs, batch)
        for name, term in losses.terms.items():
            sums["loss"] = sums.get("loss", 0.0) + float(term.total) / counts[term.unit]
            sums[name] = sums.get(name, 0.0) + float(term.total) / counts[term.unit]
        for name, term in losses.metrics.items():
            sums[name] = sums.get(name, 0.0) + float(term.total) / counts[term.unit]
    if "nll" in sums:
        sums["perplexity"] = math.exp(min(sums["nll"], 700.0))
    return {f"eval_{name}": value for name, value in sums.items()}
