"""The table of algorithms and its lookup by name; case, `-` and `_` in a name are ignored."""

from __future__ import annotations

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oxrl.names import check_keywords, find_name, import_object, import_path_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from oxrl.algorithms.recipes import Recipe
    from oxrl.types import Algorithm


def __getattr__(name: str) -> Any:
    if name == "ALGORITHMS":  # imports torch, so only on demand
        from oxrl.algorithms.table import ALGORITHMS

        return ALGORITHMS
    raise AttributeError(f"module 'oxrl.algorithms' has no attribute {name!r}")


def summaries() -> dict[str, str]:
    """Name -> one line about each algorithm, from a generated file: torch is not imported."""
    return tomllib.loads((Path(__file__).parent / "summaries.toml").read_text(encoding="utf-8"))


def algorithm(name: str | Callable[..., Any], **parameters: Any) -> Algorithm:
    """`algorithm("dpo", beta=0.2)`; `algorithm("my_file.py:my_loss")` or `algorithm(my_loss)` for a custom loss."""
    recipe = find(name)
    _check_parameters(recipe, parameters)
    defaults = {each: parameter.default for each, parameter in recipe.schema().items()}
    built = recipe.build(recipe.name, {**defaults, **parameters})
    return replace(built, source=name if isinstance(name, str) else import_path_of(name), built=built.worker_parts)


def find(name: str | Callable[..., Any]) -> Recipe:
    """Return the recipe of the table, or one built from a custom loss; an unknown name is a ValueError."""
    from oxrl.algorithms.table import ALGORITHMS, recipe_of

    if not isinstance(name, str):
        return recipe_of(name)
    if ":" in name:
        return recipe_of(import_object(name))
    return ALGORITHMS[find_name(name, ALGORITHMS, f"no algorithm is called {name!r}")]


def _check_parameters(recipe: Recipe, given: dict[str, Any]) -> None:
    from oxrl.algorithms.parameters import check_value
    from oxrl.algorithms.table import ALGORITHMS

    custom = set() if ALGORITHMS.get(recipe.name) is recipe else recipe.own()  # PARAMETERS is not for their names

    def check(name: str, value: Any, default: Any) -> None:
        check_value(recipe.name, name, value, default, in_range=name not in custom)

    check_keywords(recipe.name, recipe.schema(), given, check)
