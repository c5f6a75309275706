"""Rewards to advantages: who gets the credit. Tensors in, float32 tensors out, computed in float64, no gradient.

A group is the answers to one prompt, its rewards [G]. A group without variance, a group of one included, teaches
nothing and gets zeros. Losses and models are elsewhere; a KL in the reward is `kl.shape_rewards_with_kl`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def centre(rewards: Tensor) -> Tensor:
    """r - mean(r): GRPO without the division by std. Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO)."""
    return _centred(rewards).float()


def zscore(rewards: Tensor, *, eps: float = 1e-6) -> Tensor:
    """(r - mean(r)) / (std(r) + eps): GRPO's. Shao et al. 2024, arXiv:2402.03300.

    The paper does not say which std; the sample's (over G - 1) is what TRL and verl take.
    """
    return _standardised(_centred(rewards), eps).float()


def leave_one_out(rewards: Tensor) -> Tensor:
    """r_i - mean of the others = (r_i - mean(r)) G / (G - 1). Ahmadian et al. 2024, arXiv:2402.14740 (RLOO)."""
    centred = _centred(rewards)
    return (centred * len(centred) / max(len(centred) - 1, 1)).float()


BASELINES = ("step", "group", "none")


def against_mean(rewards: Tensor, step_mean: float, *, baseline: str = "step") -> Tensor:
    """r - baseline: the mean reward of the whole step (one answer per prompt is enough), of the group, or none.

    Williams 1992, Simple statistical gradient-following algorithms (REINFORCE).
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline is {baseline!r}; there are {', '.join(BASELINES)}")
    if baseline == "group":
        return centre(rewards)
    return (_finite(rewards) - (step_mean if baseline == "step" else 0.0)).float()


def max_rl(rewards: Tensor) -> Tensor:
    """(r - mean(r)) / mean(r): hard prompts count for 1 / success rate; zeros where nothing succeeded.

    Averages the score over successes alone, less its mean. Tajwar et al. 2026, arXiv:2602.02710, for rewards 0 and 1.
    """
    group, centred = _finite(rewards), _centred(rewards)
    if (group < 0).any():
        raise ValueError(f"max_rl divides by the mean reward, so rewards must not be negative; got {rewards.tolist()}")
    return (centred / group.mean() if group.any() else centred).float()


def best_against_greedy(rewards: Tensor, greedy_reward: float) -> Tensor:
    """r - reward of the greedy answer to the same prompt. Li et al. 2023, arXiv:2310.10505 (ReMax)."""
    return (_finite(rewards) - float(greedy_reward)).float()


def global_normalise(advantages: Tensor, *, eps: float = 1e-8) -> Tensor:
    """`zscore` over a whole step in place of one group; after `centre`, REINFORCE++ with a baseline."""
    return zscore(advantages, eps=eps)


def reinforce_pp(rewards: Sequence[Tensor], *, gamma: float = 1.0, eps: float = 1e-8) -> list[Tensor]:
    """Rewards per token of each row (with the KL in them) to returns, normalised over all tokens of the step.

    A_t = sum_{s >= t} gamma^(s - t) r_s, then (A - mean) / std. Hu et al. 2025, arXiv:2501.03262 (REINFORCE++).
    """
    import torch

    returns = [discounted_returns(each, gamma=gamma) for each in rewards]
    return list(torch.split(global_normalise(torch.cat(returns), eps=eps), [len(each) for each in returns]))


def discounted_returns(rewards: Tensor, *, gamma: float = 1.0) -> Tensor:
    """sum_{s >= t} gamma^(s - t) r_s over the trained tokens of one row: a last reward reaches every token."""
    return _discounted_sums(_finite(rewards), gamma).float()


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    ended: bool,
    last_value: float | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Tensor:
    """Generalised advantages of one row's trained tokens, [T]; add `values` for the value head's targets.

    sum_{s >= t} (gamma lam)^(s - t) d_s, d_t = r_t + gamma V_{t+1} - V_t, where values[t] is V before token t. After
    the last token V is 0 if the answer ended, `last_value` if it was cut off. Schulman et al. 2015, arXiv:1506.02438.
    """
    if rewards.shape != values.shape:
        raise ValueError(f"gae wants one value per reward; got {tuple(values.shape)} for {tuple(rewards.shape)}")
    if not ended and last_value is None:
        raise ValueError("an answer that was cut off needs last_value, the value after its last token, to go on from")
    reward, value = _finite(rewards), _finite(values)
    after = value.roll(-1)
    after[-1:] = 0.0 if ended or last_value is None else float(last_value)
    return _discounted_sums(reward + gamma * after - value, gamma * lam).float()


