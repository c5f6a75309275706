"""What is trained against what was sampled or written: token ids, turns, masks and advantages of rows.

Pure functions; each returns what is wrong, or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from oxrl.algorithms.assemble import group_items, labelled_items, pair_items, supervised_items
from oxrl.types import BoolArray, IntArray, Item, Render, Rollout, Row, Sample

References: TypeAlias = Mapping[bytes, BoolArray]
"""The mask that rows with these token ids should have."""


def references_of_rollouts(rollouts: Iterable[Rollout]) -> dict[bytes, BoolArray]:
    """Prompt and generations up to the end of each turn; what was sampled is trained."""
    found: dict[bytes, BoolArray] = {}
    for rollout in rollouts:
        sampled: list[tuple[tuple[int, ...], int]] = []
        for turn in rollout.turns:
            context = (*turn.prompt_ids, *turn.generation.token_ids)
            sampled.append((context, len(turn.prompt_ids)))
            mask = np.zeros(len(context), np.bool_)
            for earlier, start in sampled:
                if context[: len(earlier)] == earlier:
                    mask[start : len(earlier)] = True
            mask[:1] = False
            found[_key(np.array(context, np.int64))] = mask
    return found


def references_of_samples(samples: Iterable[Sample], render: Render) -> dict[bytes, BoolArray]:
    """Dataset rows as this renderer writes them: the turns of the assistant, or the responses, are trained."""
    found: dict[bytes, BoolArray] = {}
    for sample in samples:
        with suppress(ValueError):  # a row that cannot be rendered was left out
            found |= {_key(row.tokens): row.mask for item in _rendered(sample, render) for row in item}
    return found


def _rendered(sample: Sample, render: Render) -> list[Item]:
    if sample.chosen:
        return pair_items(sample, render)
    if sample.label is not None:
        return labelled_items(sample, render)
    if sample.responses:
        return group_items(sample, render)
    written = sample.text is not None or (bool(sample.messages) and sample.messages[-1].role == "assistant")
    return supervised_items(sample, render) if written else []


def _key(tokens: IntArray) -> bytes:
    return tokens.astype(np.int64).tobytes()


def wrong_mask(rows: Iterable[Row], references: References) -> str | None:
    """Of rows whose mask should be another one; a mask that is smaller in another way may be meant."""
    for row in rows:
        expected = references.get(_key(row.tokens))
        if expected is not None and (fault := mask_fault(row.mask, expected)) is not None:
            trained, wanted = (_spans(mask) for mask in (row.mask, expected))
            return f"row {row.id}: {fault}; it trains the tokens {trained}, and the response is {wanted}"
    return None


def mask_fault(mask: BoolArray, expected: BoolArray) -> str | None:
    """`"the mask is empty"` and so on, for the mask of a row and the one that it should have."""
    if not expected.any() or (mask == expected).all():
        return None
    if not mask.any():
        return "the mask is empty"
    if mask[1:].all() and not expected[1:].all():
        return "the mask is full: the prompt is trained as well"
    for shift, direction in ((-1, "left"), (1, "right")):
        moved = np.roll(expected, shift)
        moved[0] = moved[-1 if shift < 0 else 0] = False
        if (mask == moved).all() or (mask == np.roll(expected, shift)).all():
            return f"the mask is shifted by one token to the {direction}"
    ends = expected & ~np.append(expected[1:], False)
    if ((mask | ends) == expected).all() and not (mask & ends).any():
        return "the end of turn is outside of the loss: a model trained so does not learn to stop"
    return None


def _spans(mask: BoolArray) -> str:
    """`"3-7, 9-12"`: the trained positions."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(np.int8)))
    spans = [f"{start}-{end - 1}" for start, end in zip(edges[::2], edges[1::2], strict=True)]
    return ", ".join(spans[:4]) + (", ..." if len(spans) > 4 else "") if spans else "none"


def empty_rows(rows: Sequence[Row]) -> str | None:
    """Of a step in which most rows train nothing."""
    empty = [row.id for row in rows if not row.mask.any()]
    if len(empty) * 2 > len(rows):
        return f"the mask is empty in {len(empty)} of {len(rows)} rows, such as {empty[0]}"
    return None


