"""The parameters of the algorithms: meaning, allowed values, typical values, and when to change them.

Most names mean the same in every loss; a key `algorithm.parameter` is for that algorithm alone. Names and defaults are
those of the losses' signatures. All numbers must be finite.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from oxrl.algorithms.credit import BASELINES
from oxrl.algorithms.policy_recipes import CORRECTIONS, KL_TERMS, REJECTIONS
from oxrl.algorithms.preference import DIVERGENCES, MARGIN_LOSSES
from oxrl.algorithms.supervised import TEACHER_DIVERGENCES


class Allowed(NamedTuple):
    """`Allowed("above 0", lambda x: x > 0)`."""

    description: str
    holds: Callable[[Any], bool]


class Parameter(NamedTuple):
    """`Parameter("sampling temperature", ABOVE_ZERO, "1.0", "lower it for less variety")`."""

    meaning: str
    allowed: Allowed
    typical: str
    change: str  # when to change it


def one_of(names: Iterable[Any]) -> Allowed:
    known = tuple(names)
    return Allowed("one of " + ", ".join(map(str, known)), lambda name: name in known)


ANY = Allowed("any number", lambda _: True)
ABOVE_ZERO = Allowed("above 0", lambda x: x > 0)
ABOVE_ONE = Allowed("above 1", lambda x: x > 1)
FROM_ZERO = Allowed("at least 0", lambda x: x >= 0)
FROM_ONE = Allowed("at least 1", lambda x: x >= 1)
SHARE = Allowed("0 to 1", lambda x: 0 <= x <= 1)
PART = Allowed("above 0 and at most 1", lambda x: 0 < x <= 1)
INSIDE = Allowed("above 0 and below 1", lambda x: 0 < x < 1)
BELOW_HALF = Allowed("at least 0 and below 0.5", lambda x: 0 <= x < 0.5)

_BETA = Parameter(
    "how strongly the policy is kept near the reference; the larger, the smaller the change",
    ABOVE_ZERO,
    "0.05 to 0.5",
    "raise it if responses degrade or become too long; lower it if accuracy and margin hardly change",
)
_MEAN_BETA = Parameter(
    "factor of the difference between the mean log-probs of chosen and rejected",
    ABOVE_ZERO,
    "2 to 10",
    "raise it if the margin grows slowly; lower it if the model degrades",
)
_CLIP_LOW = Parameter(
    "lower clip: a token whose probability fell below 1 - clip_low times that at sampling is not lowered further",
    FROM_ZERO,
    "0.2",
    "only matters if a batch is used for several steps; lower it if such training is unstable",
)
_CLIP_HIGH = Parameter(
    "upper clip: a token whose probability rose above 1 + clip_high times that at sampling is not raised further",
    FROM_ZERO,
    "0.2 to 0.28",
    "only matters if a batch is used for several steps; raise it if the entropy falls too fast",
)
_MARGIN = Parameter(
    "margin by which the reward of chosen should exceed that of rejected",
    FROM_ZERO,
    "0.3 to 1.6",
    "raise it if chosen and rejected are clearly different; lower it if the model degrades",
)
_DISCOUNT = Parameter(
    "discount of the reward per token: a token earns gamma^k of a reward that comes k tokens later",
    SHARE,
    "0.99 to 1",
    "lower it for long or multi-turn responses where early tokens should earn less",
)
_SMOOTHING = Parameter(
    "assumed probability that chosen and rejected are swapped in a row",
    BELOW_HALF,
    "0.05 to 0.2",
    "set it to the share of wrong labels that you expect",
)
_SIDE_WEIGHT = Parameter("", FROM_ZERO, "1; total weights of good and bad responses between 1:1 and 4:3", "")

PARAMETERS: Mapping[str, Parameter] = {
    "alpha_dpo.alpha": Parameter(
        "how much the margin grows where the policy is further from the reference than on average",
        FROM_ZERO,
        "0.05 to 0.3",
        "0 is SimPO; raise it to adapt the margin more to each pair",
    ),
    "alpha_dpo.beta": _MEAN_BETA,
    "alpha_dpo.gamma": _MARGIN,
    "alphapo.alpha": Parameter(
        "shape of the reward as a function of the probability; near 0 it is the logarithm, as in SimPO",
        ANY,
        "0.1 to 0.25",
        "try other values if the chosen responses become less likely during training",
    ),
    "alphapo.beta": _MEAN_BETA,
    "alphapo.gamma": _MARGIN._replace(typical="0.1 to 0.5"),
    "aot.label_smoothing": _SMOOTHING._replace(typical="0 to 0.1"),
    "baseline": Parameter(
        "what a reward is compared with: the mean of the step, the mean of the prompt's group, or none",
        one_of(BASELINES),
        "step",
        "group, if prompts differ in difficulty and n_samples is at least 2; none, if rewards are centred already",
    ),
    "beta": _BETA,
    "beta_prime": Parameter(
        "how slowly the weight of a pair falls with its loss; a large value is DPO",
        ABOVE_ZERO,
        "0.5 to 1",
        "lower it if many pairs have wrong labels",
    ),
    "betadpo.alpha": Parameter(
        "how strongly beta follows the mean margin of the step",
        FROM_ZERO,
        "0.4 to 0.6",
        "0 is DPO; lower it if the loss is unstable",
    ),
    "bpo.alpha": Parameter(
        "weight of the rejected response's reward in the minimum of both",
        PART,
        "0.3 to 1",
        "raise it if the rejected responses fall much faster than the chosen ones rise",
    ),
    "c2dpo.lambda_": Parameter(
        "weight of the penalty on changes of the total probability of both responses",
        FROM_ZERO,
        "0.0001 to 0.001",
        "raise it if the log-probs of chosen and rejected fall together; 0 is DPO",
    ),
    "centre": Parameter(
        "weight of the penalty that keeps the scores of a pair around 0",
        FROM_ZERO,
        "0 to 0.01",
        "set it to 0.01 if the scores drift far from 0, or if scores of different prompts are compared",
    ),
    "cispo.clip_high": _CLIP_HIGH._replace(
        meaning="the weight of a token is at most 1 + clip_high; beyond it the token keeps its gradient",
        typical="4",
        change="lower it if training with a large rollout.lag or many iterations is unstable",
    ),
    "cispo.clip_low": _CLIP_LOW._replace(
        meaning="the weight of a token is at least 1 - clip_low; from 1 on there is no lower bound",
        typical="1",
        change="rarely; a value below 1 keeps more weight on tokens that became unlikely",
    ),
    "clip_high": _CLIP_HIGH,
    "clip_low": _CLIP_LOW,
    "correction": Parameter(
        "importance weights for the difference between sampler and trainer: truncated at 2, masked (tokens outside "
        "0.5 to 5 are dropped) or one per sequence",
        one_of(CORRECTIONS),
        "none; truncated with vLLM in half precision or rollout.lag above 0",
        "set it if the metric logprob_gap is large or the reward drops after a while with an external engine",
    ),
    "cpo.beta": _MEAN_BETA._replace(
        meaning="factor of the difference between the summed log-probs of chosen and rejected", typical="0.1"
    ),
    "cposimpo.beta": _MEAN_BETA,
    "cposimpo.gamma": _MARGIN._replace(typical="about half of beta"),
    "rejection": Parameter(
        "sequences whose sampler and trainer differ by more than rejection_bound are left out, by the geometric "
        "mean of the ratio or the mean of the k3 estimate",
        one_of(REJECTIONS),
        "none; geometric or k3 beside a correction, with rollout.lag above 0",
        "set it if some completions of an external engine differ much more than the others; see the metric rejected",
    ),
    "rejection_bound": Parameter(
        "bound of rejection: geometric keeps ratios from 1 / (1 + bound) to 1 + bound, k3 estimates up to bound",
        FROM_ZERO,
        "0.001 to 0.1",
        "lower it if the metric rejected is 0, raise it if most sequences are rejected",
    ),
    "desirable_weight": _SIDE_WEIGHT._replace(
        meaning="weight of the responses labelled good", change="raise it if there are fewer good than bad responses"
    ),
    "discopop.beta": _BETA._replace(typical="0.05"),
    "dposhift.lambda_": Parameter(
        "weight of the rejected response; 1 is DPO",
        FROM_ZERO,
        "0.75 to 1",
        "lower it if the log-probs of the chosen responses fall during training",
    ),
    "dpop.lambda_": Parameter(
        "weight of the penalty where chosen is less likely than under the reference",
        FROM_ZERO,
        "5 to 50",
        "raise it if the log-probs of the chosen responses fall during training",
    ),
    "dual_clip": Parameter(
        "bound of the loss of a token with a negative advantage: at most dual_clip times the advantage; None: no bound",
        ABOVE_ONE,
        "None, or 3",
        "set it if the loss has spikes while a batch is used for several steps",
    ),
    "entropy_coef": Parameter(
        "weight of a bonus for the entropy of the policy",
        FROM_ZERO,
        "0 to 0.01",
        "raise it a little if the entropy falls early and the responses to a prompt become identical",
    ),
    "eps": Parameter(
        "added to the standard deviation that rewards are divided by",
        FROM_ZERO,
        "the default",
        "raise it, for example to 0.01, if groups whose rewards differ by noise alone should count less",
    ),
    "exo.label_smoothing": _SMOOTHING._replace(
        allowed=Allowed("above 0 and below 0.5", lambda x: 0 < x < 0.5), typical="0.001 to 0.1"
    ),
    "fdpo.alpha": Parameter(
        "parameter of the alpha divergence, for divergence alpha only; near 0 is reverse_kl, 1 is forward_kl",
        PART,
        "0.25 to 0.75",
        "with divergence alpha: raise it for more variety in the responses",
    ),
    "fdpo.divergence": Parameter(
        "divergence from the reference that regularises the policy",
        one_of(DIVERGENCES),
        "reverse_kl, which is DPO; js",
        "js or forward_kl, if the responses lose variety",
    ),
    "focalpo.gamma": Parameter(
        "how much less weight pairs have that the model ranks wrongly; 0 is DPO",
        FROM_ZERO,
        "0.05 to 0.1",
        "raise it a little if many pairs are wrong or too hard; above 1.44 training goes in the wrong direction",
    ),
    "function": Parameter(
        "loss as a function of the margin",
        one_of(MARGIN_LOSSES),
        "truncated_quadratic; logistic is DPO, squared is like IPO",
        "hinge or truncated_quadratic, if pairs that are learned already should have no gradient",
    ),
    "gamma": _MARGIN,
    "gjs_beta": Parameter(
        "weight of the teacher in the generalised Jensen-Shannon divergence, for divergence jensen_shannon only",
        INSIDE,
        "0.1 to 0.9",
        "lower it to learn all that the teacher can generate; raise it to learn only its most likely responses",
    ),
    "gmpo.clip_high": _CLIP_HIGH._replace(meaning="upper clip of a token's log-ratio to the sampler", typical="0.4"),
    "gmpo.clip_low": _CLIP_LOW._replace(
        meaning="lower clip of a token's log-ratio to the sampler, as a positive number", typical="0.4"
    ),
    "gspo.clip_high": _CLIP_HIGH._replace(
        meaning="upper clip of the ratio of a whole response (its geometric mean per token)", typical="0.0004"
    ),
    "gspo.clip_low": _CLIP_LOW._replace(
        meaning="lower clip of the ratio of a whole response (its geometric mean per token)", typical="0.0003"
    ),
    "hdpo.alpha": Parameter(
        "weight of the policy's entropy in the objective; 1 is DPO",
        FROM_ZERO,
        "0.9 to 1",
        "below 1 for a sharper policy, above 1 for more variety",
    ),
    "kd.divergence": Parameter(
        "divergence between teacher and model: forward, reverse or jensen_shannon",
        one_of(TEACHER_DIVERGENCES),
        "forward",
        "reverse or jensen_shannon, if the model is much smaller than the teacher",
    ),
    "kd_weight": Parameter(
        "share of the teacher in the loss; the rest is the likelihood of the data",
        SHARE,
        "0.5 to 1",
        "raise it if the data are worse than the teacher; 0 is SFT",
    ),
    "kl_coef": Parameter(
        "weight of the KL to the reference model in the loss; 0: no reference model is loaded",
        FROM_ZERO,
        "0 for verifiable rewards, 0.01 to 0.1 for reward models and judges",
        "raise it if the reward rises while the responses become worse",
    ),
    "kl_estimator": Parameter(
        "how the KL of kl_coef is estimated; full is exact over the vocabulary",
        one_of(KL_TERMS),
        "k3; k2 has the gradient of the reverse KL",
        "full, for the least noise at the cost of the reference's logits; k1 has no effect in a loss",
    ),
    "kl_in_reward": Parameter(
        "weight of the KL to the reference model, subtracted from the reward; 0: no reference model is loaded",
        FROM_ZERO,
        "0 to 0.1",
        "use it instead of kl_coef, as in PPO and RLOO, to keep the policy near the reference",
    ),
    "label_smoothing": _SMOOTHING,
    "lam": Parameter(
        "lambda of generalised advantage estimation: 0 relies on the value head, 1 on the rewards",
        SHARE,
        "0.95 to 1",
        "raise it if the value head is inaccurate; lower it if advantages are noisy",
    ),
    "length_penalty": Parameter(
        "weight of a preference for the shorter of the correct responses to a prompt",
        FROM_ZERO,
        "0 to 0.5",
        "raise it if responses become longer without a higher reward",
    ),
    "max_length": Parameter(
        "length in tokens at which the penalty of overlong_buffer is complete; not used if that is 0",
        FROM_ONE,
        "rollout.max_tokens",
        "set it together with overlong_buffer",
    ),
    "dr_grpo.max_length": Parameter(
        "number that the sum over a response's tokens is divided by, instead of its length",
        FROM_ONE,
        "rollout.max_tokens",
        "set it to rollout.max_tokens; it scales the gradient like a learning rate",
    ),
    "nca.beta": _BETA._replace(typical="0.0001 to 0.01"),
    "nll_weight": Parameter(
        "weight of the likelihood of the chosen responses (NLL, mean over their tokens), added to the loss",
        FROM_ZERO,
        "the default",
        "raise it if the log-probs of the chosen responses fall; 0 leaves it out",
    ),
    "odpo.alpha": Parameter(
        "weight of the logarithm of the score difference, which shifts the margin",
        FROM_ZERO,
        "0.5 to 1",
        "0 is DPO; raise it if the scores are reliable",
    ),
    "orpo.lambda_": Parameter(
        "weight of the odds ratio beside the likelihood of the chosen responses",
        FROM_ZERO,
        "0.1 to 0.25",
        "raise it if chosen and rejected are not separated; lower it if the chosen responses become less likely",
    ),
    "overlong_buffer": Parameter(
        "number of tokens before max_length over which the reward falls by up to 1; 0: no penalty",
        FROM_ZERO,
        "0, or a quarter of max_length",
        "set it if many responses are truncated at the token limit",
    ),
    "paired": Parameter(
        "whether margins of pairs are compared with those of the reference, or chosen with rejected responses",
        one_of((True, False)),
        "true",
        "false, if chosen and rejected responses do not belong to the same prompts",
    ),
    "ppo.gamma": _DISCOUNT,
    "r_max": Parameter(
        "bound of a response's reward",
        ABOVE_ZERO,
        "10",
        "lower it if the loss has spikes",
    ),
    "rdpo.alpha": Parameter(
        "how much less pairs count whose chosen response is longer, per token of difference",
        FROM_ZERO,
        "0.005 to 0.05",
        "raise it if responses become longer during training; 0 is DPO",
    ),
    "reinforce_pp.gamma": _DISCOUNT,
    "simpo.beta": _MEAN_BETA,
    "simpo.gamma": _MARGIN._replace(typical="0.3 to 0.8 times beta"),
    "spo.beta": _MEAN_BETA,
    "sppo.beta": _BETA._replace(
        meaning="inverse of the step size: the log-ratio of a response is drawn to 1 / (2 beta) in either direction",
        typical="0.001",
        change="raise it if responses degrade; lower it if accuracy hardly changes",
    ),
    "tau": Parameter(
        "width of the transition between the logistic and the exponential loss",
        ABOVE_ZERO,
        "0.05",
        "rarely; a larger value mixes both losses over a wider range of margins",
    ),
    "tdpo.alpha": Parameter(
        "weight of the difference of the KL along both responses, for version 2 only",
        FROM_ZERO,
        "0.5",
        "raise it if the policy moves too far from the reference on rejected responses",
    ),
    "temperature": Parameter(
        "temperature of teacher and model in the divergence",
        ABOVE_ZERO,
        "1 to 4",
        "raise it to learn more from the teacher's less likely tokens",
    ),
    "threshold": Parameter(
        "smallest reward of a response that is trained on",
        ANY,
        "1 for rewards of 0 and 1",
        "set it to what counts as good for your reward; lower it if too few responses are left",
    ),
    "undesirable_weight": _SIDE_WEIGHT._replace(
        meaning="weight of the responses labelled bad", change="raise it if there are fewer bad than good responses"
    ),
    "value_clip": Parameter(
        "largest change of a value in the value loss from its value at the start of the step",
        ABOVE_ZERO,
        "0.2",
        "raise it if rewards are much larger than 1",
    ),
    "value_coef": Parameter(
        "weight of the value loss beside the policy loss",
        FROM_ZERO,
        "0.1 to 1",
        "raise it if the value loss stays high; lower it if the value loss dominates the gradient",
    ),
    "version": Parameter(
        "1: the KL has a gradient through the chosen response; 2: it has none, and alpha weighs it",
        one_of((1, 2)),
        "2",
        "rarely; 1 is the paper's first form",
    ),
    "wpo.beta": _BETA._replace(typical="0.01 to 0.1"),
}


def parameter_of(algorithm: str, name: str) -> Parameter | None:
    """Return what is known of an algorithm's parameter; None for a name that only a custom loss has."""
    return PARAMETERS.get(f"{algorithm}.{name}", PARAMETERS.get(name))


def check_value(algorithm: str, parameter: str, value: Any, default: Any, *, in_range: bool = True) -> None:
    """Raise ValueError for a value of another type than its default, not finite, or (`in_range`) out of its range."""
    wanted: tuple[type, ...] = {bool: (bool,), int: (int,), str: (str,)}.get(type(default), (float, int))
    if default is None and value is None:
        return
    if not isinstance(value, wanted) or isinstance(value, bool) != isinstance(default, bool):
        raise ValueError(f"{algorithm}: {parameter} must be like its default {default!r}, not {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{algorithm}: {parameter} is {value}; give a finite number")
    known = parameter_of(algorithm, parameter) if in_range else None
    if known is not None and not known.allowed.holds(value):
        raise ValueError(f"{algorithm}: {parameter} is {value!r}; it must be {known.allowed.description}")
