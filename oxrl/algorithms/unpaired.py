"""Log-ratios of responses with labels good or bad to one loss per response.

Every loss is [N] -> [N]; its baseline is a number of the whole step, computed before, without gradient. How rows become
a `Labelled`, and how a running baseline is kept, is in `recipes`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from oxrl.algorithms.kl import at_least_float32

if TYPE_CHECKING:
    from torch import Tensor


class Labelled(NamedTuple):
    """N responses: h = log p - log ref summed over the response, the label, and the baseline of h."""

    logratio: Tensor  # [N]
    good: Tensor  # [N] bool
    baseline: Tensor  # one number, or [N]; no gradient


def kto(
    labelled: Labelled, *, beta: float = 0.1, desirable_weight: float = 1.0, undesirable_weight: float = 1.0
) -> Tensor:
    """Gains and losses of h against the policy's KL z: w (1 - s(beta (h - z))) if good, w (1 - s(beta (z - h))) if bad.

    s is the sigmoid, w the weight of the side, z the mean of h over responses paired with wrong prompts, at least 0.
    Ethayarajh et al. 2024, arXiv:2402.01306.
    """
    gain = beta * _above_baseline(labelled)
    return (desirable_weight * (-gain).sigmoid()).where(labelled.good, undesirable_weight * gain.sigmoid())


def bco_unpaired(labelled: Labelled, *, beta: float = 0.1) -> Tensor:
    """A classifier of good and bad around a baseline b: -log s(beta (h - b)) if good, -log s(beta (b - h)) if bad.

    b is the running mean of h (half from the good, half from the bad), so beta b is the paper's delta. Without
    its reweighting by prompts. Jung et al. 2024, arXiv:2404.04656.
    """
    from torch.nn.functional import logsigmoid

    gain = beta * _above_baseline(labelled)
    return -logsigmoid(gain.where(labelled.good, -gain))


def kl_baseline(mismatched_logratio: Tensor) -> Tensor:
    """KTO's z, one number: max(0, mean of h) over responses paired with the wrong prompts."""
    return at_least_float32(mismatched_logratio.detach()).mean().clamp(min=0)


def _above_baseline(labelled: Labelled) -> Tensor:
    return at_least_float32(labelled.logratio) - labelled.baseline.detach()
