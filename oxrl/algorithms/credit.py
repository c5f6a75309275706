"""Rewards to advantages. Tensors in, float32 tensors out, computed in float64, no gradient.

A group is the responses to one prompt, its rewards [G]. A group without variance, a group of one included, has zero
advantages. Losses and models are elsewhere; a KL in the reward is `kl.shape_rewards_with_kl`.
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
    """(r - mean(r)) / (std(r) + eps), as in GRPO. Shao et al. 2024, arXiv:2402.03300.

    The paper leaves the std open; this is the sample std (over G - 1), as in TRL and verl.
    """
    return _standardised(_centred(rewards), eps).float()


def leave_one_out(rewards: Tensor) -> Tensor:
    """r_i - mean of the other rewards = (r_i - mean(r)) G / (G - 1). Ahmadian et al. 2024, arXiv:2402.14740 (RLOO)."""
    centred = _centred(rewards)
    return (centred * len(centred) / max(len(centred) - 1, 1)).float()


BASELINES = ("step", "group", "none")


def against_mean(rewards: Tensor, step_mean: float, *, baseline: str = "step") -> Tensor:
    """r - baseline: the mean reward of the whole step (one response per prompt is enough), of the group, or none.

    Williams 1992, Simple statistical gradient-following algorithms (REINFORCE).
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline is {baseline!r}; it must be one of {', '.join(BASELINES)}")
    if baseline == "group":
        return centre(rewards)
    return (_finite(rewards) - (step_mean if baseline == "step" else 0.0)).float()


def max_rl(rewards: Tensor) -> Tensor:
    """(r - mean(r)) / mean(r): prompts weighted by 1 / success rate; zeros if all rewards are 0.

    The mean score of the successes, less the mean of all. Tajwar et al. 2026, arXiv:2602.02710, for rewards 0 and 1.
    """
    group, centred = _finite(rewards), _centred(rewards)
    if (group < 0).any():
        raise ValueError(f"max_rl divides by the mean reward, so rewards must not be negative; got {rewards.tolist()}")
    return (centred / group.mean() if group.any() else centred).float()


def best_against_greedy(rewards: Tensor, greedy_reward: float) -> Tensor:
    """r - reward of the greedy response to the same prompt. Li et al. 2023, arXiv:2310.10505 (ReMax)."""
    return (_finite(rewards) - float(greedy_reward)).float()


def global_normalise(advantages: Tensor, *, eps: float = 1e-8) -> Tensor:
    """`zscore` over a whole step instead of one group; after `centre`, REINFORCE++ with a baseline."""
    return zscore(advantages, eps=eps)


def reinforce_pp(rewards: Sequence[Tensor], *, gamma: float = 1.0, eps: float = 1e-8) -> list[Tensor]:
    """Rewards per token of each row (KL included) to returns, normalised over all tokens of the step.

    A_t = sum_{s >= t} gamma^(s - t) r_s, then (A - mean) / std. Hu et al. 2025, arXiv:2501.03262 (REINFORCE++).
    """
    import torch

    returns = [discounted_returns(each, gamma=gamma) for each in rewards]
    return list(torch.split(global_normalise(torch.cat(returns), eps=eps), [len(each) for each in returns]))


def discounted_returns(rewards: Tensor, *, gamma: float = 1.0) -> Tensor:
    """sum_{s >= t} gamma^(s - t) r_s over the trained tokens of one row."""
    import torch

    reward = _finite(rewards)
    return _discounted_sums(reward, torch.full_like(reward, gamma)).float()


