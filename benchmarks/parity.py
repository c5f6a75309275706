"""oxRL's losses compared with TRL's code: value and gradient on the same random log-probs, as a table.

Our side is the whole `Algorithm` (credit, loss, division by its units), TRL's the loss method of a trainer built on the
`tiny` model: both read the same random model outputs, and the gradient is with respect to these. A difference is
declared with its reason, or it fails the run; so does a declared one that is not there. Sampling is left out.

    python benchmarks/parity.py [--seeds 5]
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import datasets
import torch
import transformers
from torch import Tensor

import oxrl
from oxrl.algorithms import ALGORITHMS, algorithm, credit
from oxrl.algorithms.preference import Pairs, bco, cdpo, ipo
from oxrl.data.pack import collate, count_units
from oxrl.types import Outputs, Row

TOLERANCE = 1e-4  # of what `relative` returns
ROWS, GROUP, PROMPT, REPLY, VOCABULARY = 8, 4, 3, 7, 11
CHOSEN, REJECTED = slice(ROWS // 2), slice(ROWS // 2, ROWS)  # TRL has all chosen rows before all rejected ones
GOOD, MISMATCHED = torch.arange(ROWS) % 3 == 0, torch.arange(ROWS) >= ROWS // 2  # KTO: labels, mismatched replies
Items = list[tuple[int, ...]]
SINGLES: Items = [(i,) for i in range(ROWS)]
PAIRS: Items = [(i, i + ROWS // 2) for i in range(ROWS // 2)]
GROUPS: Items = [tuple(range(i, i + GROUP)) for i in range(0, ROWS, GROUP)]


@dataclass(frozen=True)
class Problem:
    """Model outputs for rows of a prompt and a reply, `[R, L]`; position i is about token i, the shift is done.

    Every token is 0, but the first of a row is the row's number, which identifies the row wherever its tokens are used.
    """

    tokens: Tensor
    present: Tensor  # bool, not padding
    mask: Tensor  # bool, the reply
    logprob: Tensor  # a leaf, as are the next three
    entropy: Tensor
    logits: Tensor  # [R, L, V], for losses over the whole vocabulary
    score: Tensor  # [R]
    ref: Tensor
    sampler: Tensor
    log_sum_squares: Tensor
    teacher: Tensor  # [R, L, V]
    rewards: Tensor  # [R]
    margin: Tensor  # [R]


def make_problem(seed: int, prompt: int) -> Problem:
    rng = torch.Generator().manual_seed(seed)
    normal, uniform = partial(torch.randn, generator=rng), partial(torch.rand, generator=rng)
    shape = (ROWS, prompt + REPLY)
    lengths = torch.randint(2, REPLY + 1, (ROWS, 1), generator=rng)
    position, tokens = torch.arange(shape[1]).expand(shape), torch.zeros(shape, dtype=torch.long)
    tokens[:, 0] = torch.arange(ROWS)
    present, logprob = position < prompt + lengths, -0.1 - 3 * uniform(shape)
    leaves = (logprob.clone(), uniform(shape), normal((*shape, VOCABULARY)), normal(ROWS))
    ref, sampler = logprob - 0.1 + 0.5 * normal(shape), logprob + 0.8 * normal(shape)
    others = (ref, sampler, -uniform(shape), normal((*shape, VOCABULARY)), normal(ROWS), uniform(ROWS // 2).repeat(2))
    return Problem(
        tokens, present, present & (position >= prompt), *(leaf.requires_grad_() for leaf in leaves), *others
    )


def our_step(problem: Problem, name: str, items: Items, **parameters: Any) -> Tensor:
    """One step of the algorithm as it is trained; `items` has the numbers of their rows."""
    chosen, present = algorithm(name, **parameters), problem.present
    logprob = problem.logits.log_softmax(-1)[..., 0] if name == "opd" else problem.logprob
    streams = {"ref_logprob": problem.ref, "policy_logprob": logprob.detach(), "sampler_logprob": problem.sampler}
    if name in ("rloo", "opd"):  # meant for fresh samples
        streams |= {"sampler_logprob": logprob.detach(), "teacher_logprob": problem.teacher.log_softmax(-1)[..., 0]}

    def row(i: int) -> Row:
        kept = {key: stream[i][present[i]].numpy() for key, stream in streams.items()}
        scalars = {
            "reward": problem.rewards[i],
            "margin": problem.margin[i],
            "label": GOOD[i],
            "mismatched": MISMATCHED[i],
        }
        numbers = {key: float(value) for key, value in scalars.items()}
        return Row(str(i), problem.tokens[i][present[i]], problem.mask[i][present[i]], "", kept, numbers)

    credited = chosen.credit([tuple(map(row, item)) for item in items], {})
    batch, counts = collate(credited), count_units(credited)
    order = [int(id) for id in batch.ids]

    def flat(values: Tensor) -> Tensor:
        return torch.cat([(values * problem.mask)[i][present[i]] for i in order])

    statistics = {"entropy": flat(problem.entropy), "log_sum_squares": flat(problem.log_sum_squares)}
    if read := chosen.reads.get("teacher_kl"):
        statistics["teacher_kl"] = flat(read.statistic(problem.logits, problem.tokens, problem.teacher))
    losses = chosen.loss(Outputs(flat(logprob), statistics, score=problem.score[order]), batch)
    total = torch.stack([term.total / counts[term.unit] for term in losses.terms.values()]).sum()
    if objective := losses.metrics.get("objective"):  # coupled: a sum with its gradient is trained, its value reported
        return total - total.detach() + objective.total / counts[objective.unit]
    return total


def our_pairs(problem: Problem, *, mean: bool = False, reference: bool = True) -> Pairs:
    lengths = problem.mask.sum(1)
    sums = [(values * problem.mask).sum(1) for values in (problem.logprob, problem.ref * reference)]
    streams = (*(each / lengths if mean else each for each in sums), lengths)
    return Pairs(*(stream[part] for stream in streams for part in (CHOSEN, REJECTED)))


def by_group(problem: Problem, advantage: Callable[[Tensor], Tensor]) -> Tensor:
    return torch.cat([advantage(group) for group in problem.rewards.split(GROUP)])


def model_outputs(problem: Problem, kind: str, input_ids: Tensor, **_: Any) -> SimpleNamespace:
    """Replaces TRL's model. Its logits are scores, or of two tokens: 0 with the problem's log-prob, and the rest."""
    rows, nothing = input_ids[:, 0], torch.zeros(len(input_ids), input_ids.shape[1] - 1)
    named = {"log_probs": problem.logprob, "entropy": problem.entropy, "log_sum_sq_probs": problem.log_sum_squares}
    seen = {key: (values * problem.mask)[rows, 1:] for key, values in named.items()}
    two_tokens = torch.stack([problem.logprob, torch.log(-torch.expm1(problem.logprob))], -1)[rows].roll(-1, 1)
    logits = problem.score[rows, None] if kind == "Reward" else two_tokens
    return SimpleNamespace(**seen, logits=logits, mean_logits=nothing, is_top1=nothing.bool())


@cache
def trainer(kind: str, rewards: tuple[float, ...] = (0.0,) * ROWS, **settings: Any) -> Any:
    """In evaluation mode, where TRL does not divide by accumulation steps."""
    data = {"prompt": ["a", "b"], "chosen": ["c", "d"], "rejected": ["e", "f"]}
    module = importlib.import_module(f"trl.experimental.{kind.lower()}" if kind in ("CPO", "ORPO", "GMPO") else "trl")
    model, more = oxrl.load_model("tiny"), {}
    if kind == "Reward":
        model.config.num_labels = 1
        model = transformers.AutoModelForSequenceClassification.from_config(model.config)
    if kind == "KTO":
        data = {"prompt": ["a", "b"], "completion": ["c", "d"], "label": [True, False]}
    if kind in ("GRPO", "GMPO", "RLOO"):
        more["reward_funcs"] = lambda **_: list(rewards)
        settings |= {"per_device_train_batch_size": ROWS, "num_generations": GROUP, "max_completion_length": REPLY}
    settings |= {"output_dir": tempfile.gettempdir(), "use_cpu": True, "bf16": False, "report_to": "none"}
    more |= {"args": getattr(module, f"{kind}Config")(**settings), "train_dataset": datasets.Dataset.from_dict(data)}
    built = getattr(module, f"{kind}Trainer")(model=model, processing_class=oxrl.load_tokenizer("tiny"), **more)
    built.model.eval()
    built.precompute_ref_logps = True  # the references' log-probs are among the inputs
    return built


def trl_preference(problem: Problem, kind: str, **settings: Any) -> Tensor:
    here = problem.mask.long()
    inputs = {"input_ids": problem.tokens, "attention_mask": problem.present.long(), "completion_mask": here}
    first, second = ((problem.ref * problem.mask).sum(1)[part] for part in (CHOSEN, REJECTED))
    if kind == "KTO":
        mismatched = {f"KL_{key}": values[REJECTED] for key, values in inputs.items()}
        inputs = {key: values[CHOSEN] for key, values in inputs.items()} | mismatched
        inputs |= {"label": GOOD[CHOSEN], "ref_logps": first, "ref_KL_logps": second}
    else:
        inputs |= {"ref_chosen_logps": first, "ref_rejected_logps": second}
    return trainer(kind, **settings)._compute_loss(partial(model_outputs, problem, kind), inputs, return_outputs=False)


def trl_from_logits(problem: Problem, kind: str, **settings: Any) -> Tensor:
    labels = problem.tokens.masked_fill(~problem.mask, -100)
    rows = {"input_ids": problem.tokens, "attention_mask": problem.present.long(), "labels": labels}
    sides = {"chosen": CHOSEN, "rejected": REJECTED}
    inputs = {f"{side}_{key}": values[part] for side, part in sides.items() for key, values in rows.items()}
    return trainer(kind, **settings).get_batch_loss_metrics(partial(model_outputs, problem, kind), inputs)[0]


def trl_reward(problem: Problem, kind: str, **settings: Any) -> Tensor:
    inputs = {"input_ids": problem.tokens, "attention_mask": problem.present, "margin": problem.margin[CHOSEN]}
    return trainer(kind, **settings).compute_loss(partial(model_outputs, problem, kind), inputs)


def trl_policy(problem: Problem, kind: str, **settings: Any) -> Tensor:
    special = {"dr_grpo": credit.centre, "RLOO": credit.leave_one_out}
    streams = {"old_per_token_logps": problem.sampler, "ref_per_token_logps": problem.ref}
    streams |= {"completion_ids": problem.tokens, "completion_mask": problem.mask.long()}
    inputs = {key: stream[:, PROMPT:] for key, stream in streams.items()}
    inputs |= {"prompt_ids": problem.tokens[:, :PROMPT], "prompt_mask": problem.present[:, :PROMPT].long()}
    inputs |= {"old_logps": (problem.logprob * problem.mask).sum(1).detach(), "num_items_in_batch": problem.mask.sum()}
    inputs["advantages"] = by_group(problem, special.get(settings.get("loss_type", kind), credit.zscore))
    return trainer(kind, **settings)._compute_loss(partial(model_outputs, problem, kind), inputs)


def trl_advantages(problem: Problem, kind: str, **settings: Any) -> Tensor:
    """TRL samples from the tiny model; whatever it generates, its rewards are the problem's."""
    prompts = [{"prompt": text} for text in "ab" for _ in range(GROUP)]
    built = trainer(kind.split()[0], tuple(problem.rewards.tolist()), **settings)
    return built._generate_and_score_completions(prompts)["advantages"]


