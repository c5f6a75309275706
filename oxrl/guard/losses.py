"""Whether rows that are packed have the log-probs that they have alone, and whether the loss depends on a split.

The model is run on single rows and on rows together; the loss is run on the log-probs of a split and of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from oxrl.data.pack import collate, count_units
from oxrl.types import Algorithm, Backend, Batch, Counts, Item, Outputs, Row

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCE = {4: 2e-3, 2: 0.3}  # by bytes of a number, for another order of the same sums
SPLIT = 1e-3  # relative


class Passes(NamedTuple):
    """The items that were run, the largest gap of log-probs between alone and packed, and the outputs of each item."""

    items: list[Item]
    gap: float
    row: str
    outputs: list[Outputs]


def smallest_items(items: Sequence[Item], budget: int) -> list[Item]:
    """The two smallest items of a step that train something; none where they need more memory than a micro-batch.

    An item that exceeds the budget is a micro-batch of its own, and two of them without a gradient need no more.
    """
    trained = sorted((item for item in items if item and all(row.mask.any() for row in item)), key=_size)[:2]
    largest = max(map(_size, items), default=0)
    return trained if len(trained) == 2 and sum(map(_size, trained)) <= max(budget, 2 * largest) else []


def _size(item: Item) -> int:
    return sum(map(len, item))


async def run_alone_and_packed(backend: Backend, algorithm: Algorithm, items: Sequence[Item]) -> Passes:
    """Run the items together, each item alone, and the first row of the first two items alone."""
    alone = [(row,) for item in items for row in item[:1]][:2]
    batches = [collate(items), *(collate([item]) for item in items), *(collate([item]) for item in alone)]
    together, *others = await backend.logprobs(batches, reads=algorithm.reads)
    each, single = others[: len(items)], others[len(items) :]
    rows = [row for item in items for row in item]
    found = dict(zip((row.id for row in rows), _by_row(together, batches[0]), strict=True))
    gaps = [
        (float((found[row.id] - outputs.logprob.cpu())[_mask(row)].abs().max()), row.id)
        for (row,), outputs in zip(alone, single, strict=True)
    ]
    gap, row = max(gaps)
    return Passes(list(items), gap, row, each)


def _by_row(outputs: Outputs, batch: Batch) -> list[Tensor]:
    import torch

    lengths = [end - start for start, end in zip(batch.borders, batch.borders[1:], strict=False)]
    return list(torch.split(outputs.logprob.cpu(), lengths))


def _mask(row: Row) -> Tensor:
    import torch

    return torch.from_numpy(row.mask)


def wrong_packing(passes: Passes, itemsize: int) -> str | None:
    allowed = TOLERANCE.get(itemsize, 0.3)
    if passes.gap <= allowed:
        return None
    return (
        f"row {passes.row}: a log-prob differs by {passes.gap:.3g} between the row alone and packed with others, and "
        f"{allowed:g} is rounding"
    )


def wrong_split(passes: Passes, algorithm: Algorithm) -> str | None:
    """Compare the derivative of the loss over all items with those over each item; None also if all are 0."""
    import torch

    counts = count_units(passes.items)
    joint = _derivative(algorithm, _joined(passes.outputs), collate(passes.items), counts)
    parts = [
        _derivative(algorithm, outputs, collate([item]), counts)
        for item, outputs in zip(passes.items, passes.outputs, strict=True)
    ]
    for name, whole in joint.items():
        split = torch.cat([part[name] for part in parts])
        largest = float(torch.maximum(whole.abs().max(), split.abs().max()))
        difference = float((whole - split).abs().max())
        if not difference <= SPLIT * largest + 1e-12:
            return (
                f"the derivative of the loss of {algorithm.name} with respect to the {name} differs by "
                f"{100 * difference / largest:.3g}% between {len(parts)} items in one micro-batch and one item each: "
                "it depends on the split"
            )
    return None


def _joined(outputs: Sequence[Outputs]) -> Outputs:
    import torch

    def cat(parts: Sequence[Tensor | None]) -> Tensor | None:
        given = [part for part in parts if part is not None]
        return torch.cat(given) if given else None

    logprob = torch.cat([each.logprob for each in outputs])
    names = outputs[0].statistics
    statistics = {name: torch.cat([each.statistics[name] for each in outputs]) for name in names}
    values = [cat([getattr(each, name) for each in outputs]) for name in ("value", "last_value", "score")]
    return Outputs(logprob, statistics, *values)


def _derivative(algorithm: Algorithm, outputs: Outputs, batch: Batch, counts: Counts) -> Mapping[str, Tensor]:
    """Of the loss with respect to everything that a forward pass computes, by name."""
    import torch

    leaves = {
        "log-probs": outputs.logprob,
        **outputs.statistics,
        **{name: each for name in ("value", "score") if (each := getattr(outputs, name)) is not None},
    }
    leaves = {name: leaf.detach().float().cpu().clone().requires_grad_() for name, leaf in leaves.items()}
    with torch.enable_grad():
        given = Outputs(
            leaves["log-probs"],
            {name: leaves[name] for name in outputs.statistics},
            leaves.get("value"),
            None if outputs.last_value is None else outputs.last_value.detach().cpu(),
            leaves.get("score"),
        )
        terms = algorithm.loss(given, batch).terms.values()
        loss = torch.stack([term.total / counts[term.unit] for term in terms]).sum()
        if not loss.requires_grad:
            return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        name: torch.zeros_like(leaf) if each is None else each
        for (name, leaf), each in zip(leaves.items(), found, strict=True)
    }
