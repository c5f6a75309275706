"""Log-probs and advantages of sampled tokens to one loss per token: the policy-gradient family.

Every loss is [T] -> [T], 0 on untrained tokens; it is summed over the whole step and divided once, by the number of
its unit. Also here: the weights of tokens inside a sequence, importance weights for the gap between sampler and
trainer, and the value and entropy terms of PPO. Advantages are in `credit`, KL to a reference is in `kl`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from oxrl.algorithms.kl import MAX_LOG_RATIO, at_least_float32

if TYPE_CHECKING:
    from torch import Tensor


class Policy(NamedTuple):
    """The sampled tokens of a step, all `[T]`, rows concatenated without padding."""

    logprob: Tensor  # of the policy in training, with gradient
    sampler_logprob: Tensor  # of the policy that sampled the token, the denominator of the ratio
    advantage: Tensor
    mask: Tensor  # bool, the trained tokens
    segment: Tensor  # int64, the sequence of each token: 0 to num_sequences - 1
    num_sequences: int


class Distilled(NamedTuple):
    """The student's own samples and the teacher's log-probs of them, all `[T]`."""

    logprob: Tensor  # of the student in training, with gradient
    sampler_logprob: Tensor  # of the student that sampled the token
    teacher_logprob: Tensor
    mask: Tensor  # bool, the trained tokens


def clipped(policy: Policy, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Tensor:
    """PPO's surrogate with two clips: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A). Unit: token.

    r = p / p_sampler. `dual_clip` c also bounds the loss where A < 0 and r is large: at most -c A. Schulman et al.
    2017, arXiv:1707.06347; c: Ye et al. 2019, arXiv:1912.09729.
    """
    advantage = _advantage(policy)
    loss = _surrogate(_exp(_log_ratio(policy)), advantage, clip_low, clip_high)
    if dual_clip is None:
        return loss
    if dual_clip <= 1:
        raise ValueError(f"dual_clip is {dual_clip}; it bounds the ratio from above, so give a number above 1")
    return loss.minimum(-dual_clip * advantage).where(advantage < 0, loss)


def grpo(policy: Policy, *, clip_low: float = 0.2, clip_high: float = 0.2, dual_clip: float | None = None) -> Tensor:
    """PPO's clipped loss, averaged within each sequence first: short and long responses count equally. Unit: sequence.

    1/|o| sum_t -min(r_t A_t, clip(r_t) A_t). Shao et al. 2024, arXiv:2402.03300 (its KL term: `kl_coef`).
    """
    return per_sequence_mean(clipped(policy, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip), policy)


def dr_grpo(
    policy: Policy,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    max_length: int = 1024,
) -> Tensor:
    """GRPO with a constant instead of each sequence's length (and no division by the std). Unit: sequence.

    1/max_length sum_t -min(r_t A_t, clip(r_t) A_t). Liu et al. 2025, arXiv:2503.20783.
    """
    losses = clipped(policy, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
    return fixed_length(losses, policy, max_length=max_length)


def dapo(policy: Policy, *, clip_low: float = 0.2, clip_high: float = 0.28, dual_clip: float | None = None) -> Tensor:
    """PPO's clipped loss with a larger upper clip, all tokens of the step weighted equally. Unit: token.

    -min(r A, clip(r, 0.8, 1.28) A); its length penalty: `overlong_buffer`. Yu et al. 2025, arXiv:2503.14476.
    """
    return clipped(policy, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def gspo(policy: Policy, *, clip_low: float = 3e-4, clip_high: float = 4e-4) -> Tensor:
    """GRPO with one ratio per sequence, s = exp(mean_t log r_t), hence the small clips. Unit: sequence.

    1/|y| sum_t -min(s_t A_t, clip(s_t) A_t), s_t = sg[s] p_t / sg[p_t]: the paper's GSPO-token, which has GSPO's value
    and gradient if A is constant in each sequence. Zheng et al. 2025, arXiv:2507.18071.
    """
    log_ratio = _log_ratio(policy)
    ratio = _exp(_sequence_mean(log_ratio, policy).detach() + (log_ratio - log_ratio.detach()))
    return per_sequence_mean(_surrogate(ratio, _advantage(policy), clip_low, clip_high), policy)


def gmpo(policy: Policy, *, clip_low: float = 0.4, clip_high: float = 0.4) -> Tensor:
    """GRPO with the geometric mean of the clipped ratios. Unit: sequence. The clips are in log space.

    -A (prod_t r'_t)^(1/|o|), log r' = min(log r, clip_high) where A > 0, max(log r, -clip_low) where A < 0.
    Zhao et al. 2025, arXiv:2507.20673.
    """
    advantage, log_ratio = _advantage(policy), _log_ratio(policy)
    log_ratio = log_ratio.clamp(max=clip_high).where(advantage > 0, log_ratio.clamp(min=-clip_low))
    return per_sequence_mean(-advantage * _exp(_sequence_mean(log_ratio, policy)), policy)


def cispo(policy: Policy, *, clip_low: float = 1.0, clip_high: float = 4.0) -> Tensor:
    """REINFORCE weighted by a clipped ratio without gradient: clipped tokens keep their gradient. Unit: token.

    -sg[clip(r, 1 - clip_low, 1 + clip_high)] A log p. MiniMax 2025, arXiv:2506.13585: no lower bound, as here; the
    upper bound, not given there, is from Khatri et al. 2025, arXiv:2510.13786 (a weight of at most 5).
    """
    weight = _exp(_log_ratio(policy)).clamp(1 - clip_low, 1 + clip_high).detach()
    return weight * reinforce(policy)


def reinforce(policy: Policy) -> Tensor:
    """-A log p: exact on-policy. Unit: token, or sequence for the sum over each response."""
    return -_advantage(policy) * _trained(policy.logprob, policy.mask)


def opd(view: Distilled) -> Tensor:
    """On-policy distillation: policy gradient with the advantage -(log p - log p_teacher) at each token. Unit: token.

    r sg[log p - log p_teacher], r = p / p_sampler. Over the sampler's tokens its expectation is the reverse KL to the
    teacher at that prefix, and so is its gradient's; later tokens get no credit. Lu et al. 2025 (blog) use the
    sampler's log p in the advantage: the same on-policy. Agarwal et al. 2023, arXiv:2306.13649.
    """
    ratio = _exp(logprob_gap(view.logprob, view.sampler_logprob, view.mask))
    return ratio * logprob_gap(view.logprob, view.teacher_logprob, view.mask).detach()


def ppo_value(values: Tensor, old_values: Tensor, returns: Tensor, mask: Tensor, *, clip: float = 0.2) -> Tensor:
    """PPO's value loss: half the squared error, or that of the value clipped to `clip` around the old one if larger.

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2. Unit: token. The half and the clip are from
    OpenAI's code, not the paper: Engstrom et al. 2020, arXiv:2005.12729. `clip=math.inf` turns it off.
    """
    value, old, target = (_trained(each, mask) for each in (values, old_values.detach(), returns.detach()))
    clipped_value = value.clamp(old - clip, old + clip)
    return (value - target).square().maximum((clipped_value - target).square()) / 2


def entropy_bonus(entropy: Tensor, mask: Tensor, *, entropy_coef: float = 0.01) -> Tensor:
    """-entropy_coef H. Unit: token. Schulman et al. 2017, arXiv:1707.06347."""
    return -entropy_coef * _trained(entropy, mask)


def per_token(losses: Tensor, _policy: Policy) -> Tensor:
    """Weight 1 per token: with unit token the mean over tokens, with unit sequence the mean of sequence sums."""
    return losses


def per_sequence_mean(losses: Tensor, policy: Policy) -> Tensor:
    """Weight 1 / trained tokens of the sequence: with unit sequence the mean of sequence means."""
    return losses / _lengths(policy.mask, policy.segment, policy.num_sequences, losses)[policy.segment]


def fixed_length(losses: Tensor, _policy: Policy, *, max_length: int) -> Tensor:
    """Weight 1 / max_length per token, whatever the length of its sequence; with unit sequence, as in Dr. GRPO."""
    if max_length < 1:
        raise ValueError(f"max_length is {max_length}; give the largest number of tokens of a response, at least 1")
    return losses / max_length


def truncated_importance(
    trainer_logprob: Tensor, sampler_logprob: Tensor, mask: Tensor, _segment: Tensor, *, cap: float = 2.0
) -> Tensor:
    """min(p_trainer / p_sampler, cap) per token, a factor of the loss; no gradient. Yao et al. 2025 (blog, TIS)."""
    log_ratio = logprob_gap(trainer_logprob, sampler_logprob, mask).detach()
    return log_ratio.clamp(max=_log_cap(cap)).exp() * mask


def masked_importance(
    trainer_logprob: Tensor,
    sampler_logprob: Tensor,
    mask: Tensor,
    _segment: Tensor,
    *,
    low: float = 0.5,
    high: float = 5.0,
) -> Tensor:
    """p_trainer / p_sampler within [low, high], 0 outside: such tokens are dropped. No gradient.

    Ling Team 2025, arXiv:2510.18855 (IcePop).
    """
    ratio = _exp(logprob_gap(trainer_logprob, sampler_logprob, mask).detach())
    return ratio * (mask & (ratio >= low) & (ratio <= high))


def geometric_rejection(
    trainer_logprob: Tensor, sampler_logprob: Tensor, mask: Tensor, segment: Tensor, *, bound: float
) -> Tensor:
    """1 for sequences with (p_trainer(y) / p_sampler(y))^(1/|y|) in [1 / (1 + bound), 1 + bound], else 0; per token."""
    log_ratio = logprob_gap(trainer_logprob, sampler_logprob, mask)
    kept = _means(log_ratio, mask, segment).abs() <= math.log1p(bound)
    return (kept[segment] & mask).to(log_ratio.dtype)


def k3_rejection(
    trainer_logprob: Tensor, sampler_logprob: Tensor, mask: Tensor, segment: Tensor, *, bound: float
) -> Tensor:
    """1 for sequences whose mean of r - 1 - log r, with r = p_trainer / p_sampler, is at most bound, else 0."""
    log_ratio = logprob_gap(trainer_logprob, sampler_logprob, mask)
    kept = _means(_exp(log_ratio) - 1 - log_ratio, mask, segment) <= bound
    return (kept[segment] & mask).to(log_ratio.dtype)


def sequence_importance(
    trainer_logprob: Tensor,
    sampler_logprob: Tensor,
    mask: Tensor,
    segment: Tensor,
    *,
    cap: float = 2.0,
    geometric: bool = False,
) -> Tensor:
    """min(p_trainer(y) / p_sampler(y), cap), one weight for all tokens of a sequence; no gradient.

    The ratio of whole responses is unbiased except for the cap; `geometric` takes its |y|-th root, as in GSPO.
    """
    log_ratio = logprob_gap(trainer_logprob, sampler_logprob, mask).detach()
    log_weight = _means(log_ratio, mask, segment) if geometric else _sums(log_ratio, segment)
    return log_weight.clamp(max=_log_cap(cap)).exp()[segment] * mask


def _trained(values: Tensor, mask: Tensor) -> Tensor:
    """Fill untrained tokens with 0, not by multiplication: nan there must reach neither value nor gradient."""
    return at_least_float32(values).masked_fill(~mask, 0.0)


def _advantage(policy: Policy) -> Tensor:
    return _trained(policy.advantage.detach(), policy.mask)


def logprob_gap(logprob: Tensor, other_logprob: Tensor, mask: Tensor) -> Tensor:
    """log p - log p_other, without gradient of the other."""
    return _trained(logprob, mask) - _trained(other_logprob.detach(), mask)


def _log_ratio(policy: Policy) -> Tensor:
    return logprob_gap(policy.logprob, policy.sampler_logprob, policy.mask)


def _exp(log_ratio: Tensor) -> Tensor:
    """exp, capped: inf times the 0 gradient of a clipped branch would be nan."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def _surrogate(ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float) -> Tensor:
    return -(ratio * advantage).minimum(ratio.clamp(1 - clip_low, 1 + clip_high) * advantage)


def _sums(values: Tensor, segment: Tensor) -> Tensor:
    """The sum over each sequence: [T] -> [S]."""
    num_sequences = int(segment.max()) + 1 if len(segment) else 0
    return values.new_zeros(num_sequences).index_add(0, segment, values)


def _means(values: Tensor, mask: Tensor, segment: Tensor) -> Tensor:
    """The mean over the trained tokens of each sequence, of values that are 0 elsewhere: [T] -> [S]."""
    sums = _sums(values, segment)
    return sums / _lengths(mask, segment, len(sums), values)


def _lengths(mask: Tensor, segment: Tensor, num_sequences: int, like: Tensor) -> Tensor:
    """Number of trained tokens of each sequence; 1 instead of 0, as a divisor."""
    return like.new_zeros(num_sequences).index_add(0, segment, mask.to(like.dtype)).clamp(min=1.0)


def _sequence_mean(values: Tensor, policy: Policy) -> Tensor:
    """The mean over the trained tokens of a token's sequence, for every token: [T] -> [T]."""
    totals = values.new_zeros(policy.num_sequences).index_add(0, policy.segment, values)
    return (totals / _lengths(policy.mask, policy.segment, policy.num_sequences, values))[policy.segment]


def _log_cap(cap: float) -> float:
    if not cap > 0:
        raise ValueError(f"cap is {cap}; it is the largest weight of a token, so give a positive number, such as 2")
    return math.log(cap)
