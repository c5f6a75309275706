"""Log-probs of sampled tokens under a policy and a reference to a KL per token, and the two places it can enter.

Reverse is KL(policy || ref), forward is KL(ref || policy). An estimator is a function of (logprob, ref_logprob), [T]
each, and its promise holds in expectation over tokens drawn *from the policy*, unless it says otherwise. What an
estimator is worth as a value and what its gradient is worth are two things; each function states both. The exact KL
over the vocabulary is computed with the logits elsewhere and passes through `full`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

Estimator: TypeAlias = Callable[["Tensor", "Tensor"], "Tensor"]
"""(logprob [T], ref_logprob [T]) -> KL per token [T]."""

MAX_LOG_RATIO = 20.0  # exp(20) is 5e8: large enough to shout, small enough to stay finite through a sum and a backward


def at_least_float32(values: Tensor) -> Tensor:
    return values if values.dtype.itemsize >= 4 else values.float()


def k1(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """log p - log ref: unbiased for the reverse KL, any sign, high variance; the one to use in a reward.

    As a loss it does nothing: its gradient is grad log p, whose expectation is 0. Schulman 2020 (blog, KL approx).
    """
    return at_least_float32(logprob) - at_least_float32(ref_logprob)


def k2(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """(log p - log ref)^2 / 2: never negative; its value is biased, its gradient is the reverse KL's, in expectation.

    The one to use in a loss when the samples are the policy's own. Schulman 2020 (blog, KL approx).
    """
    return k1(logprob, ref_logprob).square() / 2


def k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """ref/p - 1 - log(ref/p): unbiased for the reverse KL, never negative, low variance; GRPO's.

    As a loss its expected gradient is that of the *forward* KL. Schulman 2020 (blog, KL approx), Shao et al. 2024,
    arXiv:2402.03300. ref/p is capped at exp(20), where the gradient ends.
    """
    log_ratio = (-k1(logprob, ref_logprob)).clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


def k3_weighted(logprob: Tensor, ref_logprob: Tensor, sampler_logprob: Tensor) -> Tensor:
    """k3 p / p_sampler, with the gradient of both: reverse KL in value and gradient, over the *sampler's* tokens.

    Also where the sampler is the policy of a moment ago, and the ratio 1: its gradient is what sets it apart from k3.
    DeepSeek-AI 2025, arXiv:2512.02556 (V3.2, unbiased KL estimate).
    """
    ratio = k1(logprob, sampler_logprob.detach()).clamp(max=MAX_LOG_RATIO).exp()
    return ratio * k3(logprob, ref_logprob)


def forward_k3(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
    """r log r - (r - 1) with r = ref/p: unbiased for the forward KL, never negative, from the policy's samples.

    A value to watch: its gradient is not the forward KL's (k3's is). For tokens drawn from the reference, swap the
    arguments instead: `k3(ref_logprob, logprob)`. Schulman 2020 (blog, KL approx).
    """
    log_ratio = (-k1(logprob, ref_logprob)).clamp(max=MAX_LOG_RATIO)
    return log_ratio * log_ratio.exp() - log_ratio.expm1()


def full(kl: Tensor) -> Tensor:
    """The KL over the whole vocabulary at each token, already computed: exact in value and gradient, either direction.

    Exact at the prefixes that were sampled; how the policy's choice of prefixes changes the sum is left out.
    """
    return at_least_float32(kl)


ESTIMATORS: Mapping[str, Estimator] = {"k1": k1, "k2": k2, "k3": k3, "forward_k3": forward_k3}


def truncated_kl(threshold: float = 1.0, estimator: Estimator = k1) -> Estimator:
    """An estimator whose size per token is at most `threshold`; beyond it the gradient is 0."""
    if not threshold > 0:
        raise ValueError(f"threshold is {threshold}; it is the largest KL a token may count, so give a positive number")
    return lambda logprob, ref_logprob: estimator(logprob, ref_logprob).clamp(-threshold, threshold)


def adaptive_kl(confidence_threshold: float = 0.1, estimator: Estimator = k1) -> Estimator:
    """An estimator that counts a token for less where the reference was unsure of it.

    weight = min(1, ref / confidence_threshold), where ref is the reference's probability of the token: full weight for
    tokens that the reference gave at least the threshold, then linearly down to 0. The weight carries no gradient, and
    the policy cannot change it.
    """
    if not 0 < confidence_threshold <= 1:
        raise ValueError(f"confidence_threshold is {confidence_threshold}; it is a probability above 0 and at most 1")
    log_threshold = math.log(confidence_threshold)

    def weighted(logprob: Tensor, ref_logprob: Tensor) -> Tensor:
        weight = (at_least_float32(ref_logprob.detach()) - log_threshold).clamp(max=0.0).exp()
        return weight * estimator(logprob, ref_logprob)

    return weighted


def adapt_kl_coef(kl_coef: float, observed_kl: float, *, target: float = 6.0, gain: float = 0.1) -> float:
    """The next coefficient, so that the KL per sequence settles at `target`: a proportional controller.

    kl_coef * (1 + gain * clip(observed / target - 1, -0.2, 0.2)). Ziegler et al. 2019, arXiv:1909.08593.
    """
    if not target > 0:
        raise ValueError(f"target is {target}; it is the KL per sequence to settle at, so give a positive number")
    return kl_coef * (1 + gain * min(0.2, max(-0.2, observed_kl / target - 1)))


def shape_rewards_with_kl(
    rewards: Tensor, logprob: Tensor, ref_logprob: Tensor, *, kl_coef: float = 0.05, estimator: Estimator = k1
) -> Tensor:
    """KL in the reward: r_t - kl_coef * KL_t, [T] each, without gradient; k1 here has the reverse KL's gradient.

    Stiennon et al. 2020, arXiv:2009.01325. Give the trained tokens only, or log-probs that are 0 on the others.
    """
    return rewards - kl_coef * estimator(logprob.detach(), ref_logprob.detach())


def kl_penalty(kl: Tensor, mask: Tensor, *, kl_coef: float = 0.04) -> Tensor:
    """KL in the loss: kl_coef * KL_t on trained tokens, 0 elsewhere; for a KL that is already there, as `full`."""
    return kl_coef * at_least_float32(kl).masked_fill(~mask, 0.0)


def kl_penalty_loss(
    logprob: Tensor, ref_logprob: Tensor, mask: Tensor, *, kl_coef: float = 0.04, estimator: Estimator = k3
) -> Tensor:
    """KL in the loss from log-probs of sampled tokens. GRPO's term by default: Shao et al. 2024, arXiv:2402.03300."""
    kl = estimator(logprob.masked_fill(~mask, 0.0), ref_logprob.detach().masked_fill(~mask, 0.0))
    return kl_penalty(kl, mask, kl_coef=kl_coef)
