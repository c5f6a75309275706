"""A place written as text becomes the object that is there: `package.module:name` or `path/to/file.py:name`."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any


def import_object(place: str) -> Any:
    """`import_object("my_rewards.py:length")`; what cannot be imported is a ValueError that says why."""
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
