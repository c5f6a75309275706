"""The table of algorithms in words, for the command line and the documentation, taken from the functions themselves."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from oxrl.algorithms import algorithm, find
from oxrl.algorithms.assemble import (
    conversation_items,
    good_items,
    group_against_greedy_items,
    group_items,
    judged_items,
    pair_items,
    text_items,
)
from oxrl.algorithms.ranges import allowed
from oxrl.algorithms.recipes import Recipe
from oxrl.algorithms.table import ALGORITHMS
from oxrl.types import Algorithm, AssembleFn

ROWS: dict[AssembleFn, str] = {
    conversation_items: "chats to imitate (messages, or prompt and response)",
    text_items: "plain text",
    pair_items: "pairs (prompt, chosen, rejected)",
    judged_items: "judged replies (prompt, completion, label)",
    good_items: "groups of scored replies (prompt, responses, rewards)",
    group_items: "groups of scored replies (prompt, responses, rewards)",
    group_against_greedy_items: "groups of scored replies (prompt, responses, rewards, greedy_reward)",
}


class Card(NamedTuple):
    """What there is to know about one algorithm."""

    name: str
    explanation: str
    parameters: dict[str, Any]
    allowed: dict[str, str]  # parameter -> what it may be, in words
    rows: str
    needs: list[str]
    example: str

    def __str__(self) -> str:
        parameters = [f"  {name} = {default!r}{self._range(name)}" for name, default in self.parameters.items()]
        return "\n".join(
            [
                f"{self.name}: {self.explanation}",
                f"\nlearns from {self.rows}",
                f"needs {', '.join(self.needs) or 'nothing but the model'}",
                "\nparameters and their defaults:",
                *(parameters or ["  none"]),
                f"\n{self.example}",
            ]
        )

    def in_a_line(self) -> str:
        """The parameters, for the documentation page."""
        each = [f"`{name} = {default!r}`{self._range(name)}" for name, default in self.parameters.items()]
        return ", ".join(each) or "none"

    def _range(self, name: str) -> str:
        return f" ({self.allowed[name]})" if name in self.allowed else ""


_WHICH = """\
## Which one

| you have | begin with | then |
|---|---|---|
| good answers | `sft` | `cpt` first, for a field of its own with much plain text |
| a larger model that knows better | `kd` on its answers, `opd` on the student's own | |
| pairs, better and worse | `dpo` | `ipo` or `cdpo` for noisy labels; `simpo` or `orpo` save a reference model |
| thumbs up or down, not in pairs | `kto` | |
| answers that a program can check | `sgrpo` | see below |
| people's preferences, and prompts | `rm` on the pairs, then `rlhf` | `online_dpo` |
| nothing but a strong judge | `rlaif` | |
| a sampler and a filter, and little patience | `rft` | |

**SGRPO, CISPO or PPO?** All three learn from their own samples and differ in two places: what an answer is compared
with, and what happens to tokens whose probability has moved since they were sampled.

- `sgrpo` compares an answer with its group (no second network) and stops the gradient of tokens that moved past the
  clip. The default: stable, cheap, and on policy (one step per batch of rollouts) it never clips anything.
- `cispo` keeps the gradient of every token and caps its weight instead. Better where rare words carry the reasoning
  ("wait", "however") and each batch is used for several steps (`train.iterations`, `train.mini_batches`,
  `rollout.lag`): these are the tokens that clipping silences first.
- `ppo` learns a value for every token and so knows *where* an answer went wrong. Worth its second head where answers
  are long or have several turns, rewards come per turn or per token, and a group per prompt cannot be afforded
  (`n_samples: 1` works).

Against length as a way to earn: `dr_grpo`, or `reward.length_penalty`. Against prompts that teach nothing, all right
or all wrong: `dapo`, which draws others. For mixtures of experts: `gspo`, one ratio per answer."""

FAMILIES = {
    "imitation": "rows are what the model should say",
    "pairs": "rows say which of two replies is better",
    "judged replies": "rows say whether a reply is good",
    "own samples": "the model answers prompts, rewards say what its answers are worth",
}


def families() -> dict[str, dict[str, str]]:
    """Family -> name -> the first line of its explanation."""
    told: dict[str, dict[str, str]] = {family: {} for family in FAMILIES}
    for name, recipe in ALGORITHMS.items():
        told[_family(algorithm(name))][name] = _explanation(recipe).splitlines()[0]
    return told


def _family(built: Algorithm) -> str:
    if built.online is not None:
        return "own samples"
    kinds: dict[AssembleFn, str] = {pair_items: "pairs", judged_items: "judged replies"}
    return kinds.get(_plain(built.assemble), "imitation")


def _plain(assemble: AssembleFn) -> AssembleFn:
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
        allowed={each: range_of.words for each, range_of in ranges.items() if range_of is not None},
        rows=_rows(built),
        needs=_needs(built),
        example=_example(built, name if ":" in name else recipe.name),
    )


def document() -> str:
    """The page `docs/algorithms.md`."""
    parts = [
        "# Algorithms",
        "Generated by `python -m oxrl.algorithms.describe`; `oxrl algorithms NAME` prints the same.",
        "In the formulas w is the chosen reply and l the rejected one, h = log p - log ref summed over a reply, s the "
        "sigmoid, r a ratio of probabilities, A an advantage.",
        _WHICH,
    ]
    for family, names in families().items():
        parts.append(f"## {family.capitalize()}: {FAMILIES[family]}")
        for name in names:
            card = explain(name)
            needs = ", ".join(card.needs) or "nothing but the model"
            parts += [
                f"### {name}",
                card.explanation,
                f"Learns from {card.rows}; needs {needs}. Parameters: {card.in_a_line()}.",
            ]
    return "\n\n".join(parts) + "\n"


def _explanation(recipe: Recipe) -> str:
    parts = [recipe.about, recipe.loss.__doc__]
    if recipe.advantage is not None:
        parts.append(f"A = {recipe.advantage.__doc__}")
    return "\n\n".join(inspect.cleandoc(part) for part in parts if part)


def _rows(built: Algorithm) -> str:
    files = ROWS[_plain(built.assemble)]
    return files if built.online is None else f"its own samples, or {files}"


def _needs(built: Algorithm) -> list[str]:
    words = {"ref": "a reference model", "teacher": "a teacher (model.teacher)"}
    graders = {"reward": "a reward", "reward model": "a reward model", "judge": "a judge", None: ""}
    grader = graders[built.online.reward_source] if built.online is not None else ""
    needed = [*(words[other] for other in sorted(built.others)), *(f"a {head} head" for head in built.heads)]
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
