"""Descriptions of the algorithms for the command line and the documentation, from their docstrings and signatures."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from oxrl.algorithms import algorithm, find
from oxrl.algorithms.assemble import (
    conversation_items,
    good_items,
    group_against_greedy_items,
    group_items,
    labelled_items,
    pair_items,
    text_items,
)
from oxrl.algorithms.online import against_reference_response
from oxrl.algorithms.parameters import parameter_of
from oxrl.algorithms.recipes import Recipe
from oxrl.algorithms.table import ALGORITHMS
from oxrl.types import Algorithm, AssembleFn

ROWS: dict[AssembleFn, str] = {
    conversation_items: "conversations (messages, or prompt and response)",
    text_items: "plain text",
    pair_items: "pairs (prompt, chosen, rejected)",
    labelled_items: "labelled responses (prompt, completion, label)",
    good_items: "groups of scored responses (prompt, responses, rewards)",
    group_items: "groups of scored responses (prompt, responses, rewards)",
    group_against_greedy_items: "groups of scored responses (prompt, responses, rewards, greedy_reward)",
}


class Card(NamedTuple):
    """The description of one algorithm."""

    name: str
    explanation: str
    parameters: dict[str, Any]
    allowed: dict[str, str]  # parameter -> description of its range
    meaning: dict[str, str]
    typical: dict[str, str]
    change: dict[str, str]  # parameter -> when to change it
    rows: str
    needs: list[str]
    example: str
    use: str = ""  # of the most common algorithms

    def __str__(self) -> str:
        parameters = [line for name in self.parameters for line in self._parameter_lines(name)]
        return "\n".join(
            [
                f"{self.name}: {self.explanation}",
                *([f"\ntypical use: {self.use}".replace("`", "")] if self.use else []),
                f"\ntrains on {self.rows}",
                f"needs {', '.join(self.needs) or 'only the model'}",
                "\nparameters and their defaults:",
                *(parameters or ["  none"]),
                f"\n{self.example}",
            ]
        )

    def _parameter_lines(self, name: str) -> list[str]:
        line = f"  {name} = {self.parameters[name]!r}"
        if name not in self.meaning:  # of a custom loss
            return [line]
        return [
            f"{line} ({self.allowed[name]})",
            f"      {self.meaning[name]}",
            f"      typical: {self.typical[name]}",
            f"      when to change: {self.change[name]}",
        ]

    def parameter_table(self) -> str:
        """The parameters as a Markdown table."""
        if not self.parameters:
            return "No parameters."
        rows = [
            f"| `{name} = {default!r}` | {self.meaning[name]} | {self.allowed[name]} | {self.typical[name]} "
            f"| {self.change[name]} |"
            for name, default in self.parameters.items()
        ]
        return "\n".join(
            ["| parameter | meaning | allowed | typical | when to change |", "|---|---|---|---|---|", *rows]
        )


USES = {
    "sft": "the first step: teach a format, a style or a skill from good responses",
    "cpt": "before `sft`, if there is much plain text of the domain",
    "kd": "a smaller model learns from a larger one, on given responses",
    "opd": "a smaller model learns from a larger one, on its own responses",
    "dpo": "pairs of a better and a worse response; the default for preferences",
    "ipo": "few or nearly deterministic pairs, on which DPO overfits",
    "cdpo": "pairs of which some have wrong labels",
    "simpo": "pairs, without memory for a reference model; no preference for length",
    "orpo": "pairs and no SFT before: it trains both at once, without a reference model",
    "kto": "thumbs up and down instead of pairs",
    "rm": "a reward model from pairs, for `rlhf` or for ranking",
    "rft": "a cheap start of RL: SFT on those of its own responses that earn the reward",
    "online_dpo": "a reward and the simplicity of DPO; less variance than policy gradients",
    "sgrpo": "answers that a program can verify (mathematics, code); the default for RL",
    "grpo": "as `sgrpo`, as published: each response counts equally, whatever its length",
    "dapo": "as `sgrpo`, for prompts of which many are always or never solved",
    "dr_grpo": "as `sgrpo`, if responses become longer without a gain",
    "gspo": "mixtures of experts and long responses: one ratio per response",
    "cispo": "each batch is used for several steps, or rollouts are older than the weights",
    "rloo": "plain policy gradient with a group baseline, for on-policy training",
    "ppo": "long or multi-turn responses, rewards per turn or token, one response per prompt",
    "rlhf": "human preferences: GRPO with the reward model that `rm` trained",
    "rlaif": "only a strong judge model: GRPO with its grades",
    "spin": "good responses and no preferences: they are preferred to the model's own",
}
"""The most common algorithms and what they are for; the other columns of the table follow from the algorithm."""

_WHICH = """\
Offline algorithms train on files. Online ones sample responses to the prompts during training, which takes most of the
time; they also train on recorded responses with rewards. Cost is relative to SFT with the same rows: a reference or
teacher model adds its weights and a forward pass without gradient.

**SGRPO, CISPO or PPO?** All three train on their own samples. They differ in the baseline of a response, and in the
treatment of tokens whose probability has changed since they were sampled.

- `sgrpo` compares a response with its group (no second network) and drops the gradient of tokens beyond the clip. The
  default: stable, cheap, and on-policy (one step per batch of rollouts) nothing is clipped.
- `cispo` keeps the gradient of every token and caps its weight instead. Better where rare tokens matter for the
  reasoning ("wait", "however") and each batch is used for several steps (`train.iterations`, `train.mini_batches`,
  `rollout.lag`): clipping drops these tokens first.
- `ppo` learns a value for every token, which shows *where* a response went wrong. Worth its value head for long or
  multi-turn responses, rewards per turn or per token, and where a group per prompt is too expensive (`n_samples: 1`
  works).

