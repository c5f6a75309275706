"""One naming of weights for whoever samples with them: a trainer's module to the tensors of a plain checkpoint.

Wrappers, adapters and heads have names of their own inside a training module; an engine knows those that
`save_pretrained` writes, and none other. Gathering shards is left to the backends, moving tensors to the generators.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

# What stands between two parts of a name and is no part of the model: compile, checkpointing, FSDP1, PEFT.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|base_layer|modules_to_save\.[^.]+)\."
)
_ADAPTER = re.compile(r"(?:^|\.)(?:lora_\w+|original_module)(?:\.|$)")


def plain_names(module: Any) -> dict[str, str]:
    """The tensors of a training module that a sampler knows: their names here, and in a plain checkpoint.

    `{"model.base_model.model.model.norm.weight": "model.norm.weight", ...}` for a model with an adapter and a value
    head around it. Heads and adapter weights are left out, and so is the second name of a tied weight.
    """
    prefix, _ = _transformers_model(module)
    names: dict[str, str] = {}
    seen: set[int] = set()
    for name, tensor in module.state_dict(keep_vars=True).items():
        if not name.startswith(prefix) or _ADAPTER.search(name) or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        names[name] = _WRAPPERS.sub("", name.removeprefix(prefix))
    return names


def plain_weights(module: Any) -> Iterator[tuple[str, Tensor]]:
    """Each weight under its name in a plain checkpoint, an adapter's share added to it, one at a time."""
    _, inner = _transformers_model(module)
    stream = _merged(module)
    if getattr(inner, "_weight_conversions", None):  # transformers fuses some weights (experts) when it loads them
        from transformers.core_model_loading import revert_weight_conversion

        yield from revert_weight_conversion(inner, dict(stream)).items()
    else:
        yield from stream


def write_weights(module: Any, folder: Path) -> None:
    """A folder that an engine loads: weights and `config.json`, without tokenizer, optimizer and heads."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    _transformers_model(module)[1].config.save_pretrained(folder)
    weights = {name: tensor.contiguous() for name, tensor in plain_weights(module)}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _merged(module: Any) -> Iterator[tuple[str, Tensor]]:
    import torch

    tensors = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, plain in plain_names(module).items():
            tensor = tensors[name].detach()
            owner = name.removesuffix(".base_layer.weight")
            if owner != name:
                layer = module.get_submodule(owner)
                for adapter in () if layer.disable_adapters else layer.active_adapters:
                    tensor = tensor + layer.get_delta_weight(adapter).to(tensor.dtype)
            yield plain, tensor


def _transformers_model(module: Any) -> tuple[str, Any]:
    """Where inside of a training module the language model is, as a prefix of its names, and the model."""
    from transformers import PreTrainedModel

    for name, part in module.named_modules():
        if isinstance(part, PreTrainedModel):
            return f"{name}." if name else "", part
    raise ValueError(f"{type(module).__name__} holds no transformers model whose weights could be sampled with")
