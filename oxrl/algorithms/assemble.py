"""Samples to items, and the rearrangement of a step's items into the pairs or groups that a loss compares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from oxrl.types import Item, Message, Render, Row, Sample


def conversation_items(sample: Sample, render: Render) -> list[Item]:
    """Every assistant turn is trained, each in the context of the turns before it."""
    if not sample.messages or sample.chosen or sample.label is not None or sample.responses:
        raise ValueError(f"{sample.id}: not a conversation to train on; give messages, or a prompt with a response")
    if (role := sample.messages[-1].role) != "assistant":
        hint = "; to train on the answers, map the column: response=answer" if sample.answer is not None else ""
        raise ValueError(f"{sample.id}: ends with {role!r}, so there is no response to train on{hint}")
    rows = render.conversation(sample.messages, id=sample.id, tools=sample.tools, **_media(sample))
    return [(row,) for row in rows]


def text_items(sample: Sample, render: Render) -> list[Item]:
    """Every token of a plain text is trained."""
    if sample.text is None:
        raise ValueError(f"{sample.id}: cpt trains on plain text; this row has no `text` column")
    return [(row,) for row in render.text(sample.text, id=sample.id, **_media(sample))]


def supervised_items(sample: Sample, render: Render) -> list[Item]:
    """A conversation or a plain text, whichever the row is."""
    return text_items(sample, render) if sample.text is not None else conversation_items(sample, render)


def pair_items(sample: Sample, render: Render) -> list[Item]:
    """(chosen, rejected), each a row in which only the response is trained, with its score and the margin if given."""
    if not sample.chosen or not sample.rejected:
        raise ValueError(f"{sample.id}: no pair to compare; give chosen and rejected responses")
    sides = {"chosen": sample.chosen, "rejected": sample.rejected}
    margin = _number(sample.metadata, "margin")
    pair = tuple(
        replace(
            response_row(sample, response, render, f"{sample.id}/{side}"),
            scalars={"score": _number(sample.metadata, f"score_{side}"), "margin": margin},
        )
        for side, response in sides.items()
    )
    return [pair]


def labelled_items(sample: Sample, render: Render) -> list[Item]:
    """A response with its label, 1 for good."""
    if sample.label is None:
        raise ValueError(f"{sample.id}: no labelled response; give prompt, completion and label")
    *prompt, response = sample.messages
    row = response_row(replace(sample, messages=tuple(prompt)), (response,), render, sample.id)
    return [(replace(row, scalars={"label": float(sample.label), "mismatched": 0.0}),)]


def group_items(sample: Sample, render: Render) -> list[Item]:
    """The scored responses to one prompt as one item: a group."""
    if not sample.responses:
        raise ValueError(f"{sample.id}: no scored responses; give prompt, responses and rewards")
    rows = []
    for index, (response, reward) in enumerate(zip(sample.responses, sample.rewards, strict=True)):
        row = response_row(sample, response, render, f"{sample.id}/{index}")
        rows.append(replace(row, scalars={"reward": reward, "ended": 1.0}))
    return [tuple(rows)]


def group_against_greedy_items(sample: Sample, render: Render) -> list[Item]:
    """A group with the reward of the greedy response to its prompt, from the column `greedy_reward`."""
    if "greedy_reward" not in sample.metadata:
        raise ValueError(f"{sample.id}: no reward of a greedy response; give a column greedy_reward")
    baseline = _number(sample.metadata, "greedy_reward")
    (group,) = group_items(sample, render)
    return [tuple(replace(row, scalars={**row.scalars, "greedy_reward": baseline}) for row in group)]


def good_items(sample: Sample, render: Render, *, threshold: float = 1.0) -> list[Item]:
    """Likelihood of the responses whose reward is at least the threshold; the others are left out (RAFT, RFT).

    Dong et al. 2023, arXiv:2304.06767.
    """
    (group,) = group_items(sample, render)
    return [(row,) for row in group if row.scalars["reward"] >= threshold]


def response_row(sample: Sample, response: Sequence[Message], render: Render, id: str) -> Row:
    """The sample's prompt with a response; only the response is trained."""
    rows = render.conversation(
        (*sample.messages, *response),
        id=id,
        first_trained=len(sample.messages),
        tools=sample.tools,
        **_media(sample),
    )
    if len(rows) != 1:
        raise ValueError(f"{id}: the chat template splits the response into {len(rows)} rows, and one is needed")
    return rows[0]


def _media(sample: Sample) -> dict[str, Any]:
    """The argument of a sample with media; custom implementations of `Render` may not know it."""
    return {"media": sample.media} if sample.media else {}


def _number(metadata: Mapping[str, object], name: str) -> float:
    value = metadata.get(name, 0.0)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{name} must be a number, it is {value!r}")
    return float(value)


def with_mismatched(items: list[Item]) -> list[Item]:
    """The labelled rows, and each prompt again with the response to another one: KTO's sample of the policy's KL."""
    rows = [row for (row,) in items]
    neighbours = rows[1:] + rows[:1]
    mismatched = [_with_response_of(row, other) for row, other in zip(rows, neighbours, strict=True)]
    return [*items, *((row,) for row in mismatched)]


def _with_response_of(row: Row, other: Row) -> Row:
    prompt_end, response_start = int(row.mask.argmax()), int(other.mask.argmax())
    return Row(
        f"{row.id}~{other.id}",
        np.concatenate([row.tokens[:prompt_end], other.tokens[response_start:]]),
        np.concatenate([row.mask[:prompt_end], other.mask[response_start:]]),
        scalars={**row.scalars, "mismatched": 1.0},
        media=row.media,
        allowed_tokens=row.allowed_tokens,
    )


def best_and_worst(items: list[Item]) -> list[Item]:
    """Pair the responses with the highest and the lowest reward of each group; skip groups of equal rewards."""
    pairs: list[Item] = []
    for group in items:
        ranked = sorted(group, key=lambda row: row.scalars["reward"])
        if ranked[0].scalars["reward"] < ranked[-1].scalars["reward"]:
            pairs.append(tuple(_scored(row) for row in (ranked[-1], ranked[0])))
    if not pairs:
        raise ValueError(f"rewards are equal within each of the {len(items)} groups of this step: no pair to train on")
    return pairs


def _scored(row: Row) -> Row:
    return replace(row, scalars={"score": row.scalars["reward"], "margin": 0.0})
