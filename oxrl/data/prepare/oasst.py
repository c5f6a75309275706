"""OpenAssistant: trees of messages with ranked replies, as one conversation each or as pairs of ranked replies."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import Dataset, Raw
from oxrl.types import Message, Sample

_ROLES = {"prompter": "user", "assistant": "assistant"}


def convert(row: Raw) -> list[Sample]:
    """Return the conversation along the best replies; of several follow-ups, the first with a reply."""
    messages, node = [_message(_root(row))], _root(row)
    while replies := _replies(node):
        best = min(replies, key=_rank)
        messages.append(_message(best))
        answered = [follow for follow in _replies(best) if _replies(follow)]
        if not answered:
            return [Sample("", tuple(messages), metadata=_about(row))]
        node = answered[0]
        messages.append(_message(node))
    raise BadRow("the prompt has no reply")


def convert_pairs(row: Raw) -> list[Sample]:
    """Return every pair of ranked replies to the same message."""
    root = _root(row)
    pairs = [
        Sample("", prompt, chosen=(_message(better),), rejected=(_message(worse),), metadata=_about(row))
        for prompt, replies in _prompts_with_replies(root, (_message(root),))
        for better, worse in combinations(sorted((each for each in replies if _ranked(each)), key=_rank), 2)
        if better["text"] != worse["text"]
    ]
    if not pairs:
        raise BadRow("no message has two ranked replies")
    return pairs


def _prompts_with_replies(node: Raw, path: tuple[Message, ...]) -> Iterator[tuple[tuple[Message, ...], list[Raw]]]:
    replies = _replies(node)
    yield path, replies
    for reply in replies:
        for follow in _replies(reply):
            yield from _prompts_with_replies(follow, (*path, _message(reply), _message(follow)))


def _root(row: Raw) -> Raw:
    root = row.get("prompt")
    if not isinstance(root, dict) or not root.get("text"):
        raise BadRow("prompt must be a message with its replies")
    return root


def _replies(node: Raw) -> list[Raw]:
    return [
        reply
        for reply in node.get("replies") or []
        if reply.get("text") and not reply.get("deleted") and reply.get("review_result") is not False
    ]


def _ranked(reply: Raw) -> bool:
    return reply.get("rank") is not None


def _rank(reply: Raw) -> float:
    rank: float | None = reply.get("rank")
    return float("inf") if rank is None else rank


def _message(node: Raw) -> Message:
    role = node.get("role")
    if role not in _ROLES:
        raise BadRow(f"the role {role!r} is neither prompter nor assistant")
    return Message(_ROLES[role], str(node["text"]))


def _about(row: Raw) -> dict[str, Any]:
    return {"message_tree_id": row.get("message_tree_id"), "lang": _root(row).get("lang")}


def _tree(sample: Sample) -> str:
    return str(sample.metadata["message_tree_id"])


OASST = Dataset(
    name="oasst",
    summary="conversations between people, one per tree, along the best replies",
    licence="Apache-2.0",
    convert=convert,
    hub="OpenAssistant/oasst1",
    splits={"train": "2023-04-12_oasst_ready.trees.jsonl.gz"},
    held_out=0.05,
    group=_tree,
    seen_real_rows=True,
)
OASST_PAIRS = OASST._replace(
    name="oasst_pairs", summary="pairs of replies, as people ranked them", convert=convert_pairs
)
