"""Pure losses to `Algorithm`s: rows become the view that a loss asks for, and its result becomes sums with units.

One adapter per view. A loss's keyword-only signature is its schema, so nothing about it is declared twice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor

from oxrl.algorithms import credit as crediting
from oxrl.algorithms import kl, policy, supervised
from oxrl.algorithms.assemble import (
    best_and_worst,
    conversation_items,
    good_items,
    group_items,
    judged_items,
    pair_items,
    text_items,
)
from oxrl.algorithms.policy import Distilled, Policy
from oxrl.algorithms.preference import Pairs, sample_tokens
from oxrl.algorithms.unpaired import Labelled, kl_baseline
from oxrl.tensors import entropy, forward_kl, log_sum_squares, segment_sums
from oxrl.types import (
    Algorithm,
    ArrangeFn,
    AssembleFn,
    Batch,
    CreditFn,
    Item,
    Losses,
    Memory,
    Outputs,
    Read,
    Row,
    Term,
    Unit,
    no_credit,
)

T = TypeVar("T")
Loss: TypeAlias = Callable[..., Tensor]
Parameters: TypeAlias = dict[str, Any]


class Recipe(NamedTuple):
    """A line of the table: what is shown (`loss`, its docstring and parameters) and how it becomes an `Algorithm`."""

    name: str
    loss: Callable[..., Any]
    build: Callable[[str, Parameters], Algorithm]
    also: tuple[Callable[..., Any], ...] = ()  # functions whose keyword-only parameters belong to it too
    hidden: tuple[str, ...] = ()  # parameters that the adapter fills

    def own(self) -> set[str]:
        """The parameters of the loss itself, without those of what is added to it."""
        return set(accepted(self.loss, self.schema()))

    def schema(self) -> dict[str, inspect.Parameter]:
        """Parameter name -> its default and annotation."""
        return {
            name: parameter
            for function in (self.loss, *self.also)
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and name not in self.hidden
        }


def accepted(function: Callable[..., Any], parameters: Mapping[str, Any]) -> Parameters:
    """Those of `parameters` that `function` takes by keyword."""
    return {name: value for name, value in parameters.items() if name in inspect.signature(function).parameters}


def imitation(name: str, assemble: AssembleFn) -> Recipe:
    loss = supervised.negative_log_likelihood
    return Recipe(name, loss, lambda n, p: Algorithm(n, assemble, loss, parameters=p))


def distillation(name: str) -> Recipe:
    def build(name: str, parameters: Parameters) -> Algorithm:
        divergence = supervised.teacher_divergence(**accepted(supervised.teacher_divergence, parameters))
        mixed = partial(supervised.distilled, **accepted(supervised.distilled, parameters))
        reads = {"teacher_kl": Read(divergence, of="teacher")}
        return Algorithm(name, conversation_items, mixed, reads=reads, parameters=parameters)

    return Recipe(name, supervised.distilled, build, also=(supervised.teacher_divergence,))


def reward_model(name: str) -> Recipe:
    def build(name: str, parameters: Parameters) -> Algorithm:
        def loss(outputs: Outputs, batch: Batch) -> Losses:
            assert outputs.score is not None, "the score head is missing"
            scores = supervised.Scores(outputs.score[0::2], outputs.score[1::2], batch.scalars["margin"][0::2])
            correct = (scores.chosen > scores.rejected).float().sum()
            losses = supervised.bradley_terry(scores, **parameters)
            return Losses({"ranking": Term(losses.sum(), "pair")}, {"accuracy": Term(correct, "pair")})

        return Algorithm(name, pair_items, loss, heads=("score",), parameters=parameters)

    return Recipe(name, supervised.bradley_terry, build)


def rejection_sampling(name: str) -> Recipe:
    def build(name: str, parameters: Parameters) -> Algorithm:
        assemble = partial(good_items, **parameters)
        return Algorithm(name, assemble, supervised.negative_log_likelihood, parameters=parameters)

    return Recipe(name, good_items, build)


def pair_view(outputs: Outputs, batch: Batch) -> Pairs:
    """Sums over each row's trained tokens; rows alternate chosen and rejected."""
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


