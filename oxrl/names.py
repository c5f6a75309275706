"""Import objects by path, and suggest the nearest known name for a misspelt one.

An object is named `package.module:name` or `path/to/file.py:name`. A function defined in a script or a notebook has no
import path: `import_path_of` registers it as `live:name` for the lifetime of the process.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any

LIVE = "live"
_LIVE: dict[str, Any] = {}


def import_path_of(function: Callable[..., Any]) -> str:
    """Return the path from which `import_object` loads a function; registers it if it cannot be imported."""
    name = getattr(function, "__qualname__", type(function).__name__)
    module = getattr(function, "__module__", "__main__")
    if module != "__main__" and getattr(sys.modules.get(module), name, None) is function:
        return f"{module}:{name}"
    _LIVE[name] = function
    return f"{LIVE}:{name}"


def import_object(import_path: str) -> Any:
    """Return the object at `import_path`, e.g. `my_rewards.py:length`; raise a ValueError if it cannot be imported."""
    source, _, name = import_path.rpartition(":")
    if source == LIVE:
        if name not in _LIVE:
            raise ValueError(
                f"{name} was defined in the script or notebook that started this run and is not available in this "
                f"process: resume from there, or move it to a file and refer to it as FILE.py:{name}"
            )
        return _LIVE[name]
    path = Path(source)
    try:
        module = _module_of_file(path) if path.suffix == ".py" else importlib.import_module(source)
        return getattr(module, name)
    except (ImportError, AttributeError, SyntaxError) as error:
        raise ValueError(f"{import_path} cannot be imported: {error}") from error


def _module_of_file(path: Path) -> ModuleType:
    """Load a module by its file path, since another module may have the same name."""
    if not path.is_file():
        raise ImportError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(f"oxrl_user_{path.stem}", path)
    assert spec is not None, f"{path} ends with .py"
    assert spec.loader is not None, f"{path} ends with .py"
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # annotations are resolved there
    spec.loader.exec_module(module)
    return module


def nearest_name(name: str, known: Iterable[str], *, cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, or None if no similarity reaches `cutoff`."""
    return next(iter(get_close_matches(name, list(known), n=1, cutoff=cutoff)), None)


def did_you_mean(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """`did_you_mean("gpro", ["grpo", "dpo"]) == "; did you mean grpo?"`; `otherwise` if no known name is similar."""
    nearest = nearest_name(name, known)
    return otherwise if nearest is None else f"; did you mean {nearest}?"
