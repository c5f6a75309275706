"""Small random models that read images or audio, with the image processors and feature extractors of transformers."""

from __future__ import annotations

import io
import wave
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image

from oxrl.data.media_features import attach_towers
from oxrl.types import Media

PLACEHOLDER, START, END = 290, 292, 293
TEXT = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 259,
    "pad_token_id": 256,
}
SIGLIP = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 32,
    "patch_size": 8,
}
PATCHES = {"depth": 2, "num_heads": 2, "patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
OF_16 = {"hidden_size": 16, "intermediate_size": 32, "out_hidden_size": 32}
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
QWEN = {
    "image_token_id": PLACEHOLDER,
    "video_token_id": 291,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
WINDOWS = {"head_dim": 8, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
WHISPER = {
    "num_mel_bins": 16,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 32,
    "d_model": 16,
    "max_source_positions": 50,
}


class Shape(NamedTuple):
    config: str
    settings: dict[str, Any]
    reader: str  # transformers' class that reads media, and its settings
    options: dict[str, Any]
    padded: bool = False

    @property
    def kind(self) -> str:
        return "audio" if self.config == "Qwen2AudioConfig" else "image"


PIXELS = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 256, "max_pixels": 4096}
SQUARE = {"height": 32, "width": 32}
EDGE = {"longest_edge": 32}
WITH_ROPE = {**TEXT, "rope_parameters": MROPE}
LLAMA = {**TEXT, "model_type": "llama"}
IDEFICS = {"text_config": LLAMA, "vision_config": SIGLIP, "image_token_id": PLACEHOLDER, "scale_factor": 2}
WHOLE = {"size": EDGE, "max_image_size": EDGE, "do_image_splitting": False}
SHAPES = {
    "qwen2-vl": Shape(
        "Qwen2VLConfig",
        {
            "text_config": WITH_ROPE,
            "vision_config": {**PATCHES, "embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
            **QWEN,
        },
        "Qwen2VLImageProcessorPil",
        PIXELS,
    ),
    "qwen2.5-vl": Shape(
        "Qwen2_5_VLConfig",
        {
            "text_config": WITH_ROPE,
            "vision_config": {**PATCHES, **OF_16, "window_size": 32, "fullatt_block_indexes": [1]},
            **QWEN,
        },
        "Qwen2VLImageProcessorPil",
        PIXELS,
    ),
    "qwen3-vl": Shape(
        "Qwen3VLConfig",
        {
            "text_config": {**WITH_ROPE, "head_dim": 8},
            "vision_config": {**PATCHES, **OF_16, "num_position_embeddings": 64, "deepstack_visual_indexes": [0]},
            **QWEN,
        },
        "Qwen2VLImageProcessorPil",
        PIXELS,
    ),
    "smolvlm": Shape("SmolVLMConfig", IDEFICS, "Idefics3ImageProcessorPil", WHOLE),
    "idefics3": Shape("Idefics3Config", IDEFICS, "Idefics3ImageProcessorPil", WHOLE),
    "gemma3": Shape(
        "Gemma3Config",
        {
            "text_config": {**TEXT, **WINDOWS},
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_id": PLACEHOLDER,
            "boi_token_id": START,
            "eoi_token_id": END,
        },
        "Gemma3ImageProcessorPil",
        {"size": SQUARE},
        padded=True,
    ),
    "llava": Shape(
        "LlavaConfig",
        {
            "text_config": LLAMA,
            "vision_config": {**SIGLIP, "model_type": "clip_vision_model"},
            "image_token_id": PLACEHOLDER,
            "vision_feature_layer": -1,
        },
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": SQUARE},
    ),
    "qwen2-audio": Shape(
        "Qwen2AudioConfig",
        {"text_config": {**TEXT, "model_type": "qwen2"}, "audio_config": WHISPER, "audio_token_id": PLACEHOLDER},
        "WhisperFeatureExtractor",
        {"feature_size": 16, "chunk_length": 1},
    ),
}


class Reader:
    """The part of a processor that makes features: rows are written by the tests."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.reader = getattr(transformers, shape.reader)(**shape.options)
        self.placeholders = {shape.kind: "<medium>"}

    def features(self, media: Sequence[Media]) -> dict[str, torch.Tensor]:
        if self.shape.kind == "audio":
            samples = [np.frombuffer(medium.data[44:], dtype="<i2").astype(np.float32) / 2**15 for medium in media]
            options = {"sampling_rate": 16000, "return_attention_mask": True, "padding": "max_length"}
            made = self.reader(samples, return_tensors="pt", **options)
            return {"input_features": made["input_features"], "feature_attention_mask": made["attention_mask"]}
        images = [Image.open(io.BytesIO(medium.data)) for medium in media]
        nested = "Idefics3" in self.shape.reader
        return dict(self.reader([images] if nested else images, return_tensors="pt"))


def build(name: str) -> Any:
    """Return a model with its reader; gains and biases are random, so that none can be forgotten."""
    shape = SHAPES[name]
    torch.manual_seed(1)
    config = getattr(transformers, shape.config)(**shape.settings)
    model = transformers.AutoModelForMultimodalLM.from_config(config).eval()
    for weight in model.parameters():
        weight.data += 0.05 * torch.randn_like(weight)
    model.generation_config.eos_token_id = TEXT["eos_token_id"]
    attach_towers(model, Reader(shape))
    return model


def medium(kind: str, size: int, seed: int) -> Media:
    """A picture of 30 times `size` pixels, or a sound of `size` hundredths of a second."""
    noise, file = np.random.default_rng(seed), io.BytesIO()
    if kind == "image":
        Image.fromarray(noise.integers(0, 256, (size, 30, 3), dtype=np.uint8)).save(file, "PNG")
        return Media("image", file.getvalue(), "image/png")
    with wave.open(file, "wb") as written:
        written.setparams((1, 2, 16000, 0, "NONE", ""))
        written.writeframes((noise.standard_normal(160 * size) * 3000).astype("<i2").tobytes())
    return Media("audio", file.getvalue(), "audio/wav")