def trl_gkd(problem: Problem, _kind: str, **settings: Any) -> Tensor:
    from trl.experimental.gkd import GKDTrainer

    labels = problem.tokens.masked_fill(~problem.mask, -100)
    return GKDTrainer.generalized_jsd_loss(problem.logits, problem.teacher, labels, **settings)


def trl_sdpo(problem: Problem, _kind: str, **settings: Any) -> Tensor:
    from trl.experimental.sdpo import loss_utils

    tokens = torch.zeros_like(problem.tokens)
    loss = loss_utils.compute_sampled_token_self_distillation_loss(problem.logits, problem.teacher, tokens, **settings)
    return loss[problem.mask].mean()


def trl_overlong(problem: Problem, _kind: str, **settings: Any) -> Tensor:
    from trl.rewards import get_soft_overlong_punishment

    replies = [[0] * int(length) for length in problem.mask.sum(1)]
    return torch.tensor(get_soft_overlong_punishment(**settings)(completion_ids=replies))


Function = Callable[..., Tensor]
TRL: Mapping[str, tuple[Function, Items]] = {
    "DPO": (trl_preference, PAIRS), "KTO": (trl_preference, SINGLES), "Reward": (trl_reward, PAIRS),
    "CPO": (trl_from_logits, PAIRS), "ORPO": (trl_from_logits, PAIRS),
    "GRPO": (trl_policy, GROUPS), "GMPO": (trl_policy, GROUPS), "RLOO": (trl_policy, GROUPS),
    "GRPO advantages": (trl_advantages, GROUPS), "RLOO advantages": (trl_advantages, GROUPS),
    "GKD": (trl_gkd, SINGLES), "SDPO": (trl_sdpo, SINGLES), "soft_overlong": (trl_overlong, SINGLES),
}  # fmt: skip
PURE: Mapping[str, Function] = {
    "sft of the chosen": lambda problem: our_step(problem, "sft", SINGLES[CHOSEN]),
    "ipo on means": lambda problem, **p: ipo(our_pairs(problem, mean=True), **p).mean(),
    "cdpo without reference": lambda problem, **p: cdpo(our_pairs(problem, reference=False), **p).mean(),
    "bco without baseline": lambda problem, **p: bco(our_pairs(problem), **p).mean(),
    "zscore": lambda problem, **p: by_group(problem, partial(credit.zscore, **p)),
    "centre": lambda problem: by_group(problem, credit.centre),
    "leave_one_out": lambda problem: by_group(problem, credit.leave_one_out),
    "global_normalise": lambda problem, **p: credit.global_normalise(by_group(problem, credit.leave_one_out), **p),
    "soft_overlong_penalty": lambda problem, **p: credit.soft_overlong_penalty(problem.mask.sum(1), **p),
}
"""What is compared with TRL as a function, and not as the algorithm that it is a part of."""


