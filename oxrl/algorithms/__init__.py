"""The table of algorithms, and the door to it. A name is read without regard to case, `-` and `_`."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

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
    return recipe.build(recipe.name, {**defaults, **parameters})


def find(name: str) -> Recipe:
    """The line of the table, or one made of a user's function; an unknown name gets the nearest."""
    from oxrl.algorithms.table import ALGORITHMS, recipe_of

    if ":" in name:
        return recipe_of(_import(name))
    known = {_plain(each): each for each in ALGORITHMS}
    if _plain(name) not in known:
        near = get_close_matches(_plain(name), known, n=1)
        hint = f"; did you mean {known[near[0]]}?" if near else "."
        raise ValueError(f"no algorithm is called {name!r}{hint} There are: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[known[_plain(name)]]


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _check_parameters(recipe: Recipe, given: dict[str, Any]) -> None:
    schema = recipe.schema()
    for name, value in given.items():
        if name not in schema:
            near = get_close_matches(name, schema, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; it takes: {', '.join(schema) or 'none'}"
            raise ValueError(f"{recipe.name} has no parameter {name}{hint}")
        default = schema[name].default
        if isinstance(default, bool) != isinstance(value, bool) or (
            isinstance(default, float | int) and not isinstance(value, float | int)
        ):
            raise ValueError(f"{recipe.name}: {name} must be like its default {default!r}, not {value!r}")
    if missing := [name for name, p in schema.items() if p.default is inspect.Parameter.empty and name not in given]:
        raise ValueError(f"{recipe.name} needs {', '.join(missing)}")


def _import(place: str) -> Any:
    """`package.module:function` or `path/to/file.py:function`."""
    where, _, name = place.rpartition(":")
    path = Path(where)
    try:
        module = _module_of_file(path) if path.suffix == ".py" else importlib.import_module(where)
        return getattr(module, name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{place} cannot be imported: {error}") from error


def _module_of_file(path: Path) -> ModuleType:
    """By its path and not by its name, which another module may have too."""
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"oxrl_user_{path.stem}", path)
    assert spec is not None, f"{path} ends with .py"
    assert spec.loader is not None, f"{path} ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # annotations are looked up there
    spec.loader.exec_module(module)
    return module
