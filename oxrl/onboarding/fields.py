"""Fields of a `config.json` that the installed transformers reads otherwise than they are written: rope and dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from oxrl.onboarding.files import ModelFiles, stored_dtype
from oxrl.onboarding.findings import Finding
from oxrl.onboarding.tokens import text_section

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

OLD_THETA = ("rope_theta", "rotary_emb_base", "rope_base")
OLD_TYPES = {"su": "longrope"}  # names that transformers gave up
FLOATS = ("float32", "bfloat16", "float16", "float64")


def field_findings(files: ModelFiles, parsed: PreTrainedConfig) -> Iterator[Finding]:
    """Yield a finding for rope, and one for the dtype, if they are read otherwise than written."""
    meant, read = rope_as_written(text_section(files.config)), _rope_as_read(parsed)
    differing = {key: value for key, value in meant.items() if read and read.get(key) != value}
    if differing:
        told = ", ".join(f"{key} {value}" for key, value in differing.items())
        seen = ", ".join(f"{key} {read.get(key)}" for key in differing)
        yield Finding("rope", "repair", f"config.json has {told}, but transformers reads {seen}", repair="rope")
    elif read:
        yield Finding("rope", "ok", f"rotary embedding {read['rope_type']}, theta {read.get('rope_theta')}")
    yield from _dtype(files)


def rope_as_written(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return theta and type as the file has them, under whichever of their names; a top-level theta is the older."""
    section = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not isinstance(section, Mapping) or any(isinstance(value, Mapping) for value in section.values()):
        return {}  # one set of parameters per kind of layer
    meant: dict[str, Any] = {}
    theta = next((text[key] for key in OLD_THETA if isinstance(text.get(key), int | float)), None)
    if theta is not None:
        meant["rope_theta"] = float(theta)
    kind = section.get("rope_type", section.get("type"))
    if isinstance(kind, str):
        meant["rope_type"] = OLD_TYPES.get(kind, kind)
    return meant


def _rope_as_read(parsed: PreTrainedConfig) -> dict[str, Any]:
    read = getattr(parsed.get_text_config(), "rope_parameters", None) or {}
    return dict(read) if isinstance(read.get("rope_type"), str) else {}


def _dtype(files: ModelFiles) -> Iterator[Finding]:
    """transformers reads `dtype`, and `torch_dtype` only if there is none; neither changes how weights are stored."""
    stored = stored_dtype(files.tensors.values())
    spelt = {
        key: str(files.config[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if files.config.get(key)
    }
    wrong = {key: value for key, value in spelt.items() if value not in FLOATS or (stored and value != stored)}
    if stored and wrong:
        named = " and ".join(f"{key} {value}" for key, value in wrong.items())
        yield Finding("dtype", "repair", f"config.json has {named}, but the weights are {stored}", repair="dtype")
    elif stored:
        yield Finding("dtype", "ok", f"the weights are {stored}")
