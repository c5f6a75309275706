"""One naming of weights for whoever samples with them: a trainer's module to the tensors of a plain checkpoint.

Wrappers, adapters and heads have names of their own inside a training module; an engine knows those that
`save_pretrained` writes, and none other. Weights pass one at a time and are written in buckets, so a model that is
spread over ranks is never whole anywhere: how one of its weights is brought together comes from outside (`full`).
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

from oxrl.types import Rendezvous, Weights, WeightSource
from oxrl.weights.broadcast import send

if TYPE_CHECKING:
    import torch
    from torch import Tensor

BUCKET = 2**30  # bytes of weights in one file, and in memory on their way there
ADAPTER_WEIGHTS = "adapter_model.safetensors"
POLICY_ADAPTER = "default"  # as PEFT calls the first
REFERENCE_ADAPTER = "ref"
_INDEX = "model.safetensors.index.json"
# What stands between two parts of a name and is no part of the model: compile, checkpointing, FSDP1, PEFT.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module|base_layer|modules_to_save\.[^.]+)\."
)
_ADAPTER = re.compile(r"(?:^|\.)(?:lora_\w+|original_module)(?:\.|$)")
_FOLLOWS = re.compile(rf"(?<=\.)(lora_\w+)\.{REFERENCE_ADAPTER}(?=\.|$)")
_LAYER = re.compile(r".*?\.\d+(?=\.)")

Full: TypeAlias = "Callable[[Tensor], Tensor]"
"""The whole of one weight of a training module. Over ranks it is a collective: all call it for the same weights."""


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor.detach()


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


def followed_name(name: str) -> str | None:
    """The weight that one of the reference's adapter follows; None for those of everything else.

    `followed_name("up_proj.lora_A.ref.weight") == "up_proj.lora_A.default.weight"`.
    """
    followed = _FOLLOWS.sub(rf"\1.{POLICY_ADAPTER}", name)
    return followed if followed != name else None


def plain_weights(module: Any, full: Full = as_it_is, *, adapter: bool = True) -> Iterator[tuple[str, Tensor]]:
    """Each weight under its name in a plain checkpoint, an adapter's share added to it unless told not to."""
    _, inner = _transformers_model(module)
    if not getattr(inner, "_weight_conversions", None):
        yield from _merged(module, full, adapter)
        return
    # transformers fuses some weights (experts) when it loads them; all that becomes one is of one layer.
    from transformers.core_model_loading import revert_weight_conversion

    for _, layer in groupby(_merged(module, full, adapter), key=lambda named: _layer_of(named[0])):
        yield from revert_weight_conversion(inner, dict(layer)).items()


def pass_weights(module: Any, full: Full, *, adapter: bool = True) -> None:
    """Take part in bringing together what another rank writes, and keep nothing."""
    for _ in _merged(module, full, adapter):
        pass


def write_weights(
    module: Any, folder: Path, full: Full = as_it_is, *, bucket: int = BUCKET, adapter: bool = True
) -> None:
    """A folder that an engine loads: weights and `config.json`, without tokenizer, optimizer and heads."""
    folder.mkdir(parents=True, exist_ok=True)
    _transformers_model(module)[1].config.save_pretrained(folder)
    write_tensors(plain_weights(module, full, adapter=adapter), folder, bucket=bucket)


