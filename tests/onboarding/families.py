"""Twelve small models of different families, made on the spot: random weights, real config classes and tokenizers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from oxrl.models.builtin import TINY_VOCABULARY, prepare_builtin
from oxrl.models.load import load_hf_tokenizer, load_model

SMALL = {
    "vocab_size": TINY_VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 257,
    "eos_token_id": 259, "pad_token_id": 256,
}  # fmt: skip
HYBRID = {
    "attn_layer_indices": [1], "mamba_n_heads": 8,
    "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_expand": 2, "mamba_chunk_size": 8,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
OUTSIDE = (  # the end of a turn belongs to the message after it
    "{% for m in messages %}{% if not loop.first %}{{ '<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_end|>\n<|im_start|>assistant\n' }}{% endif %}"
)


def make(family: str, folder: Path) -> Path:
    """Write the model of a family; returns the path to give to the scout."""
    torch.manual_seed(1)
    return MAKERS[family](folder)


def plain(folder: Path, config: str = "LlamaConfig", **fields: Any) -> Path:
    made = getattr(transformers, config)(**{**SMALL, **fields})
    return _saved(transformers.AutoModelForCausalLM.from_config(made), folder)


def _saved(model: Any, folder: Path) -> Path:
    for weight in model.parameters():  # gains of 1 and biases of 0 would hide a forgotten one
        weight.data += 0.1 * torch.randn_like(weight)
    model.save_pretrained(folder)
    load_hf_tokenizer("tiny").save_pretrained(folder)
    return folder


def change(file: Path, **fields: Any) -> None:
    """Set fields of a JSON file; None removes them."""
    content = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def base(folder: Path) -> Path:
    plain(folder, "Olmo2Config", tie_word_embeddings=True)
    (folder / "chat_template.jinja").unlink()
    change(folder / "tokenizer_config.json", pad_token=None)
    return folder


def wrong_end(folder: Path) -> Path:
    plain(folder, "MistralConfig", sliding_window=8)
    change(folder / "tokenizer_config.json", eos_token="<|bos|>")
    change(folder / "config.json", eos_token_id=257)
    change(folder / "generation_config.json", eos_token_id=257)
    return folder


def end_outside(folder: Path) -> Path:
    plain(folder, "Qwen3Config", head_dim=16)
    (folder / "chat_template.jinja").write_text(OUTSIDE)
    return folder


def resized(folder: Path) -> Path:
    """Eight rows more than the config says, one matrix for both ends, and an old name for the rotary base."""
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.Gemma2Config(**{**SMALL, "head_dim": 8}, tie_word_embeddings=True)
    )
    model.resize_token_embeddings(TINY_VOCABULARY + 8)
    _saved(model, folder)
    change(folder / "config.json", vocab_size=TINY_VOCABULARY, rotary_emb_base=50000.0, rope_parameters=None)
    change(folder / "config.json", dtype=None, torch_dtype="float16")
    return folder


def experts(folder: Path) -> Path:
    return plain(folder, "Qwen3MoeConfig", **EXPERTS)


def hybrid(folder: Path) -> Path:
    return plain(folder, "BambaConfig", **HYBRID)


def vision(folder: Path) -> Path:
    """The built-in Qwen2-VL with random weights, which reads images."""
    return copy(prepare_builtin("tiny-vlm"), folder)


def reward_model(folder: Path) -> Path:
    config = transformers.LlamaConfig(**SMALL, num_labels=1)
    return _saved(transformers.AutoModelForSequenceClassification.from_config(config), folder)


def gguf(folder: Path) -> Path:
    from tests.models.test_load import write_gguf

    folder.mkdir()
    write_gguf(load_model("tiny"), load_hf_tokenizer("tiny"), folder / "tiny.gguf", quantised=False)
    return folder / "tiny.gguf"


def missing_shard(folder: Path) -> Path:
    plain(folder)
    weights = load_file(folder / "model.safetensors")
    shards = {"model-00001-of-00002.safetensors": {}, "model-00002-of-00002.safetensors": {}}
    names = sorted(weights)
    places = {name: list(shards)[index >= len(names) // 2] for index, name in enumerate(names)}
    for name, shard in places.items():
        shards[shard][name] = weights[name]
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "model.safetensors").unlink()
    (folder / "model-00002-of-00002.safetensors").unlink()
    return folder


def own_code(folder: Path) -> Path:
    plain(folder)
    code = f"from pathlib import Path\nPath({str(folder / 'executed')!r}).touch()\n"
    for file in ("modeling_own.py", "configuration_own.py", "tokenization_own.py"):
        (folder / file).write_text(code)
    tokenizer = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    change(folder / "tokenizer_config.json", tokenizer_class="OwnTokenizer", auto_map=tokenizer)
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(folder / "config.json", model_type="own_model", architectures=["OwnForCausalLM"], auto_map=own)
    return folder


def working_code(folder: Path) -> Path:
    """A Llama whose class is in the model's own files; not one of the twelve."""
    plain(folder)
    (folder / "configuration_own.py").write_text(
        "from transformers import LlamaConfig\n\n\nclass OwnConfig(LlamaConfig):\n    model_type = 'own_model'\n"
    )
    (folder / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\nfrom .configuration_own import OwnConfig\n\n\n"
        "class OwnForCausalLM(LlamaForCausalLM):\n    config_class = OwnConfig\n"
    )
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    change(folder / "config.json", model_type="own_model", architectures=["OwnForCausalLM"], auto_map=own)
    return folder


def encoder(folder: Path) -> Path:
    fields = {key: value for key, value in SMALL.items() if key != "num_key_value_heads"}
    return _saved(transformers.AutoModelForMaskedLM.from_config(transformers.BertConfig(**fields)), folder)


MAKERS = {
    each.__name__: each
    for each in (
        base, wrong_end, end_outside, resized, experts, hybrid, vision, reward_model, gguf, missing_shard, own_code,
        encoder,
    )
}  # fmt: skip


def copy(folder: Path, target: Path) -> Path:
    """A copy for a test that changes it."""
    return Path(shutil.copytree(folder, target))
