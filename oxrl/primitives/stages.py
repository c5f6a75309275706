"""Arguments of the primitives, converted from an earlier stage where that has one meaning.

A step goes from samples to rollouts, to items of rows, to the view of a forward pass. What cannot be converted, because
a model or a tokenizer is missing, is an error with the function to call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from oxrl.algorithms.online import trained_rollouts
from oxrl.algorithms.policy import Policy
from oxrl.algorithms.preference import Pairs
from oxrl.algorithms.rows import ungraded_rows_of
from oxrl.names import kind_of
from oxrl.rollouts.batches import compute_reward, group_rollouts
from oxrl.rollouts.buffer import Group
from oxrl.types import Item, Rollout, Row

_VIEWS: Mapping[type, str] = {
    Policy: "create_policy_batch(model, rollouts)",
    Pairs: "create_pair_batch(model, rollouts, ref_model=ref_model)",
}


def rollouts_of(data: Any) -> list[Rollout]:
    """Return the rollouts in a list of rollouts or of groups of them; none if it holds something else."""
    if not isinstance(data, Sequence):
        return []
    groups = [[each] if isinstance(each, Rollout) else each for each in data if isinstance(each, Rollout | Sequence)]
    return [each for group in groups for each in group if isinstance(each, Rollout)]


def as_groups(data: Any, owner: str) -> list[Group]:
    """Return rollouts, or groups of them, as groups."""
    if rollouts := rollouts_of(data):
        return group_rollouts(rollouts)
    if isinstance(data, Sequence) and not data:
        return []
    raise ValueError(
        f"{owner} takes graded rollouts, or group_rollouts(rollouts), not {kind_of(data)}; "
        "create_batch_rollouts(..., reward_fn=...) samples and grades them"
    )


def as_items(data: Any, owner: str, convert: Callable[[list[Rollout]], list[Item]]) -> list[Item]:
    """Return items of rows as they are, and rollouts as `convert` makes them."""
    if rollouts := rollouts_of(data):
        return convert(rollouts)
    if isinstance(data, list | tuple) and data and all(_is_item(each) for each in data):
        return list(data)
    first = data[0] if isinstance(data, list | tuple) and data else data
    raise ValueError(f"{owner} takes rollouts, or items (tuples of rows), not {kind_of(data)}; {_how_to_make(first)}")


def _how_to_make(first: Any) -> str:
    if isinstance(first, Row):
        return "put each row into an item: (row,) for SFT, (chosen, rejected) for a pair, all rows of a prompt for RL"
    return (
        "prepare_grpo_batch(rollouts) makes items of rollouts, [item for sample in samples for item in "
        "algorithm(NAME).assemble(sample, Renderer(tokenizer))] makes them of samples"
    )


def _is_item(each: Any) -> bool:
    return isinstance(each, list | tuple) and bool(each) and all(isinstance(row, Row) for row in each)


def rows_by_entry(data: Any, owner: str) -> list[list[Row]]:
    """Return the rows of each row or rollout in a list of them, of items or of groups."""
    if not isinstance(data, Sequence):
        data = [data]
    entries = [each for entry in data for each in (entry if isinstance(entry, list | tuple) else [entry])]
    if wrong := next((each for each in entries if not isinstance(each, Row | Rollout)), None):
        raise ValueError(
            f"{owner} takes rows or rollouts, and there is {kind_of(wrong)} among them; rollouts are sampled by "
            "create_batch_rollouts, and algorithm(NAME).assemble(sample, Renderer(tokenizer)) returns rows of a sample"
        )
    return [[each] if isinstance(each, Row) else ungraded_rows_of(each) for each in entries]


def rewards_by_group(rewards: Any) -> list[Tensor]:
    """Return the rewards of each group: of graded rollouts by prompt, or as given."""
    if rollouts := rollouts_of(rewards):
        return [torch.tensor([compute_reward(each) for each in group]) for group in _trained_groups(rollouts)]
    groups = rewards if isinstance(rewards, Sequence | Tensor) else [rewards]
    for group in groups:
        if not isinstance(group, Tensor | Sequence) or (isinstance(group, Tensor) and group.ndim != 1):
            raise ValueError(
                "rewards has single numbers; give the rewards of each prompt in a list of their own, [[1.0, 0.0], "
                "[0.5, 0.5]], or graded rollouts"
            )
        if isinstance(group, Sequence) and not all(isinstance(each, int | float | Tensor) for each in group):
            raise ValueError(f"rewards has {kind_of(group)}; give numbers by prompt, or graded rollouts")
    return [torch.as_tensor(group) for group in groups]


def _trained_groups(rollouts: list[Rollout]) -> list[list[Rollout]]:
    return [trained_rollouts(group) for group in group_rollouts(rollouts)]


def check_view(batch: Any, view: type, owner: str) -> None:
    """Raise unless `batch` is the view that a loss takes."""
    if not isinstance(batch, view):
        raise ValueError(
            f"{owner} takes {view.__name__}, the log-probs of a forward pass, not {kind_of(batch)}; make it by "
            f"{_VIEWS[view]}"
        )


def as_advantages(advantages: Any, batch: Policy) -> Tensor:
    """Return advantages per token, from those per token or per sequence, in one tensor or in one for each group."""
    if isinstance(advantages, list | tuple) and advantages and isinstance(advantages[0], Tensor):
        advantages = torch.cat([each.reshape(-1) for each in advantages])
    given = torch.as_tensor(advantages, device=batch.logprob.device)
    if given.shape == batch.logprob.shape:
        return given
    if given.shape == (batch.num_sequences,):
        return given[batch.segment]
    raise ValueError(
        f"advantages has the shape {tuple(given.shape)}; give one for each of {batch.num_sequences} sequences, or for "
        f"each of {len(batch.logprob)} tokens, those of the prompt included"
    )
