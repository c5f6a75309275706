"""A rollout to trainable rows: what was sampled is trained on as sampled, what the model only saw is masked.

A row goes on while the next prompt begins with all that is there; where it does not, because a template rewrites the
past, a new row begins. Rows of one rollout share its id as their `sequence`. What the rows are worth is `credit`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from oxrl.types import Generation, Rollout, Row, Score, Turn


@dataclass(slots=True)
class _Growing:
    """A row while its turns are being added."""

    tokens: list[int] = field(default_factory=list)
    mask: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)

    def see(self, tokens: Sequence[int]) -> None:
        nothing = [0] * len(tokens)
        self._add(tokens, False, nothing, nothing, nothing)

    def say(self, generation: Generation, rewards: Sequence[float]) -> None:
        self._add(generation.token_ids, True, generation.logprobs, rewards, generation.token_versions)

    def _add(
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
    """Streams `sampler_logprob`, `sampler_version` and `reward` (where it was earned), scalars `reward` (the whole) and
    `ended`.

    `ended` says of every row whether the rollout's last generation ended by itself: whoever discounts rewards takes
    the rows of a rollout as one run of tokens, so only its very end can be cut off. Rows without a sampled token are
    left out.
    """
    if rollout.error is not None or rollout.score is None:
        reason = rollout.error or "it has no score"
        raise ValueError(f"rollout {rollout.id} cannot be trained on: {reason}; leave it out")
    rewards = _rewards_per_token(rollout, rollout.score)
    rows = [row for row in _grown(rollout.turns, rewards) if any(row.mask)]
    ended = float(bool(rollout.turns) and rollout.generation.finish_reason == "stop")
    return [
        Row(
            rollout.id if index == 0 else f"{rollout.id}~{index}",
            np.array(row.tokens),
            np.array(row.mask),
            sequence=rollout.id,
            streams={
                "sampler_logprob": np.array(row.logprobs, np.float32),
                "sampler_version": np.array(row.versions, np.float32),
                "reward": np.array(row.rewards, np.float32),
            },
            scalars={"reward": float(rollout.score.value), "ended": ended},
            media=rollout.sample.media,
        )
        for index, row in enumerate(rows)
    ]


def ungraded_rows_of(rollout: Rollout) -> list[Row]:
    """For algorithms that do not look at rewards: all of them are 0."""
    return rows_of(replace(rollout, score=Score(0.0)))


def _grown(turns: Sequence[Turn], rewards: Sequence[Sequence[float]]) -> list[_Growing]:
    rows: list[_Growing] = []
    for turn, earned in zip(turns, rewards, strict=True):
        if not rows or list(turn.prompt_ids[: len(rows[-1].tokens)]) != rows[-1].tokens:
            rows.append(_Growing())
        rows[-1].see(turn.prompt_ids[len(rows[-1].tokens) :])
        rows[-1].say(turn.generation, earned)
    return rows


def _rewards_per_token(rollout: Rollout, score: Score) -> list[list[float]]:
    """For each turn, a reward for each of its sampled tokens."""
    lengths = [len(turn.generation.token_ids) for turn in rollout.turns]
    for turn, length in zip(rollout.turns, lengths, strict=True):
        if len(turn.generation.logprobs) != length:
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
            raise ValueError(f"rollout {rollout.id}: turn {lost[0]} earned a reward but sampled no token to put it on")
    return [[0.0] * (n - 1) + [value] if n else [] for value, n in zip(per_turn, lengths, strict=True)]


def _check(rollout: Rollout, value: float, parts: Sequence[float], wanted: int, name: str, of: str) -> None:
    if len(parts) != wanted:
        raise ValueError(f"rollout {rollout.id}: {name} has {len(parts)} rewards for {wanted} {of}; give one for each")
    if not math.isclose(sum(parts), value, rel_tol=1e-4, abs_tol=1e-4):
        raise ValueError(f"rollout {rollout.id}: {name} adds up to {sum(parts):g}, but the score's value is {value:g}")
