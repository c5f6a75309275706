"""Names to objects, the nearest name to one that does not exist, and former names of keywords.

An object is named `package.module:name` or `path/to/file.py:name`. A function of a script or a notebook has no such
path: `import_path_of` keeps it, as `live:name`, while the process lives.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from functools import wraps
from pathlib import Path
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")
LIVE = "live"
_LIVE: dict[str, Any] = {}


def import_path_of(function: Callable[..., Any]) -> str:
    """Where `import_object` finds a function: in its module, or among those that only this process knows."""
    name = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", "__main__")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is function:
        return f"{module}:{name}"
    _LIVE[name] = function
    return f"{LIVE}:{name}"


def import_object(place: str) -> Any:
    """`import_object("my_rewards.py:length")`; what cannot be imported is a ValueError that says why."""
    where, _, name = place.rpartition(":")
    if where == LIVE:
        if name not in _LIVE:
            raise ValueError(
                f"{name} was a function of the script or notebook that began this run, and is not known here: go on "
                f"from there, or put it into a file and name it FILE.py:{name}"
            )
        return _LIVE[name]
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


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """`did_you_mean("gpro", ["grpo", "dpo"]) == "; did you mean grpo?"`; `otherwise` where nothing is near."""
    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else otherwise


def renamed_keywords(**renamed: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Accept former spellings of keyword parameters, with a DeprecationWarning: `@renamed_keywords(old="new")`."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
            for old, new in renamed.items():
                if old not in kwargs:
                    continue
                if new in kwargs:
                    raise TypeError(f"{function.__name__} got both {new} and its former name {old}; pass {new} alone")
                warnings.warn(
                    f"{function.__name__}: {old} is now {new}; pass {new}=...", DeprecationWarning, stacklevel=2
                )
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return wrapper

    return decorate
