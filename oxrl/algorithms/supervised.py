"""Supervised losses: likelihood of the data, distillation from a teacher, ranking of pairs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from oxrl.names import lookup
from oxrl.tensors import Statistic, correct, forward_kl, jensen_shannon, reverse_kl
from oxrl.types import Batch, Losses, Outputs, Read, Term

if TYPE_CHECKING:
    from torch import Tensor


class Tokens(NamedTuple):
    """The tokens of conversations or texts, all `[T]`, rows concatenated without padding."""

    logprob: Tensor  # of the model in training, with gradient; 0 for tokens that are not trained
    mask: Tensor  # bool, the trained tokens
    segment: Tensor  # int64, the sequence of each token: 0 to num_sequences - 1
    num_sequences: int


def negative_log_likelihood(outputs: Outputs, batch: Batch) -> Losses:
    """-log p(token) over the trained tokens of the step."""
    nll = Term(-(outputs.logprob * batch.mask).sum(), "token")
    return Losses({"nll": nll}, _accuracy(outputs))


ACCURACY: Mapping[str, Read] = {"correct": Read(correct)}
"""What supervised algorithms read for their metrics, besides what their loss needs."""


def _accuracy(outputs: Outputs) -> dict[str, Term]:
    """The share of tokens that were the most likely ones; a pass for gradients alone does not compute it."""
    hits = outputs.statistics.get("correct")
    return {} if hits is None else {"token_accuracy": Term(hits.sum(), "token")}


TEACHER_DIVERGENCES: Mapping[str, Callable[[float], Callable[..., Tensor]]] = {
    "forward": lambda _: forward_kl,
    "reverse": lambda _: reverse_kl,
    "jensen_shannon": lambda beta: partial(jensen_shannon, beta=beta),
}


def teacher_divergence(*, divergence: str = "forward", temperature: float = 1.0, gjs_beta: float = 0.5) -> Statistic:
    """The divergence from the teacher: forward (KL(teacher || model)), reverse, or generalised Jensen-Shannon."""
    if not temperature > 0:
        raise ValueError(f"temperature is {temperature}; it must be above 0")
    kind = lookup("divergence", divergence, TEACHER_DIVERGENCES)(gjs_beta)
    # Gradients of softened distributions shrink with the square of the temperature: Hinton et al. 2015.
    return lambda logits, targets, other: temperature**2 * kind(logits, targets, other, temperature=temperature)


def distilled(outputs: Outputs, batch: Batch, *, kd_weight: float = 0.5) -> Losses:
    """(1 - kd_weight) * -log p(token) + kd_weight * T^2 * divergence from the teacher's distribution at temperature T.

    Hinton et al. 2015, arXiv:1503.02531; the generalised Jensen-Shannon form: Agarwal et al. 2023, arXiv:2306.13649.
    """
    nll = -(outputs.logprob * batch.mask).sum()
    divergence = outputs.statistics["teacher_kl"].sum()
    terms = {"data": Term((1 - kd_weight) * nll, "token"), "kd": Term(kd_weight * divergence, "token")}
    unweighted = {"nll": Term(nll.detach(), "token"), "teacher_kl": Term(divergence.detach(), "token")}
    return Losses(terms, {**unweighted, **_accuracy(outputs)})


class Scores(NamedTuple):
    """A scalar head's scores of N pairs, and the margin by which the chosen score should be higher."""

    chosen: Tensor  # [N]
    rejected: Tensor  # [N]
    margin: Tensor  # [N], 0 if not given


def bradley_terry(scores: Scores, *, centre: float = 0.0) -> Tensor:
    """-log s(r_w - r_l - margin) + centre (r_w + r_l)^2: one loss per pair.

    Ouyang et al. 2022, arXiv:2203.02155; the margin: Touvron et al. 2023, arXiv:2307.09288; centring, which fixes the
    zero of the scores: Eisenstein et al. 2023, arXiv:2312.09244.
    """
    from torch.nn.functional import logsigmoid

    ranking = -logsigmoid(scores.chosen - scores.rejected - scores.margin)
    return ranking + centre * (scores.chosen + scores.rejected).square()
