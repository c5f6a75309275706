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
from oxrl.algorithms.ranges import allowed
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
    rows: str
    needs: list[str]
    example: str

    def __str__(self) -> str:
        parameters = [f"  {name} = {default!r}{self._range(name)}" for name, default in self.parameters.items()]
        return "\n".join(
            [
                f"{self.name}: {self.explanation}",
                f"\ntrains on {self.rows}",
                f"needs {', '.join(self.needs) or 'only the model'}",
                "\nparameters and their defaults:",
                *(parameters or ["  none"]),
                f"\n{self.example}",
            ]
        )

    def parameter_list(self) -> str:
        """The parameters with defaults and ranges, in one line."""
        each = [f"`{name} = {default!r}`{self._range(name)}" for name, default in self.parameters.items()]
        return ", ".join(each) or "none"

    def _range(self, name: str) -> str:
        return f" ({self.allowed[name]})" if name in self.allowed else ""


_WHICH = """\
## Which one

| you have | start with | then |
|---|---|---|
| good responses | `sft` | `cpt` first, if there is much plain text of the domain |
| a larger, better model | `kd` on its responses, `opd` on the student's own | |
| pairs, better and worse | `dpo` | `ipo` or `cdpo` for noisy labels; `simpo` or `orpo` need no reference model |
| labels good or bad, without pairs | `kto` | |
| answers that a program can verify | `sgrpo` | see below |
| human preferences, and prompts | `rm` on the pairs, then `rlhf` | `online_dpo` |
| only a strong judge | `rlaif` | |
| a sampler and a filter, and little time | `rft` | |

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
    ranges = {each: allowed(recipe.name, each) for each in parameters if ":" not in name}
    return Card(
        name=name if ":" in name else recipe.name,
        explanation=_explanation(recipe),
        parameters=parameters,
        allowed={each: range_of.description for each, range_of in ranges.items() if range_of is not None},
        rows=_rows(built),
        needs=_needs(built),
        example=_example(built, name if ":" in name else recipe.name),
    )


def document() -> str:
    """The page `docs/algorithms.md`."""
    parts = [
        "# Algorithms",
        "Generated by `python -m oxrl.algorithms.describe`; `oxrl algorithms NAME` prints the same.",
        "In the formulas w is the chosen response and l the rejected one, h = log p - log ref summed over a response, "
        "s the sigmoid, r a ratio of probabilities, A an advantage.",
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
                f"Trains on {card.rows}; needs {needs}. Parameters: {card.parameter_list()}.",
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
