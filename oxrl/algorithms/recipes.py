"""Pure losses to `Algorithm`s: rows become the view that a loss takes, and its result becomes sums with units.

One adapter per view. The keyword-only parameters of a loss are its schema, so nothing is declared twice.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from oxrl.algorithms import supervised
from oxrl.algorithms.advantages import accepted
from oxrl.algorithms.assemble import (
    best_and_worst,
    conversation_items,
    good_items,
    group_items,
    labelled_items,
    pair_items,
    supervised_items,
)
from oxrl.algorithms.online import against_reference_response, good_rollouts, one_row_each
from oxrl.algorithms.preference import Pairs, sample_tokens
from oxrl.algorithms.unpaired import Labelled, kl_baseline
from oxrl.tensors import forward_kl, log_sum_squares, segment_sums
from oxrl.types import (
    Algorithm,
    ArrangeFn,
    AssembleFn,
    Batch,
    CreditFn,
    Item,
    Losses,
    Memory,
    Online,
    Outputs,
    Read,
    Row,
    Term,
    Unit,
    no_credit,
)

logger = logging.getLogger(__name__)

Loss: TypeAlias = Callable[..., Tensor]
Parameters: TypeAlias = dict[str, Any]


class OnView(NamedTuple):
    """`OnView(Pairs, dpo, "pair")`: the loss as a function of one view alone, and the unit of its mean."""

    view: type
    loss: Loss
    unit: Unit


class Recipe(NamedTuple):
    """An entry of the table: `loss`, whose docstring and parameters are shown, and `build` for its `Algorithm`."""

    name: str
    loss: Callable[..., Any]
    build: Callable[[str, Parameters], Algorithm]
    also: tuple[Callable[..., Any], ...] = ()  # functions whose keyword-only parameters are added
    hidden: tuple[str, ...] = ()  # parameters filled by the adapter
    about: str = ""  # shown before the docstring of `loss`
    advantage: Callable[..., Any] | None = None  # its docstring defines A in that of `loss`
    on_view: OnView | None = None  # None: the loss needs more than one view

    def own(self) -> set[str]:
        """The parameters of the loss itself, without those of `also`."""
        return set(accepted(self.loss, self.schema()))

    def schema(self) -> dict[str, inspect.Parameter]:
        """Parameter name -> its default and annotation."""
        return {
            name: parameter
            for function in (self.loss, *self.also)
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in self.hidden
        }


def supervised_loss(name: str, assemble: AssembleFn) -> Recipe:
    loss = supervised.negative_log_likelihood
    return Recipe(name, loss, lambda n, p: Algorithm(n, assemble, loss, reads=supervised.ACCURACY, parameters=p))


def token_loss(loss: Loss) -> Recipe:
    """A loss per token of conversations or texts: the mean over the trained tokens of the step."""

    def build(name: str, parameters: Parameters) -> Algorithm:
        def loss_fn(outputs: Outputs, batch: Batch) -> Losses:
            view = supervised.Tokens(outputs.logprob, batch.mask, batch.segments, batch.num_rows)
            total = loss(view, **parameters).sum()
            likelihood = supervised.negative_log_likelihood(outputs, batch)
            nll = likelihood.terms["nll"]
            metrics = {"nll": nll._replace(total=nll.total.detach()), **likelihood.metrics}
            return Losses({"supervised": Term(total, "token")}, metrics)

        return Algorithm(name, supervised_items, loss_fn, parameters=parameters)

    return Recipe(loss.__name__, loss, build, on_view=OnView(supervised.Tokens, loss, "token"))


def distillation(name: str) -> Recipe:
    def build(name: str, parameters: Parameters) -> Algorithm:
        divergence = supervised.teacher_divergence(**accepted(supervised.teacher_divergence, parameters))
        mixed = partial(supervised.distilled, **accepted(supervised.distilled, parameters))
        reads = {"teacher_kl": Read(divergence, of="teacher"), **supervised.ACCURACY}
        return Algorithm(name, conversation_items, mixed, reads=reads, parameters=parameters)

    return Recipe(name, supervised.distilled, build, also=(supervised.teacher_divergence,))


def reward_model(name: str) -> Recipe:
    def build(name: str, parameters: Parameters) -> Algorithm:
        def loss(outputs: Outputs, batch: Batch) -> Losses:
            assert outputs.score is not None, "the score head is missing"
            scores = supervised.Scores(outputs.score[0::2], outputs.score[1::2], batch.scalars["margin"][0::2])
            losses = supervised.bradley_terry(scores, **parameters)
            return Losses({"ranking": Term(losses.sum(), "pair")}, _reward_metrics(scores.chosen, scores.rejected))

        return Algorithm(name, pair_items, loss, heads=("score",), parameters=parameters)

    on_view = OnView(supervised.Scores, supervised.bradley_terry, "pair")
    return Recipe(name, supervised.bradley_terry, build, on_view=on_view)


def rejection_sampling(name: str) -> Recipe:
    def build(name: str, parameters: Parameters) -> Algorithm:
        assemble = partial(good_items, **parameters)
        online = Online(partial(good_rollouts, **parameters), min_group_size=1)
        loss, reads = supervised.negative_log_likelihood, supervised.ACCURACY
        return Algorithm(name, assemble, loss, reads=reads, parameters=parameters, online=online)

    return Recipe(name, good_items, build)


def pair_view(outputs: Outputs, batch: Batch) -> Pairs:
    """Sums over each row's trained tokens; chosen and rejected rows alternate."""
    keep = batch.streams.get("keep", batch.mask)

    def sums(stream: Tensor) -> tuple[Tensor, Tensor]:
        rows = segment_sums(stream * keep, batch.segments, batch.num_rows)
        return rows[0::2], rows[1::2]

    chosen, rejected = sums(outputs.logprob)
    ref_chosen, ref_rejected = sums(batch.streams.get("ref_logprob", torch.zeros_like(outputs.logprob)))
    len_chosen, len_rejected = sums(torch.ones_like(outputs.logprob))
    more: dict[str, Tensor] = {}
    if "ref_kl" in outputs.statistics:
        more["kl_chosen"], more["kl_rejected"] = sums(outputs.statistics["ref_kl"])
    if "log_sum_squares" in outputs.statistics:
        certain_w, certain_l = sums(outputs.logprob - outputs.statistics["log_sum_squares"])
        more["weight_chosen"] = (certain_w / len_chosen).exp().detach()
        more["weight_rejected"] = (certain_l / len_rejected).exp().detach()
    if "score" in batch.scalars:
        more["score_chosen"], more["score_rejected"] = batch.scalars["score"][0::2], batch.scalars["score"][1::2]
    return Pairs(chosen, rejected, ref_chosen, ref_rejected, len_chosen, len_rejected, **more)


