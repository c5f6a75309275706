"""The table of all metrics, most informative first: the order of every display, and the page docs/metrics.md.

`python -m oxrl.tracking.catalogue > docs/metrics.md` writes the page.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

T = TypeVar("T")

PART = "reward_<part>"  # one metric for each part of a reward
EVAL = "eval_"


class Family(NamedTuple):
    """Runs that log the same metrics."""

    title: str
    algorithms: str


FAMILIES: Mapping[str, Family] = {
    "supervised": Family("Supervised", "sft, cpt, kd, and rft on rows"),
    "pairs": Family("Preference pairs", "dpo and the other losses of pairs, also on the policy's own responses"),
    "labels": Family("Labelled responses", "kto, bco_unpaired"),
    "rm": Family("Reward model", "rm"),
    "rl": Family("Reinforcement learning", "grpo, ppo and all other runs that sample: also rft, online_dpo, spin, opd"),
}


class Metric(NamedTuple):
    """`Metric("accuracy", ("pairs",), "share of ...", "it stays near 0.5")`; no families: all runs have it."""

    name: str
    families: tuple[str, ...]
    meaning: str
    check: str = ""  # investigate if
    headline: bool = False  # shown on the console
    rare: bool = False  # logged by some runs of the family only


METRICS: tuple[Metric, ...] = (
    Metric("reward", ("rl",), "mean reward of the responses of this step", "it does not rise over tens of steps", True),
    Metric(PART, ("rl",), "mean of each part of the reward", "one part rises at the cost of the others", True, True),
    Metric("truncated", ("rl",), "share of responses cut off at rollout.max_tokens",
           "most are: raise rollout.max_tokens", True),
    Metric("length", ("rl",), "mean tokens per response", "it falls to 1, or grows to the limit", True),
    Metric("entropy", ("rl",), "of the sampler, estimated from its log-probs", "it falls to 0 early", True),
    Metric("flat_groups", ("rl",), "groups whose rewards are all equal: their advantages are 0",
           "most are: prompts too easy or too hard", True),
    Metric("loss", (), "the trained loss: the sum of its terms, which are also logged", "it rises far above its start",
           True),
    Metric("accuracy", ("pairs", "labels", "rm"),
           "share of pairs with the higher reward for the chosen response; share of labels on the right side of the "
           "baseline", "it stays near 0.5", True),
    Metric("margin", ("pairs", "rm"),
           "chosen_reward - rejected_reward; without a reference, the difference of log-probs", "it does not rise",
           True),
    Metric("chosen_reward", ("pairs", "labels", "rm"),
           "beta (log p - log ref) of chosen, or well labelled, responses; the score of a reward model",
           "it falls while margin rises", True),
    Metric("rejected_reward", ("pairs", "labels", "rm"), "the same of rejected, or badly labelled, responses", "",
           True),
    Metric("chosen_logprob", ("pairs",), "log-prob of a chosen response, summed over its tokens",
           "it falls fast: lower lr, raise beta, or add an NLL term (dpnll)", True),
    Metric("rejected_logprob", ("pairs",), "log-prob of a rejected response", "", True),
    Metric("perplexity", ("supervised",), "exp of the mean negative log-likelihood of the trained tokens", "", True),
    Metric("token_accuracy", ("supervised",), "share of trained tokens that were the most likely ones", "", True),
    Metric("reward_std", ("rl",), "standard deviation of the rewards", "it is 0: nothing can be learned"),
    Metric("longest", ("rl",), "tokens of the longest response"),
    Metric("kl", ("rl",), "the KL term of the loss, times kl_coef", "it grows without bound", True, True),
    Metric("teacher_gap", ("rl",), "mean log p - log p of the teacher (opd)", "it does not approach 0", True, True),
    Metric("teacher_kl", ("supervised",), "mean divergence from the teacher (kd)", "", True, True),
    Metric("grad_norm", (), "norm of the gradient before clipping", "it is 0, or grows from step to step"),
    Metric("lr", (), "learning rate of this step", "", True),
    Metric("tokens_per_second", ("supervised", "pairs", "labels", "rm"), "tokens of the step by its seconds", "", True),
    Metric("generated_per_second", ("rl",), "sampled tokens per second", "", True),
    Metric("memory_gib", (), "memory of this process on its GPU, else resident", "it grows from step to step", True),
    Metric("logprob_gap", ("rl",), "largest gap between sampler and trainer in one token's log-prob",
           "it grows; above train.max_logprob_gap the run stops: `oxrl mismatch RUN`", rare=True),
    Metric("ratio", ("rl",), "mean of p / p_sampler over trained tokens", "on policy it is 1", rare=True),
    Metric("advantage", ("rl",), "mean of the advantages without their sign", "it is 0", rare=True),
    Metric("nll", ("supervised",), "mean negative log-likelihood of the trained tokens"),
    Metric("objective", ("pairs",), "the loss over all pairs of the step, where it couples them (bco, aot, ...)",
           "", True, True),
    Metric("tokens", (), "tokens of the step"),
    Metric("trained_tokens", (), "tokens with a loss", "fewer than expected: see `oxrl data show`"),
    Metric("ungraded", ("rl",), "responses that could not be graded", "it is not 0"),
    Metric("ungraded_groups", ("rl",), "prompts left out because of them", "it is not 0"),
    Metric("drawn", ("rl",), "prompts sampled for the step"),
    Metric("filtered_groups", ("rl",), "groups rejected by a filter", "many are: the data is too easy or too hard"),
    Metric("groups", ("rl",), "groups trained on"),
    Metric("turns", ("rl",), "mean turns per response"),
    Metric("generated_tokens", ("rl",), "sampled tokens of the step"),
    Metric("age", ("rl",), "versions (optimizer steps) between the oldest token and its update",
           "it is above rollout.lag steps"),
    Metric("age_mean", ("rl",), "the same, over all tokens"),
    Metric("sampler_unseen", ("rl",), "with rollout.sampler: solve_rate: share of prompts not sampled yet", rare=True),
    Metric("sampler_mixed", ("rl",), "share of prompts whose last groups were neither solved nor unsolved", rare=True),
    Metric("sampler_solved", ("rl",), "share of prompts that were solved", "all are: use harder prompts", rare=True),
    Metric("sampler_unsolved", ("rl",), "share of prompts whose last groups earned nothing",
           "most are: use easier prompts", rare=True),
    Metric("rejected", ("rl",), "share of sequences that train.alg_params.rejection leaves out",
           "most are: raise rejection_bound, or lower rollout.lag", rare=True),
    Metric("carried", ("rl",), "partial groups carried over to the next step"),
    Metric("wasted", ("rl",), "tokens discarded"),
    Metric("expired", ("rl",), "partial groups older than allowed, sampled again"),
    Metric("expired_groups", ("rl",), "groups of the run dropped as too old"),
    Metric("cut_mass", ("rl",), "probability removed by top-p, top-k and min-p per token",
           "it is not small: log-probs are of the full softmax", rare=True),
    Metric("generate_seconds", ("rl",), "seconds spent sampling"),
    Metric("train_seconds", ("rl",), "seconds spent training"),
    Metric("wait_seconds", ("rl",), "seconds that training waited for a batch"),
    Metric("step_seconds", ("supervised", "pairs", "labels", "rm"), "seconds of the step"),
    Metric("record_seconds", (), "seconds spent on the record of the step", "it is above 2% of it", rare=True),
    Metric("check_seconds", (), "seconds spent on the checks of the step", "it is above 2% of it", rare=True),
    Metric("sync_seconds", ("rl",), "seconds of the weight update of an engine with its own weights", rare=True),
    Metric("engine_gap", ("rl",), "gap between its log-probs and the trainer's after the update", "it grows",
           rare=True),
    Metric("engine_restarts", ("rl",), "engines restarted so far", "it is not 0", rare=True),
    Metric("policy", ("rl",), "term of the loss: the surrogate", rare=True),
    Metric("value", ("rl",), "term of the loss: the value function (ppo)", rare=True),
    Metric("entropy_bonus", ("rl",), "term of the loss: - entropy_coef times the entropy", rare=True),
    Metric("preference", ("pairs",), "term of the loss: the mean over pairs", rare=True),
    Metric("nll_chosen", ("pairs",), "term of the loss: nll_weight times the NLL of chosen responses", rare=True),
    Metric("weighted", ("pairs",), "term of the loss whose gradient is that of `objective`", rare=True),
    Metric("judged", ("labels",), "term of the loss: the mean over responses"),
    Metric("ranking", ("rm",), "term of the loss: the mean over pairs"),
    Metric("data", ("supervised",), "term of the loss: (1 - kd_weight) times nll (kd)", rare=True),
    Metric("kd", ("supervised",), "term of the loss: kd_weight times teacher_kl (kd)", rare=True),
    Metric("micro_batch_tokens", (), "its value, after memory ran out", "", rare=True),
    Metric("gradient_checkpointing", (), "1 after memory ran out and it was enabled", "", rare=True),
    Metric("slots", ("rl",), "slots of the embedded engine, after memory ran out", "", rare=True),
    Metric("algorithm_switched", (), "1 at a step of train.alg_schedule", "", rare=True),
)  # fmt: skip

EVALUATED: Mapping[str, str] = {
    "eval_reward": "mean reward of one response to each held-out prompt",
    "eval_reward_low": "lower end of its 95% confidence interval",
    "eval_reward_high": "upper end",
    "eval_length": "mean tokens per response",
    "eval_truncated": "share of responses cut off",
    "eval_ungraded": "responses that could not be graded",
}
"""Evaluations that sample; those of rows have the metrics of their family with `eval_` before the name."""

_RANKS = {metric.name: rank for rank, metric in enumerate(METRICS)}
_HEADLINES = {metric.name for metric in METRICS if metric.headline}
_INTERVAL = ("eval_reward_low", "eval_reward_high")
_OF_THE_MACHINE = {"lr", "tokens_per_second", "generated_per_second", "memory_gib"}  # shown, but no results


def _entry(name: str) -> str:
    """The name in the table: `reward_<part>` for a part of the reward, without `eval_` for an evaluation."""
    plain = name.removeprefix(EVAL)
    return PART if plain.startswith("reward_") and plain not in _RANKS else plain


def most_informative_first(names: Iterable[str]) -> list[str]:
    """The names in the order of the table; an evaluation follows its metric, unknown names come last."""
    return sorted(names, key=lambda name: (_RANKS.get(_entry(name), len(METRICS)), name in _INTERVAL, name))


def ordered(metrics: Mapping[str, T]) -> dict[str, T]:
    """The metrics, most informative first."""
    return {name: metrics[name] for name in most_informative_first(metrics)}


def headlines(metrics: Mapping[str, float]) -> dict[str, float]:
    """What a console shows, most informative first: evaluations, then the main metrics of the family."""
    shown = [name for name in most_informative_first(metrics) if _entry(name) in _HEADLINES]
    evaluated = [name for name in shown if name.startswith(EVAL) and name not in _INTERVAL]
    return {name: metrics[name] for name in [*evaluated, *(name for name in shown if not name.startswith(EVAL))]}


def results(names: Iterable[str]) -> list[str]:
    """The main results of a run among its metrics, most informative first."""
    return [name for name in headlines(dict.fromkeys(names, 0.0)) if name not in _OF_THE_MACHINE]


def of_family(family: str, *, rare: bool = True) -> list[Metric]:
    """The metrics of a family, most informative first, with those of all runs."""
    return [each for each in METRICS if (not each.families or family in each.families) and (rare or not each.rare)]


def is_known(name: str, families: Sequence[str]) -> bool:
    """Whether the table has this metric of a run of these families."""
    if name in EVALUATED:
        return "rl" in families
    return any(metric.name == _entry(name) for family in families for metric in of_family(family))


def document() -> str:
    """The page docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every run writes one line per logged step to `metrics.jsonl`. Console, `oxrl plot` and trackers get the same",
        "numbers, the most informative first, in the order of these tables. Evaluations have `eval_` before the name;",
        "step 0 is the model before training (`train.eval_at_start`).",
        "",
        "## All runs",
        "",
        *_table(metric for metric in METRICS if not metric.families),
    ]
    for name, family in FAMILIES.items():
        own = [metric for metric in METRICS if name in metric.families]
        lines += ["", f"## {family.title}", "", f"Algorithms: {family.algorithms}.", "", *_table(own)]
    lines += ["", "Evaluations by sampling:", "", "| name | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in EVALUATED.items()]
    return "\n".join([*lines, "", *_warnings()])


def _table(metrics: Iterable[Metric]) -> list[str]:
    rows = [
        f"| `{metric.name}` | {metric.meaning}{' (not in every run)' if metric.rare else ''} | {metric.check} |"
        for metric in metrics
    ]
    return ["| name | meaning | investigate if |", "|---|---|---|", *rows]


def _warnings() -> list[str]:
    from oxrl.tracking.health import CHECKS

    return [
        "## Warnings of a run",
        "",
        "Checked at every logged step. Each warning is logged once, with its step, and listed again at the end of "
        "`oxrl train`;",
        "`oxrl.tracking.health.find_warnings(rows)` finds them in a history.",
        "",
        "| warning | when | what to do |",
        "|---|---|---|",
        *(f"| {check.name} | {check.when} | {check.remedy} |" for check in CHECKS),
        "",
    ]


if __name__ == "__main__":
    import sys

    sys.stdout.write(document())
