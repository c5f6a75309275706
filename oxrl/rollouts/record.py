"""Rollouts to JSON and back without loss: prompt, tokens, log-probs, scores. Used for logs, checkpoints and files."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oxrl.parsing import parse_json
from oxrl.types import Generation, Media, Message, Rollout, Sample, Score, Turn


def rollout_to_json(rollout: Rollout) -> dict[str, Any]:
    score = rollout.score
    return {
        "sample": _sample_to_json(rollout.sample),
        "turns": [_turn_to_json(turn) for turn in rollout.turns],
        "group": rollout.group,
        "index": rollout.index,
        "score": None if score is None else {**score._asdict(), "parts": dict(score.parts)},
        "error": rollout.error,
        "greedy": rollout.greedy,
        "kl_divergence": rollout.kl_divergence,
        "metadata": dict(rollout.metadata),
        **({"prompt_messages": _dicts(rollout.prompt_messages)} if rollout.prompt_messages else {}),
    }


def rollout_from_json(raw: Mapping[str, Any]) -> Rollout:
    score = raw["score"]
    plain = {name: raw[name] for name in ("group", "index", "error", "greedy", "kl_divergence", "metadata")}
    return Rollout(
        sample=_sample_from_json(raw["sample"]),
        turns=tuple(_turn_from_json(turn) for turn in raw["turns"]),
        score=None if score is None else Score(**{**score, **_tuples(score, "per_turn", "per_token")}),
        prompt_messages=_messages(raw.get("prompt_messages", ())),
        **plain,
    )


def write_rollouts(path: str | Path, rollouts: Iterable[Rollout]) -> None:
    """Append one rollout per line to a file; `read_rollouts` returns them unchanged."""
    lines = []
    for rollout in rollouts:
        try:
            lines.append(json.dumps(rollout_to_json(rollout)) + "\n")
        except TypeError as error:
            raise ValueError(f"rollout {rollout.id} cannot be written: {error}; metadata must be plain JSON") from error
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with Path(path).open("a", encoding="utf-8") as file:
        file.writelines(lines)


def read_rollouts(path: str | Path) -> list[Rollout]:
    """Read a file of `write_rollouts`."""
    rollouts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        try:
            rollouts.append(rollout_from_json(parse_json(line)))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number} is not a rollout ({type(error).__name__}: {error})") from error
    return rollouts


def digest_of(rollouts: Sequence[Rollout]) -> str:
    """Return a digest that is equal for equal rollouts, to the last bit of their log-probs."""
    text = json.dumps([rollout_to_json(rollout) for rollout in rollouts], sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _turn_to_json(turn: Turn) -> dict[str, Any]:
    return {
        "prompt_ids": list(turn.prompt_ids),
        "generation": turn.generation._asdict(),
        "messages": _dicts(turn.messages),
        **({"media": [_media_to_json(media) for media in turn.media]} if turn.media else {}),
        **({"unused": turn.unused} if turn.unused else {}),
    }


def _turn_from_json(raw: Mapping[str, Any]) -> Turn:
    generation = raw["generation"]
    return Turn(
        tuple(raw["prompt_ids"]),
        Generation(**{**generation, **_tuples(generation, "token_ids", "logprobs", "versions", "allowed_tokens")}),
        _messages(raw["messages"]),
        tuple(_media_from_json(media) for media in raw.get("media", ())),
        raw.get("unused", 0),
    )


_CHATS = ("messages", "chosen", "rejected")
_PLAIN = ("id", "text", "answer", "label")


def _sample_to_json(sample: Sample) -> dict[str, Any]:
    return {
        **{name: getattr(sample, name) for name in _PLAIN},
        **{name: _dicts(getattr(sample, name)) for name in _CHATS},
        "responses": [_dicts(reply) for reply in sample.responses],
        "rewards": list(sample.rewards),
        "tools": [dict(tool) for tool in sample.tools],
        "metadata": dict(sample.metadata),
        **({"conversational": True} if sample.conversational else {}),
        **({"media": [_media_to_json(media) for media in sample.media]} if sample.media else {}),
    }


def _sample_from_json(raw: Mapping[str, Any]) -> Sample:
    chats: dict[str, Any] = {name: _messages(raw[name]) for name in _CHATS}
    return Sample(
        **{name: raw[name] for name in _PLAIN},
        **chats,
        responses=tuple(_messages(reply) for reply in raw["responses"]),
        rewards=tuple(raw["rewards"]),
        tools=tuple(raw["tools"]),
        metadata=raw["metadata"],
        media=tuple(_media_from_json(media) for media in raw.get("media", ())),
        conversational=raw.get("conversational", False),
    )


def _media_to_json(media: Media) -> dict[str, str]:
    plain = {"kind": media.kind, "mime_type": media.mime_type}
    if isinstance(media.data, bytes):
        return {**plain, "base64": base64.b64encode(media.data).decode()}
    return {**plain, "data": media.data}


def _media_from_json(raw: Mapping[str, Any]) -> Media:
    data = base64.b64decode(raw["base64"]) if "base64" in raw else raw["data"]
    return Media(raw["kind"], data, raw["mime_type"])


def _dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    return [message.to_dict() for message in messages]


def _messages(raw: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    return tuple(Message.from_dict(message) for message in raw)


def _tuples(raw: Mapping[str, Any], *names: str) -> dict[str, tuple[Any, ...]]:
    return {name: tuple(raw[name]) for name in names if raw.get(name) is not None}
