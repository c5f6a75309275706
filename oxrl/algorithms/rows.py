"""A rollout to trainable rows: sampled tokens are trained as sampled, all others are masked.

A turn extends the row if its prompt starts with all tokens of the row; otherwise, because the chat template rewrote
earlier turns or other tokens were allowed, it starts a new row. Rows of one rollout share its id as their `sequence`.
Advantages are in `credit`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from oxrl.types import Generation, Media, Rollout, Row, Score, Turn


@dataclass(slots=True)
class _RowBuilder:
    """A row to which turns are appended."""

    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    media: tuple[Media, ...] = ()
    allowed_tokens: tuple[int, ...] = ()

    def add_prompt(self, tokens: Sequence[int]) -> None:
        zeros = [0] * len(tokens)
        self._extend(tokens, False, zeros, zeros, zeros)

    def add_generation(self, generation: Generation, rewards: Sequence[float], unused: int) -> None:
        self._extend(generation.token_ids, True, generation.logprobs, rewards, generation.token_versions)
        if unused:
            self.mask[-unused:] = [False] * unused

    def _extend(
        self,
        tokens: Sequence[int],
        sampled: bool,
        logprobs: Sequence[float],
        rewards: Sequence[float],
        versions: Sequence[int],
    ) -> None:
        self.tokens += tokens
        self.mask += [sampled] * len(tokens)
        self.logprobs += logprobs
        self.rewards += rewards
        self.versions += versions


def rows_of(rollout: Rollout) -> list[Row]:
    """Rows with streams `sampler_logprob`, `sampler_version`, `reward` (per token), scalars `reward` (total), `ended`.

    `ended` is the same for all rows: whether the last generation stopped by itself. Discounted sums run over all rows
    of a rollout as one sequence, so only its end can be truncated. Rows without a sampled token are left out, and
    tokens without an effect (`Turn.unused`) masked. Without any log-prob there is no stream of them: the policy before
    the step then counts as the sampler.
    """
    if rollout.error is not None or rollout.score is None:
        reason = rollout.error or "it has no score"
        raise ValueError(f"rollout {rollout.id} cannot be trained on: {reason}; leave it out")
    rewards = _rewards_per_token(rollout, rollout.score)
    rows = [row for row in _build_rows(rollout.turns, rewards) if any(row.mask)]
    ended = float(bool(rollout.turns) and rollout.generation.finish_reason == "stop")
    return [
        Row(
            rollout.id if index == 0 else f"{rollout.id}~{index}",
            np.array(row.tokens),
            np.array(row.mask),
            sequence=rollout.id,
            streams={
                **({"sampler_logprob": np.array(row.logprobs, np.float32)} if rollout.has_logprobs else {}),
                "sampler_version": np.array(row.versions, np.float32),
                "reward": np.array(row.rewards, np.float32),
            },
            scalars={"reward": float(rollout.score.value), "ended": ended},
            media=row.media or rollout.sample.media,
            allowed_tokens=row.allowed_tokens,
        )
        for index, row in enumerate(rows)
    ]


def ungraded_rows_of(rollout: Rollout) -> list[Row]:
    """For algorithms without rewards: all rewards are 0."""
    return rows_of(replace(rollout, score=Score(0.0)))


def _build_rows(turns: Sequence[Turn], rewards: Sequence[Sequence[float]]) -> list[_RowBuilder]:
    rows: list[_RowBuilder] = []
    for turn, turn_rewards in zip(turns, rewards, strict=True):
        allowed = turn.generation.allowed_tokens
        extends = rows and list(turn.prompt_ids[: len(rows[-1].tokens)]) == rows[-1].tokens
        if not extends or rows[-1].allowed_tokens != allowed:
            rows.append(_RowBuilder(allowed_tokens=allowed))
        rows[-1].add_prompt(turn.prompt_ids[len(rows[-1].tokens) :])
        rows[-1].media = turn.media
        rows[-1].add_generation(turn.generation, turn_rewards, turn.unused)
    return rows


def _rewards_per_token(rollout: Rollout, score: Score) -> list[list[float]]:
    """Return, for each turn, a reward for each of its sampled tokens."""
    lengths = [len(turn.generation.token_ids) for turn in rollout.turns]
    for turn, length in zip(rollout.turns, lengths, strict=True):
        if rollout.has_logprobs and len(turn.generation.logprobs) != length:
            given = len(turn.generation.logprobs)
            raise ValueError(f"rollout {rollout.id}: {given} log-probs for {length} sampled tokens; give one for each")
    if score.per_token is not None:
        _check(rollout, score.value, score.per_token, sum(lengths), "per_token", "sampled tokens")
        ends = np.cumsum(lengths).tolist()
        return [list(score.per_token[end - length : end]) for end, length in zip(ends, lengths, strict=True)]
    per_turn = score.per_turn
    if per_turn is None:
        last = max((index for index, length in enumerate(lengths) if length), default=-1)
        per_turn = tuple(score.value if index == last else 0.0 for index in range(len(lengths)))
    else:
        _check(rollout, score.value, per_turn, len(lengths), "per_turn", "turns")
        if lost := [n for n, (value, length) in enumerate(zip(per_turn, lengths, strict=True)) if value and not length]:
            raise ValueError(f"rollout {rollout.id}: turn {lost[0]} has a reward but no sampled token to put it on")
    unused = [turn.unused for turn in rollout.turns]
    return [
        [0.0] * (length - 1 - without) + [value] + [0.0] * without if length else []
        for value, length, without in zip(per_turn, lengths, unused, strict=True)
    ]


def _check(rollout: Rollout, value: float, parts: Sequence[float], wanted: int, name: str, of: str) -> None:
    if len(parts) != wanted:
        raise ValueError(f"rollout {rollout.id}: {name} has {len(parts)} rewards for {wanted} {of}; give one for each")
    if not math.isclose(sum(parts), value, rel_tol=1e-4, abs_tol=1e-4):
        raise ValueError(f"rollout {rollout.id}: {name} adds up to {sum(parts):g}, but the score's value is {value:g}")
