"""A dict of tokens and masks, or rows with advantages, to the arguments of a step: for loops written by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from oxrl.algorithms import algorithm as named_algorithm
from oxrl.data.pack import collate, count_units
from oxrl.types import Algorithm, Batch, Counts, Item, Losses, Outputs, Row, Term

_KEYS = ("tokens", "loss_mask", "labels", "advantages")


def plain_step(batch: Mapping[str, Any] | Sequence[Item]) -> tuple[list[Batch], Algorithm, Counts]:
    """One micro-batch, its loss (the mean over trained tokens of -log p, times the advantage if given) and counts."""
    items = items_of(batch) if isinstance(batch, Mapping) else list(batch)
    if not items or not all(isinstance(row, Row) for item in items for row in item):
        raise ValueError(
            "forward_backward takes (batches, algorithm, counts), or alone a dict of tokens and loss_mask, or items as "
            "prepare_grpo_batch returns them"
        )
    algorithm = named_algorithm("sft")
    if all("advantage" in row.streams for item in items for row in item):
        algorithm = replace(algorithm, name="policy gradient", loss=policy_gradient_loss)
    return [collate(items)], algorithm, count_units(items)


def policy_gradient_loss(outputs: Outputs, batch: Batch) -> Losses:
    """-A log p of the trained tokens."""
    losses = -(batch.streams["advantage"] * outputs.logprob)[batch.mask]
    return Losses({"policy": Term(losses.sum(), "token")})


def items_of(batch: Mapping[str, Any]) -> list[Item]:
    """`items_of({"tokens": [[1, 5, 6]], "loss_mask": [[0, 1, 1]], "advantages": [0.5]})`: rows without padding.

    Tensors `[B, S]` with padding on the right, or lists of different lengths. `labels` are the tokens, or -100 where
    nothing is trained: they are not shifted. `advantages` has one number per row or per token.
    """
    if unknown := [key for key in batch if key not in _KEYS]:
        raise ValueError(f"the batch has {unknown[0]!r}; it takes {', '.join(_KEYS)}")
    if missing := [key for key in _KEYS[:2] if key not in batch]:
        raise ValueError(f"the batch has no {missing[0]!r}; it needs tokens and loss_mask, [B, S] each")
    if len({len(value) for value in batch.values() if value is not None}) > 1:
        sizes = ", ".join(f"{key} {len(value)}" for key, value in batch.items() if value is not None)
        raise ValueError(f"the entries of the batch have different numbers of rows: {sizes}")
    rows = [_row(index, batch) for index in range(len(batch["tokens"]))]
    if not any(rows):
        raise ValueError("no token of the batch is trained on: loss_mask is 0 everywhere, or 1 for first tokens only")
    return [(row,) for row in rows if row is not None]


def _row(index: int, batch: Mapping[str, Any]) -> Row | None:
    """The row up to its last trained token, which is all that its loss depends on; None if nothing is trained."""
    given = {key: _numbers(value[index]) for key, value in batch.items() if value is not None}
    tokens, mask = given["tokens"].astype(np.int64), given["loss_mask"]
    if mask.shape != tokens.shape or not np.isin(mask, (0, 1)).all():
        raise ValueError(f"row {index}: loss_mask has a 0 or a 1 for each of its {len(tokens)} tokens")
    trained = mask.astype(np.bool_)
    trained[:1] = False  # the first token has no context
    if "labels" in given:
        trained &= given["labels"] >= 0
        if (given["labels"] != tokens)[trained].any():
            raise ValueError(
                f"row {index}: labels differ from tokens where loss_mask is 1; labels[s] is the token at s, or -100 "
                "(the shift by one position happens here): set labels to tokens"
            )
    if not trained.any():
        return None
    end = int(trained.nonzero()[0][-1]) + 1
    streams = {}
    if "advantages" in given:
        streams["advantage"] = np.broadcast_to(given["advantages"].astype(np.float32), tokens.shape)[:end]
    return Row(f"batch:{index}", tokens[:end], trained[:end], streams=streams)


def _numbers(value: Any) -> np.ndarray[Any, Any]:
    return torch.as_tensor(value).detach().cpu().numpy()
