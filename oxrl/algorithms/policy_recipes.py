"""Losses over sampled tokens to `Algorithm`s, for the policy's own rollouts or for recorded, scored responses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from oxrl.algorithms import kl, policy
from oxrl.algorithms.advantages import accepted, gae_credit, group_credit, row_by_row
from oxrl.algorithms.assemble import group_items
from oxrl.algorithms.online import group_of_rollouts, ungraded_group
from oxrl.algorithms.policy import Distilled, Policy
from oxrl.algorithms.recipes import Loss, OnView, Parameters, Recipe
from oxrl.names import lookup
from oxrl.tensors import entropy, reverse_kl
from oxrl.types import Algorithm, AssembleFn, Batch, CreditFn, Losses, Online, Outputs, Read, Term, Unit

KLTerm: TypeAlias = Callable[[Outputs, Batch, Policy, float], Tensor]
"""(outputs, batch, view, kl_coef) -> the penalty per token."""
SINGLE_ROLLOUTS = Online(group_of_rollouts, min_group_size=1)


def policy_view(outputs: Outputs, batch: Batch) -> Policy:
    """The view of a batch; a sequence is a rollout, whatever the number of its rows.

    Without log-probs of the sampler, the policy of this pass is the sampler.
    """
    rows = torch.arange(batch.num_rows, device=batch.segments.device)
    _, rollout = torch.unique(batch.scalars.get("rollout", rows), return_inverse=True)
    sampler = batch.streams.get("sampler_logprob", outputs.logprob.detach())
    advantage = batch.streams["advantage"]
    return Policy(outputs.logprob, sampler, advantage, batch.mask, rollout[batch.segments], batch.num_rows)


def _regularised(kl_coef: float) -> Callable[..., None]:
    default = kl_coef

    def regularised(
        *,
        kl_coef: float = default,
        kl_estimator: str = "k3",
        entropy_coef: float = 0.0,
        correction: str = "none",
        rejection: str = "none",
        rejection_bound: float = 0.01,
    ) -> None:
        """Options of every policy loss: KL to a reference in the loss, an entropy bonus, and importance weights for the
        gap between sampler and trainer (`truncated`, `masked` or `sequence`). `rejection` leaves out sequences whose
        gap is above a bound (`geometric` or `k3`)."""

    return regularised


REJECTIONS: Mapping[str, Callable[..., Tensor] | None] = {
    "none": None,
    "geometric": policy.geometric_rejection,
    "k3": policy.k3_rejection,
}
CORRECTIONS: Mapping[str, Callable[..., Tensor] | None] = {
    "none": None,
    "truncated": policy.truncated_importance,
    "masked": policy.masked_importance,
    "sequence": policy.sequence_importance,
}


def _sampled(estimator: kl.Estimator) -> KLTerm:
    return lambda _, batch, view, kl_coef: kl.kl_penalty_loss(
        view.logprob, batch.streams["ref_logprob"], view.mask, kl_coef=kl_coef, estimator=estimator
    )


def _weighted(outputs: Outputs, batch: Batch, view: Policy, kl_coef: float) -> Tensor:
    sampler = view.sampler_logprob.masked_fill(~view.mask, 0.0)
    return _sampled(partial(kl.k3_weighted, sampler_logprob=sampler))(outputs, batch, view, kl_coef)


def _exact(outputs: Outputs, _: Batch, view: Policy, kl_coef: float) -> Tensor:
    return kl.kl_penalty(kl.full(outputs.statistics["ref_kl"]), view.mask, kl_coef=kl_coef)


KL_TERMS: Mapping[str, KLTerm] = {
    **{name: _sampled(estimator) for name, estimator in kl.ESTIMATORS.items()},
    "k3_weighted": _weighted,
    "full": _exact,
}


def policy_gradient(
    loss: Loss,
    advantage: Callable[..., Any],
    unit: Unit,
    *,
    name: str | None = None,
    kl_coef: float = 0.0,
    credit_of: Callable[..., CreditFn] = group_credit,
    weigh: Callable[[Tensor, Policy], Tensor] = policy.per_token,
    assemble: AssembleFn = group_items,
    online: Online = Online(group_of_rollouts),  # noqa: B008 - immutable
) -> Recipe:
    """A loss per token, with advantages per group (or step); `weigh` gives the KL term the same token weights."""

    def build(name: str, parameters: Parameters) -> Algorithm:
        corrected = _corrected(loss, parameters)
        add_kl = _kl_added(parameters, weigh, unit)
        entropy_coef = parameters["entropy_coef"]

        def loss_fn(outputs: Outputs, batch: Batch) -> Losses:
            view = policy_view(outputs, batch)
            terms = {"policy": Term(corrected(view, batch).sum(), unit), **add_kl(outputs, batch, view)}
            metrics = {**_policy_metrics(view), **_rejected(parameters, view, batch)}
            return Losses({**terms, **_entropy_term(outputs, view, entropy_coef)}, metrics)

        credit = credit_of(partial(advantage, **accepted(advantage, parameters)), **accepted(credit_of, parameters))
        return Algorithm(
            name,
            assemble,
            loss_fn,
            _needs(parameters),
            _reads(parameters),
            credit=credit,
            eval_metric=None,
            parameters=parameters,
            online=online._replace(reuses=loss is not policy.reinforce),
        )

    also = (_regularised(kl_coef), advantage, credit_of)
    on_view = OnView(Policy, loss, unit)
    return Recipe(name or loss.__name__, loss, build, also=also, advantage=advantage, on_view=on_view)


def _needs(parameters: Parameters) -> tuple[str, ...]:
    """A correction needs the policy's log-probs before the step; the exact KL is computed in the forward pass."""
    own = "sampler" if parameters["correction"] == parameters["rejection"] == "none" else "policy"
    in_loss = parameters["kl_coef"] and parameters["kl_estimator"] != "full"
    return (own, "ref") if in_loss or parameters.get("kl_in_reward") else (own,)