def _pair_metrics(pairs: Pairs) -> dict[str, Term]:
    margin = ((pairs.chosen - pairs.ref_chosen) - (pairs.rejected - pairs.ref_rejected)).detach()
    return {"accuracy": Term((margin > 0).float().sum(), "pair"), "margin": Term(margin.sum(), "pair")}


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
) -> Recipe:
    """A loss whose pairs do not depend on each other; `nll` adds that much of the chosen replies' NLL."""

    def build(name: str, parameters: Parameters) -> Algorithm:
        own, nll_weight = accepted(loss, parameters), parameters.get("nll_weight", 0.0)

        def step(outputs: Outputs, batch: Batch) -> Losses:
            pairs = pair_view(outputs, batch)
            terms = {"preference": Term(loss(pairs, **own).sum(), "pair")}
            if nll_weight:
                terms["nll_chosen"] = Term(-nll_weight * pairs.chosen.sum(), "chosen_token")
            return Losses(terms, _pair_metrics(pairs))

        needs = ("ref",) if reference else ()
        return Algorithm(name, assemble, step, needs, reads, arrange, credit, parameters=parameters)

    return Recipe(name or loss.__name__, loss, build, also=(_nll_added(nll),) if nll else ())


def _nll_added(default: float) -> Callable[..., None]:
    def also(*, nll_weight: float = default) -> None:
        """How much of the chosen replies' NLL is added."""

    return also


def coupled_preference(loss: Loss, remember: Callable[[Pairs, Memory], float] | None = None) -> Recipe:
    """A loss in which the pairs of a step depend on each other, written over the whole step's stamped log-probs.

    Its derivative with respect to each row's log-prob becomes the row's coefficient, and the weighted sum of log-probs
    is what is trained: the same gradient, whatever the micro-batches. `remember` turns a running mean into `baseline`.
    """

    def build(name: str, parameters: Parameters) -> Algorithm:
        def credit(items: list[Item], memory: Memory) -> list[Item]:
            pairs = _stamped_pairs(items)
            given = parameters if remember is None else {**parameters, "baseline": remember(pairs, memory)}
            losses = loss(pairs, **given)
            slopes = torch.autograd.grad(losses.mean(), [pairs.chosen, pairs.rejected])
            return [
                tuple(
                    replace(row, scalars={**row.scalars, "slope": float(slope), "objective": float(value) / 2})
                    for row, slope in zip(item, both, strict=True)
                )
                for item, value, *both in zip(items, losses.detach(), *slopes, strict=True)
            ]

        def step(outputs: Outputs, batch: Batch) -> Losses:
            pairs = pair_view(outputs, batch)
            slopes = batch.scalars["slope"]
            weighted = (slopes[0::2] * pairs.chosen + slopes[1::2] * pairs.rejected).sum()
            objective = Term(batch.scalars["objective"].sum(), "pair")
            return Losses({"weighted": Term(weighted, "constant")}, {"objective": objective, **_pair_metrics(pairs)})

        needs = ("policy", "ref")
        return Algorithm(name, pair_items, step, needs, credit=credit, parameters=parameters, judged_by="objective")

    return Recipe(loss.__name__, loss, build, hidden=("baseline",))


def _stamped_pairs(items: Sequence[Item]) -> Pairs:
    def sums(side: int, stream: str) -> Tensor:
        return torch.tensor([float((i[side].streams[stream] * i[side].mask).sum()) for i in items], dtype=torch.float64)

    lengths = [torch.tensor([float(item[side].mask.sum()) for item in items]) for side in (0, 1)]
    chosen, rejected = (sums(side, "policy_logprob").requires_grad_() for side in (0, 1))
    return Pairs(chosen, rejected, sums(0, "ref_logprob"), sums(1, "ref_logprob"), *lengths)


def running_mean(name: str, value: float, memory: Memory, momentum: float = 0.9) -> float:
    """Moves `memory[name]` towards `value`; the first value is taken whole."""
    memory[name] = momentum * memory[name] + (1 - momentum) * value if name in memory else value
    return memory[name]


def mean_log_ratio(pairs: Pairs, memory: Memory) -> float:
    """BCO's baseline: the running mean of h over both sides."""
    both = torch.cat([pairs.chosen - pairs.ref_chosen, pairs.rejected - pairs.ref_rejected])
    return running_mean("mean_log_ratio", float(both.detach().mean()), memory)


