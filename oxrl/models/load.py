"""Load a model by name: from the catalogue, a hub id, a local folder, a `.gguf` file or the folder of a LoRA adapter.

`check_model` validates a `ModelConfig` before any weight is read; the loaders apply its dtype, device, attention and
gradient checkpointing. Only safetensors are loaded, never pickles; files of a checkpoint are compared with its digests.
Adding adapters is in `lora`, sharding in the backends.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from oxrl.machine.hub import SECONDS, offline_if_unreachable
from oxrl.machine.inventory import REPAIR_TORCHVISION, torchvision_error
from oxrl.models.builtin import BUILTIN_MODELS, builtin_named_by, prepare_builtin
from oxrl.models.catalog import catalog, catalogued
from oxrl.models.chat_templates import set_template
from oxrl.models.lora import ADAPTER_CONFIG, load_adapter, read_adapter_config
from oxrl.names import nearest_name
from oxrl.parsing import read_json
from oxrl.types import ModelConfig
from oxrl.weights.checkpoint_names import enable_gradient_checkpointing
from oxrl.weights.integrity import check_model_files

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from oxrl.data.media import Kind
    from oxrl.data.processor import MediaProcessor

logger = logging.getLogger(__name__)

DTYPES = ("auto", "float32", "bfloat16", "float16")
MEDIA_CONFIGS: Mapping[str, Kind] = {"vision_config": "image", "audio_config": "audio"}
SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
TRAINED_BASE = "oxrl_base.json"  # of an exported adapter: the built-in model that it was trained on
LFS_POINTER = b"version https://git-lfs"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


class ModelLoader(Protocol):
    """The signature of the function that `load_model` calls, such as `load_hf_model`."""

    def __call__(
        self,
        name_or_path: str,
        dtype: str,
        device: str,
        attn_implementation: str,
        *,
        trust_remote_code: bool,
        revision: str | None,
        is_trainable: bool,
    ) -> PreTrainedModel: ...


class TokenizerLoader(Protocol):
    """The signature of the function that `load_tokenizer` calls, such as `load_hf_tokenizer`."""

    def __call__(
        self, name_or_path: str, *, trust_remote_code: bool, revision: str | None
    ) -> PreTrainedTokenizerBase: ...


class Source(NamedTuple):
    """`Source("gguf", "/models/a.gguf")`: the kind of a model's name, and its path or id."""

    kind: Literal["builtin", "folder", "gguf", "adapter", "hub"]
    where: str


def load_hf_model(
    name_or_path: str,
    dtype: str = "auto",
    device: str = "auto",
    attn_implementation: str = "sdpa",
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    is_trainable: bool = True,
) -> PreTrainedModel:
    """Load a causal language model, also one that reads media; an adapter's folder gives its base with the adapter."""
    config = ModelConfig(
        name_or_path,
        dtype=dtype,
        attn_implementation=attn_implementation,
        trust_remote_code=trust_remote_code,
        device=device,
        revision=revision,
    )
    check_model(config)
    source = find_model(name_or_path)
    if source.kind in ("folder", "adapter") and not builds_empty():
        check_model_files(Path(source.where), weights=True)
    if source.kind == "adapter":
        base = load_hf_model(
            adapter_base(source.where), dtype, device, attn_implementation, trust_remote_code=trust_remote_code
        )
        return load_adapter(base, source.where, trainable=is_trainable)
    if builds_empty():
        return _build_empty(source, config)
    return _load_weights(source, config).to(resolve_device(device))


def builds_empty() -> bool:
    """Return whether models are built without weights: inside `with torch.device("meta")`, as sharded backends do."""
    import torch

    return torch.get_default_device().type == "meta"


