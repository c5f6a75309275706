"""The weights of a training module under their names in a plain checkpoint, for engines and files.

Wrappers, adapters and heads change names inside a training module; an engine knows only those that `save_pretrained`
writes. Weights are passed one at a time and written in buckets, so a sharded model is never complete in one process;
the caller defines how one weight is gathered (`full`).
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from oxrl.types import Media, Rendezvous, Weights, WeightSource
from oxrl.weights.broadcast import send
from oxrl.weights.buckets import grouped

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUCKET = 2**30  # bytes of weights in one file, and in memory while writing
ADAPTER_WEIGHTS = "adapter_model.safetensors"
POLICY_ADAPTER = "default"  # PEFT's name of the first adapter
REFERENCE_ADAPTER = "ref"
_INDEX = "model.safetensors.index.json"
# Name components of wrappers: compile, checkpointing, FSDP1, PEFT.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|base_layer|modules_to_save\.[^.]+)\."
)
_ADAPTER = re.compile(r"(?:^|\.)(?:lora_\w+|original_module)(?:\.|$)")
_FOLLOWS = re.compile(rf"(?<=\.)(lora_\w+)\.{REFERENCE_ADAPTER}(?=\.|$)")
_LAYER = re.compile(r".*?\.\d+(?=\.)")

Full: TypeAlias = "Callable[[Tensor], Tensor]"
"""Returns one full weight of a training module. Over ranks it is a collective: all call it for the same weights."""


def detached(tensor: Tensor) -> Tensor:
    return tensor.detach()


def plain_names(module: Any) -> dict[str, str]:
    """Return the tensors of a training module that an engine loads: name in the module -> name in a plain checkpoint.

    `{"model.base_model.model.model.norm.weight": "model.norm.weight", ...}` for a model with an adapter and a value
    head around it. Heads, adapter weights and the second name of a tied weight are omitted.
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


def followed_name(name: str) -> str | None:
    """Return the policy weight that a weight of the reference adapter follows; None for other weights.

    `followed_name("up_proj.lora_A.ref.weight") == "up_proj.lora_A.default.weight"`.
    """
    followed = _FOLLOWS.sub(rf"\1.{POLICY_ADAPTER}", name)
    return followed if followed != name else None


