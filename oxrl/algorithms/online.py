"""The answers to one prompt to items: how an algorithm that samples for itself makes its rows of rollouts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from oxrl.algorithms.assemble import reply_row
from oxrl.algorithms.rows import rows_of, ungraded_rows_of
from oxrl.types import Item, Message, Render, Rollout, Row


def answers(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """All but the greedy one, which is a baseline and never trained on."""
    return [rollout for rollout in rollouts if not rollout.greedy]


def group_of_rollouts(rollouts: Sequence[Rollout], render: Render) -> list[Item]:  # noqa: ARG001 - one signature
    """All rows of all answers, together."""
    return _together([row for rollout in answers(rollouts) for row in rows_of(rollout)])


def ungraded_group(rollouts: Sequence[Rollout], render: Render) -> list[Item]:  # noqa: ARG001 - one signature
    """The same for an algorithm that does not look at rewards."""
    return _together([row for rollout in answers(rollouts) for row in ungraded_rows_of(rollout)])


def group_against_greedy(rollouts: Sequence[Rollout], render: Render) -> list[Item]:
    """Every row knows the greedy answer's reward, as `greedy_reward`."""
    baselines = [rollout.score.value for rollout in rollouts if rollout.greedy and rollout.score is not None]
    if not baselines:
        raise ValueError(f"group {rollouts[0].group} has no graded greedy answer to compare with; leave it out")
    return [
        tuple(replace(row, scalars={**row.scalars, "greedy_reward": baselines[0]}) for row in item)
        for item in group_of_rollouts(rollouts, render)
    ]


def one_row_each(rollouts: Sequence[Rollout], render: Render) -> list[Item]:  # noqa: ARG001 - one signature
    """A group of which pairs can be made: each answer is one row."""
    rows = [_only_row(rollout, rows_of(rollout)) for rollout in answers(rollouts)]
    return _together([row for row in rows if row is not None])


def good_rollouts(rollouts: Sequence[Rollout], render: Render, *, threshold: float) -> list[Item]:  # noqa: ARG001
    """The rows of answers whose reward reaches the threshold, each by itself."""
    rows = [row for rollout in answers(rollouts) for row in rows_of(rollout)]
    return [(row,) for row in rows if row.scalars["reward"] >= threshold]


def against_reference_reply(rollouts: Sequence[Rollout], render: Render) -> list[Item]:
    """(the reply that the data set has, what the policy said in its place): SPIN's pairs."""
    pairs: list[Item] = []
    for rollout in answers(rollouts):
        said = _only_row(rollout, ungraded_rows_of(rollout))
        if said is not None:
            chosen = _reference_row(rollout, render)
            pairs.append(
                tuple(replace(row, streams={}, scalars={"score": 0.0, "margin": 0.0}) for row in (chosen, said))
            )
    return pairs


def _together(rows: Sequence[Row]) -> list[Item]:
    return [tuple(rows)] if rows else []


def _only_row(rollout: Rollout, rows: Sequence[Row]) -> Row | None:
    """None where nothing was sampled."""
    if len(rows) > 1:
        raise ValueError(
            f"rollout {rollout.id}: its prompts do not continue each other, which makes {len(rows)} rows of it, and a "
            "side of a pair is one row; use a policy gradient (grpo), or a chat template that keeps what was said"
        )
    return rows[0] if rows else None


def _reference_row(rollout: Rollout, render: Render) -> Row:
    sample = rollout.sample
    if sample.messages and sample.messages[-1].role == "assistant":
        prompt, reply = sample.messages[:-1], sample.messages[-1]
    elif sample.answer is not None:
        prompt, reply = sample.messages, Message("assistant", sample.answer)
    else:
        raise ValueError(f"{sample.id}: spin needs the reply to prefer; give messages that end with it, or an answer")
    return reply_row(replace(sample, messages=prompt), (reply,), render, f"{rollout.id}/chosen")