If length is rewarded unintentionally: `dr_grpo`, or `reward.length_penalty`. If all responses to many prompts have the
same reward: `dapo`, which samples other prompts. For mixtures of experts: `gspo`, one ratio per response."""

FAMILIES = {
    "imitation": "supervised training on the rows",
    "pairs": "each row has a better and a worse response",
    "judged replies": "each row has a response with a label, good or bad",
    "own samples": "the model generates responses to prompts, which a reward scores",
}


def families() -> dict[str, dict[str, str]]:
    """Return family -> name -> the first line of its explanation."""
    summaries: dict[str, dict[str, str]] = {family: {} for family in FAMILIES}
    for name, recipe in ALGORITHMS.items():
        summaries[_family(algorithm(name))][name] = _explanation(recipe).splitlines()[0]
    return summaries


def _family(built: Algorithm) -> str:
    if built.online is not None:
        return "own samples"
    kinds: dict[AssembleFn, str] = {pair_items: "pairs", labelled_items: "judged replies"}
    return kinds.get(_without_partial(built.assemble), "imitation")


def _without_partial(assemble: AssembleFn) -> AssembleFn:
    inner: AssembleFn = getattr(assemble, "func", assemble)
    return inner


def explain(name: str) -> Card:
    recipe = find(name)
    built = algorithm(name)
    parameters = {each: parameter.default for each, parameter in recipe.schema().items()}
    custom = recipe.own() if ":" in name else set()
    texts = {each: text for each in parameters if each not in custom and (text := parameter_of(recipe.name, each))}
    return Card(
        name=name if ":" in name else recipe.name,
        explanation=_explanation(recipe),
        parameters=parameters,
        allowed={each: text.allowed.description for each, text in texts.items()},
        meaning={each: text.meaning for each, text in texts.items()},
        typical={each: text.typical for each, text in texts.items()},
        change={each: text.change for each, text in texts.items()},
        rows=_rows(built),
        needs=_needs(built),
        example=_example(built, name if ":" in name else recipe.name),
        use=USES.get(recipe.name, ""),
    )


def which_table() -> str:
    """The most common algorithms as a Markdown table: use, data, online or offline, cost."""
    rows = []
    for name, use in USES.items():
        built = algorithm(name)
        data, kind = _data(built), "offline" if built.online is None else "online"
        rows.append(f"| [`{name}`](#{name}) | {use} | {data} | {kind} | {_cost(built)} |")
    return "\n".join(["| algorithm | typical use | data | online or offline | cost |", "|---|---|---|---|---|", *rows])


def _data(built: Algorithm) -> str:
    if built.online is None:
        return ROWS[_without_partial(built.assemble)]
    if built.online.items is against_reference_response:
        return "prompts with a good response"
    return "prompts" if built.online.reward_source is None else f"prompts, and a {built.online.reward_source}"


def _cost(built: Algorithm) -> str:
    models = {"ref": "a reference model", "teacher": "a teacher"}
    parts = ["sampling"] if built.online is not None else []
    parts += [models[other] for other in sorted(built.others)]
    parts += ["a value head"] if "value" in built.heads else []
    return ", ".join(parts) or "as SFT"


def document() -> str:
    """The page `docs/algorithms.md`."""
    parts = [
        "# Algorithms",
        "Generated by `python -m oxrl.algorithms.describe`; `oxrl algorithms NAME` prints the same.",
        "In the formulas w is the chosen response and l the rejected one, h = log p - log ref summed over a response, "
        "s the sigmoid, r a ratio of probabilities, A an advantage.",
        "## Which one",
        which_table(),
        _WHICH,
    ]
    for family, names in families().items():
        parts.append(f"## {family.capitalize()}: {FAMILIES[family]}")
        for name in names:
            card = explain(name)
            needs = ", ".join(card.needs) or "only the model"
            parts += [
                f"### {name}",
                card.explanation,
                f"Trains on {card.rows}; needs {needs}.",
                card.parameter_table(),
            ]
    return "\n\n".join(parts) + "\n"


def _explanation(recipe: Recipe) -> str:
    parts = [recipe.about, recipe.loss.__doc__]
    if recipe.advantage is not None:
        parts.append(f"A = {recipe.advantage.__doc__}")
    return "\n\n".join(inspect.cleandoc(part) for part in parts if part)


def _rows(built: Algorithm) -> str:
    files = ROWS[_without_partial(built.assemble)]
    return files if built.online is None else f"its own samples, or {files}"


def _needs(built: Algorithm) -> list[str]:
    models = {"ref": "a reference model", "teacher": "a teacher (model.teacher)"}
    graders = {"reward": "a reward", "reward model": "a reward model", "judge": "a judge", None: ""}
    grader = graders[built.online.reward_source] if built.online is not None else ""
    needed = [*(models[other] for other in sorted(built.others)), *(f"a {head} head" for head in built.heads)]
    return [*needed, *([f"{grader} for its own samples"] if grader else [])]


def _example(built: Algorithm, name: str) -> str:
    lines = ["model:", "  name: smollm2-135m", *(["  teacher: smollm2-135m"] if "teacher" in built.others else [])]
    lines += [
        "train:",
        f"  alg_name: {name}",
        "data:",
        f"  train_files_path: {'rows' if built.online is None else 'prompts'}.jsonl",
    ]
    graders = {
        "reward": "  reward_func: number_match",
        "reward model": "  model: runs/rm",
        "judge": "  judge: smollm2-135m",
    }
    if built.online is not None and built.online.reward_source is not None:
        lines += ["reward:", graders[built.online.reward_source]]
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(document())
