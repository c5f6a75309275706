"""The rollouts of one prompt to items, for algorithms that train on their own samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oxrl.algorithms.assemble import response_row
from oxrl.algorithms.rows import rows_of, ungraded_rows_of
from oxrl.types import Item, Message, Render, Rollout, Row


def trained_rollouts(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """All but the greedy one, which is only a baseline."""
    return [rollout for rollout in rollouts if not rollout.greedy]


def group_of_rollouts(rollouts: Sequence[Rollout], render: Render) -> list[Item]:  # noqa: ARG001 - one signature
    """All rows of all rollouts as one item."""
    return _as_one_item([row for rollout in trained_rollouts(rollouts) for row in rows_of(rollout)])


def ungraded_group(rollouts: Sequence[Rollout], render: Render) -> list[Item]:  # noqa: ARG001 - one signature
    """The same for an algorithm without rewards."""
    return _as_one_item([row for rollout in trained_rollouts(rollouts) for row in ungraded_rows_of(rollout)])


def group_against_greedy(rollouts: Sequence[Rollout], render: Render) -> list[Item]:
    """The group, with the reward of the greedy rollout as the scalar `greedy_reward` of every row."""
    baselines = [rollout.score.value for rollout in rollouts if rollout.greedy and rollout.score is not None]
    if not baselines:
        raise ValueError(f"group {rollouts[0].group} has no graded greedy rollout as baseline; leave the group out")
    return [
        tuple(replace(row, scalars={**row.scalars, "greedy_reward": baselines[0]}) for row in item)
        for item in group_of_rollouts(rollouts, render)
    ]


def one_row_each(rollouts: Sequence[Rollout], render: Render) -> list[Item]:  # noqa: ARG001 - one signature
    """A group for pairs: each rollout must be one row."""
    rows = [_only_row(rollout, rows_of(rollout)) for rollout in trained_rollouts(rollouts)]
    return _as_one_item([row for row in rows if row is not None])


def good_rollouts(rollouts: Sequence[Rollout], render: Render, *, threshold: float) -> list[Item]:  # noqa: ARG001
    """The rows of rollouts whose reward is at least the threshold, each as its own item."""
    rows = [row for rollout in trained_rollouts(rollouts) for row in rows_of(rollout)]
    return [(row,) for row in rows if row.scalars["reward"] >= threshold]


def against_reference_response(rollouts: Sequence[Rollout], render: Render) -> list[Item]:
    """SPIN's pairs: (the response in the data, the policy's own)."""
    pairs: list[Item] = []
    for rollout in trained_rollouts(rollouts):
        sampled = _only_row(rollout, ungraded_rows_of(rollout))
        if sampled is not None:
            chosen = _reference_row(rollout, render)
            pairs.append(
                tuple(replace(row, streams={}, scalars={"score": 0.0, "margin": 0.0}) for row in (chosen, sampled))
            )
    return pairs


def _as_one_item(rows: Sequence[Row]) -> list[Item]:
    return [tuple(rows)] if rows else []


def _only_row(rollout: Rollout, rows: Sequence[Row]) -> Row | None:
    """Return the single row; None if nothing was sampled."""
    if len(rows) > 1:
        raise ValueError(
            f"rollout {rollout.id}: a later prompt does not start with the earlier turns, which gives {len(rows)} "
            "rows, and each side of a pair must be one row; use a policy gradient (grpo), or a chat template that "
            "keeps earlier turns"
        )
    return rows[0] if rows else None


def _reference_row(rollout: Rollout, render: Render) -> Row:
    sample = rollout.sample
    if sample.messages and sample.messages[-1].role == "assistant":
        prompt, response = sample.messages[:-1], sample.messages[-1]
    elif sample.answer is not None:
        prompt, response = sample.messages, Message("assistant", sample.answer)
    else:
        raise ValueError(f"{sample.id}: spin needs a reference response; give messages that end with it, or an answer")
    return response_row(replace(sample, messages=prompt), (response,), render, f"{rollout.id}/chosen")
