"""Load a `.gguf` file as a plain model: dequantised, trainable, and saved like any other. Writing is not supported."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

SINGLE_DIGIT_RULES = ("smollm", "starcoder", "refact", "command-r")
"""Pre-tokenizers that split every digit, which also changes the spaces before a number."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Name the file in the errors of its readers, which speak of arrays and keys."""
    try:
        yield
    except (ValueError, KeyError, IndexError, TypeError, OSError, struct.error) as error:
        why = " ".join(str(error).split())
        message = f"{path} cannot be read: it is damaged or cut off, or its architecture is unknown ({why})"
        raise ValueError(message) from error


def load_gguf_config(path: Path) -> PreTrainedConfig:
    """Return the config that transformers makes of the file's entries."""
    from transformers import AutoConfig

    with reading(path):
        return AutoConfig.from_pretrained(path.parent, gguf_file=path.name)


def load_gguf_model(path: Path, *, dtype: torch.dtype, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """`load_gguf_model(Path("model.Q4_1.gguf"), dtype=torch.float32).save_pretrained("plain")`."""
    import transformers

    # From 5.17 on, the model would be marked as quantised otherwise, and could be neither trained nor saved.
    has_gguf_config = hasattr(transformers, "GgufConfig")
    with reading(path):
        model, report = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent,
            gguf_file=path.name,
            dtype=dtype,
            attn_implementation=attn_implementation,
            output_loading_info=True,
            **({"quantization_config": transformers.GgufConfig(dequantize=True)} if has_gguf_config else {}),
        )
    if report["missing_keys"]:
        raise ValueError(f"{path} lacks weights that its architecture has: {', '.join(sorted(report['missing_keys']))}")
    if hasattr(model.config, "_model_name_or_path"):  # a title, not a path; it would be saved with the model
        del model.config._model_name_or_path
    model.config.name_or_path = model.name_or_path = str(path)
    return model


def load_gguf_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the file, with errors of the reader corrected from the file's entries."""
    from gguf import GGUFReader
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with reading(path):
        read = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        entries = {name.removeprefix("tokenizer.ggml."): field for name, field in GGUFReader(path).fields.items()}
    special = {
        f"{name}_token": read.convert_ids_to_tokens(int(entries[f"{entry}_token_id"].contents()))
        for name, entry in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        if f"{entry}_token_id" in entries
    }
    backend = read.backend_tokenizer
    if "pre" in entries and entries["pre"].contents() in SINGLE_DIGIT_RULES:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), backend.pre_tokenizer])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=read.chat_template, clean_up_tokenization_spaces=False, **special
    )
