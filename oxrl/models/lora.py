"""LoRA adapters: attach, save, load and merge.

With the adapter disabled, the base model computes bit-identical outputs, so it can serve as the reference of its own
training; a reference that follows the policy is a second adapter over the same base. The projection to the vocabulary
never gets an adapter, and towers that read media get one only if a target is in them alone. Loading is in `load`.
"""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from oxrl.parsing import read_json
from oxrl.weights.checkpoint_names import (
    ADAPTER_WEIGHTS,
    POLICY_ADAPTER,
    REFERENCE_ADAPTER,
    followed_name,
    write_adapter,
)

if TYPE_CHECKING:
    from peft import PeftModel
    from transformers import PreTrainedModel

ADAPTER_CONFIG = "adapter_config.json"
_MAMBA = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}  # peft accepts no adapter at their out_proj
_NO_HEAD_ADAPTER = "is used as one plain matrix, so an adapter there would have no effect; leave it out"


class LoraSettings(NamedTuple):
    """`LoraSettings(r=8, target_modules=("q_proj", "v_proj"))`; biases are never trained."""

    r: int = 16
    alpha: int = 32
    dropout: float = 0.0
    target_modules: str | tuple[str, ...] = "all-linear"


def attach_lora(model: PreTrainedModel, settings: LoraSettings, *, seed: int = 0) -> PeftModel:
    """Freeze the model and add a trainable adapter, which has no effect until it is trained.

    The initial weights depend on `seed` only, not on the global random state.
    """
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model

    if isinstance(model, PeftModel):
        raise ValueError("the model already has an adapter; train that one, or merge it before attaching another")
    if settings.r < 1 or settings.alpha <= 0 or not 0 <= settings.dropout < 1:
        raise ValueError(f"LoRA needs r >= 1, alpha > 0 and 0 <= dropout < 1, but got {settings}")
    config = LoraConfig(
        r=settings.r,
        lora_alpha=settings.alpha,
        lora_dropout=settings.dropout,
        target_modules=(targets := _checked_targets(model, settings.target_modules)),
        exclude_modules=_towers_without_adapter(model, targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        return _with_mode_of(model, get_peft_model(model, config))


def attach_reference(model: PeftModel) -> PeftModel:
    """Add a frozen copy of the adapter, as a reference that can follow the policy; it is inactive otherwise."""
    import torch

    config = copy.deepcopy(model.peft_config[POLICY_ADAPTER])
    config.lora_dropout = 0.0  # a reference has no dropout
    with torch.random.fork_rng(devices=[]):
        model.add_adapter(REFERENCE_ADAPTER, config)
    weights = dict(model.named_parameters())
    with torch.no_grad():
        for name, weight in weights.items():
            if (followed := followed_name(name)) is not None:
                weight.requires_grad_(False).copy_(weights[followed])
    return _with_mode_of(model, model)


def save_adapter(model: PeftModel, folder: str | Path) -> None:
    """Write the adapter without the base model, and verify that it is complete."""
    write_adapter(model, Path(folder))


def load_adapter(base: PreTrainedModel, folder: str | Path, trainable: bool = True) -> PeftModel:
    """Return the base model with the adapter of `folder`; every weight of the adapter must match a layer."""
    from peft import PeftModel, get_peft_model_state_dict
    from safetensors import safe_open

    read_adapter_config(folder)
    try:
        model = PeftModel.from_pretrained(base, str(folder), is_trainable=trainable)
    except RuntimeError as error:
        last_line = str(error).strip().splitlines()[-1].strip()  # PEFT reports one line per weight
        raise ValueError(f"the adapter in {folder} does not fit the base model: {last_line}") from error
    with safe_open(Path(folder) / ADAPTER_WEIGHTS, framework="pt") as written:
        unmatched = set(written.keys()) ^ set(get_peft_model_state_dict(model, save_embedding_layers=False))
    if unmatched:
        raise ValueError(
            f"the adapter in {folder} does not fit the base model: {len(unmatched)} weights have no counterpart, "
            f"such as {min(unmatched)}"
        )
    if type(model.get_output_embeddings()).__module__.startswith("peft."):
        raise ValueError(
            f"the adapter in {folder} changes the projection to the vocabulary, but that {_NO_HEAD_ADAPTER}"
        )
    return _with_mode_of(base, model)


def read_adapter_config(folder: str | Path) -> dict[str, Any]:
    """Return `adapter_config.json` of a folder with a LoRA adapter in safetensors."""
    folder = Path(folder)
    if not (folder / ADAPTER_CONFIG).is_file():
        raise ValueError(f"{folder} is not an adapter folder: it has no {ADAPTER_CONFIG}")
    config = read_json(folder / ADAPTER_CONFIG)
    if config.get("peft_type") != "LORA":
        raise ValueError(f"the adapter in {folder} has the type {config.get('peft_type')}; only LORA is supported")
    if not (folder / ADAPTER_WEIGHTS).is_file():
        raise ValueError(f"the adapter in {folder} has no {ADAPTER_WEIGHTS}; pickled weights (.bin) are not loaded")
    return config


def merge_adapter(model: PeftModel) -> PreTrainedModel:
    """Return a plain model with the adapter merged into a copy of the weights; `model` is not changed."""
    merged = copy.deepcopy(model).merge_and_unload(safe_merge=True)
    return merged.requires_grad_(True)


def save_merged(model: PeftModel, folder: str | Path) -> None:
    """Write the merged model as plain Hugging Face weights."""
    merge_adapter(model).save_pretrained(folder)


def linear_layer_names(model: PreTrainedModel) -> list[str]:
    """Return the last name parts of all layers that can get an adapter: `["down_proj", "gate_proj", ...]`."""
    return sorted({name.rpartition(".")[2] for name in _linear_layers(model)})


def _with_mode_of(base: PreTrainedModel | PeftModel, model: PeftModel) -> PeftModel:
    """Put new modules, which start in train mode with active dropout, into the mode of the base model."""
    return model.train(base.training)


def _linear_layers(model: PreTrainedModel) -> list[str]:
    from torch.nn import Linear
    from transformers.pytorch_utils import Conv1D

    head = model.get_output_embeddings()
    return [
        name
        for name, module in model.named_modules()
        if module is not head
        and not (model.config.model_type in _MAMBA and name.endswith("out_proj"))
        # A subclass with a result of its own, such as Llama 4's router of experts, can have no adapter.
        and any(isinstance(module, kind) and type(module).forward is kind.forward for kind in (Linear, Conv1D))
    ]


def _checked_targets(model: PreTrainedModel, targets: str | tuple[str, ...]) -> list[str]:
    from oxrl.data.media_features import language_model_of

    if targets == "all-linear":
        return linear_layer_names(language_model_of(model))
    names = [targets] if isinstance(targets, str) else list(targets)
    head = model.get_output_embeddings()
    head_name = next((name for name, module in model.named_modules() if module is head), "lm_head")
    linear = _linear_layers(model)
    for target in names:
        if _matches(target, head_name):
            raise ValueError(f"{target} cannot be a LoRA target: it projects to the vocabulary and {_NO_HEAD_ADAPTER}")
        if not any(_matches(target, name) for name in linear):
            raise ValueError(
                f"the LoRA target {target} matches no linear layer of {type(model).__name__}; "
                f"use 'all-linear' or some of {', '.join(linear_layer_names(model))}"
            )
    if not names:
        raise ValueError(f"LoRA needs targets: 'all-linear' or some of {', '.join(linear_layer_names(model))}")
    return names


def _towers_without_adapter(model: PreTrainedModel, targets: list[str]) -> str | None:
    """Return a pattern of the vision and audio towers, unless a target is in them only: adapters go elsewhere."""
    from oxrl.data.media_features import body_of, towers_of

    towers = [id(tower) for tower in towers_of(body_of(model))]
    prefixes = [name for name, module in model.named_modules() if id(module) in towers]
    inside = [name for name in _linear_layers(model) if name.startswith(tuple(f"{prefix}." for prefix in prefixes))]
    outside = set(_linear_layers(model)) - set(inside)
    if not prefixes or not all(any(_matches(target, name) for name in outside) for target in targets):
        return None
    return rf"(.*\.)?({'|'.join(map(re.escape, prefixes))})\..*"


def _matches(target: str, module: str) -> bool:
    return module == target or module.endswith(f".{target}")
