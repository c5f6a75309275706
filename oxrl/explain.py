"""The table of algorithms in words, for the command line and the documentation, taken from the functions themselves."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

from oxrl.algorithms import algorithm, find
from oxrl.algorithms.assemble import conversation_items, good_items, group_items, judged_items, pair_items, text_items
from oxrl.algorithms.table import ALGORITHMS
from oxrl.types import Algorithm, AssembleFn

ROWS: dict[AssembleFn, str] = {
    conversation_items: "chats to imitate (messages, or prompt and response)",
    text_items: "plain text",
    pair_items: "pairs (prompt, chosen, rejected)",
    judged_items: "judged replies (prompt, completion, label)",
    good_items: "groups of scored replies (prompt, responses, rewards)",
    group_items: "groups of scored replies (prompt, responses, rewards)",
}


class Card(NamedTuple):
    """What there is to know about one algorithm."""

    name: str
    explanation: str
    parameters: dict[str, Any]
    rows: str
    needs: list[str]
    example: str

    def __str__(self) -> str:
        parameters = [f"  {name} = {default!r}" for name, default in self.parameters.items()] or ["  none"]
        return "\n".join(
            [
                f"{self.name}: {self.explanation}",
                f"\nlearns from {self.rows}",
                f"needs {', '.join(self.needs) or 'nothing but the model'}",
                "\nparameters and their defaults:",
                *parameters,
                f"\n{self.example}",
            ]
        )


def summaries() -> dict[str, str]:
    """Name -> the first line of its explanation."""
    return {name: _explanation(recipe.loss).splitlines()[0] for name, recipe in ALGORITHMS.items()}


def explain(name: str) -> Card:
    recipe = find(name)
    built = algorithm(name)
    parameters = {each: parameter.default for each, parameter in recipe.schema().items()}
    rows = ROWS[getattr(built.assemble, "func", built.assemble)]
    shown = name if ":" in name else recipe.name
    return Card(shown, _explanation(recipe.loss), parameters, rows, _needs(built), _example(built, shown))


def document() -> str:
    """The page `docs/algorithms.md`."""
    parts = [
        "# Algorithms",
        "Generated from the functions themselves by `python -m oxrl.explain`; `oxrl algorithms NAME` prints the same.",
        "In the formulas w is the chosen reply and l the rejected one, h = log p - log ref summed over a reply, s the "
        "sigmoid, r a ratio of probabilities, A an advantage.",
    ]
    for name in ALGORITHMS:
        card = explain(name)
        defaults = ", ".join(f"`{each} = {value!r}`" for each, value in card.parameters.items()) or "none"
        needs = ", ".join(card.needs) or "nothing but the model"
        parts += [f"## {name}", card.explanation, f"Learns from {card.rows}; needs {needs}. Parameters: {defaults}."]
    return "\n\n".join(parts) + "\n"


def _explanation(function: Any) -> str:
    return inspect.cleandoc(function.__doc__ or "")


def _needs(built: Algorithm) -> list[str]:
    words = {"ref": "a reference model", "teacher": "a teacher (model.teacher)"}
    return [*(words[other] for other in sorted(built.others)), *(f"a {head} head" for head in built.heads)]


def _example(built: Algorithm, name: str) -> str:
    lines = ["model:", "  name: smollm2-135m", *(["  teacher: smollm2-135m"] if "teacher" in built.others else [])]
    lines += ["train:", f"  alg_name: {name}", "data:", "  train_files_path: rows.jsonl"]
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(document())
