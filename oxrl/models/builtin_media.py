"""The built-in models that read images or sounds: real architectures and processors with random weights.

`tiny-vlm` is a Qwen2-VL: images of any size, one token for 28 x 28 pixels, positions in three dimensions. `tiny-audio`
is a Qwen2-Audio that reads sounds of at most two seconds, 25 tokens a second. Both have the byte tokenizer of `tiny`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oxrl.models.builtin import TINY_CHAT_TEMPLATE, TINY_CONTEXT, TINY_VOCABULARY, byte_tokenizer, draw_weights
from oxrl.models.load import save_under_published_names

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")  # ids 260 to 263
AUDIO_TOKENS = ("<|audio_bos|>", "<|audio_eos|>", "<|AUDIO|>")  # ids 260 to 262
PATCH = 14
VLM_STD = 0.1  # of its weights: with the 0.02 of large models, it takes three times as long to relate words to pictures
MAX_SECONDS = 2
MEL_BINS = 32

_TEXT_PART = "{%- for part in message.content if part.type == 'text' %}{{- part.text }}{%- endfor %}"
_ANY_PART = """\
{%- for part in message.content %}
            {%- if part.type == 'text' %}{{- part.text }}
            {%- elif part.type == '<kind>' %}{{- '<text>' }}{%- endif %}
        {%- endfor %}"""


def build_tiny_vlm(folder: Path) -> None:
    """Write a Qwen2-VL of 0.8M parameters; a picture of 56 x 56 pixels becomes 4 tokens, 2 more around them."""
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    start, end, image, video = VISION_TOKENS
    tokenizer = byte_tokenizer(_template("image", start + image + end), VISION_TOKENS)
    config = Qwen2VLConfig(
        text_config={**_text_settings(tokenizer), "rope_parameters": _mrope()},
        vision_config={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 128,
            "num_heads": 4,
            "mlp_ratio": 2,
            "patch_size": PATCH,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        vision_start_token_id=tokenizer.convert_tokens_to_ids(start),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(end),
        image_token_id=tokenizer.convert_tokens_to_ids(image),
        video_token_id=tokenizer.convert_tokens_to_ids(video),
        tie_word_embeddings=True,
    )
    pixels = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (16 * PATCH) ** 2}
    mean, std = [0.5] * 3, [0.5] * 3
    shared = {"patch_size": PATCH, "merge_size": 2, "temporal_patch_size": 2, "image_mean": mean, "image_std": std}
    processor = {
        "processor_class": "Qwen2VLProcessor",
        "image_processor": {"image_processor_type": "Qwen2VLImageProcessor", "size": pixels, **shared},
        "video_processor": {"video_processor_type": "Qwen2VLVideoProcessor", "size": pixels, **shared},
    }
    _write(folder, Qwen2VLForConditionalGeneration(config), tokenizer, processor, VLM_STD)


def build_tiny_audio(folder: Path, seconds: int = MAX_SECONDS) -> None:
    """Write a Qwen2-Audio of 0.7M parameters; a second of sound becomes 25 tokens, 2 more around them.

    Sounds have at most `seconds`; vLLM (0.32) runs only those with the 30 of the published model.
    """
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration
    from transformers.models.whisper.modeling_whisper import sinusoids

    start, end, audio = AUDIO_TOKENS
    tokenizer = byte_tokenizer(_template("audio", start + audio + end), AUDIO_TOKENS)
    config = Qwen2AudioConfig(
        # transformers does not tie these; vLLM does what this says.
        text_config={**_text_settings(tokenizer), "model_type": "qwen2", "tie_word_embeddings": False},
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "num_mel_bins": MEL_BINS,
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 128,
            "max_source_positions": 50 * seconds,
        },
        audio_token_index=tokenizer.convert_tokens_to_ids(audio),
    )
    model = Qwen2AudioForConditionalGeneration(config)
    positions = model.model.audio_tower.embed_positions.weight
    positions.data = sinusoids(*positions.shape)  # transformers reads them from checkpoints, and draws them here
    processor = {
        "processor_class": "Qwen2AudioProcessor",
        "audio_token": audio,
        "audio_bos_token": start,
        "audio_eos_token": end,
        "feature_extractor": {
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": MEL_BINS,
            "sampling_rate": 16000,
            "chunk_length": seconds,
            "return_attention_mask": True,
        },
    }
    _write(folder, model, tokenizer, processor)


def _template(kind: str, text: str) -> str:
    assert TINY_CHAT_TEMPLATE.count(_TEXT_PART) == 1
    return TINY_CHAT_TEMPLATE.replace(_TEXT_PART, _ANY_PART.replace("<kind>", kind).replace("<text>", text))


def _text_settings(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    return {
        "vocab_size": TINY_VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 512,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": TINY_CONTEXT,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _mrope() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}


def _write(
    folder: Path, model: Any, tokenizer: PreTrainedTokenizerBase, processor: dict[str, Any], std: float = 0.02
) -> None:
    draw_weights(model, std)
    save_under_published_names(model)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "processor_config.json").write_text(json.dumps(processor, indent=2) + "\n", encoding="utf-8")