def wrong_tokens(rows: Iterable[Row], rollouts: Sequence[Rollout], tokenizer: Any = None) -> str | None:
    """Of rows that belong to a rollout and have other ids than it."""
    by_id = {rollout.id: rollout for rollout in rollouts}
    references = references_of_rollouts(rollouts)
    for row in rows:
        rollout = by_id.get(row.sequence or row.id)
        if rollout is None or not rollout.turns or _key(row.tokens) in references:
            continue
        sampled = np.array(rollout.tokens, np.int64)
        return f"row {row.id}: {_first_difference(row.tokens, sampled, tokenizer)}"
    return None


def _first_difference(trained: IntArray, sampled: IntArray, tokenizer: Any) -> str:
    common = min(len(trained), len(sampled))
    differ = np.flatnonzero(trained[:common] != sampled[:common])
    at = int(differ[0]) if len(differ) else common
    ids = [str(int(each[at])) if at < len(each) else "nothing" for each in (trained, sampled)]
    what = f"at position {at} of {len(sampled)} the token {ids[0]} is trained, and {ids[1]} was sampled"
    if tokenizer is not None and tokenizer.decode(trained.tolist()) == tokenizer.decode(sampled.tolist()):
        return f"{what}; the text is the same, so it was re-tokenised"
    return f"{what}: it was re-tokenised, or is another text"


def broken_turns(rollouts: Iterable[Rollout], tokenizer: Any) -> str | None:
    """A turn whose prompt has the text of the turns before it, in other tokens; a template may rewrite the text."""
    for rollout in rollouts:
        for number, (before, after) in enumerate(zip(rollout.turns, rollout.turns[1:], strict=False), 1):
            context = [*before.prompt_ids, *before.generation.token_ids]
            prompt = list(after.prompt_ids)
            if prompt[: len(context)] == context:
                continue
            if _text(tokenizer, prompt).startswith(_text(tokenizer, context)):
                at = next((i for i, (a, b) in enumerate(zip(prompt, context, strict=False)) if a != b), len(prompt))
                return (
                    f"rollout {rollout.id}: the prompt of turn {number + 1} has the text of the turns before it in "
                    f"other tokens, from position {at} on: it was re-tokenised, and is trained as a row of its own"
                )
    return None


def _text(tokenizer: Any, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def wrong_advantages(items: Iterable[Item], group_of: Mapping[str, int] = MappingProxyType({})) -> str | None:
    """Of rows with rewards and a stream `advantage`: none at all, not finite, or on the last token only.

    `group_of` maps rollouts to their groups; rows of other rollouts are a group if their prompts are equal.
    """
    only_last = longer = 0
    example = ""
    groups: dict[int | bytes, list[Row]] = {}
    for row in (row for item in items for row in item if "advantage" in row.streams and row.mask.any()):
        values = np.asarray(row.streams["advantage"])[row.mask]
        if not np.isfinite(values).all():
            return f"row {row.id}: an advantage is not finite"
        if len(values) > 1 and values.any():
            longer += 1
            only_last += not values[:-1].any()
            example = example or row.id
        if "reward" in row.scalars:
            own = group_of.get(row.sequence or row.id, _key(row.tokens[: int(row.mask.argmax())]))
            groups.setdefault(own, []).append(row)
    # Advantages are computed from rewards in float32, where those of 5000 that differ by less than 1e-4 are equal.
    differing = [rows for rows in groups.values() if len({np.float32(row.scalars["reward"]) for row in rows}) > 1]
    kept = [rows for rows in differing if any((np.asarray(row.streams["advantage"]) * row.mask).any() for row in rows)]
    lost = len(differing) - len(kept)
    if lost and not kept:
        return f"advantages are lost: the rewards differ in {lost} groups, and all advantages of the step are 0"
    if longer > 1 and only_last == longer:
        return f"the advantage is on the last token only, in all {longer} rows such as {example}"
    return None
