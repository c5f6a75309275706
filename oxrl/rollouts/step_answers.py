"""Groups and rows of a step to the lines of its record: conversations, rewards, and numbers per token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from oxrl.algorithms.rows import ungraded_rows_of
from oxrl.rollouts.buffer import Group, LeftOut
from oxrl.rollouts.report import reward_std
from oxrl.rollouts.step_media import GroupMedia, media_of
from oxrl.seeds import mixed_seed
from oxrl.tracking.step_files import json_numbers, json_text
from oxrl.types import Item, Rollout, Row

Computed: TypeAlias = Mapping[str, np.ndarray[Any, Any]]
"""What the step computed for a row, one number per token: `{"policy_logprob": ..., "ratio": ...}`."""
Pieces: TypeAlias = Callable[[Sequence[int]], list[str]]
"""Token ids to the text of each."""
FROM_ROW = {
    "sampler_logprob": "sampler_logprob",
    "ref_logprob": "ref_logprob",
    "advantage": "advantage",
    "version": "sampler_version",
}
"""Name in the record -> stream of a row."""
COMPUTED = ("policy_logprob", "ratio", "clipped", "gradient")
_LONGEST = 1000  # characters of a part of a message that is no text, such as an image as a data URL


class Recorded(NamedTuple):
    """A group as a record has it: its rollouts, why each is left out (or None), and whether they are recorded."""

    number: int
    rollouts: tuple[Rollout, ...]
    left_out: tuple[str | None, ...]

    @property
    def rewards(self) -> list[float]:
        return [each.score.value for each in self.rollouts if each.score is not None and not each.greedy]

    @property
    def spread(self) -> float:
        return reward_std(self.rewards) if self.rewards else -1.0


def merged_groups(groups: Sequence[Group], left_out: Sequence[LeftOut]) -> list[Recorded]:
    """All groups of a step by number: trained ones first, each with its rollouts that could not be graded."""
    parts: dict[int, dict[int, tuple[Rollout, str | None]]] = {}
    for group in groups:
        parts[group[0].group] = {each.index: (each, None) for each in group}
    for reason, rollouts in left_out:
        for each in rollouts:
            parts.setdefault(each.group, {}).setdefault(each.index, (each, reason))
    return [
        Recorded(number, *map(tuple, zip(*(answers[index] for index in sorted(answers)), strict=True)))
        for number, answers in parts.items()
        if answers
    ]


def chosen_groups(groups: Sequence[Recorded], mode: str, seed: int) -> set[int]:
    """Numbers of the groups to record: all, or the one with the largest spread, one with only the best rewards of the
    step, one with only the worst, and one at random. A group that is still being sampled is never recorded.
    """
    finished = [group for group in groups if any(reason != "carried" for reason in group.left_out)]
    if mode == "full" or len(finished) <= 1:
        return {group.number for group in finished}
    graded = [group for group in finished if group.rewards]
    best = max((max(group.rewards) for group in graded), default=0.0)
    worst = min((min(group.rewards) for group in graded), default=0.0)
    wanted: list[Iterable[Recorded]] = [
        sorted(graded, key=lambda group: -group.spread)[:1],
        [group for group in graded if min(group.rewards) == best > worst][:1],
        [group for group in graded if max(group.rewards) == worst][:1],
    ]
    chosen = {group.number for part in wanted for group in part}
    others = [group for group in finished if group.number not in chosen]
    return chosen | ({others[seed % len(others)].number} if others else set())


def group_summary(group: Recorded, recorded: bool) -> dict[str, Any]:
    """The entry of a group in the first line of a step."""
    rewards = group.rewards
    trained = any(reason is None for reason in group.left_out)
    return {
        "group": group.number,
        "sample_id": group.rollouts[0].sample.id,
        "rewards": [each.reward for each in group.rollouts if not each.greedy],
        "mean": float(np.mean(rewards)) if rewards else None,
        "std": reward_std(rewards) if rewards else None,
        "recorded": recorded,
        "left_out": None if trained else group.left_out[0],
    }


def answer_lines(
    group: Recorded, rows: Mapping[str, Sequence[Row]], computed: Mapping[str, Computed], pieces: Pieces, seed: int
) -> Iterable[str]:
    """One line of JSON per rollout of a group; `rows` are those that were trained on, by rollout."""
    media = GroupMedia()
    for rollout, left_out in zip(group.rollouts, group.left_out, strict=True):
        trained = rows.get(rollout.id, ())
        if not trained and left_out is None and not rollout.greedy:
            left_out = "not used by the algorithm"
        head = {
            "kind": "answer",
            "group": rollout.group,
            "index": rollout.index,
            "sample_id": rollout.sample.id,
            "reward": rollout.reward,
            "parts": {} if rollout.score is None else dict(rollout.score.parts),
            "error": rollout.error,
            "status": rollout.status.value,
            "greedy": rollout.greedy,
            "left_out": left_out,
            "seed": mixed_seed(seed, rollout.group, rollout.index),
            "messages": [_message(message.to_dict()) for message in rollout.messages],
            "reference_answer": rollout.sample.answer,
            "media": media.of(rollout.index, media_of(rollout)),
            "turns": len(rollout.turns),
            "versions": sorted(set(rollout.versions)),
        }
        yield with_tokens(head, trained or _untrained_rows(rollout), computed, pieces)


def item_lines(item: Item, group: int, computed: Mapping[str, Computed], pieces: Pieces) -> Iterable[str]:
    """One line per row of a dataset; the rows of a pair are a group."""
    media = GroupMedia()
    for index, row in enumerate(item):
        head = {
            "kind": "row",
            "group": group,
            "index": index,
            "sample_id": row.id,
            **{name: float(value) for name, value in sorted(row.scalars.items())},
            "left_out": None,
            "media": media.of(index, row.media),
        }
        yield with_tokens(head, [row], computed, pieces)


def with_tokens(head: Mapping[str, Any], rows: Sequence[Row], computed: Mapping[str, Computed], pieces: Pieces) -> str:
    """The line of an answer: what is known of it, and the tokens of its rows one after the other."""
    return f'{json_text(head)[:-1]},"tokens":{_tokens(rows, computed, pieces) if rows else "null"}}}'


def numbers_of(row: Row, computed: Mapping[str, Computed]) -> Computed:
    """What was computed for a row; nothing where another row has its id."""
    found = computed.get(row.id, {})
    return found if all(len(values) == len(row) for values in found.values()) else {}


def _tokens(rows: Sequence[Row], computed: Mapping[str, Computed], pieces: Pieces) -> str:
    ids = np.concatenate([row.tokens for row in rows])
    mask = np.concatenate([row.mask for row in rows])
    fields = {
        "ids": json_text(ids.tolist()),
        "pieces": json_text(pieces(ids.tolist())),
        "mask": json_text(mask.astype(int).tolist()),
        "rows": json_text([len(row) for row in rows]),
    }
    known = {name: [row.streams.get(stream) for row in rows] for name, stream in FROM_ROW.items()}
    known |= {name: [numbers_of(row, computed).get(name) for row in rows] for name in COMPUTED}
    for name, parts in known.items():
        if all(part is None for part in parts):
            fields[name] = "null"
            continue
        values = [
            np.full(len(row), np.nan, np.float32) if part is None else np.asarray(part)
            for row, part in zip(rows, parts, strict=True)
        ]
        fields[name] = json_numbers(_whole(name, np.concatenate(values)), mask)
    return "{" + ",".join(f'"{name}":{text}' for name, text in fields.items()) + "}"


def _whole(name: str, values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Versions and flags without a decimal point."""
    if name not in ("version", "clipped") or not np.isfinite(values).all():
        return values
    return values.astype(np.int64)


def _untrained_rows(rollout: Rollout) -> list[Row]:
    """The tokens of a rollout that is not trained on; none where they are unknown or incomplete."""
    from dataclasses import replace

    if not rollout.turns:
        return []
    try:
        return ungraded_rows_of(replace(rollout, error=None))
    except ValueError:  # log-probs for some of its tokens only
        return []


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    parts = [_shortened(part) for part in content] if isinstance(content, list) else content
    return {**message, "content": parts}


def _shortened(part: Any) -> Any:
    if not isinstance(part, Mapping):
        return part
    return {key: value if key == "text" else _short(value) for key, value in part.items()}


def _short(value: Any) -> Any:
    if isinstance(value, Mapping):
        return _shortened(value)
    if isinstance(value, bytes) or (isinstance(value, str) and len(value) > _LONGEST):
        return f"<{len(value)} {'bytes' if isinstance(value, bytes) else 'characters'}>"
    return value