def spread(advantage: float | Tensor, mask: Tensor) -> Tensor:
    """An advantage to every trained token: one number to all of them, or [K], each to the tokens of its turn."""
    if isinstance(advantage, float | int) or advantage.ndim == 0:
        return mask.float() * float(advantage)
    turn = _starts(mask).cumsum(0) - 1
    advantages = mask.new_zeros(len(mask)).float()
    advantages[mask] = _one_per_turn(advantage, mask)[turn[mask]]
    return advantages


def place(reward: float | Tensor, mask: Tensor) -> Tensor:
    """A reward to where it was earned: one number on the last trained token, or [K], each on the last of its turn."""
    ends = _starts(mask.flip(0)).flip(0).nonzero().squeeze(1)
    if not len(ends):
        raise ValueError("no token of this row is trained, so its reward would land nowhere; leave the row out")
    rewards = mask.new_zeros(len(mask)).float()
    if isinstance(reward, float | int) or reward.ndim == 0:
        rewards[ends[-1]] = float(reward)
    else:
        rewards[ends] = _one_per_turn(reward, mask)
    return rewards


def soft_overlong_penalty(length: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """0 up to max_length - buffer tokens, then linearly down to -1 at max_length; add it to the reward.

    ((max_length - buffer) - |y|) / buffer within the buffer. Yu et al. 2025, arXiv:2503.14476 (DAPO).
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer is {buffer}; it is the last part of max_length={max_length}, so 1 to {max_length}")
    return ((max_length - buffer - length.double()) / buffer).clamp(-1.0, 0.0).float()


def length_penalty(length: Tensor, correct: Tensor) -> Tensor:
    """Shorter is better within a group, and a wrong answer earns nothing by it; add it to the reward, weighed.

    x = 1/2 - (|y| - min) / (max - min) where correct, min(0, x) where not; zeros if all lengths are equal.
    Kimi Team 2025, arXiv:2501.12599.
    """
    group = _finite(length)
    if _is_flat(group):
        return group.new_zeros(len(group)).float()
    x = 0.5 - (group - group.min()) / (group.max() - group.min())
    return x.where(correct.bool(), x.clamp(max=0.0)).float()


def _finite(values: Tensor) -> Tensor:
    if values.ndim != 1:
        raise ValueError(
            f"expected one dimension, got shape {tuple(values.shape)}; give one group or one row at a time"
        )
    if not values.isfinite().all():
        raise ValueError(
            f"nan or inf among {values.tolist()}; a reward that failed is its rollout's error, not a number"
        )
    return values.detach().double()


def _is_flat(group: Tensor) -> bool:
    return not bool((group != group[:1]).any())


def _centred(rewards: Tensor) -> Tensor:
    """Exactly 0 for equal rewards: rounding must not become an advantage."""
    group = _finite(rewards)
    return group.new_zeros(len(group)) if _is_flat(group) else group - group.mean()


def _standardised(centred: Tensor, eps: float) -> Tensor:
    if not centred.any():
        return centred
    return centred / ((centred.square().sum() / (len(centred) - 1)).sqrt() + eps)


def _discounted_sums(values: Tensor, factor: float) -> Tensor:
    """sum_{s >= t} factor^(s - t) x_s by doubling: after k rounds each entry holds its next 2^k terms.

    log2(T) vector operations and no division, so factor = 1 and factor^T = 0 are both harmless.
    """
    sums, reach = values.clone(), 1
    while reach < len(sums):
        sums[:-reach] += factor**reach * sums[reach:]
        reach *= 2
    return sums


def _starts(mask: Tensor) -> Tensor:
    """Where a run of trained tokens, a turn, begins."""
    before = mask.roll(1)
    before[:1] = False
    return mask & ~before


def _one_per_turn(numbers: Tensor, mask: Tensor) -> Tensor:
    turns = int(_starts(mask).sum())
    if len(numbers) != turns:
        raise ValueError(f"{len(numbers)} numbers for a row with {turns} trained turns; give one for each turn")
    return numbers.detach().float()
