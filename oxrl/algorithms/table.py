"""The table of algorithms: one line per algorithm."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal

from oxrl.algorithms import credit, policy
from oxrl.algorithms import preference as p
from oxrl.algorithms.advantages import step_credit
from oxrl.algorithms.assemble import conversation_items, group_against_greedy_items, text_items, with_mismatched
from oxrl.algorithms.custom import checked_loss
from oxrl.algorithms.online import group_against_greedy, group_of_rollouts
from oxrl.algorithms.policy import Policy
from oxrl.algorithms.policy_recipes import SINGLE_ROLLOUTS, actor_critic, distilled_policy, policy_gradient
from oxrl.algorithms.preference import Pairs
from oxrl.algorithms.recipes import (
    AGAINST_DATA,
    CERTAINTY,
    ON_GROUPS,
    REF_KL,
    Recipe,
    bco_credit,
    coupled_preference,
    distillation,
    down_sampled,
    gap_statistics,
    kto_credit,
    labelled_loss,
    mean_log_ratio,
    mean_margin,
    preference,
    rejection_sampling,
    reward_model,
    supervised_loss,
    token_loss,
)
from oxrl.algorithms.supervised import Tokens
from oxrl.algorithms.unpaired import bco_unpaired, kto
from oxrl.types import Online

_GRPO: dict[str, Any] = {
    "loss": policy.grpo,
    "advantage": credit.zscore,
    "unit": "sequence",
    "weigh": policy.per_sequence_mean,
}
_GREEDY: dict[str, Any] = {
    "assemble": group_against_greedy_items,
    "online": Online(group_against_greedy, greedy=True, min_group_size=1),
}
_ABOUT = {
    "sft": "Supervised fine-tuning: the likelihood of the responses.",
    "kd": "Distillation: the likelihood of the responses, and the distribution of a larger teacher model.",
    "rm": "A reward model: a score head that ranks the responses of a pair.",
    "kto": "For responses labelled good or bad, without pairs, weighed like gains and losses.",
    "grpo": "Group relative policy optimization: each response is compared with the others to its prompt.",
    "reinforce": "The plain policy gradient with a baseline.",
    "ppo": "Proximal policy optimization, with a value head that estimates the reward at each token.",
    "cpt": "Continued pre-training: SFT over every token of plain text.",
    "dpnll": "DPO plus the NLL of the chosen responses, a mean over tokens (arXiv:2404.19733: over each response).",
    "online_dpo": "DPO on the policy's own responses with the highest and the lowest reward of each prompt.",
    "spin": "Self-play: DPO with the data's response as chosen and the policy's own as rejected (arXiv:2401.01335).",
    "rlhf": "Reinforcement learning from human feedback: GRPO with a trained reward model.",
    "rlaif": "Reinforcement learning from AI feedback: GRPO with a judge's rewards.",
    "sgrpo": "Stable GRPO: the clipped surrogate with group advantages, all tokens of the step weighted equally.",
    "rloo": "REINFORCE with the mean reward of the other responses to the prompt as baseline.",
    "max_rl": "REINFORCE with (r - mean) / mean over the group: maximum likelihood of success.",
    "remax": "REINFORCE with the reward of the greedy response as baseline.",
    "reinforce_pp": "REINFORCE++: the clipped surrogate with rewards normalised over the step.",
}
"""The first line of algorithms whose loss is shared with others or starts with a formula."""


def _feedback(reward_source: Literal["reward model", "judge"]) -> dict[str, Any]:
    return {"kl_coef": 0.05, "online": Online(group_of_rollouts, reward_source=reward_source)}


_TABLE = (
    supervised_loss("sft", conversation_items),
    supervised_loss("cpt", text_items),
    distillation("kd"),
    reward_model("rm"),
    rejection_sampling("rft"),
    *(
        preference(loss)
        for loss in (
            p.dpo,
            p.ipo,
            p.hinge,
            p.cdpo,
            p.robust_dpo,
            p.exo,
            p.nca,
            p.sppo,
            p.apo_zero,
            p.apo_down,
            p.dpop,
            p.rdpo,
            p.odpo,
            p.discopop,
            p.caldpo,
            p.chipo,
            p.focalpo,
            p.gpo,
            p.hdpo,
            p.fdpo,
            p.dposhift,
            p.minordpo,
            p.bpo,
            p.c2dpo,
        )
    ),
    *(preference(loss, reference=False) for loss in (p.simpo, p.alphapo, p.spo)),
    *(preference(loss, reference=False, nll=p.NLL_WEIGHT[loss.__name__]) for loss in (p.orpo, p.cpo, p.cposimpo)),
    preference(p.dpo, nll=p.NLL_WEIGHT["dpnll"], name="dpnll"),
    preference(p.tdpo, reads=REF_KL),
    preference(p.wpo, reads=CERTAINTY),
    preference(p.sampo, credit=down_sampled),
    coupled_preference(p.aot),
    coupled_preference(p.drdpo),
    coupled_preference(p.bco, mean_log_ratio),
    coupled_preference(p.betadpo, mean_margin),
    coupled_preference(p.alpha_dpo, gap_statistics),
    preference(p.dpo, name="online_dpo", **ON_GROUPS),
    preference(p.dpo, name="spin", online=AGAINST_DATA),
    preference(p.dapo_pairs, **ON_GROUPS),
    labelled_loss(kto, kto_credit, with_mismatched),
    labelled_loss(bco_unpaired, bco_credit),
    policy_gradient(**_GRPO),
    policy_gradient(**_GRPO, **_feedback("reward model"), name="rlhf"),
    policy_gradient(**_GRPO, **_feedback("judge"), name="rlaif"),
    policy_gradient(policy.clipped, credit.zscore, "token", name="sgrpo"),
    policy_gradient(policy.dr_grpo, credit.centre, "sequence"),
    policy_gradient(policy.dapo, credit.zscore, "token", online=Online(group_of_rollouts, needs_variance=True)),
    policy_gradient(policy.gspo, credit.zscore, "sequence", weigh=policy.per_sequence_mean),
    policy_gradient(policy.gmpo, credit.zscore, "sequence", weigh=policy.per_sequence_mean),
    policy_gradient(policy.cispo, credit.zscore, "token"),
    policy_gradient(policy.reinforce, credit.against_mean, "sequence", online=SINGLE_ROLLOUTS),
    policy_gradient(policy.reinforce, credit.leave_one_out, "sequence", name="rloo"),
    policy_gradient(policy.reinforce, credit.max_rl, "sequence", name="max_rl"),
    policy_gradient(policy.reinforce, credit.best_against_greedy, "sequence", name="remax", **_GREEDY),
    policy_gradient(
        policy.clipped, credit.reinforce_pp, "token", name="reinforce_pp", credit_of=step_credit, online=SINGLE_ROLLOUTS
    ),
    actor_critic("ppo"),
    distilled_policy("opd"),
)

ALGORITHMS: Mapping[str, Recipe] = {
    recipe.name: recipe._replace(about=_ABOUT.get(recipe.name, "")) for recipe in _TABLE
}


VIEWS: Mapping[str, tuple[type, Callable[[Any], Recipe]]] = {
    "pairs": (Pairs, preference),
    "policy": (Policy, lambda loss: policy_gradient(loss, credit.zscore, "token")),
    "tokens": (Tokens, token_loss),
}
"""Name of the first argument of a custom loss -> its view, and the recipe of such a loss."""


def recipe_of(function: Any) -> Recipe:
    """Return the recipe of a custom loss, by the annotation of its first argument, or without one by its name."""
    name = getattr(function, "__name__", type(function).__name__)
    first = next(iter(inspect.signature(function).parameters), "")
    try:
        hint = typing.get_type_hints(function).get(first)
    except (NameError, TypeError):  # an annotation that cannot be resolved, or a function without any
        hint = None
    for argument, (view, recipe) in VIEWS.items():
        if hint is view or (hint is None and first == argument):
            return recipe(checked_loss(function))
    raise ValueError(
        f"{name}{inspect.signature(function)}: annotate its first argument with Pairs (a loss per pair), Policy (per "
        "sampled token) or Tokens (per token of the data), or call it pairs, policy or tokens: that selects the view "
        "that it is called with"
    )