def mean_margin(pairs: Pairs, memory: Memory) -> float:
    """beta-DPO's baseline: the running mean of h_w - h_l."""
    margin = (pairs.chosen - pairs.ref_chosen) - (pairs.rejected - pairs.ref_rejected)
    return running_mean("mean_margin", float(margin.detach().mean()), memory)


def down_sampled(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
    """Both replies of a pair count with as many tokens as the shorter one has, drawn by the row's id (SamPO)."""

    def kept(row: Row, wanted: int) -> Row:
        trained = np.flatnonzero(row.mask)
        keep = np.zeros(len(row), dtype=np.float32)
        keep[trained[sample_tokens(len(trained), wanted, row.id)]] = 1.0
        return replace(row, streams={**row.streams, "keep": keep})

    return [tuple(kept(row, min(int(r.mask.sum()) for r in item)) for row in item) for item in items]


def judged(loss: Loss, credit: CreditFn, arrange: ArrangeFn = list) -> Recipe:
    def build(name: str, parameters: Parameters) -> Algorithm:
        def step(outputs: Outputs, batch: Batch) -> Losses:
            ratio = (outputs.logprob - batch.streams["ref_logprob"]) * batch.mask
            sums = segment_sums(ratio, batch.segments, batch.num_rows)
            good = batch.scalars["label"] > 0.5
            losses = loss(Labelled(sums, good, batch.scalars["baseline"]), **parameters)
            right = ((sums.detach() > batch.scalars["baseline"]) == good).float().sum()
            return Losses({"judged": Term(losses.sum(), "sequence")}, {"accuracy": Term(right, "sequence")})

        needs = ("policy", "ref")
        return Algorithm(name, judged_items, step, needs, credit=credit, arrange=arrange, parameters=parameters)

    return Recipe(loss.__name__, loss, build)


def _log_ratio(row: Row) -> float:
    return float(((row.streams["policy_logprob"] - row.streams["ref_logprob"]) * row.mask).sum())


def _with_baseline(items: Sequence[Item], baseline: float) -> list[Item]:
    return [tuple(replace(row, scalars={**row.scalars, "baseline": baseline}) for row in item) for item in items]


def kto_credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
    """The KL baseline from mismatched rows, once for the step; those rows have then done their part."""
    strangers = [row for (row,) in items if row.scalars["mismatched"]]
    baseline = float(kl_baseline(torch.tensor([_log_ratio(row) for row in strangers])))
    return _with_baseline([item for item in items if not item[0].scalars["mismatched"]], baseline)


def bco_credit(items: list[Item], memory: Memory) -> list[Item]:
    """The running mean of h, half from good replies and half from bad ones."""
    sides = [[_log_ratio(row) for (row,) in items if bool(row.scalars["label"]) == good] for good in (True, False)]
    for name, values in zip(("mean_good", "mean_bad"), sides, strict=True):
        if values:
            running_mean(name, float(np.mean(values)), memory)
    seen = [memory[name] for name in ("mean_good", "mean_bad") if name in memory]
    return _with_baseline(items, float(np.mean(seen)))


def policy_view(outputs: Outputs, batch: Batch) -> Policy:
    sampler, advantage = batch.streams["sampler_logprob"], batch.streams["advantage"]
    return Policy(outputs.logprob, sampler, advantage, batch.mask, batch.segments, batch.num_rows)


def regularised(
    *, kl_coef: float = 0.0, kl_estimator: str = "k3", entropy_coef: float = 0.0, correction: str = "none"
) -> None:
    """What any policy loss can add: KL to a reference in the loss, a bonus for entropy, and a weight per token for the
    gap between a recorded sampler and the trainer (`truncated`, `masked` or `sequence` importance)."""


CORRECTIONS: Mapping[str, Callable[..., Tensor] | None] = {
    "none": None,
    "truncated": policy.truncated_importance,
    "masked": policy.masked_importance,
    "sequence": policy.sequence_importance,
}


def group_credit(advantage: Callable[[Tensor], Tensor]) -> CreditFn:
    """One advantage per reply from the rewards of its group, on every token of the reply; then each on its own."""

    def credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
        rows: list[Item] = []
        for group in items:
            values = advantage(torch.tensor([row.scalars["reward"] for row in group]))
            rows += [(_advantaged(row, float(value) * row.mask),) for row, value in zip(group, values, strict=True)]
        return rows

    return credit


def _advantaged(row: Row, advantage: Any) -> Row:
    """What was sampled elsewhere knows its sampler's log-probs; else the policy of before this step is the sampler."""
    sampler = row.streams.get("sampler_logprob", row.streams["policy_logprob"])
    streams = {**row.streams, "advantage": np.asarray(advantage, np.float32), "sampler_logprob": sampler}
    return replace(row, streams=streams)


def policy_gradient(
    loss: Loss,
    advantage: Callable[..., Any],
    unit: Unit,
    *,
    name: str | None = None,
    credit_of: Callable[[Callable[..., Any]], CreditFn] = group_credit,
    weigh: Callable[[Tensor, Policy], Tensor] = policy.per_token,
) -> Recipe:
    """A loss per token, with an advantage per group (or step); the KL term is weighed over tokens as the loss is."""

    def build(name: str, parameters: Parameters) -> Algorithm:
        kl_coef, entropy_coef = parameters["kl_coef"], parameters["entropy_coef"]
        estimator = _chosen(kl.ESTIMATORS, parameters["kl_estimator"], "kl_estimator")
        correct = _chosen(CORRECTIONS, parameters["correction"], "correction")
        own = accepted(loss, parameters)

        def step(outputs: Outputs, batch: Batch) -> Losses:
            view = policy_view(outputs, batch)
            if correct is None:
                losses = loss(view, **own)
            else:  # the ratio is then against the trainer's own policy of before the step
                before = batch.streams["policy_logprob"]
                weights = correct(before, view.sampler_logprob, view.mask, view.segment)
                losses = weights * loss(view._replace(sampler_logprob=before), **own)
            terms = {"policy": Term(losses.sum(), unit)}
            if kl_coef:
                reference = batch.streams["ref_logprob"]
                penalty = kl.kl_penalty_loss(view.logprob, reference, view.mask, kl_coef=kl_coef, estimator=estimator)
                terms["kl"] = Term(weigh(penalty, view).sum(), unit)
            return Losses({**terms, **_entropy_term(outputs, view, entropy_coef)}, _policy_metrics(view))

        needs = ("policy", "ref") if kl_coef else ("policy",)
        reads = _entropy_read(entropy_coef)
        credit = credit_of(partial(advantage, **accepted(advantage, parameters)))
        return Algorithm(name, group_items, step, needs, reads, credit=credit, parameters=parameters, judged_by=None)

    return Recipe(name or loss.__name__, loss, build, also=(regularised, advantage))


def _entropy_read(entropy_coef: float) -> dict[str, Read]:
    return {"entropy": Read(entropy)} if entropy_coef else {}


def _entropy_term(outputs: Outputs, view: Policy, entropy_coef: float) -> dict[str, Term]:
    if not entropy_coef:
        return {}
    bonus = policy.entropy_bonus(outputs.statistics["entropy"], view.mask, entropy_coef=entropy_coef)
    return {"entropy_bonus": Term(bonus.sum(), "token")}


def _chosen(table: Mapping[str, T], name: str, parameter: str) -> T:
    if name not in table:
        raise ValueError(f"{parameter} is {name!r}; there are {', '.join(table)}")
    return table[name]


def _policy_metrics(view: Policy) -> dict[str, Term]:
    gap = (view.logprob - view.sampler_logprob).detach() * view.mask
    return {
        "ratio": Term((gap.exp() * view.mask).sum(), "token"),
        "advantage": Term((view.advantage * view.mask).abs().sum(), "token"),
    }


def ppo(
    *,
    gamma: float = 1.0,
    lam: float = 0.95,
    value_coef: float = 0.1,
    value_clip: float = 0.2,
    kl_in_reward: float = 0.0,
    entropy_coef: float = 0.0,
) -> None:
    """GAE over a value head on the shared backbone, clipped surrogate, clipped value loss. Schulman et al. 2017."""


def actor_critic(name: str = "ppo") -> Recipe:
    def build(name: str, parameters: Parameters) -> Algorithm:
        own = accepted(policy.clipped, parameters)
        entropy_coef, in_reward = parameters["entropy_coef"], parameters["kl_in_reward"]
        discount = {"gamma": parameters["gamma"], "lam": parameters["lam"]}

        def credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
            return [(_with_returns(row, in_reward, discount),) for group in items for row in group]

        def step(outputs: Outputs, batch: Batch) -> Losses:
            assert outputs.value is not None, "the value head is missing"
            view = policy_view(outputs, batch)
            value_loss = policy.ppo_value(
                outputs.value,
                batch.streams["value"],
                batch.streams["return"],
                view.mask,
                clip=parameters["value_clip"],
            )
            terms = {
                "policy": Term(policy.clipped(view, **own).sum(), "token"),
                "value": Term(parameters["value_coef"] * value_loss.sum(), "token"),
            }
            return Losses({**terms, **_entropy_term(outputs, view, entropy_coef)}, _policy_metrics(view))

        needs = ("policy", "ref") if in_reward else ("policy",)
        reads = _entropy_read(entropy_coef)
        options: dict[str, Any] = {"heads": ("value",), "parameters": parameters, "judged_by": None}
        return Algorithm(name, group_items, step, needs, reads, credit=credit, **options)

    return Recipe(name, ppo, build, also=(policy.clipped,))


def _with_returns(row: Row, kl_in_reward: float, discount: dict[str, float]) -> Row:
    trained = torch.from_numpy(row.mask)
    rewards = crediting.place(row.scalars["reward"], trained)[trained]
    streams = {name: torch.from_numpy(np.array(stream))[trained] for name, stream in row.streams.items()}
    if kl_in_reward:
        policy_logprob, reference = streams["policy_logprob"], streams["ref_logprob"]
        rewards = kl.shape_rewards_with_kl(rewards, policy_logprob, reference, kl_coef=kl_in_reward)
    advantage = crediting.gae(
        rewards, streams["value"], ended=bool(row.scalars["ended"]), last_value=row.scalars["last_value"], **discount
    )
    spread, returns = np.zeros((2, len(row)), dtype=np.float32)
    spread[row.mask], returns[row.mask] = advantage.numpy(), (advantage + streams["value"]).numpy()
    credited = _advantaged(row, spread)
    return replace(credited, streams={**credited.streams, "return": returns})


def step_credit(over_step: Callable[[list[Tensor]], list[Tensor]]) -> CreditFn:
    """Advantages that depend on the whole step: from rewards placed on last tokens to a number per token."""

    def credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
        rows = [row for group in items for row in group]
        placed = [crediting.place(r.scalars["reward"], m := torch.from_numpy(r.mask))[m] for r in rows]
        credited: list[Item] = []
        for row, advantage in zip(rows, over_step(placed), strict=True):
            stream = np.zeros(len(row), dtype=np.float32)
            stream[row.mask] = advantage.numpy()
            credited.append((_advantaged(row, stream),))
        return credited

    return credit


def distilled_policy(name: str = "opd") -> Recipe:
    """The student's own samples, pulled towards the teacher; rewards are not looked at."""

    def build(name: str, parameters: Parameters) -> Algorithm:
        def credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
            return [(_advantaged(row, 0.0 * row.mask),) for group in items for row in group]

        def step(outputs: Outputs, batch: Batch) -> Losses:
            streams = batch.streams
            view = Distilled(outputs.logprob, streams["sampler_logprob"], streams["teacher_logprob"], batch.mask)
            gap = ((outputs.logprob.detach() - view.teacher_logprob) * batch.mask).sum()
            return Losses({"policy": Term(policy.opd(view).sum(), "token")}, {"teacher_gap": Term(gap, "token")})

        needs = ("policy", "teacher")
        return Algorithm(name, group_items, step, needs, credit=credit, parameters=parameters, judged_by=None)

    return Recipe(name, policy.opd, build)


REF_KL = {"ref_kl": Read(forward_kl, of="ref")}
CERTAINTY = {"log_sum_squares": Read(log_sum_squares)}
ON_GROUPS: dict[str, Any] = {"assemble": group_items, "arrange": best_and_worst}
TEXT, CHAT = text_items, conversation_items
