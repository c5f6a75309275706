"""The table of algorithms, and the door to it. A name is read without regard to case, `-` and `_`."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from oxrl.names import did_you_mean, import_object, nearest_name

if TYPE_CHECKING:
    from oxrl.algorithms.recipes import Recipe
    from oxrl.types import Algorithm


def __getattr__(name: str) -> Any:
    if name == "ALGORITHMS":  # torch comes with it, so only on demand
        from oxrl.algorithms.table import ALGORITHMS

        return ALGORITHMS
    raise AttributeError(f"module 'oxrl.algorithms' has no attribute {name!r}")


def algorithm(name: str, **parameters: Any) -> Algorithm:
    """`algorithm("dpo", beta=0.2)`; `algorithm("my_file.py:my_loss", beta=0.2)` for a loss of one's own."""
    recipe = find(name)
    _check_parameters(recipe, parameters)
    defaults = {each: parameter.default for each, parameter in recipe.schema().items()}
    return replace(recipe.build(recipe.name, {**defaults, **parameters}), source=name)


def find(name: str) -> Recipe:
    """The line of the table, or one made of a user's function; an unknown name gets the nearest."""
    from oxrl.algorithms.table import ALGORITHMS, recipe_of

    if ":" in name:
        return recipe_of(import_object(name))
    known = {_plain(each): each for each in ALGORITHMS}
    if _plain(name) not in known:
        nearest = nearest_name(_plain(name), known)
        hint = f"; did you mean {known[nearest]}?" if nearest else "."
        raise ValueError(f"no algorithm is called {name!r}{hint} There are: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[known[_plain(name)]]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _check_parameters(recipe: Recipe, given: dict[str, Any]) -> None:
    from oxrl.algorithms.ranges import check_value
    from oxrl.algorithms.table import ALGORITHMS

    schema = recipe.schema()
    strange = () if ALGORITHMS.get(recipe.name) is recipe else recipe.own()  # a user's own names mean what they mean
    for name, value in given.items():
        if name not in schema:
            hint = did_you_mean(name, schema, f"; it takes: {', '.join(schema) or 'none'}")
            raise ValueError(f"{recipe.name} has no parameter {name}{hint}")
        if schema[name].default is not inspect.Parameter.empty:
            check_value(recipe.name, name, value, schema[name].default, ours=name not in strange)
    if missing := [name for name, p in schema.items() if p.default is inspect.Parameter.empty and name not in given]:
        raise ValueError(f"{recipe.name} needs {', '.join(missing)}")