def _reads(parameters: Parameters) -> dict[str, Read]:
    exact = parameters["kl_coef"] and parameters["kl_estimator"] == "full"
    return _entropy_read(parameters["entropy_coef"]) | ({"ref_kl": Read(reverse_kl, of="ref")} if exact else {})


def _corrected(loss: Loss, parameters: Parameters) -> Callable[[Policy, Batch], Tensor]:
    """The loss per token; with a correction its ratio is against the trainer's policy before the step."""
    correct = lookup("correction", parameters["correction"], CORRECTIONS)
    own, kept = accepted(loss, parameters), _kept(parameters)

    def losses(view: Policy, batch: Batch) -> Tensor:
        if correct is None:
            return kept(view, batch) * loss(view, **own)
        before = batch.streams["policy_logprob"]
        weights = correct(before, view.sampler_logprob, view.mask, view.segment)
        return kept(view, batch) * weights * loss(view._replace(sampler_logprob=before), **own)

    return losses


def _kept(parameters: Parameters) -> Callable[[Policy, Batch], Tensor]:
    """1 for the tokens of sequences that are kept, 0 for those that the rejection leaves out."""
    reject = lookup("rejection", parameters["rejection"], REJECTIONS)

    def kept(view: Policy, batch: Batch) -> Tensor:
        if reject is None:
            return view.mask.to(view.logprob.dtype)
        before = batch.streams["policy_logprob"]
        return reject(before, view.sampler_logprob, view.mask, view.segment, bound=parameters["rejection_bound"]).to(
            view.logprob.dtype
        )

    return kept


def _rejected(parameters: Parameters, view: Policy, batch: Batch) -> dict[str, Term]:
    """The share of sequences that are left out."""
    if parameters["rejection"] == "none":
        return {}
    left_out = torch.unique(view.segment[view.mask & (_kept(parameters)(view, batch) == 0)])
    return {"rejected": Term(view.logprob.new_tensor(float(len(left_out))), "sequence")}


def _kl_added(
    parameters: Parameters, weigh: Callable[[Tensor, Policy], Tensor], unit: Unit
) -> Callable[[Outputs, Batch, Policy], dict[str, Term]]:
    kl_coef = parameters["kl_coef"]
    penalty = lookup("kl_estimator", parameters["kl_estimator"], KL_TERMS)

    def terms(outputs: Outputs, batch: Batch, view: Policy) -> dict[str, Term]:
        if not kl_coef:
            return {}
        return {"kl": Term(weigh(penalty(outputs, batch, view, kl_coef), view).sum(), unit)}

    return terms