class Case(NamedTuple):
    """`differs` names what may differ, and `why` is the reason."""

    ours: str
    parameters: dict[str, Any]
    trl: str
    settings: dict[str, Any]
    differs: tuple[str, ...] = ()
    why: str = ""
    prompt: int = PROMPT


VALUE, BOTH = ("value",), ("value", "gradient")
BETA, SMOOTH, KD = {"beta": 0.1}, {"beta": 0.1, "label_smoothing": 0.1}, {"kd_weight": 1.0}
SIMPO = {"loss_type": "simpo", "cpo_alpha": 0.0}
KL, PLAIN_KL = {"kl_coef": 0.04}, {"beta": 0.04, "use_bias_correction_kl": False}
SLOPE = "log p instead of the ratio: on fresh samples the same gradient"
CASES = [
    Case("sft of the chosen", {}, "DPO", {"loss_type": "sft"}),
    Case("dpo", BETA, "DPO", {"loss_type": "sigmoid", **BETA}),
    Case("hinge", BETA, "DPO", {"loss_type": "hinge", **BETA}),
    Case("ipo", BETA, "DPO", {"loss_type": "ipo", **BETA}, BOTH, "paper: sums; TRL: means over tokens"),
    Case("ipo on means", BETA, "DPO", {"loss_type": "ipo", **BETA}),
    Case("robust_dpo", SMOOTH, "DPO", {"loss_type": "robust", **SMOOTH}),
    Case("exo", SMOOTH, "DPO", {"loss_type": "exo_pair", **SMOOTH}),
    Case("nca", BETA, "DPO", {"loss_type": "nca_pair", **BETA}),
    Case("sppo", BETA, "DPO", {"loss_type": "sppo_hard", **BETA}),
    Case("apo_zero", BETA, "DPO", {"loss_type": "apo_zero", **BETA}, VALUE, "TRL adds 1"),
    Case("apo_down", BETA, "DPO", {"loss_type": "apo_down", **BETA}, VALUE, "TRL adds 1"),
    Case("aot", SMOOTH, "DPO", {"loss_type": "aot", **SMOOTH}),
    Case("aot", {"paired": False, **SMOOTH}, "DPO", {"loss_type": "aot_unpaired", **SMOOTH}),
    Case("bco", BETA, "DPO", {"loss_type": "bco_pair", **BETA}, BOTH, "TRL leaves out the paper's running mean"),
    Case("bco without baseline", BETA, "DPO", {"loss_type": "bco_pair", **BETA}),
    Case("discopop", {"beta": 0.05}, "DPO", {"loss_type": "discopop", "beta": 0.05}),
    Case("wpo", BETA, "DPO", {"use_weighting": True, **BETA}),
    Case("fdpo", {"divergence": "forward_kl"}, "DPO", {"f_divergence_type": "forward_kl"}),
    Case("fdpo", {"divergence": "js"}, "DPO", {"f_divergence_type": "js_divergence"}),
    Case(
        "fdpo", {"divergence": "alpha", "alpha": 0.3},
        "DPO", {"f_divergence_type": "alpha_divergence", "f_alpha_divergence_coef": 0.7}, why="TRL's alpha is 1 - ours",
    ),
    Case("cpo", BETA, "CPO", BETA, why="with its NLL"),
    Case("cdpo without reference", SMOOTH, "CPO", {"cpo_alpha": 0.0, **SMOOTH}),
    Case("simpo", {}, "CPO", {**SIMPO, "beta": 2.0, "simpo_gamma": 1.0}),
    Case("cposimpo", {}, "CPO", {**SIMPO, "beta": 10.0, "simpo_gamma": 5.4, "cpo_alpha": 0.05}),
    Case("alphapo", {}, "CPO", {**SIMPO, "beta": 2.5, "simpo_gamma": 0.25, "alpha": 0.25}),
    Case("orpo", {}, "ORPO", BETA, BOTH, "TRL's NLL includes the prompt"),
    Case("orpo", {}, "ORPO", BETA, why="prompts of one token, which no NLL includes", prompt=1),
    Case("kto", {"undesirable_weight": 1.5}, "KTO", {"undesirable_weight": 1.5}),
    Case("rm", {"centre": 0.01}, "Reward", {"center_rewards_coefficient": 0.01}, why="with margins"),
    Case("kd", KD, "GKD", {"beta": 0}),
    Case("kd", {"divergence": "reverse", **KD}, "GKD", {"beta": 1}),
    Case("kd", {"divergence": "jensen_shannon", "gjs_beta": 0.3, **KD}, "GKD", {"beta": 0.3}),
    Case("kd", {"temperature": 2.0, **KD}, "GKD", {"beta": 0, "temperature": 2.0}, BOTH, "TRL has no factor T^2"),
    Case("opd", {}, "SDPO", {"distillation_alpha": 1.0}, VALUE, SLOPE),
    Case("grpo", KL, "GRPO", {"loss_type": "grpo", "beta": 0.04}, BOTH, "TRL's KL is weighed by the ratio"),
    Case("grpo", KL, "GRPO", {"loss_type": "grpo", **PLAIN_KL}),
    Case("sgrpo", {"entropy_coef": 0.01}, "GRPO", {"loss_type": "bnpo", "entropy_coef": 0.01}),
    Case("sgrpo", {"dual_clip": 2.0}, "GRPO", {"loss_type": "bnpo", "delta": 2.0}),
    Case("dr_grpo", {"max_length": REPLY}, "GRPO", {"loss_type": "dr_grpo"}),
    Case("dapo", KL, "GRPO", {"loss_type": "dapo", "epsilon_high": 0.28, **PLAIN_KL}),
    Case("cispo", {}, "GRPO", {"loss_type": "cispo", "epsilon_high": 5.0}, why="TRL's bound is absolute, ours 1 + 4"),
    Case(
        "gspo", {"clip_low": 0.2, "clip_high": 0.3},
        "GRPO", {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_high": 0.3},
    ),
    Case("gmpo", {}, "GMPO", {}),
    Case("rloo", {}, "RLOO", {}, VALUE, SLOPE),
    Case("zscore", {"eps": 1e-4}, "GRPO advantages", {}, why="TRL's eps; ours is 1e-6 by default"),
    Case("centre", {}, "GRPO advantages", {"scale_rewards": "none"}),
    Case("leave_one_out", {}, "RLOO advantages", {}),
    Case("global_normalise", {"eps": 1e-4}, "RLOO advantages", {"normalize_advantages": True}, why="TRL's eps again"),
    Case(
        "soft_overlong_penalty", {"max_length": 6, "buffer": 4},
        "soft_overlong", {"max_completion_len": 6, "soft_punish_cache": 4},
    ),
]  # fmt: skip

NOT_COMPARED = {
    "cpt": "sft on plain text",
    "rft": "sft on what a reward has kept",
    "spin": "dpo on the model's own replies",
    "dpnll": "dpo and the NLL of cpo, which are compared",
    "dapo_pairs": "dpo on pairs that rewards have picked",
    "sampo": "dpo on sampled tokens",
    "online_dpo": "dpo; TRL computes it inside its training step, right after sampling",
    "ppo": "TRL has no PPO any more",
    "bco_unpaired": "TRL has no BCO any more, but for DPO's bco_pair",
    "truncated_importance, masked_importance, sequence_importance": "inside TRL's sampling, and only with vLLM",
    "shape_rewards_with_kl": "TRL takes the KL of a whole reply off its reward, and only inside its sampling",
}


def relative(pair: tuple[Tensor, ...], floor: float) -> Tensor:
    """The largest difference, as a share of TRL's largest entry or of `floor` if that is larger; nan stays nan."""
    ours, theirs = pair
    return (ours - theirs).abs().max() / theirs.abs().max().clamp(min=floor)


def differences(case: Case, seed: int) -> dict[str, Tensor]:
    problem = make_problem(seed, case.prompt)
    theirs, items = TRL[case.trl]
    ours = PURE.get(case.ours) or partial(our_step, name=case.ours, items=items)
    values = ours(problem, **case.parameters), theirs(problem, case.trl, **case.settings)
    found = {"value": relative(values, floor=1.0).detach()}
    if values[1].requires_grad:
        leaves = (problem.logprob, problem.entropy, problem.logits, problem.score)
        slopes = [torch.autograd.grad(value, leaves, materialize_grads=True) for value in values]
        found["gradient"] = torch.stack([relative(both, floor=1e-6) for both in zip(*slopes, strict=True)]).max()
    return found


def report(case: Case, seeds: int) -> list[str]:
    """Print the case's line; return what is wrong with it."""
    found = [differences(case, seed) for seed in range(seeds)]
    largest = {what: float(torch.stack([each[what] for each in found]).max()) for what in found[0]}
    shown = [f"{largest[what]:.0e}" if what in largest else "" for what in BOTH]
    spelled = [", ".join(f"{key}={value}" for key, value in each.items()) for each in (case.parameters, case.settings)]
    print(f"| {case.ours} | {spelled[0]} | {case.trl} | {spelled[1]} | {' | '.join(shown)} | {case.why} |", flush=True)
    wrong = [what for what in largest if (largest[what] <= TOLERANCE) == (what in case.differs)]
    return [f"{case.ours} and {case.trl} ({spelled[1]}): {what} differs by {largest[what]:.1e}" for what in wrong]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    seeds = parser.parse_args().seeds
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    print("| oxRL | parameters | TRL | settings | value | gradient | |\n|---|---|---|---|---|---|---|")
    wrong = [line for case in CASES for line in report(case, seeds)]
    print("\nNot compared:")
    for name in sorted((ALGORITHMS.keys() | NOT_COMPARED) - {case.ours.split()[0] for case in CASES}):
        print(f"- {name}: {NOT_COMPARED.get(name, 'TRL has no such loss')}")
    sys.exit("\nNot as declared:\n" + "\n".join(wrong) if wrong else 0)


if __name__ == "__main__":
    main()
