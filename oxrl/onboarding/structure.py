"""The facts of a model by its config and headers, and which parts of oxRL know it. No weight is loaded.

The model is built on torch's meta device, where tensors have no memory. What only a run can prove (the layout of
batches, the decoder) is called expected here; `verify_model` measures it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any

from oxrl.models.catalog import catalog
from oxrl.models.load import MEDIA_CONFIGS, SAFETENSORS, check_model, custom_classes, load_model_config, quantisation
from oxrl.models.lora import linear_layer_names
from oxrl.onboarding.files import ModelFiles, licence_of, stored_bytes, stored_dtype
from oxrl.onboarding.findings import Finding
from oxrl.onboarding.tokens import embedding_rows, text_section
from oxrl.types import ModelConfig

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")
ATTENTION = {"full_attention", "sliding_attention", "chunked_attention", "attention"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
REWARD_CLASS = "ForSequenceClassification"
PLANNED_DTYPE = "bfloat16"
UNBUILDABLE = (RuntimeError, ValueError, TypeError, AttributeError, ImportError, ArithmeticError, LookupError)
"""What the classes of transformers raise for a config that they do not fit; they check few of its numbers."""


def structure(files: ModelFiles, *, trust_remote_code: bool = False) -> tuple[dict[str, Any], list[Finding]]:
    """Return the facts of a model, and the findings about who knows its architecture."""
    facts: dict[str, Any] = {"modalities": modalities(files), "processors": processors(files)}
    findings = list(_weights(files, facts))
    if code := custom_classes(files.config):
        named = f"the config names Python code of the model for {', '.join(code)}; it is not executed"
        findings.append(Finding("custom_code", "note", named + (" unless needed" if trust_remote_code else "")))
    config = ModelConfig(files.loadable, trust_remote_code=trust_remote_code)
    refusal = _refusal(config)
    parsed, unreadable = _parsed(config)
    if parsed is not None:
        facts |= config_facts(parsed, files.config)
    if (score := _scores(files, parsed)) is not None:
        findings.append(Finding("architecture", "blocked", score))
    elif quantisation(files.config) is not None:
        findings.append(Finding("quantization", "blocked", str(refusal)))
    elif refusal is not None or parsed is None:
        findings.append(Finding("architecture", "blocked", refusal or unreadable))
    else:
        findings += _support(files, parsed, facts, trust_remote_code=trust_remote_code)
    facts["licence"] = licence_of(files)
    return facts, findings


def modalities(files: ModelFiles) -> list[str]:
    return ["text", *(medium for key, medium in MEDIA_CONFIGS.items() if files.config.get(key) is not None)]


def processors(files: ModelFiles) -> dict[str, str]:
    """Return the classes that the processor's files name: `{"image_processor_type": "Idefics3ImageProcessor"}`."""
    found: dict[str, str] = {}
    for file in PROCESSOR_FILES:
        content = files.json(file)
        for key in ("processor_class", "image_processor_type", "feature_extractor_type"):
            if isinstance(content.get(key), str):
                found.setdefault(key, content[key])
    return found


def _scores(files: ModelFiles, parsed: PreTrainedConfig | None) -> str | None:
    """Return what to do with a sequence classifier or a checkpoint of the algorithm rm; None for any other model."""
    from oxrl.models.reward_model import is_reward_model

    classifies = any(name.endswith(REWARD_CLASS) for name in architectures(files.config))
    labels = getattr(parsed, "num_labels", 1)
    if classifies and labels != 1:
        return f"this is a classifier of {labels} classes: it generates no text, and a reward model has one label"
    if classifies or (files.source.kind != "gguf" and is_reward_model(files.folder)):
        return f"this is a reward model: it gives scores; use it as reward.model: {files.name}"
    return None


def architectures(raw: Mapping[str, Any]) -> list[str]:
    """Return the classes that a `config.json` names."""
    named = raw.get("architectures")
    return [str(name) for name in named] if isinstance(named, list) else []


