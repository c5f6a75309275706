"""The settings of vLLM, read from its source: importing it takes about ten seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from oxrl.names import did_you_mean


def vllm_settings() -> set[str]:
    """Return `{"gpu_memory_utilization", ...}`; empty if vLLM is not installed or its source has changed."""
    spec = find_spec("vllm")
    file = Path(spec.origin).parent / "engine" / "arg_utils.py" if spec and spec.origin else None
    if file is None or not file.is_file():
        return set()
    return {
        field.target.id
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs")
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def check_settings(given: Iterable[str]) -> None:
    """Raise ValueError for a name that vLLM does not have; without vLLM's source, vLLM itself checks them later."""
    known = vllm_settings()
    for name in given if known else ():
        if name not in known:
            raise ValueError(
                f"inference_engine.{name} is neither a key nor a setting of vLLM{did_you_mean(name, known)}"
            )
