"""Rewards for the length of a response, in sampled tokens over all turns; they read nothing of the sample."""

from __future__ import annotations

from oxrl.rewards.grade import reads
from oxrl.types import Rollout


def sampled_tokens(rollout: Rollout) -> int:
    return sum(len(turn.generation.token_ids) for turn in rollout.turns)


@reads()
def length_target(rollout: Rollout, *, target: int) -> float:
    """1 at `target` tokens, decreasing linearly to 0 at 0 tokens and at `2 * target` tokens."""
    if target < 1:
        raise ValueError(f"length_target needs a target of at least 1 token, not {target}")
    return max(0.0, 1.0 - abs(sampled_tokens(rollout) - target) / target)


@reads()
def overlong_penalty(rollout: Rollout, *, limit: int, margin: int) -> float:
    """0 up to `limit - margin` tokens, then decreasing linearly to -1 at `limit` (DAPO, arXiv:2503.14476)."""
    if not 0 < margin <= limit:
        raise ValueError(f"overlong_penalty needs 0 < margin <= limit, not margin {margin} and limit {limit}")
    return -min(1.0, max(0.0, sampled_tokens(rollout) - (limit - margin)) / margin)