def load_hf_tokenizer(
    name_or_path: str, *, trust_remote_code: bool = False, revision: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a model; for an adapter's folder without one, its base's."""
    check_torchvision()
    from transformers import AutoTokenizer

    source = find_model(name_or_path)
    if source.kind == "gguf":
        from oxrl.models.gguf import load_gguf_tokenizer

        logger.warning("the tokenizer rebuilt from %s may split rare text differently from the original", source.where)
        return load_gguf_tokenizer(Path(source.where))
    where = str(prepare_builtin(source.where)) if source.kind == "builtin" else source.where
    if source.kind != "hub" and not any((Path(where) / file).is_file() for file in TOKENIZER_FILES):
        if source.kind == "adapter":
            return load_hf_tokenizer(adapter_base(where), trust_remote_code=trust_remote_code)
        raise ValueError(f"{where} has no tokenizer: it contains none of {', '.join(TOKENIZER_FILES)}")
    if source.kind == "hub":
        hub_config_file(where, revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            where, trust_remote_code=trust_remote_code, revision=revision or "main"
        )
    except _reading_errors() as error:
        why = _why_no_tokenizer(where, error)
        raise ValueError(f"the tokenizer of {name_or_path} cannot be loaded: {why}") from error
    _find_processor(tokenizer, source._replace(where=where), trust_remote_code, revision)
    return tokenizer


def _why_no_tokenizer(where: str, error: Exception) -> str:
    """Return what is wrong with the files of a tokenizer, which transformers does not name."""
    from huggingface_hub.errors import StrictDataclassError

    message = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, StrictDataclassError):  # transformers reads it to find the tokenizer's class
        return "the config.json there cannot be used"
    if "trust_remote_code" in message:
        return "it needs custom code of the model; review it, and if you trust it set trust_remote_code"
    for file in (Path(where) / name for name in TOKENIZER_FILES if name.endswith(".json")):
        if file.is_file() and file.read_bytes()[: len(LFS_POINTER)] == LFS_POINTER:
            return f"{file.name} is a pointer of Git LFS instead of the file: run `git lfs pull` in its folder"
        try:
            if file.is_file():
                read_json(file)
        except ValueError as damaged:
            return f"{damaged}: download it again"
    return message[:300]


def _find_processor(
    tokenizer: PreTrainedTokenizerBase, source: Source, trust_remote_code: bool, revision: str | None
) -> None:
    """Note where the processor of a model that reads media is; an older one has the chat template, too."""
    from oxrl.data.processor import PROCESSOR_FILES, ProcessorSource, processor_of, set_processor_source

    own = any((Path(source.where) / file).is_file() for file in PROCESSOR_FILES)
    model = find_model(adapter_base(source.where)) if source.kind == "adapter" else source
    where = str(prepare_builtin(model.where)) if model.kind == "builtin" and model is not source else model.where
    if model.kind == "gguf" or (model.kind != "hub" and not (Path(where) / "config.json").is_file()):
        return
    raw = _read_config(model._replace(where=where), revision if model is source else None)
    if not any(raw.get(key) is not None for key in MEDIA_CONFIGS):
        return
    found = ProcessorSource(source.where if own else where, str(raw["model_type"]), trust_remote_code, revision)
    set_processor_source(tokenizer, found)
    if tokenizer.chat_template is None:
        processor_of(tokenizer)


def context_length(config: ModelConfig) -> int | None:
    """Return the number of positions that a model was made for; None if its config does not say."""
    length: int | None = getattr(load_model_config(config).get_text_config(), "max_position_embeddings", None)
    return length


def load_model_config(config: ModelConfig) -> PreTrainedConfig:
    """Load the transformers config of a model, without its weights; for an adapter's folder, its base's."""
    check_torchvision()
    source = find_model(config.name)
    if source.kind == "adapter":
        return load_model_config(config._replace(name=adapter_base(source.where), revision=None))
    if source.kind == "gguf":
        from oxrl.models.gguf import load_gguf_config

        return load_gguf_config(Path(source.where))
    where = str(prepare_builtin(source.where)) if source.kind == "builtin" else source.where
    return _parsed_config(where, config)


def _parsed_config(where: str, config: ModelConfig) -> PreTrainedConfig:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(
            where, revision=config.revision or "main", trust_remote_code=config.trust_remote_code
        )
    except _reading_errors() as error:
        text = " ".join(str(error).split()).partition(". Errors: ")[0]  # one per type that it could have
        why = f"{type(error).__name__}: {text}" if isinstance(error, LookupError | ArithmeticError) else text
        raise ValueError(f"the config.json of {config.name} cannot be used: {why}") from error


def count_parameters(config: ModelConfig) -> int:
    """Return the number of a model's parameters by its config, without reading weights; for an adapter, its base's."""
    import torch

    parsed = load_model_config(config)
    with torch.device("meta"):
        model = auto_class(parsed).from_config(parsed, trust_remote_code=config.trust_remote_code)
    return sum(weight.numel() for weight in model.parameters())


def end_tokens(config: ModelConfig) -> tuple[int, ...]:
    """Return the end-of-sequence tokens of the model's generation config; its tokenizer may have others."""
    from transformers import GenerationConfig

    parsed = load_model_config(config)
    source = find_model(config.name)
    where = str(prepare_builtin(source.where)) if source.kind == "builtin" else source.where
    try:
        ends = GenerationConfig.from_pretrained(where, revision=config.revision or "main").eos_token_id
    except OSError:  # the model has no generation_config.json
        ends = GenerationConfig.from_model_config(parsed).eos_token_id
    return () if ends is None else (ends,) if isinstance(ends, int) else tuple(ends)


def load_model(
    config: ModelConfig | str, *, model_loader: ModelLoader = load_hf_model, is_trainable: bool = True
) -> PreTrainedModel:
    """`load_model("tiny")`, or with a `ModelConfig`; in train mode only with gradient checkpointing.

    `is_trainable=False` freezes it; the base of a trainable LoRA adapter is always frozen.
    """
    from safetensors import SafetensorError

    config = _as_config(config)
    try:
        model = model_loader(
            config.name,
            config.dtype,
            config.device,
            config.attn_implementation,
            trust_remote_code=config.trust_remote_code,
            revision=config.revision,
            is_trainable=is_trainable,
        )
    except SafetensorError as error:
        raise ValueError(f"the weights of {config.name} cannot be read: {error}") from error
    _attach_processor(model, config)
    if not is_trainable:
        return freeze(model)
    if not hasattr(model, "peft_config"):
        freeze_part(model, config.freeze)
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def load_tokenizer(
    config: ModelConfig | str, *, tokenizer_loader: TokenizerLoader = load_hf_tokenizer
) -> PreTrainedTokenizerBase:
    """`load_tokenizer("tiny")`; without a padding token, it pads with its end-of-sequence token."""
    config = _as_config(config)
    tokenizer = tokenizer_loader(config.name, trust_remote_code=config.trust_remote_code, revision=config.revision)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if config.chat_template is not None:
        set_template(tokenizer, config.chat_template)
    return tokenizer


def load_processor(
    config: ModelConfig | str, tokenizer: PreTrainedTokenizerBase | None = None
) -> MediaProcessor | None:
    """`load_processor("tiny-vlm")`: what turns images and audio into tokens and features; None for a model of text."""
    from oxrl.data.processor import processor_of

    return processor_of(load_tokenizer(config) if tokenizer is None else tokenizer)


def load_model_and_ref(
    config: ModelConfig | str, *, model_loader: ModelLoader = load_hf_model
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return the model to train, and a frozen copy of it."""
    config = _as_config(config)
    model = load_model(config._replace(gradient_checkpointing=False), model_loader=model_loader)
    ref = freeze(copy.deepcopy(model))
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model, ref


def _attach_processor(model: Any, config: ModelConfig) -> None:
    """Give a model with towers the processor of its folder, which turns media into what the towers read."""
    import torch

    from oxrl.data.media_features import attach_towers, body_of, towers_of

    inner = model.get_base_model() if hasattr(model, "peft_config") else model
    if towers_of(body_of(inner)):
        with torch.device("cpu"):  # also for an empty model
            processor = load_processor(config)
        assert processor is not None, f"{type(inner).__name__} has towers"
        attach_towers(inner, processor)
        save_under_published_names(inner)


def save_under_published_names(model: Any) -> None:
    """Undo that transformers (5.19) renames the language model of Qwen2-Audio twice when it saves it.

    Its own `from_pretrained` reads such files; vLLM and other programs find no `language_model.model.model.layers`.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping

    if model.config.model_type != "qwen2_audio":
        return
    renamings = getattr(model, "_weight_conversions", None) or get_model_conversion_mapping(model, add_legacy=False)
    # An empty scope: those of the body alone, which the whole model's include.
    model._weight_conversions = [each for each in renamings if getattr(each, "scope_prefix", None) != ""]


def freeze_part(model: PreTrainedModel, part: str) -> None:
    """Freeze the towers of a model that reads media with their projections, or all but these."""
    from oxrl.data.media_features import body_of, towers_of

    towers = towers_of(body_of(model))
    if not towers or part == "nothing":
        return
    model.requires_grad_(part == "towers")
    for tower in towers:
        tower.requires_grad_(part == "language_model")


def freeze(model: PreTrainedModel) -> PreTrainedModel:
    return model.requires_grad_(False).eval()


def check_model(config: ModelConfig | str, *, weights: bool = True) -> None:
    """Raise a ValueError if this model cannot be loaded with these settings; reads no weights.

    With `weights=False` it does not matter whether the weights are there.
    """
    check_torchvision()
    config = _as_config(config)
    source = find_model(config.name)
    resolve_dtype(config.dtype, resolve_device(config.device))
    check_attention(config.attn_implementation)
    if source.kind in ("folder", "adapter"):
        check_model_files(Path(source.where), weights=False)
    if source.kind == "adapter":
        check_model(config._replace(name=adapter_base(source.where), revision=None))
    elif source.kind == "gguf":
        with Path(source.where).open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ValueError(f"{source.where} is not a GGUF file: its first bytes are not GGUF")
    elif source.kind != "builtin":
        _check_architecture(source, config)
        if weights:
            _check_weights(source, config.revision)


def check_tokenizer(model: PreTrainedModel | PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a ValueError if the tokenizer has a token without an embedding in the model."""
    if hasattr(model, "get_input_embeddings"):
        rows = model.get_input_embeddings().weight.shape[0]
    else:
        rows = model.get_text_config().vocab_size
    token, largest = max(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    if largest >= rows:
        raise ValueError(
            f"the tokenizer does not fit the model: its token {token!r} has the id {largest}, but the model's "
            f"embedding has {rows} rows; use the tokenizer that comes with the model"
        )


def check_torchvision() -> None:
    """Raise a ValueError if an installed torchvision keeps transformers from importing models."""
    if error := torchvision_error():
        raise ValueError(
            f"torchvision is installed and cannot be imported ({error}), so that transformers loads no model; "
            f"{REPAIR_TORCHVISION}"
        )


def check_attention(name: str) -> None:
    """Raise a ValueError unless transformers has this attention implementation and its package is installed."""
    from transformers import utils
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    known = sorted({"eager", *(key for key in ALL_ATTENTION_FUNCTIONS.valid_keys() if "|" not in key)})
    if name not in known:
        raise ValueError(f"unknown attn_implementation {name!r}{_nearest(name, known)}; allowed: {', '.join(known)}")
    packages = {
        "flash_attention_2": (utils.is_flash_attn_2_available, "flash-attn"),
        "flash_attention_3": (utils.is_flash_attn_3_available, "flash-attn-3"),
        "flash_attention_4": (utils.is_flash_attn_4_available, "flash-attn-4"),
    }
    if name in packages:
        is_available, package = packages[name]
        if not is_available():
            raise ValueError(
                f"attn_implementation {name!r} needs the package {package} and a CUDA device, and one of them is "
                f"missing; use 'sdpa'"
            )


def resolve_device(name: str) -> str:
    """`resolve_device("auto")` is "cuda" if available, else "cpu"."""
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if name != "cpu" and (kind != "cuda" or not (index.isdecimal() or name == "cuda")):
        raise ValueError(f"unknown device {name!r}; allowed: auto, cpu, cuda, cuda:0, cuda:1, ...")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"the device {name!r} is not available: torch {torch.__version__} finds no CUDA; use 'auto'")
    if index and int(index) >= torch.cuda.device_count():
        raise ValueError(f"there is no device {name!r}: torch finds {torch.cuda.device_count()} CUDA device(s)")
    return name


def resolve_dtype(name: str, device: str) -> torch.dtype:
    """`resolve_dtype("auto", "cpu")` is `torch.float32`, and `torch.bfloat16` on CUDA."""
    import torch

    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}{_nearest(name, DTYPES)}; allowed: {', '.join(DTYPES)}")
    if name == "auto":
        name = "float32" if device == "cpu" else "bfloat16"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def find_model(name: str) -> Source:
    """Return the kind of a model's name, from the local disk only; raise a ValueError if it is none."""
    if name in BUILTIN_MODELS:
        return Source("builtin", name)
    path = Path(name).expanduser()
    if name and path.is_dir():  # an empty name would be the working directory
        return Source("adapter" if (path / ADAPTER_CONFIG).is_file() else "folder", str(path))
    if path.is_file():
        if path.suffix == ".gguf":
            return Source("gguf", str(path))
        raise ValueError(f"the model {name} is a file, but not a .gguf file; pass the folder that contains it")
    if (entry := catalogued(name)) is not None:
        _log_catalogued(name, entry.source)
        return Source("builtin" if entry.source in BUILTIN_MODELS else "hub", entry.source)
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1 or path.suffix == ".gguf" or not name
    neighbours = [entry.name for entry in path.parent.iterdir()] if is_path and path.parent.is_dir() else []
    nearest = _nearest(path.name, [*catalog(), *neighbours])
    # A bare name close to one of the catalogue is taken for a typo; the hub is not queried.
    if is_path or ("/" not in name and nearest):
        raise ValueError(
            f"there is no model {name!r}{nearest}; use a built-in name ({', '.join(BUILTIN_MODELS)}), a name from "
            "`oxrl models list`, a local folder, a .gguf file or a hub id"
        )
    return Source("hub", name)


@cache
def _log_catalogued(name: str, source: str) -> None:
    """Log it once: a run looks for its model several times."""
    logger.info("the model %s of the catalogue is %s", name, source)


def adapter_base(folder: str) -> str:
    """Return the base model of an adapter, also if it is a built-in model in another machine's cache folder."""
    base = read_adapter_config(folder).get("base_model_name_or_path")
    if (marker := Path(folder) / TRAINED_BASE).is_file():
        return str(read_json(marker)["model"])
    if not base:
        raise ValueError(f"the adapter in {folder} does not name its base model; set base_model_name_or_path there")
    return base if Path(base).is_dir() else builtin_named_by(base) or str(base)


def name_public_base(folder: Path) -> None:
    """Name the base of an adapter as others find it: by its hub id or built-in name instead of a cache folder.

    The copy of a hub model that is built in has rounded weights. Its name is kept in a file, from which oxRL loads it.
    """
    settings = read_adapter_config(folder)
    base = Path(str(settings["base_model_name_or_path"]))
    if (name := builtin_named_by(str(base))) is not None:
        hub = catalog()[name].hub
        settings["base_model_name_or_path"] = hub or name
        if hub is not None:
            (folder / TRAINED_BASE).write_text(json.dumps({"model": name}) + "\n", encoding="utf-8")
            logger.warning(
                "the adapter was trained on the built-in copy of %s, whose weights are rounded to 4 bits: on the "
                "weights of the hub its output differs a little. `oxrl merge` writes the weights that were trained",
                hub,
            )
    elif base.parent.name == "snapshots" and base.parents[1].name.startswith("models--"):  # the hub's cache
        settings["base_model_name_or_path"] = base.parents[1].name.removeprefix("models--").replace("--", "/")
        settings["revision"] = base.name
    (folder / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")


def _as_config(config: ModelConfig | str) -> ModelConfig:
    return ModelConfig(config) if isinstance(config, str) else config


def _nearest(name: str, candidates: Iterable[str]) -> str:
    found = nearest_name(name.lower(), candidates, cutoff=0.7)
    return f" (did you mean {found!r}?)" if found else ""


def _load_weights(source: Source, config: ModelConfig) -> PreTrainedModel:
    from transformers.utils.logging import disable_progress_bar

    dtype = resolve_dtype(config.dtype, resolve_device(config.device))
    if source.kind == "gguf":
        from oxrl.models.gguf import load_gguf_model

        return load_gguf_model(Path(source.where), dtype=dtype, attn_implementation=config.attn_implementation)
    if not sys.stderr.isatty():
        disable_progress_bar()  # no progress bars in log files
    parsed = load_model_config(config)
    model, report = auto_class(parsed).from_pretrained(
        prepare_builtin(source.where) if source.kind == "builtin" else source.where,
        dtype=dtype,
        attn_implementation=supported_attention(parsed, config.attn_implementation),
        trust_remote_code=config.trust_remote_code,
        revision=config.revision or "main",
        use_safetensors=True,
        ignore_mismatched_sizes=True,  # refused here, by name
        output_loading_info=True,
    )
    if mismatched := sorted(report["mismatched_keys"]):
        name, stored, expected = mismatched[0]
        raise ValueError(
            f"{len(mismatched)} tensors in the weights of {config.name} have other shapes than config.json says, such "
            f"as {name}: {_shape(stored)} instead of {_shape(expected)}; use the config.json of these weights"
        )
    if missing := sorted(report["missing_keys"]):
        raise ValueError(
            f"the weights of {config.name} lack {len(missing)} tensors of {type(model).__name__}, such as "
            f"{missing[0]}, which would be initialised at random; use complete weights"
        )
    _make_savable(model, config.name)
    return model


def _shape(sizes: Iterable[int]) -> str:
    """`_shape((320, 128)) == "320 x 128"`."""
    return " x ".join(map(str, sizes))


def _make_savable(model: PreTrainedModel, name: str) -> None:
    """Complete a generation config with which transformers would refuse to save the model, at the first checkpoint."""
    settings = getattr(model, "generation_config", None)
    if settings is None:
        return
    try:
        settings.validate(strict=True)
    except ValueError:
        settings.do_sample = True  # sampling parameters without it are the usual mistake
    else:
        return
    try:
        settings.validate(strict=True)
    except ValueError as error:
        raise ValueError(f"correct the generation_config.json of {name}: {' '.join(str(error).split())}") from error
    logger.info("the generation config of %s has sampling parameters; do_sample is set to true", name)


def _build_empty(source: Source, config: ModelConfig) -> PreTrainedModel:
    """Return the model of `_load_weights` without weights; the caller loads them."""
    import torch

    if source.kind == "gguf":  # its config is known only after reading the file
        with torch.device("cpu"):
            return _load_weights(source, config).to("meta")
    parsed = load_model_config(config)
    return (
        auto_class(parsed)
        .from_config(
            parsed,
            dtype=resolve_dtype(config.dtype, resolve_device(config.device)),
            attn_implementation=supported_attention(parsed, config.attn_implementation),
            trust_remote_code=config.trust_remote_code,
        )
        .eval()
    )


def model_class(config: PreTrainedConfig) -> type[PreTrainedModel]:
    """Return transformers' class for a config: a causal language model, or else one that reads media and text."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    mapping = MODEL_FOR_MULTIMODAL_LM_MAPPING if reads_media(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    found: type[PreTrainedModel] = mapping[type(config)]
    return found


def reads_media(config: PreTrainedConfig) -> bool:
    """Whether this is the config of a model that gets images or audio at placeholders, and is no model of text too."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_MULTIMODAL_LM_MAPPING

    from oxrl.data.media_features import placeholder_ids

    if type(config) not in MODEL_FOR_MULTIMODAL_LM_MAPPING or not placeholder_ids(config):
        return False
    same = MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    return MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), same) is same


def media_read_by(config: ModelConfig) -> list[Kind]:
    """`media_read_by(ModelConfig("tiny-vlm")) == ["image"]`: what a model reads beside text."""
    if find_model(config.name).kind == "gguf":  # of text, and slow to read
        return []
    parsed = load_model_config(config)
    found = [kind for key, kind in MEDIA_CONFIGS.items() if getattr(parsed, key, None) is not None]
    return found if found and reads_media(parsed) else []


def auto_class(config: PreTrainedConfig) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    return AutoModelForMultimodalLM if reads_media(config) else AutoModelForCausalLM


def _check_architecture(source: Source, config: ModelConfig) -> None:
    from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_MASKED_LM_MAPPING
    from transformers import __version__ as version

    raw = _read_config(source, config.revision)
    if (method := quantisation(raw)) is not None:
        raise ValueError(f"the weights of {config.name} are quantised ({method}): use the unquantised model")
    kind, custom_code = raw.get("model_type"), custom_classes(raw)
    if custom_code and config.trust_remote_code:
        return
    needs_trust = ValueError(
        f"the model {config.name} contains custom code; review it, and if you trust it set trust_remote_code"
    )
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        if custom_code:
            raise needs_trust
        raise ValueError(
            f"the model {config.name} has the type {kind!r}, which transformers {version} does not support"
        )
    parsed = _parsed_config(source.where, config._replace(trust_remote_code=False))
    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING and "AutoModelForCausalLM" in custom_code:
        raise needs_trust
    is_encoder = type(parsed) in MODEL_FOR_MASKED_LM_MAPPING and not getattr(parsed, "is_decoder", False)
    encodes = is_encoder or getattr(parsed, "is_encoder_decoder", False)
    if reads_media(parsed) and not encodes:
        supported_attention(parsed, config.attn_implementation)
        return
    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING or encodes:
        if media := [medium for key, medium in MEDIA_CONFIGS.items() if getattr(parsed, key, None) is not None]:
            named = " and ".join({"image": "images", "audio": "audio"}[medium] for medium in media)
            raise ValueError(
                f"the model {config.name} is a {kind} model, which reads {named}, but not as tokens "
                "beside its text; use the text model of the same family"
            )
        raise ValueError(
            f"the model {config.name} is a {kind} model, which is not a causal language model; use a model that "
            f"transformers loads with AutoModelForCausalLM"
        )
    supported_attention(parsed, config.attn_implementation)


def custom_classes(raw: Mapping[str, Any]) -> list[str]:
    """`["AutoConfig", "AutoModelForCausalLM"]`: what a `config.json` takes from Python code of the model."""
    named = raw.get("auto_map")
    return sorted(map(str, named)) if isinstance(named, Mapping) else []


def supported_attention(parsed: PreTrainedConfig, attention: str) -> str:
    """Return the attention to load a model with: eager where its class has no sdpa; other unsupported ones raise."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(parsed) not in MODEL_FOR_CAUSAL_LM_MAPPING and not reads_media(parsed):  # code of the model's own
        return attention
    found = model_class(parsed)
    flags = {"sdpa": "_supports_sdpa", "flex_attention": "_supports_flex_attn"}
    flag = "_supports_flash_attn" if attention.startswith("flash_attention") else flags.get(attention)
    if flag is None or getattr(found, flag, False):
        return attention
    if attention != "sdpa":  # which is the default
        raise ValueError(f"{found.__name__} has no {attention} attention; use attn_implementation='eager'")
    _log_eager(found.__name__)
    return "eager"


@cache
def _log_eager(name: str) -> None:
    logger.info("%s has no sdpa attention: eager attention is used", name)


def quantisation(raw: Mapping[str, Any]) -> str | None:
    """`quantisation({"quantization_config": {"quant_method": "gptq", ...}}) == "gptq"`: None for plain weights.

    oxRL trains no quantised weights: not of 4 bits, not of 8. GGUF files are dequantised when they are loaded.
    """
    text = raw.get("text_config")
    for section in (raw, text if isinstance(text, Mapping) else {}):
        for key in ("quantization_config", "compression_config", "quantization"):
            if settings := section.get(key):
                fields = settings if isinstance(settings, Mapping) else {}
                return str(fields.get("quant_method") or (f"{fields['bits']} bits" if "bits" in fields else key))
    return None


def _check_weights(source: Source, revision: str | None) -> None:
    from transformers.utils.hub import has_file

    if not any(has_file(source.where, file, revision=revision) for file in SAFETENSORS):
        raise ValueError(
            f"{source.where} has no weights in safetensors ({' or '.join(SAFETENSORS)}); pickled weights (.bin) can "
            f"run code when they are loaded and are refused: convert them with save_pretrained"
        )


def _read_config(source: Source, revision: str | None) -> dict[str, Any]:
    file = hub_config_file(source.where, revision) if source.kind == "hub" else Path(source.where) / "config.json"
    if not file.is_file():
        raise ValueError(f"{source.where} is not a model folder: it has no config.json")
    return read_json(file)


def hub_config_file(name: str, revision: str | None, *, seconds: float = SECONDS) -> Path:
    """Return the cached `config.json` of a hub model, downloaded if the hub responds within so many seconds."""
    from huggingface_hub import errors, hf_hub_download

    entry = next((entry for entry in catalog().values() if (entry.hub or "").lower() == name.lower()), None)
    near = _nearest(name.rpartition("/")[2], catalog()) if entry is None else _nearest(entry.name, BUILTIN_MODELS)
    known = f"the built-in names are {', '.join(BUILTIN_MODELS)}{near}"
    try:
        with offline_if_unreachable(seconds):
            return Path(hf_hub_download(name, "config.json", revision=revision))
    except errors.HFValidationError as error:
        raise ValueError(f"{name!r} is neither a local folder nor a valid hub id; {known}") from error
    except errors.GatedRepoError as error:
        raise ValueError(f"the model {name} is gated: request access on its page, then run `hf auth login`") from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"the model {name} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(f"there is no model {name} on the hub, or it is private (`hf auth login`); {known}") from error
    except errors.LocalEntryNotFoundError as error:
        raise ValueError(
            f"there is no local model {name}, and the hub cannot be reached to look for one (no network, or offline "
            f"mode); check the connection and the spelling, or use a local folder; {known}"
        ) from error
    except errors.EntryNotFoundError as error:
        raise ValueError(f"{name} on the hub is not a transformers model: it has no config.json") from error


def _reading_errors() -> tuple[type[Exception], ...]:
    """What transformers raises for damaged or unexpected small files."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        OSError,
        ValueError,
        TypeError,
        LookupError,
        ArithmeticError,
        AttributeError,
        ImportError,
        StrictDataclassError,
    )