def _pair_metrics(pairs: Pairs, beta: float | None) -> dict[str, Term]:
    """Metrics of implicit rewards, beta (log p - log ref); without a reference (`beta` None), of log-probs."""
    logprobs = {
        "chosen_logprob": Term(pairs.chosen.detach().sum(), "pair"),
        "rejected_logprob": Term(pairs.rejected.detach().sum(), "pair"),
    }
    if beta is None:
        compared = _reward_metrics(pairs.chosen, pairs.rejected)
        return {"accuracy": compared["accuracy"], "margin": compared["margin"], **logprobs}
    rewards = beta * (pairs.chosen - pairs.ref_chosen), beta * (pairs.rejected - pairs.ref_rejected)
    return {**_reward_metrics(*rewards), **logprobs}


def _beta(parameters: Parameters) -> float:
    """Factor of the implicit reward; losses without one, or with 0, compare log-ratios."""
    return float(parameters.get("beta") or 1.0)


def _reward_metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Term]:
    """Share of pairs whose chosen response has the higher reward, mean difference, and the mean of each."""
    chosen, rejected = chosen.detach(), rejected.detach()
    return {
        "accuracy": Term((chosen > rejected).float().sum(), "pair"),
        "margin": Term((chosen - rejected).sum(), "pair"),
        "chosen_reward": Term(chosen.sum(), "pair"),
        "rejected_reward": Term(rejected.sum(), "pair"),
    }


def preference(
    loss: Loss,
    *,
    reference: bool = True,
    nll: float = 0.0,
    reads: Mapping[str, Read] = MappingProxyType({}),
    credit: CreditFn = no_credit,
    assemble: AssembleFn = pair_items,
    arrange: ArrangeFn = list,
    name: str | None = None,
    online: Online | None = None,
) -> Recipe:
    """A loss over independent pairs; `nll` is the default weight of an added NLL of the chosen responses."""

    def build(name: str, parameters: Parameters) -> Algorithm:
        own, nll_weight = accepted(loss, parameters), parameters.get("nll_weight", 0.0)

        def loss_fn(outputs: Outputs, batch: Batch) -> Losses:
            pairs = pair_view(outputs, batch)
            terms = {"preference": Term(loss(pairs, **own).sum(), "pair")}
            if nll_weight:
                terms["nll_chosen"] = Term(-nll_weight * pairs.chosen.sum(), "chosen_token")
            return Losses(terms, _pair_metrics(pairs, _beta(parameters) if reference else None))

        needs = ("ref",) if reference else ()
        return Algorithm(name, assemble, loss_fn, needs, reads, arrange, credit, parameters=parameters, online=online)

    also = (_nll_added(nll),) if nll else ()
    return Recipe(name or loss.__name__, loss, build, also=also, on_view=OnView(Pairs, loss, "pair"))