def write_tensors(weights: Iterator[tuple[str, Tensor]], folder: Path, *, bucket: int = BUCKET) -> None:
    """As a checkpoint's files, of at most `bucket` bytes each, with an index where they are several."""
    files = [_write_bucket(folder, *each) for each in enumerate(_buckets(weights, bucket), 1)]
    if len(files) == 1:
        (folder / files[0][0]).rename(folder / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, (file, names, _) in enumerate(files, 1):
        final = f"model-{number:05}-of-{len(files):05}.safetensors"
        (folder / file).rename(folder / final)
        where |= dict.fromkeys(names, final)
    _write_index(folder, where, sum(size for _, _, size in files))


def index_weights(folder: Path) -> None:
    """Where weights are in one file, say so: vLLM takes every safetensors file for weights that no index leaves out."""
    from safetensors import safe_open

    file = folder / "model.safetensors"
    if file.exists() and not (folder / _INDEX).exists():
        with safe_open(file, framework="pt") as opened:
            _write_index(folder, dict.fromkeys(opened.keys(), file.name), file.stat().st_size)


def _write_index(folder: Path, where: dict[str, str], size: int) -> None:
    index = {"metadata": {"total_size": size}, "weight_map": where}
    (folder / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def read_weights(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """What `write_weights` wrote, one at a time."""
    from safetensors import safe_open

    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                yield name, opened.get_tensor(name)


def adapter_files(write: Callable[[Path], None]) -> dict[str, bytes]:
    """What `write` puts into a folder, by name: an adapter's files are small enough to travel as they are."""
    with tempfile.TemporaryDirectory(prefix="oxrl-adapter-", dir=shm_dir()) as folder:
        write(Path(folder))
        return {file.name: file.read_bytes() for file in Path(folder).iterdir() if file.is_file()}


def adapter_weights(module: Any, full: Full = as_it_is) -> dict[str, Tensor]:
    """The policy's adapter: weights under their names in the model that has it, all of them, for they are small."""
    tensors = _adapted_model(module).state_dict(keep_vars=True)
    return {
        name: full(tensor) for name, tensor in tensors.items() if _ADAPTER.search(name) and followed_name(name) is None
    }


def write_adapter(module: Any, folder: Path, weights: dict[str, Tensor] | None = None) -> None:
    """The policy's adapter alone, and proof that it arrived: wrappers around layers can hide it from PEFT."""
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
            f"the adapter saved in {folder} has {saved} of the model's {held} adapter weights; is a layer wrapped "
            f"(for activation checkpointing, say) so that its weights have other names?"
        )


class ModuleWeights:
    """`ModuleWeights(model)`: the weights of a module in this process, as a `WeightSource`."""

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

    def send(self, place: Rendezvous) -> None:
        send(plain_weights(self.module), place)

    def logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        return trainer_logprobs(self.module, tokens)


class StaleWeightsError(RuntimeError):
    """Weights of a version that their holder does not have any more: it has trained on."""


def source_of(weights: Weights) -> WeightSource:
    """Whom to ask for these: the module if it is here, else whoever has them."""
    if weights.module is not None:
        return ModuleWeights(weights.module)
    if weights.source is None:
        raise ValueError(f"version {weights.version} of the weights has neither a module nor a source to ask for them")
    return weights.source


def trainer_logprobs(module: Any, tokens: Sequence[int]) -> tuple[float, ...]:
    """Of each token but the first, by the trainer's module, adapter included, without dropout."""
    import torch

    with eval_mode(module):
        device = module.get_input_embeddings().weight.device
        ids = torch.tensor([list(tokens)], device=device)
        logits = module(input_ids=ids, use_cache=False).logits[0, :-1].float()
        return tuple(logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0].tolist())


@contextmanager
def eval_mode(model: Any) -> Iterator[None]:
    """Without dropout and gradients; afterwards the model is in the mode that it was in."""
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


def shm_dir() -> Path:
    """In memory if this machine has a folder there: engines on other machines need a shared one instead."""
    memory = Path("/dev/shm")  # noqa: S108 - whoever uses it makes a folder of its own in it
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
                    tensor = tensor + _share(layer, adapter, full).to(tensor.dtype)
            yield plain, tensor


def _share(layer: Any, adapter: str, full: Full) -> Tensor:
    """What an adapter adds to the weight of its layer, by PEFT's own arithmetic over the whole of its weights."""
    import torch

    class Share(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = layer

        def forward(self) -> Any:
            return self.layer.get_delta_weight(adapter)

    own = {f"layer.{name}": full(weight) for name, weight in layer.named_parameters() if f".{adapter}" in name}
    added: Tensor = torch.func.functional_call(Share(), own, ())
    return added


def _layer_of(name: str) -> str:
    found = _LAYER.match(name)
    return found.group() if found else ""


def _buckets(weights: Iterator[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    bucket: dict[str, Tensor] = {}
    for name, tensor in weights:
        if bucket and _size(bucket) + tensor.nbytes > limit:
            yield bucket
            bucket = {}
        bucket[name] = tensor.cpu().contiguous()
    yield bucket


def _write_bucket(folder: Path, number: int, bucket: dict[str, Tensor]) -> tuple[str, list[str], int]:
    from safetensors.torch import save_file

    file = f"model-{number:05}.safetensors"
    save_file(bucket, folder / file, metadata={"format": "pt"})
    return file, list(bucket), _size(bucket)


def _size(tensors: dict[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _adapted_model(module: Any) -> Any:
    return next(part for part in module.modules() if hasattr(part, "peft_config"))


def _transformers_model(module: Any) -> tuple[str, Any]:
    """Where inside of a training module the language model is, as a prefix of its names, and the model."""
    from transformers import PreTrainedModel

    for name, part in module.named_modules():
        if isinstance(part, PreTrainedModel):
            return f"{name}." if name else "", part
    raise ValueError(f"{type(module).__name__} holds no transformers model whose weights could be sampled with")