def _entropy_read(entropy_coef: float) -> dict[str, Read]:
    return {"entropy": Read(entropy)} if entropy_coef else {}


def _entropy_term(outputs: Outputs, view: Policy, entropy_coef: float) -> dict[str, Term]:
    if not entropy_coef:
        return {}
    bonus = policy.entropy_bonus(outputs.statistics["entropy"], view.mask, entropy_coef=entropy_coef)
    return {"entropy_bonus": Term(bonus.sum(), "token")}


def _policy_metrics(view: Policy) -> dict[str, Term]:
    gap = policy.logprob_gap(view.logprob, view.sampler_logprob, view.mask).detach()
    return {
        "ratio": Term((gap.exp() * view.mask).sum(), "token"),
        "advantage": Term((view.advantage * view.mask).abs().sum(), "token"),
        "logprob_gap": Term(gap.abs().max(), "largest"),
    }


def ppo(
    *,
    value_coef: float = 0.1,
    value_clip: float = 0.2,
    entropy_coef: float = 0.0,
    correction: str = "none",
    rejection: str = "none",
    rejection_bound: float = 0.01,
) -> None:
    """GAE over a value head on the shared backbone, clipped surrogate, clipped value loss. Schulman et al. 2017."""


def actor_critic(name: str = "ppo") -> Recipe:
    def build(name: str, parameters: Parameters) -> Algorithm:
        corrected, entropy_coef = _corrected(policy.clipped, parameters), parameters["entropy_coef"]

        def loss_fn(outputs: Outputs, batch: Batch) -> Losses:
            assert outputs.value is not None, "the value head is missing"
            view, old, target = policy_view(outputs, batch), batch.streams["value"], batch.streams["return"]
            value_loss = policy.ppo_value(outputs.value, old, target, view.mask, clip=parameters["value_clip"])
            terms = {
                "policy": Term(corrected(view, batch).sum(), "token"),
                "value": Term(parameters["value_coef"] * value_loss.sum(), "token"),
            }
            metrics = {**_policy_metrics(view), **_rejected(parameters, view, batch)}
            return Losses({**terms, **_entropy_term(outputs, view, entropy_coef)}, metrics)

        return Algorithm(
            name,
            group_items,
            loss_fn,
            ("policy", "ref") if parameters["kl_in_reward"] else ("policy",),
            _entropy_read(entropy_coef),
            credit=gae_credit(**accepted(gae_credit, parameters)),
            heads=("value",),
            eval_metric=None,
            parameters=parameters,
            online=SINGLE_ROLLOUTS,
        )

    on_view = OnView(Policy, policy.clipped, "token")
    return Recipe(name, ppo, build, also=(policy.clipped, gae_credit), on_view=on_view)


def distilled_policy(name: str = "opd") -> Recipe:
    """The student's own samples, trained towards the teacher, without rewards."""

    def build(name: str, parameters: Parameters) -> Algorithm:
        def loss_fn(outputs: Outputs, batch: Batch) -> Losses:
            streams = batch.streams
            view = Distilled(outputs.logprob, streams["sampler_logprob"], streams["teacher_logprob"], batch.mask)
            logprob = view.logprob.detach()
            teacher_gap = policy.logprob_gap(logprob, view.teacher_logprob, view.mask)
            sampler_gap = policy.logprob_gap(logprob, view.sampler_logprob, view.mask)
            metrics = {
                "teacher_gap": Term(teacher_gap.sum(), "token"),
                "logprob_gap": Term(sampler_gap.abs().max(), "largest"),
            }
            return Losses({"policy": Term(policy.opd(view).sum(), "token")}, metrics)

        return Algorithm(
            name,
            group_items,
            loss_fn,
            ("sampler", "teacher"),
            credit=row_by_row,
            eval_metric=None,
            parameters=parameters,
            online=Online(ungraded_group, min_group_size=1, reward_source=None),
        )

    return Recipe(name, policy.opd, build, on_view=OnView(Distilled, policy.opd, "token"))
