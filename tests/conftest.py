"""What every test shares: no hub, one thread, no GPU, and the two built-in models."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # before anything imports huggingface_hub, which reads it once
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")  # facts are about float32 on the CPU, also on a machine with a GPU
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from typing import Any

import pytest

from oxrl.models.load import load_model, load_tokenizer
from oxrl.types import ModelConfig


@pytest.fixture(scope="session")
def tiny() -> tuple[ModelConfig, Any]:
    """The random model of 1 M parameters, as a config to load it from, and its tokenizer (do not change it)."""
    config = ModelConfig("tiny", dtype="float32", device="cpu")
    return config, load_tokenizer(config)


@pytest.fixture
def tiny_model(tiny: tuple[ModelConfig, Any]) -> Any:
    """Fresh weights for one test, which may change them."""
    return load_model(tiny[0])


@pytest.fixture(scope="session")
def smollm2() -> tuple[ModelConfig, Any]:
    """The real SmolLM2-135M-Instruct, downloaded and converted on the first use, and its tokenizer."""
    config = ModelConfig("smollm2-135m", dtype="float32", device="cpu")
    return config, load_tokenizer(config)