def config_facts(parsed: PreTrainedConfig, raw: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a transformers config says about size, context, attention and experts."""
    text = parsed.get_text_config()
    experts = next((value for name in EXPERTS if (value := getattr(text, name, None))), None)
    rope = getattr(text, "rope_parameters", None) or {}
    return {
        "architecture": next(iter(architectures(raw)), None),
        "model_type": parsed.model_type,
        "layers": getattr(text, "num_hidden_layers", None),
        "hidden_size": getattr(text, "hidden_size", None),
        "attention": attention_kinds(text),
        "heads": getattr(text, "num_attention_heads", None),
        "key_value_heads": getattr(text, "num_key_value_heads", None),
        "context": getattr(text, "max_position_embeddings", None),
        "rope": rope.get("rope_type") if isinstance(rope.get("rope_type"), str) else None,
        "vocabulary": getattr(text, "vocab_size", None),
        "tied_embeddings": bool(getattr(parsed, "tie_word_embeddings", False)),
        "experts": experts,
        "experts_per_token": getattr(text, "num_experts_per_tok", None) if experts else None,
    }


def attention_kinds(text: PreTrainedConfig) -> list[str]:
    """`["full_attention", "linear_attention"]`: the kinds of its layers."""
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds:
        kinds = {"sliding_attention" if getattr(text, "sliding_window", None) else "full_attention"}
    return sorted(map(str, kinds))


def _refusal(config: ModelConfig) -> str | None:
    """Return why the loaders refuse a model."""
    try:
        check_model(config, weights=False)
    except ValueError as error:
        return str(error)
    return None


def _parsed(config: ModelConfig) -> tuple[PreTrainedConfig | None, str]:
    """Return the transformers config; without one, why this transformers cannot read it."""
    try:
        return load_model_config(config), ""
    except ValueError as error:
        return None, str(error)


def _weights(files: ModelFiles, facts: dict[str, Any]) -> Iterator[Finding]:
    facts["stored_dtype"] = stored_dtype(files.tensors.values())
    facts["stored_bytes"] = stored_bytes(files.tensors.values()) or None
    if files.tensors and not files.defects:
        facts["parameters"] = sum(tensor.size for tensor in files.tensors.values())
    if files.source.kind == "gguf":
        facts["stored_bytes"] = (files.folder / files.source.where).stat().st_size
        yield Finding("weights", "note", "a GGUF file is dequantised when it is loaded; it cannot be repaired here")
        return
    for defect in files.defects:
        remedy = "" if "git lfs pull" in defect else ": download the model again"
        yield Finding("weights", "blocked", f"{defect}{remedy}")
    if not files.tensors and not files.defects:
        if files.source.kind == "hub":
            yield Finding("weights", "note", f"the weights are not here yet: oxrl models fetch {files.source.where}")
        else:
            pickled = next((f"; {file.name} is pickled, and not loaded" for file in files.folder.glob("*.bin")), "")
            message = f"there are no weights in safetensors ({' or '.join(SAFETENSORS)}){pickled}"
            yield Finding("weights", "blocked", f"{message}: write them with save_pretrained")
    elif not files.defects:
        count = len({tensor.file for tensor in files.tensors.values()})
        yield Finding("weights", "ok", f"{len(files.tensors)} tensors in {count} safetensors file(s)")


def _support(
    files: ModelFiles, parsed: PreTrainedConfig, facts: dict[str, Any], *, trust_remote_code: bool
) -> Iterator[Finding]:
    """Yield a finding for each part that has to know the architecture, and add what the planner counts."""
    import torch
    import transformers

    from oxrl.diagnose.model_facts import on_meta, shape_facts

    try:
        model = on_meta(parsed, torch.bfloat16, None, trust_remote_code)
    except UNBUILDABLE as error:
        yield Finding("architecture", "blocked", f"transformers cannot build it from its config.json: {_brief(error)}")
        return
    name = type(model).__name__
    if facts["architecture"] not in (name, None):
        message = f"config.json names {facts['architecture']}, but transformers builds {name} for its model_type"
        yield Finding("architecture", "note", message)
    facts["architecture"] = name
    facts.setdefault("parameters", sum(weight.numel() for weight in model.parameters()))
    known = f"known to transformers {transformers.__version__}"
    yield Finding("architecture", "ok", f"{name}, {'by its own code' if _is_own(model) else known}")
    yield from _shapes(files, model)
    stateful = bool(getattr(model, "_is_stateful", False)) or not set(facts["attention"]) <= ATTENTION
    packed = not stateful and bool(getattr(model, "_supports_sdpa", False))
    layout = "packed rows are expected" if packed else "rows with padding are expected: its layers carry state"
    if not packed and not stateful:
        layout = "rows with padding are expected: it has no sdpa attention"
    yield Finding("layout", "ok", f"{layout}; proven when it is verified")
    decoder = "padded waves" if stateful else "slots"
    yield Finding("embedded", "ok", f"the embedded engine is expected to sample in {decoder}")
    yield _vllm(name)
    targets = lora_targets(name, linear_layer_names(model))
    facts["lora_targets"] = targets
    yield Finding("lora", "ok" if targets else "note", f"LoRA targets: {', '.join(targets) or 'none'}")
    try:
        counted = shape_facts(parsed, torch.bfloat16, trust_remote_code=trust_remote_code)
    except UNBUILDABLE as error:
        yield Finding("planner", "note", f"the planner cannot count it: {_brief(error)}")
        return
    facts["active_parameters"] = facts["parameters"] - (counted.parameters - counted.active)
    yield Finding("planner", "ok", f"the planner counts {counted.weight_bytes / 2**30:.3g} GiB in {PLANNED_DTYPE}")


def _shapes(files: ModelFiles, model: PreTrainedModel) -> Iterator[Finding]:
    """Compare the headers of the weights with the tensors of the model that the config describes."""
    rows, declared = embedding_rows(files.tensors), text_section(files.config).get("vocab_size")
    if not files.tensors or files.defects or (rows is not None and declared is not None and rows != declared):
        return  # reported as findings about the weights and the vocabulary
    needed = {name: weight for name, weight in model.named_parameters() if not _may_be_missing(model, name)}
    differing = [name for name, weight in needed.items() if _stored_otherwise(files, name, tuple(weight.shape))]
    if differing:
        name = differing[0]
        stored, expected = (" x ".join(map(str, shape)) for shape in (files.tensors[name].shape, needed[name].shape))
        message = f"{len(differing)} tensors in the weights have other shapes than config.json says, such as {name}:"
        yield Finding("shapes", "blocked", f"{message} {stored} instead of {expected}")
        return
    stored_parameters = sum(tensor.size for tensor in files.tensors.values())
    parameters = sum(weight.numel() for weight in needed.values())
    if stored_parameters >= parameters:
        yield Finding("shapes", "ok", f"the weights have all {parameters:,} parameters of {type(model).__name__}")
        return
    missing = sorted(needed.keys() - files.tensors.keys())
    message = f"the weights lack {parameters - stored_parameters:,} of {parameters:,} parameters"
    if files.tensors.keys() <= dict(model.state_dict(keep_vars=True)).keys():  # no other names for the same tensors
        message += f", such as {missing[0]}"
    head = model.get_output_embeddings()
    if head is not None and all(needed[name] is head.weight for name in missing):
        message += "; if the model was trained with tied embeddings, set tie_word_embeddings to true in config.json"
    yield Finding("shapes", "blocked", message)


def _brief(error: Exception) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def _is_own(model: PreTrainedModel) -> bool:
    return not type(model).__module__.startswith("transformers.")


def _may_be_missing(model: PreTrainedModel, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in model._keys_to_ignore_on_load_missing or ())


def _stored_otherwise(files: ModelFiles, name: str, shape: tuple[int, ...]) -> bool:
    tensor = files.tensors.get(name)
    return tensor is not None and tensor.shape != shape


def lora_targets(architecture: str, linear: list[str]) -> list[str]:
    """Return the targets of the catalogue for an architecture, else all its linear layers."""
    known = next((entry.lora_targets for entry in catalog().values() if entry.architecture == architecture), None)
    return list(known) if known is not None and set(known) <= set(linear) else linear


def _vllm(architecture: str) -> Finding:
    known = vllm_architectures()
    if known is None:
        return Finding("vllm", "note", "vLLM is not installed here")
    if architecture in known:
        return Finding("vllm", "ok", f"the installed vLLM knows {architecture}")
    return Finding("vllm", "note", f"the installed vLLM does not know {architecture}: sample with the embedded engine")


@cache
def vllm_architectures() -> frozenset[str] | None:
    """Return the architectures of the installed vLLM; None without it."""
    if importlib.util.find_spec("vllm") is None:
        return None
    try:
        from vllm.model_executor.models.registry import ModelRegistry
    except (ImportError, RuntimeError, OSError):  # installed, but broken: `oxrl doctor` says how
        return None
    return frozenset(ModelRegistry.get_supported_archs())