def gae(
    rewards: Tensor,
    values: Tensor,
    *,
    ended: bool = True,
    last_value: float | Tensor | None = None,
    dones: Tensor | None = None,
    gamma: float = 1.0,
    lam: float = 0.95,
) -> Tensor:
    """Generalised advantages of the trained tokens of one row, [T], or of several, [B, T]; add `values` for targets.

    sum_{s >= t} (gamma lam)^(s - t) d_s, d_t = r_t + gamma V_{t+1} - V_t, where values[t] is V before token t. After
    the last token V is 0 if the response ended, else `last_value` (truncated). `dones` marks each last token instead:
    V after it is 0, and no sum crosses it. Schulman et al. 2015, arXiv:1506.02438.
    """
    import torch

    if rewards.ndim not in (1, 2):
        raise ValueError(f"gae takes one row, [T], or several, [B, T]; got shape {tuple(rewards.shape)}")
    for name, each in {"value": values, "entry of dones": rewards if dones is None else dones}.items():
        if each.shape != rewards.shape:
            raise ValueError(f"gae needs one {name} per reward; got {tuple(each.shape)} for {tuple(rewards.shape)}")
    reward, value = _all_finite(rewards), _all_finite(values)
    done = torch.zeros_like(reward, dtype=torch.bool) if dones is None else dones.bool()
    if dones is None and ended:
        done[..., -1:] = True
    if last_value is None and not done[..., -1:].all():
        raise ValueError(
            "a truncated response needs last_value, the value after its last token, to bootstrap from; with dones, "
            "mark the padding after a response, too"
        )
    after = value.roll(-1, dims=-1)
    last = torch.as_tensor(0.0 if last_value is None else last_value, dtype=value.dtype, device=value.device)
    after[..., -1:] = last[..., None]
    factors = torch.full_like(value, gamma * lam).masked_fill(done, 0.0)
    return _discounted_sums(reward + gamma * after.masked_fill(done, 0.0) - value, factors).float()


def reward_on_last_token(reward: float | Tensor, mask: Tensor) -> Tensor:
    """Return rewards per token: one number on the last trained token, or [K], each on the last token of its turn."""
    ends = _starts(mask.flip(0)).flip(0).nonzero().squeeze(1)
    if not len(ends):
        raise ValueError("the row has no trained token to put the reward on; leave the row out")
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
    """A preference for short responses within a group, without gain for wrong ones; add it, weighted, to the reward.

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
    return _all_finite(values)


def _all_finite(values: Tensor) -> Tensor:
    if not values.isfinite().all():
        raise ValueError(
            f"nan or inf among {values.tolist()}; record a failed reward as the rollout's error, not as a number"
        )
    return values.detach().double()


def _is_flat(group: Tensor) -> bool:
    return not bool((group != group[:1]).any())


def _centred(rewards: Tensor) -> Tensor:
    """Exactly 0 for equal rewards: rounding errors must not become advantages."""
    group = _finite(rewards)
    return group.new_zeros(len(group)) if _is_flat(group) else group - group.mean()


def _standardised(centred: Tensor, eps: float) -> Tensor:
    if not centred.any():
        return centred
    return centred / ((centred.square().sum() / (len(centred) - 1)).sqrt() + eps)


def _discounted_sums(values: Tensor, factors: Tensor) -> Tensor:
    """S_t = x_t + factor_t S_{t+1} along the last dimension, by doubling: after k rounds S_t has its next 2^k terms.

    log2(T) vector operations and no division, so factors of 1 and of 0, and products of 0, are all safe.
    """
    sums, products, offset = values.clone(), factors.clone(), 1
    while offset < sums.shape[-1]:
        sums[..., :-offset] += products[..., :-offset] * sums[..., offset:]
        products[..., :-offset] = products[..., :-offset] * products[..., offset:]
        offset *= 2
    return sums


def _starts(mask: Tensor) -> Tensor:
    """Mark the first token of each turn, a run of trained tokens."""
    before = mask.roll(1)
    before[:1] = False
    return mask & ~before


def _one_per_turn(numbers: Tensor, mask: Tensor) -> Tensor:
    turns = int(_starts(mask).sum())
    if len(numbers) != turns:
        raise ValueError(f"{len(numbers)} numbers for a row with {turns} trained turns; give one for each turn")
    return numbers.detach().float()