def _nll_added(default: float) -> Callable[..., None]:
    def also(*, nll_weight: float = default) -> None:
        """The weight of the added NLL of the chosen responses."""

    return also


def no_statistics(pairs: Pairs, memory: Memory) -> dict[str, float]:  # noqa: ARG001 - the signature of `remember`
    return {}


def coupled_preference(loss: Loss, remember: Callable[[Pairs, Memory], dict[str, float]] = no_statistics) -> Recipe:
    """A loss that couples the pairs of a step, computed over the log-probs recorded for the whole step.

    The trained loss is the sum of log-probs weighted by the derivative of the loss with respect to each of them: the
    same gradient, independent of the micro-batches. `remember` returns running statistics, passed to the loss by name.
    """

    def build(name: str, parameters: Parameters) -> Algorithm:
        def credit(items: list[Item], memory: Memory) -> list[Item]:
            pairs = _recorded_pairs(items)
            losses = loss(pairs, **parameters, **remember(pairs, memory))
            slopes = torch.autograd.grad(losses.mean(), [pairs.chosen, pairs.rejected])
            return [
                tuple(
                    replace(row, scalars={**row.scalars, "slope": float(slope), "objective": float(value) / 2})
                    for row, slope in zip(item, both, strict=True)
                )
                for item, value, *both in zip(items, losses.detach(), *slopes, strict=True)
            ]

        def loss_fn(outputs: Outputs, batch: Batch) -> Losses:
            pairs = pair_view(outputs, batch)
            slopes = batch.scalars["slope"]
            weighted = (slopes[0::2] * pairs.chosen + slopes[1::2] * pairs.rejected).sum()
            objective = Term(batch.scalars["objective"].sum(), "pair")
            metrics = {"objective": objective, **_pair_metrics(pairs, _beta(parameters))}
            return Losses({"weighted": Term(weighted, "constant")}, metrics)

        needs = ("policy", "ref")
        return Algorithm(
            name, pair_items, loss_fn, needs, credit=credit, parameters=parameters, eval_metric="objective"
        )

    return Recipe(loss.__name__, loss, build, hidden=("baseline", "spread"), on_view=OnView(Pairs, loss, "pair"))


def _recorded_pairs(items: Sequence[Item]) -> Pairs:
    def sums(side: int, stream: str) -> Tensor:
        return torch.tensor([float((i[side].streams[stream] * i[side].mask).sum()) for i in items], dtype=torch.float64)

    lengths = [torch.tensor([float(item[side].mask.sum()) for item in items]) for side in (0, 1)]
    chosen, rejected = (sums(side, "policy_logprob").requires_grad_() for side in (0, 1))
    return Pairs(chosen, rejected, sums(0, "ref_logprob"), sums(1, "ref_logprob"), *lengths)


def running_mean(name: str, value: float, memory: Memory, momentum: float = 0.9) -> float:
    """Update the exponential moving average `memory[name]` and return it; it starts at the first value."""
    memory[name] = momentum * memory[name] + (1 - momentum) * value if name in memory else value
    return memory[name]


def mean_log_ratio(pairs: Pairs, memory: Memory) -> dict[str, float]:
    """BCO's baseline: the running mean of h over both sides."""
    both = torch.cat([pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected])
    return {"baseline": running_mean("mean_log_ratio", float(both.detach().mean()), memory)}


def mean_margin(pairs: Pairs, memory: Memory) -> dict[str, float]:
    """beta-DPO's baseline: the running mean of h_w - h_l."""
    margin = (pairs.chosen - pairs.ref_chosen) - (pairs.rejected - pairs.ref_rejected)
    return {"baseline": running_mean("mean_margin", float(margin.detach().mean()), memory)}


def gap_statistics(pairs: Pairs, memory: Memory) -> dict[str, float]:
    """alpha-DPO's mean and standard deviation of the gap between policy and reference, over the last steps."""
    gaps = pairs.mean_gap.detach()
    mean = running_mean("mean_gap", float(gaps.mean()), memory)
    square = running_mean("mean_squared_gap", float(gaps.square().mean()), memory)
    return {"baseline": mean, "spread": max(square - mean**2, 0.0) ** 0.5}