def plain_weights(module: Any, full: Full = detached, *, adapter: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight under its name in a plain checkpoint, by default with the adapter merged."""
    _, inner = _transformers_model(module)
    if not getattr(inner, "_weight_conversions", None):
        yield from _merged(module, full, adapter)
        return
    # transformers fuses some weights (experts) on loading; those that are fused belong to one layer.
    from transformers.core_model_loading import revert_weight_conversion

    for _, layer in groupby(_merged(module, full, adapter), key=lambda named: _layer_of(named[0])):
        yield from revert_weight_conversion(inner, dict(layer)).items()


def pass_weights(module: Any, full: Full, *, adapter: bool = True) -> None:
    """Take part in gathering the weights that another rank writes, and keep nothing."""
    for _ in _merged(module, full, adapter):
        pass


def write_weights(
    module: Any, folder: Path, full: Full = detached, *, bucket: int = BUCKET, adapter: bool = True
) -> None:
    """Write a folder that an engine loads: weights and `config.json`, without tokenizer, optimizer and heads."""
    folder.mkdir(parents=True, exist_ok=True)
    _transformers_model(module)[1].config.save_pretrained(folder)
    write_tensors(plain_weights(module, full, adapter=adapter), folder, bucket=bucket)


def write_tensors(weights: Iterator[tuple[str, Tensor]], folder: Path, *, bucket: int = BUCKET) -> None:
    """Write safetensors files of at most `bucket` bytes each, with an index if there are several."""
    on_cpu = ((name, tensor.cpu().contiguous()) for name, tensor in weights)
    files = [_write_bucket(folder, number, dict(each)) for number, each in enumerate(grouped(on_cpu, bucket), 1)]
    if len(files) == 1:
        (folder / files[0][0]).rename(folder / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (file, names, _) in enumerate(files, 1):
        final = f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / file).rename(folder / final)
        weight_map |= dict.fromkeys(names, final)
    _write_index(folder, weight_map, sum(size for _, _, size in files))


def index_weights(folder: Path) -> None:
    """Write an index for a single weights file: without one, vLLM loads every safetensors file in the folder."""
    from safetensors import safe_open

    file = folder / "model.safetensors"
    if file.exists() and not (folder / _INDEX).exists():
        with safe_open(file, framework="pt") as opened:
            _write_index(folder, dict.fromkeys(opened.keys(), file.name), file.stat().st_size)


def _write_index(folder: Path, weight_map: dict[str, str], size: int) -> None:
    index = {"metadata": {"total_size": size}, "weight_map": weight_map}
    (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that `write_weights` wrote, by name."""
    from safetensors import safe_open

    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_tensor(name)


def adapter_files(write: Callable[[Path], None]) -> dict[str, bytes]:
    """Return the files that `write` puts into a folder, by name; an adapter's are small enough to send."""
    with tempfile.TemporaryDirectory(prefix="oxrl-adapter-", dir=shm_dir()) as folder:
        write(Path(folder))
        return {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}


def adapter_weights(module: Any, full: Full = detached) -> dict[str, Tensor]:
    """Return all weights of the policy's adapter, under their names in the PEFT model."""
    tensors = _adapted_model(module).state_dict(keep_vars=True)
    return {
        name: full(tensor) for name, tensor in tensors.items() if _ADAPTER.search(name) and followed_name(name) is None
    }


def write_adapter(module: Any, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """Write the policy's adapter, and check that all of it was saved: wrappers around layers can hide it from PEFT."""
    from safetensors import safe_open

    weights = adapter_weights(module) if weights is None else weights
    _adapted_model(module).save_pretrained(
        str(folder), state_dict=weights, save_embedding_layers=False, selected_adapters=[POLICY_ADAPTER]
    )
    with safe_open(folder / ADAPTER_WEIGHTS, framework="pt") as written:
        saved = sum("lora_" in name for name in written.keys())  # noqa: SIM118 - not a mapping
    held = sum("lora_" in name and followed_name(name) is None for name, _ in module.named_parameters())
    if not held or saved != held:
        raise RuntimeError(
            f"the adapter saved in {folder} has {saved} of the model's {held} adapter weights: check whether a wrapper "
            "around a layer (e.g. for activation checkpointing) renames its weights"
        )


class ModuleWeights:
    """`ModuleWeights(model)`: a `WeightSource` over a module in this process."""

    def __init__(self, module: Any) -> None:
        self.module = module

    @property
    def vocabulary(self) -> int:
        return int(self.module.get_input_embeddings().weight.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.module.get_input_embeddings().weight.dtype
        return dtype

    @property
    def adapted(self) -> bool:
        return hasattr(self.module, "peft_config")

    def write(self, folder: Path) -> None:
        write_weights(self.module, folder)

    def write_base(self, folder: Path) -> None:
        write_weights(self.module, folder, adapter=False)

    def write_adapter(self, folder: Path) -> None:
        write_adapter(self.module, folder)

    def send(self, rendezvous: Rendezvous) -> None:
        send(plain_weights(self.module), rendezvous)

    def logprobs(self, tokens: Sequence[int], media: Sequence[Media] = ()) -> tuple[float, ...]:
        return trainer_logprobs(self.module, tokens, media)


class StaleWeightsError(RuntimeError):
    """The requested version of the weights no longer exists: the trainer has taken another step."""


def source_of(weights: Weights) -> WeightSource:
    """Return the source of these weights: the module if it is in this process, else the given source."""
    if weights.module is not None:
        return ModuleWeights(weights.module)
    if weights.source is None:
        raise ValueError(f"version {weights.version} of the weights has neither a module nor a source")
    return weights.source


def trainer_logprobs(module: Any, tokens: Sequence[int], media: Sequence[Media] = ()) -> tuple[float, ...]:
    """Return log-probs of each token but the first by the trainer's module, with its adapter, without dropout."""
    import torch

    with eval_mode(module):
        device = module.get_input_embeddings().weight.device
        ids = torch.tensor([list(tokens)], device=device)
        inputs = _with_media(module, tokens, media) if media else {"input_ids": ids}
        logits = module(**inputs, use_cache=False).logits[0, :-1].float()
        return tuple(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist())


def _with_media(module: Any, tokens: Sequence[int], media: Sequence[Media]) -> dict[str, Any]:
    _, model = _transformers_model(module)
    inputs: dict[str, Any] = model.media_towers.own_inputs(model, tokens, media)
    return inputs


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Disable dropout and gradients inside the block; restore the mode of each module afterwards."""
    import torch

    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass instead of keeping them.

    transformers does so in train mode only, so the model is put into train mode. The re-entrant variant loses
    gradients if the inputs need none, as after the frozen embedding of a LoRA model.
    """
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.train()


def shm_dir() -> Path:
    """Return a folder in memory if this machine has one, else the temporary folder; not shared between machines."""
    memory = Path("/dev/shm")  # noqa: S108 - callers create their own folder in it
    return memory if memory.is_dir() else Path(tempfile.gettempdir())


def _merged(module: Any, full: Full, with_adapter: bool) -> Iterator[tuple[str, Tensor]]:
    import torch

    tensors = module.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, plain in plain_names(module).items():
            tensor = full(tensors[name])
            owner = name.removesuffix(".base_layer.weight")
            if owner != name and with_adapter:
                layer = module.get_submodule(owner)
                for adapter in () if layer.disable_adapters else layer.active_adapters:
                    tensor = tensor + _delta(layer, adapter, full).to(tensor.dtype)
            yield plain, tensor


def _delta(layer: Any, adapter: str, full: Full) -> Tensor:
    """Return what an adapter adds to the weight of its layer, computed by PEFT from the full adapter weights."""
    import torch

    class Delta(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self) -> Any:
            return self.layer.get_delta_weight(adapter)

    own = {f"layer.{name}": full(weight) for name, weight in layer.named_parameters() if f".{adapter}" in name}
    added: Tensor = torch.func.functional_call(Delta(), own, ())
    return added


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else ""


def _write_bucket(folder: Path, number: int, bucket: dict[str, Tensor]) -> tuple[str, list[str], int]:
    from safetensors.torch import save_file

    file = f"model-{number:05}.safetensors"
    save_file(bucket, folder / file, metadata={"format": "pt"})
    return file, list(bucket), sum(tensor.nbytes for tensor in bucket.values())


def _adapted_model(module: Any) -> Any:
    return next(part for part in module.modules() if hasattr(part, "peft_config"))


def _transformers_model(module: Any) -> tuple[str, Any]:
    """Return the transformers model inside a training module, and the prefix of its names."""
    from transformers import PreTrainedModel

    for name, part in module.named_modules():
        if isinstance(part, PreTrainedModel):
            return f"{name}." if name else "", part
    raise ValueError(f"{type(module).__name__} contains no transformers model")
