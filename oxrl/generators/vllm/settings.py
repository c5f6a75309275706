"""Which settings vLLM has, read from its source: importing it takes seconds, and a misspelt one is told before that."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from oxrl.names import did_you_mean


def vllm_settings() -> set[str]:
    """`{"gpu_memory_utilization", ...}`; empty where it is not installed, or looks otherwise than expected."""
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        return set()
    file = Path(spec.origin).parent / "engine" / "arg_utils.py"
    if not file.is_file():
        return set()
    classes = [node for node in ast.parse(file.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef)]
    return {
        field.target.id
        for made in classes
        if made.name in ("EngineArgs", "AsyncEngineArgs")
        for field in made.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }


def check_settings(given: Iterable[str]) -> None:
    """Refuse what vLLM does not know; where nothing is known of it, it will say so itself."""
    known = vllm_settings()
    for name in given if known else ():
        if name not in known:
            raise ValueError(
                f"inference_engine.{name} is neither a key nor a setting of vLLM{did_you_mean(name, known)}"
            )