def down_sampled(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
    """SamPO: keep as many tokens of each response of a pair as the shorter one has, sampled by row id."""

    def kept(row: Row, wanted: int) -> Row:
        trained = np.flatnonzero(row.mask)
        keep = np.zeros(len(row), dtype=np.float32)
        keep[trained[sample_tokens(len(trained), wanted, row.id)]] = 1.0
        return replace(row, streams={**row.streams, "keep": keep})

    return [tuple(kept(row, min(int(r.mask.sum()) for r in item)) for row in item) for item in items]


def labelled_loss(loss: Loss, credit: CreditFn, arrange: ArrangeFn = list) -> Recipe:
    def build(name: str, parameters: Parameters) -> Algorithm:
        def loss_fn(outputs: Outputs, batch: Batch) -> Losses:
            ratio = (outputs.logprob - batch.streams["ref_logprob"]) * batch.mask
            sums = segment_sums(ratio, batch.segments, batch.num_rows)
            good = batch.scalars["label"] > 0.5
            losses = loss(Labelled(sums, good, batch.scalars["baseline"]), **parameters)
            right = ((sums.detach() > batch.scalars["baseline"]) == good).float().sum()
            rewards = _beta(parameters) * sums.detach() * batch.scalars["per_label"]
            metrics = {
                name: Term(rewards[side].sum(), "sequence")
                for name, side in (("chosen_reward", good), ("rejected_reward", ~good))
                if side.any()
            }
            return Losses({"judged": Term(losses.sum(), "sequence")}, {"accuracy": Term(right, "sequence"), **metrics})

        needs = ("policy", "ref")
        return Algorithm(name, labelled_items, loss_fn, needs, credit=credit, arrange=arrange, parameters=parameters)

    return Recipe(loss.__name__, loss, build, on_view=OnView(Labelled, loss, "sequence"))


def _log_ratio(row: Row) -> float:
    return float(((row.streams["policy_logprob"] - row.streams["ref_logprob"]) * row.mask).sum())


def _with_baseline(items: Sequence[Item], baseline: float) -> list[Item]:
    """`per_label` turns a mean over all sequences of the step into one over those with the row's label."""
    label_of = {row.sequence or row.id: bool(row.scalars["label"]) for item in items for row in item}
    share = {label: len(label_of) / max(1, list(label_of.values()).count(label)) for label in (True, False)}

    def with_scalars(row: Row) -> Row:
        return replace(
            row, scalars={**row.scalars, "baseline": baseline, "per_label": share[bool(row.scalars["label"])]}
        )

    return [tuple(map(with_scalars, item)) for item in items]


def _warn_if_one_label(rows: Sequence[Row], memory: Memory) -> None:
    """Warn once per run: the losses compare good with bad responses, so a step needs both."""
    labels = {bool(row.scalars["label"]) for row in rows}
    if len(labels) == 1 and "warned_of_one_side" not in memory:
        memory["warned_of_one_side"] = 1.0
        logger.warning(
            "all %d labelled responses of a step are %s, so good and bad cannot be compared; increase the batch size, "
            "or mix the labels",
            len(rows),
            "good" if True in labels else "bad",
        )


def kto_credit(items: list[Item], memory: Memory) -> list[Item]:
    """Set the KL baseline of the step from the mismatched rows, and drop those rows."""
    mismatched = [row for (row,) in items if row.scalars["mismatched"]]
    labelled = [item for item in items if not item[0].scalars["mismatched"]]
    _warn_if_one_label([row for (row,) in labelled], memory)
    baseline = float(kl_baseline(torch.tensor([_log_ratio(row) for row in mismatched])))
    return _with_baseline(labelled, baseline)


def bco_credit(items: list[Item], memory: Memory) -> list[Item]:
    """Set the baseline to the running mean of h, half from good responses and half from bad ones."""
    _warn_if_one_label([row for (row,) in items], memory)
    sides = [[_log_ratio(row) for (row,) in items if bool(row.scalars["label"]) == good] for good in (True, False)]
    for name, values in zip(("mean_good", "mean_bad"), sides, strict=True):
        if values:
            running_mean(name, float(np.mean(values)), memory)
    seen = [memory[name] for name in ("mean_good", "mean_bad") if name in memory]
    return _with_baseline(items, float(np.mean(seen)))


REF_KL = {"ref_kl": Read(forward_kl, of="ref")}
CERTAINTY = {"log_sum_squares": Read(log_sum_squares)}
ON_GROUPS: dict[str, Any] = {
    "assemble": group_items,
    "arrange": best_and_worst,
    "online": Online(one_row_each, needs_variance=True),
}
AGAINST_DATA = Online(against_reference_response, min_group_size=1, reward_source=None)
