"""Log-probs of sampled tokens under a policy and a reference to a KL per token, in the reward or in the loss.

Reverse is KL(policy || ref), forward is KL(ref || policy). An estimator is a function of (logprob, ref_logprob), [T]
each. Statements about bias hold in expectation over tokens sampled *from the policy*, unless noted otherwise. The
value and the gradient of an estimator can have different expectations; each function states both. The exact KL over
the vocabulary is computed from the logits elsewhere and passes through `full`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Estimator: TypeAlias = Callable[["Tensor", "Tensor"], "Tensor"]
"""(logprob [T], ref_logprob [T]) -> KL per token [T]."""
KLFn: TypeAlias = Callable[["Tensor", "Tensor"], "Tensor | float"]
"""An estimator, or a function of a sequence's log-probs that returns one number for the sequence."""

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: large enough to notice, small enough to stay finite through a sum and a backward


def at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype.itemsize >= 4 else values.float()


def k1(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """log p - log ref: unbiased for the reverse KL, any sign, high variance; for use in a reward.

    As a loss it has no effect: its gradient is grad log p, whose expectation is 0. Schulman 2020 (blog, KL approx).
    """
    return at_least_float32(logprob) - at_least_float32(ref_logprob)


def k2(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """(log p - log ref)^2 / 2: never negative; its value is biased, its gradient is the reverse KL's, in expectation.

    For use in a loss on the policy's own samples. Schulman 2020 (blog, KL approx).
    """
    return k1(logprob, ref_logprob).square() / 2


def k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """ref/p - 1 - log(ref/p): unbiased for the reverse KL, never negative, low variance; used by GRPO.

    As a loss its expected gradient is that of the *forward* KL. Schulman 2020 (blog, KL approx), Shao et al. 2024,
    arXiv:2402.03300. ref/p is capped at exp(20); above, the gradient is 0.
    """
    log_ratio = (-k1(logprob, ref_logprob)).clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def k3_weighted(logprob: Tensor, ref_logprob: Tensor, sampler_logprob: Tensor) -> Tensor:
    """k3 p / p_sampler, with the gradient of both: reverse KL in value and gradient, over the *sampler's* tokens.

    Where the sampler is the current policy, the ratio is 1 and only the gradient differs from k3's.
    DeepSeek-AI 2025, arXiv:2512.02556 (V3.2, unbiased KL estimate).
    """
    ratio = k1(logprob, sampler_logprob.detach()).clamp(max=MAX_LOG_RATIO).exp()
    return ratio * k3(logprob, ref_logprob)


def forward_k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """r log r - (r - 1) with r = ref/p: unbiased for the forward KL, never negative, from the policy's samples.

    For monitoring: its gradient is not the forward KL's (k3's is). For tokens sampled from the reference, swap the
    arguments instead: `k3(ref_logprob, logprob)`. Schulman 2020 (blog, KL approx).
    """
    log_ratio = (-k1(logprob, ref_logprob)).clamp(max=MAX_LOG_RATIO)
    return log_ratio * log_ratio.exp() - log_ratio.expm1()


def full(kl: Tensor) -> Tensor:
    """The precomputed KL over the whole vocabulary at each token: exact in value and gradient, either direction.

    Exact at the sampled prefixes; the gradient through the distribution of prefixes is left out.
    """
    return at_least_float32(kl)


ESTIMATORS: Mapping[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "forward_k3": forward_k3}


def create_truncated_kl(threshold: float = 1.0, estimator: Estimator = k1) -> Estimator:
    """An estimator clipped to [-threshold, threshold] per token; beyond it the gradient is 0."""
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; it is the largest KL per token, so give a positive number")
    return lambda logprob, ref_logprob: estimator(logprob, ref_logprob).clamp(-threshold, threshold)


def create_adaptive_kl(confidence_threshold: float = 0.1, estimator: Estimator = k1) -> Estimator:
    """An estimator with less weight on tokens that are unlikely under the reference.

    weight = min(1, ref / confidence_threshold), where ref is the reference's probability of the token: full weight from
    the threshold up, linear to 0 below it. The weight does not depend on the policy and has no gradient.
    """
    if not 0 < confidence_threshold <= 1:
        raise ValueError(f"confidence_threshold is {confidence_threshold}; it is a probability above 0 and at most 1")
    log_threshold = math.log(confidence_threshold)

    def weighted(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        weight = (at_least_float32(ref_logprob.detach()) - log_threshold).clamp(max=0.0).exp()
        return weight * estimator(logprob, ref_logprob)

    return weighted


def adapt_kl_coef(kl_coef: float, observed_kl: float, *, target: float = 6.0, gain: float = 0.1) -> float:
    """Return the next coefficient of a proportional controller that keeps the KL per sequence at `target`.

    kl_coef * (1 + gain * clip(observed / target - 1, -0.2, 0.2)). Ziegler et al. 2019, arXiv:1909.08593.
    """
    if not target > 0:
        raise ValueError(f"target is {target}; it is the KL per sequence to aim at, so give a positive number")
    return kl_coef * (1 + gain * min(0.2, max(-0.2, observed_kl / target - 1)))


def shape_rewards_with_kl(
    rewards: Tensor, logprob: Tensor, ref_logprob: Tensor, *, kl_coef: float = 0.05, estimator: Estimator = k1
) -> Tensor:
    """KL in the reward: r_t - kl_coef * KL_t, [T] each, without gradient; k1 here has the reverse KL's gradient.

    Stiennon et al. 2020, arXiv:2009.01325. Pass the trained tokens only, or log-probs that are 0 on the others.
    """
    return rewards - kl_coef * estimator(logprob.detach(), ref_logprob.detach())


def kl_penalty(kl: Tensor, mask: Tensor, *, kl_coef: float = 0.04) -> Tensor:
    """KL in the loss: kl_coef * KL_t on trained tokens, 0 elsewhere; for a precomputed KL such as `full`."""
    return kl_coef * at_least_float32(kl).masked_fill(~mask, 0.0)


def kl_penalty_loss(
    logprob: Tensor, ref_logprob: Tensor, mask: Tensor, *, kl_coef: float = 0.04, estimator: Estimator = k3
) -> Tensor:
    """KL in the loss from log-probs of sampled tokens. GRPO's term by default: Shao et al. 2024, arXiv:2402.03300."""
    kl = estimator(logprob.masked_fill(~mask, 0.0), ref_logprob.detach())
    return kl_penalty(kl, mask, kl_coef=kl_coef)
