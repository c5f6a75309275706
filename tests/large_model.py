"""A model folder with the config of 8 billion parameters and no weights."""

from pathlib import Path

from oxrl.models.load import load_tokenizer


def write_large_model(folder: Path) -> Path:
    from transformers import LlamaConfig

    LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=7, num_attention_heads=64, num_key_value_heads=8,
        vocab_size=128256, architectures=["LlamaForCausalLM"], tie_word_embeddings=False,
    ).save_pretrained(folder)  # fmt: skip
    load_tokenizer("tiny").save_pretrained(folder)
    (folder / "model.safetensors").touch()
    return folder
