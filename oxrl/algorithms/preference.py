"""Log-probs of pairs of responses to one loss per pair: the DPO family, each from its paper.

Every loss is [N] -> [N], and its mean over the pairs of the step is the paper's loss; `aot`, `betadpo` and `drdpo`
need all pairs of the step in one call, `bco`, `betadpo` and `alpha_dpo` take running statistics. In the formulas w is
the chosen response and l the rejected one, log p their summed log-probs, n their lengths, and h = log p - log ref; s is
the sigmoid. How rows become a `Pairs`, running means, and the NLL term that some add are in `recipes`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from oxrl.algorithms.kl import at_least_float32
from oxrl.names import lookup
from oxrl.types import IntArray

if TYPE_CHECKING:
    from torch import Tensor

NLL_WEIGHT: Mapping[str, float] = {"orpo": 1.0, "cpo": 1.0, "cposimpo": 0.05, "dpnll": 1.0}
"""The weight of the token-mean NLL of the chosen responses that these losses add; the others add none."""

MAX_EXPONENT = 30.0  # e^30 is 1e13: beyond it the exponential is replaced by its tangent, finite and of the right sign


class Pairs(NamedTuple):
    """N pairs, all `[N]`; log-probs are summed over the response's tokens, and lengths count those tokens.

    The fields after the lengths are for the losses that need them: rewards for `odpo`; for `tdpo`, KL(ref || policy)
    summed over the positions of the response, with gradient; for `wpo`, exp of the mean over the tokens of
    (log p - log of the sum over the vocabulary of p^2), without gradient.
    """

    chosen: Tensor
    rejected: Tensor
    ref_chosen: Tensor
    ref_rejected: Tensor
    len_chosen: Tensor
    len_rejected: Tensor
    score_chosen: Tensor | None = None
    score_rejected: Tensor | None = None
    kl_chosen: Tensor | None = None
    kl_rejected: Tensor | None = None
    weight_chosen: Tensor | None = None
    weight_rejected: Tensor | None = None

    @property
    def mean_gap(self) -> Tensor:
        """h_w / n_w - h_l / n_l, of which `alpha_dpo` takes running statistics."""
        h_w, h_l = _log_ratios(self)
        return h_w / self.len_chosen - h_l / self.len_rejected


def dpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """The logistic loss on the margin of log-ratios: -log s(beta (h_w - h_l)).

    Rafailov et al. 2023, arXiv:2305.18290.
    """
    return -_log_sigmoid(beta * _margin(pairs))


def ipo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """DPO with a finite target for the margin: (h_w - h_l - 1/(2 beta))^2.

    beta is the paper's tau. Azar et al. 2023, arXiv:2310.12036; sums as there (TRL takes means over tokens).
    """
    return (_margin(pairs) - 1 / (2 * beta)).square()


def hinge(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """DPO with SLiC's hinge loss instead of the logistic: max(0, 1 - beta (h_w - h_l)).

    The form with a reference: Liu et al. 2023, arXiv:2309.06657. SLiC itself (Zhao et al. 2023, arXiv:2305.10425) has
    none, and a margin delta = 1/beta.
    """
    return (1 - beta * _margin(pairs)).relu()


def cdpo(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """DPO for labels that are wrong with probability e: -(1 - e) log s(z) - e log s(-z), z = beta (h_w - h_l).

    Mitchell 2023, A note on DPO with noisy preferences.
    """
    z = beta * _margin(pairs)
    return -(1 - label_smoothing) * _log_sigmoid(z) - label_smoothing * _log_sigmoid(-z)


def robust_dpo(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.1) -> Tensor:
    """DPO made unbiased for labels flipped with probability e: (-(1 - e) log s(z) + e log s(-z)) / (1 - 2 e).

    z = beta (h_w - h_l). Its mean over the flips is DPO on clean labels. Chowdhury et al. 2024, arXiv:2403.00409.
    """
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; robust_dpo needs a flip rate in [0, 0.5)")
    z = beta * _margin(pairs)
    noisy = -(1 - label_smoothing) * _log_sigmoid(z) + label_smoothing * _log_sigmoid(-z)
    return noisy / (1 - 2 * label_smoothing)


def exo(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 1e-3) -> Tensor:
    """DPO with the reverse KL: KL from (s(z), s(-z)) to the labels (1 - e, e), z = beta (h_w - h_l).

    s(z) (log s(z) - log(1 - e)) + s(-z) (log s(-z) - log e). Ji et al. 2024, arXiv:2402.00856.
    """
    if not 0 < label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; exo takes its logarithm, so give one in (0, 0.5)")
    z = beta * _margin(pairs)
    chosen = z.sigmoid() * (_log_sigmoid(z) - math.log1p(-label_smoothing))
    return chosen + (-z).sigmoid() * (_log_sigmoid(-z) - math.log(label_smoothing))


def nca(pairs: Pairs, *, beta: float = 0.01) -> Tensor:
    """Noise-contrastive, each response on its own: -log s(beta h_w) - (log s(-beta h_w) + log s(-beta h_l)) / 2.

    Chen et al. 2024, arXiv:2402.05369.
    """
    r_w, r_l = _rewards(pairs, beta)
    return -_log_sigmoid(r_w) - (_log_sigmoid(-r_w) + _log_sigmoid(-r_l)) / 2


def sppo(pairs: Pairs, *, beta: float = 0.001) -> Tensor:
    """IPO with a target for each response: (h_w - 1/(2 beta))^2 + (h_l + 1/(2 beta))^2.

    1/beta is the paper's eta, its win rates are 1 and 0 here. Wu et al. 2024, arXiv:2405.00675.
    """
    h_w, h_l = _log_ratios(pairs)
    return (h_w - 1 / (2 * beta)).square() + (h_l + 1 / (2 * beta)).square()


def apo_zero(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """Raises chosen and lowers rejected, each against the reference: -s(beta h_w) + s(beta h_l).

    For chosen responses better than the model's own. D'Oosterlinck et al. 2024, arXiv:2408.06266 (TRL adds 1).
    """
    r_w, r_l = _rewards(pairs, beta)
    return r_l.sigmoid() - r_w.sigmoid()


def apo_down(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """Lowers chosen, and rejected more: s(beta h_w) - s(beta (h_w - h_l)).

    For chosen responses worse than the model's own. D'Oosterlinck et al. 2024, arXiv:2408.06266 (TRL adds 1).
    """
    r_w, r_l = _rewards(pairs, beta)
    return r_w.sigmoid() - (r_w - r_l).sigmoid()


def aot(pairs: Pairs, *, beta: float = 0.1, label_smoothing: float = 0.0, paired: bool = True) -> Tensor:
    """cDPO between quantiles of the step instead of within pairs; value i belongs to rank i, not to pair i.

    z_i = beta (i-th smallest a - i-th smallest b). Paired: a = log p_w - log p_l, b the same of the reference; not
    paired: a = h_w, b = h_l. Melnyk et al. 2024, arXiv:2406.05882.
    """
    above, below = (_policy_margin(pairs), _ref_margin(pairs)) if paired else _log_ratios(pairs)
    z = beta * (above.sort().values - below.sort().values)
    return -(1 - label_smoothing) * _log_sigmoid(z) - label_smoothing * _log_sigmoid(-z)


def bco(pairs: Pairs, *, beta: float = 0.1, baseline: float = 0.0) -> Tensor:
    """Binary classification around the mean reward: -log s(beta (h_w - b)) - log s(-beta (h_l - b)).

    b is the running mean of h over all responses, chosen and rejected, so beta b is the paper's delta. Jung et al.
    2024, arXiv:2404.04656.
    """
    h_w, h_l = _log_ratios(pairs)
    return -_log_sigmoid(beta * (h_w - baseline)) - _log_sigmoid(-beta * (h_l - baseline))


def dpop(pairs: Pairs, *, beta: float = 0.3, lambda_: float = 50.0) -> Tensor:
    """DPO with a penalty where chosen falls below the reference: -log s(beta (h_w - h_l - lambda max(0, -h_w))).

    Pal et al. 2024, arXiv:2402.13228.
    """
    h_w, h_l = _log_ratios(pairs)
    return -_log_sigmoid(beta * (h_w - h_l - lambda_ * (-h_w).relu()))


def rdpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 0.05) -> Tensor:
    """DPO with less gradient where chosen is longer: -log s(beta (h_w - h_l) + alpha (n_w - n_l)).

    Park et al. 2024, arXiv:2403.19159.
    """
    margin = _margin(pairs)
    return -_log_sigmoid(beta * margin + alpha * (pairs.len_chosen - pairs.len_rejected).to(margin))


def odpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 1.0) -> Tensor:
    """DPO with an offset by the score difference: -log s(beta (h_w - h_l) - alpha log(score_w - score_l)).

    A pair whose scores do not agree with its order has an offset of log 0 and is in effect not trained. Amini et al.
    2024, arXiv:2402.10571.
    """
    score_w, score_l = _required(pairs.score_chosen, "score_chosen"), _required(pairs.score_rejected, "score_rejected")
    offset = alpha * (at_least_float32(score_w) - score_l).clamp(min=1e-30).log()
    return -_log_sigmoid(beta * _margin(pairs) - offset)


def discopop(pairs: Pairs, *, beta: float = 0.05, tau: float = 0.05) -> Tensor:
    """DPO below a margin of 0 and the exponential loss above: (1 - s(z / tau)) (-log s(z)) + s(z / tau) e^-z.

    z = beta (h_w - h_l). Not convex: at z = 0, where training starts, it falls towards *negative* z. Lu et al. 2024,
    arXiv:2406.08414.
    """
    z = beta * _margin(pairs)
    exponential = _expm1(_log_sigmoid(z / tau) - z) + 1
    return (-z / tau).sigmoid() * -_log_sigmoid(z) + exponential


def caldpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """DPO with SPPO's targets for calibration: -log s(h_w - h_l) + (h_w - 1/(2 beta))^2 + (h_l + 1/(2 beta))^2.

    Xiao et al. 2024, arXiv:2412.14516 (the authors' code halves the squares).
    """
    return dpo(pairs, beta=1.0) + sppo(pairs, beta=beta)


def wpo(pairs: Pairs, *, beta: float = 0.01) -> Tensor:
    """DPO weighted by how likely both responses are under the policy: -w_w w_l log s(beta (h_w - h_l)).

    A weight is exp of the mean over the tokens of log p - log of the sum of p^2 over the vocabulary, without gradient.
    Zhou et al. 2024, arXiv:2406.11827.
    """
    w_w, w_l = _required(pairs.weight_chosen, "weight_chosen"), _required(pairs.weight_rejected, "weight_rejected")
    return (at_least_float32(w_w) * w_l).detach() * dpo(pairs, beta=beta)


def sampo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """DPO over equally many tokens: all four sums run over min(n_w, n_l) tokens, sampled by the row's id.

    Lu et al. 2024, arXiv:2406.10957.
    """
    return dpo(pairs, beta=beta)


def betadpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 0.6, baseline: float = 0.0) -> Tensor:
    """DPO with beta (1 + alpha (mean of h_w - h_l over the step - b)), at least 0.001, instead of beta.

    b is the running mean of that mean, this step included (with momentum 0.9, as the authors). As in their code the
    margins are not scaled by beta; the filtering of pairs is left out. Wu et al. 2024, arXiv:2407.08639.
    """
    margin = _margin(pairs)
    step_beta = (beta * (1 + alpha * (margin.detach().mean() - baseline))).clamp(min=1e-3)
    return -_log_sigmoid(step_beta * margin)


def drdpo(pairs: Pairs, *, beta: float = 0.1, beta_prime: float = 1.0) -> Tensor:
    """DPO with less weight on pairs with a high loss: -beta' log mean exp(-DPO / beta'), the mean over the step.

    One number for the step, repeated for each of its pairs. Wu et al. 2024, arXiv:2407.07880.
    """
    losses = dpo(pairs, beta=beta)
    log_mean = (-losses / beta_prime).logsumexp(0) - math.log(len(losses))
    return (-beta_prime * log_mean).expand_as(losses)


def chipo(pairs: Pairs, *, beta: float = 0.05, r_max: float = 10.0) -> Tensor:
    """DPO with phi(u) = u + log u instead of log u: -log s(clip(beta (phi(e^h_w) - phi(e^h_l)), -2 r_max, 2 r_max)).

    r_max bounds the rewards; its default is not from the paper. Huang et al. 2024, arXiv:2407.13399.
    """
    h_w, h_l = _log_ratios(pairs)
    z = beta * (_expm1(h_w) - _expm1(h_l) + h_w - h_l)
    return -_log_sigmoid(z.clamp(-2 * r_max, 2 * r_max))


def focalpo(pairs: Pairs, *, beta: float = 0.1, gamma: float = 0.05) -> Tensor:
    """DPO with less weight on pairs that are ranked wrongly: -s(z)^gamma log s(z), z = beta (h_w - h_l).

    Where log s(z) < -1/gamma the gradient changes sign: above gamma = 1.44 already at z = 0. Liu et al. 2025,
    arXiv:2501.06645.
    """
    log_p = _log_sigmoid(beta * _margin(pairs))
    return -(gamma * log_p).exp() * log_p


MARGIN_LOSSES: Mapping[str, Callable[[Tensor], Tensor]] = {
    "logistic": lambda x: -_log_sigmoid(x),
    "hinge": lambda x: (1 - x).relu(),
    "squared": lambda x: (x - 1).square(),
    "exponential": lambda x: _expm1(-x) + 1,
    "truncated_quadratic": lambda x: (1 - x).relu().square(),
    "savage": lambda x: (-x).sigmoid().square(),
}


def gpo(pairs: Pairs, *, beta: float = 0.1, function: str = "truncated_quadratic") -> Tensor:
    """DPO with any classification loss f: f(beta (h_w - h_l)).

    f(x): logistic log(1 + e^-x), hinge max(0, 1 - x), squared (x - 1)^2, exponential e^-x, truncated_quadratic
    max(0, 1 - x)^2, savage 1/(1 + e^x)^2. Tang et al. 2024, arXiv:2402.05749.
    """
    return lookup("function", function, MARGIN_LOSSES)(beta * _margin(pairs))


def hdpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 0.9) -> Tensor:
    """DPO with control of the entropy: -log s(beta (alpha (log p_w - log p_l) - (log ref_w - log ref_l))).

    alpha < 1 makes the policy sharper. Omura et al. 2024, arXiv:2411.07595.
    """
    return -_log_sigmoid(beta * (alpha * _policy_margin(pairs) - _ref_margin(pairs)))


DIVERGENCES: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "reverse_kl": lambda h, _: h,
    "forward_kl": lambda h, _: -_expm1(-h),
    "js": lambda h, _: _log_sigmoid(h),
    "alpha": lambda h, alpha: -_expm1(-alpha * h) / alpha,
}


def fdpo(pairs: Pairs, *, beta: float = 0.1, divergence: str = "reverse_kl", alpha: float = 0.5) -> Tensor:
    """DPO under any f-divergence: -log s(beta (f'(u_w) - f'(u_l))), u = e^h.

    f'(u), up to a constant: reverse_kl log u, forward_kl -1/u, js log(u / (1 + u)), alpha (1 - u^-alpha) / alpha with
    0 < alpha < 1. Wang et al. 2023, arXiv:2309.16240 (TRL's alpha is 1 minus this one).
    """
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha is {alpha}; give one in (0, 1]: near 0 is reverse_kl, 1 is forward_kl")
    slope = lookup("divergence", divergence, DIVERGENCES)
    h_w, h_l = _log_ratios(pairs)
    return -_log_sigmoid(beta * (slope(h_w, alpha) - slope(h_l, alpha)))


def dposhift(pairs: Pairs, *, beta: float = 0.1, lambda_: float = 0.95) -> Tensor:
    """DPO with less weight on the rejected response: -log s(beta (h_w - lambda h_l)).

    lambda is the paper's f(lambda), fixed. Yang et al. 2025, arXiv:2502.07599.
    """
    h_w, h_l = _log_ratios(pairs)
    return -_log_sigmoid(beta * (h_w - lambda_ * h_l))


def minordpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """DPO that stops lowering a rejected response below the reference: -log s(beta (h_w - max(0, h_l))).

    Xie et al. 2024, arXiv:2408.09834.
    """
    h_w, h_l = _log_ratios(pairs)
    return -_log_sigmoid(beta * (h_w - h_l.clamp(min=0)))  # not relu: at 0, where training starts, it has a gradient


def bpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 0.3) -> Tensor:
    """DPO on the smaller of both rewards instead of their sum: -log s(beta min(h_w, -alpha h_l)).

    Balanced preference optimization: chosen must rise, because lowering rejected alone does not reduce the loss. Sun et
    al. 2025, arXiv:2506.03557.
    """
    r_w, r_l = _rewards(pairs, beta)
    return -_log_sigmoid(r_w.minimum(-alpha * r_l))


def c2dpo(pairs: Pairs, *, beta: float = 0.1, lambda_: float = 2e-4) -> Tensor:
    """DPO with a penalty where the total probability of both moves: -log s(beta (h_w - h_l)) + lambda (h_w + h_l)^2.

    Constrained controlled DPO, with its logarithmic constraint. Asadi et al. 2025, arXiv:2502.17507.
    """
    h_w, h_l = _log_ratios(pairs)
    return dpo(pairs, beta=beta) + lambda_ * (h_w + h_l).square()


def tdpo(pairs: Pairs, *, beta: float = 0.1, alpha: float = 0.5, version: int = 2) -> Tensor:
    """DPO with KL(ref || policy) along each response: -log s(beta (h_w - h_l + alpha (stop(kl_w) - kl_l))).

    Version 1 has alpha = 1 and a gradient through kl_w. Zeng et al. 2024, arXiv:2404.11999.
    """
    if version not in (1, 2):
        raise ValueError(f"version is {version}; tdpo has versions 1 and 2")
    kl_w = at_least_float32(_required(pairs.kl_chosen, "kl_chosen"))
    kl_l = _required(pairs.kl_rejected, "kl_rejected")
    kl = kl_w - kl_l if version == 1 else alpha * (kl_w.detach() - kl_l)
    return -_log_sigmoid(beta * (_margin(pairs) + kl))


def cpo(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """DPO without a reference, plus the NLL of chosen: -log s(beta (log p_w - log p_l)).

    Xu et al. 2024, arXiv:2401.08417.
    """
    return -_log_sigmoid(beta * _policy_margin(pairs))


def simpo(pairs: Pairs, *, beta: float = 2.0, gamma: float = 1.0) -> Tensor:
    """DPO on mean log-probs, without a reference, with a margin: -log s(beta (log p_w / n_w - log p_l / n_l) - gamma).

    Meng et al. 2024, arXiv:2405.14734.
    """
    mean_w, mean_l = _means(pairs)
    return -_log_sigmoid(beta * (mean_w - mean_l) - gamma)


def spo(pairs: Pairs, *, beta: float = 2.5, gamma: float = 0.8) -> Tensor:
    """SimPO with SiLU instead of -log s: -z s(-z), z = beta (log p_w / n_w - log p_l / n_l) - gamma.

    Self preference optimization. Its minimum is at z = 1.28: pairs that are further apart are drawn back. Sun et al.
    2025, Findings of EMNLP, 2025.findings-emnlp.300.
    """
    mean_w, mean_l = _means(pairs)
    z = beta * (mean_w - mean_l) - gamma
    return -z * (-z).sigmoid()


def alpha_dpo(
    pairs: Pairs,
    *,
    beta: float = 2.5,
    alpha: float = 0.2,
    gamma: float = 1.5,
    baseline: float = 0.0,
    spread: float = 1.0,
) -> Tensor:
    """SimPO with a larger margin where the policy is ahead of the reference: -log s(beta (m - alpha stop(z)) - gamma).

    m = log p_w / n_w - log p_l / n_l, z = (h_w / n_w - h_l / n_l - b) / d; b and d are the running mean and standard
    deviation of h_w / n_w - h_l / n_l with momentum 0.9 (the authors' d is the running mean of the d of each step).
    gamma is beta times their gamma_beta_ratio; defaults as theirs for Llama 3. Wu et al. 2024, arXiv:2410.10148.
    """
    mean_w, mean_l = _means(pairs)
    ahead = (pairs.mean_gap.detach() - baseline) / max(spread, 1e-6)  # below is rounding: at the start all gaps are 0
    return -_log_sigmoid(beta * (mean_w - mean_l - alpha * ahead) - gamma)


def cposimpo(pairs: Pairs, *, beta: float = 10.0, gamma: float = 5.4) -> Tensor:
    """SimPO plus the NLL of chosen: -log s(beta (log p_w / n_w - log p_l / n_l) - gamma).

    From the repository CPO_SIMPO of the authors of CPO, 2024, with its defaults and weight.
    """
    return simpo(pairs, beta=beta, gamma=gamma)


def alphapo(pairs: Pairs, *, beta: float = 2.5, alpha: float = 0.25, gamma: float = 0.25) -> Tensor:
    """SimPO with another reward shape: -log s(r_w - r_l - gamma), r = beta (1 - p^(-alpha / n)) / alpha.

    alpha near 0 is SimPO. Gupta et al. 2025, arXiv:2501.03884.
    """
    if alpha == 0:
        return simpo(pairs, beta=beta, gamma=gamma)
    mean_w, mean_l = _means(pairs)
    return -_log_sigmoid(beta / alpha * (_expm1(-alpha * mean_l) - _expm1(-alpha * mean_w)) - gamma)


def orpo(pairs: Pairs, *, lambda_: float = 0.1) -> Tensor:
    """The NLL of chosen plus a penalty on the odds ratio: -lambda log s(logit q_w - logit q_l).

    q = p^(1/n) is the mean probability of a token, logit q = log q - log(1 - q). Hong et al. 2024, arXiv:2403.07691.
    """
    mean_w, mean_l = _means(pairs)
    return -lambda_ * _log_sigmoid(_logit(mean_w) - _logit(mean_l))


def dapo_pairs(pairs: Pairs, *, beta: float = 0.1) -> Tensor:
    """DPO on pairs selected by reward from a group of samples: -log s(beta (h_w - h_l)).

    Not `dapo`, which has decoupled clipping.
    """
    return dpo(pairs, beta=beta)


def sample_tokens(length: int, wanted: int, row_id: str) -> IntArray:
    """Return the sorted indices of `wanted` of `length` tokens, for `sampo`; a function of the row's id."""
    if not 0 <= wanted <= length:
        raise ValueError(f"row {row_id}: {wanted} of {length} tokens wanted; give 0 to {length}")
    seed = int.from_bytes(blake2b(row_id.encode(), digest_size=8).digest(), "little")
    order = np.random.PCG64(seed).random_raw(length).argsort(kind="stable")  # raw bits are stable across NumPy versions
    return np.sort(order[:wanted])


def _log_ratios(pairs: Pairs) -> tuple[Tensor, Tensor]:
    # one float32 operand is enough: the other is promoted before the subtraction
    return at_least_float32(pairs.chosen) - pairs.ref_chosen, at_least_float32(pairs.rejected) - pairs.ref_rejected


def _policy_margin(pairs: Pairs) -> Tensor:
    return at_least_float32(pairs.chosen) - pairs.rejected


def _ref_margin(pairs: Pairs) -> Tensor:
    return at_least_float32(pairs.ref_chosen) - pairs.ref_rejected


def _margin(pairs: Pairs) -> Tensor:
    h_w, h_l = _log_ratios(pairs)
    return h_w - h_l


def _rewards(pairs: Pairs, beta: float) -> tuple[Tensor, Tensor]:
    h_w, h_l = _log_ratios(pairs)
    return beta * h_w, beta * h_l


def _means(pairs: Pairs) -> tuple[Tensor, Tensor]:
    return at_least_float32(pairs.chosen) / pairs.len_chosen, at_least_float32(pairs.rejected) / pairs.len_rejected


def _log_sigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)


def _expm1(x: Tensor) -> Tensor:
    """e^x - 1 up to `MAX_EXPONENT`, then its tangent."""
    return x.clamp(max=MAX_EXPONENT).expm1() + math.exp(MAX_EXPONENT) * (x - MAX_EXPONENT).relu()


def _logit(log_q: Tensor) -> Tensor:
    """log q - log(1 - q); q is kept below 1, where the odds are infinite."""
    log_q = log_q.clamp(max=-1e-6)
    return log_q - (-log_q.expm1()).log()


def _required(field: Tensor | None, name: str) -> Tensor:
    if field is None:
        raise ValueError(f"this loss needs `{name}`, which is None; set that field of Pairs")
    return field
