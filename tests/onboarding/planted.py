"""Faults for the bugfixer: engines that share the trainer's weights and fail at a planted place."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from oxrl.config.registry import EngineRecord
from oxrl.generators.connection import EngineError
from oxrl.onboarding.attempt import attempt_in_child
from oxrl.onboarding.remedies import Task
from oxrl.run.engines import open_embedded

STATES_PER_WEIGHT = 16  # bytes: weight, gradient and two moments in float32
BOUND = 400_000  # bytes; an adapter of a small model fits


@asynccontextmanager
async def open_bounded(config: Any, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Any]:
    """There is memory for the states of an adapter, not for those of all weights."""
    trained = sum(weight.numel() for weight in trainer.model.parameters() if weight.requires_grad)
    if STATES_PER_WEIGHT * trained > BOUND:
        raise torch.OutOfMemoryError(f"{STATES_PER_WEIGHT * trained} bytes, and {BOUND} are free")
    async with open_embedded(config, tokenizer, folder, trainer) as engine:
        yield engine


@asynccontextmanager
async def open_flaky(config: Any, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Any]:
    """It fails the first time, and starts from then on."""
    marker = Path(config.model.name) / "flaky"
    if not marker.exists():
        marker.touch()
        raise EngineError("the engine ended while it started")
    async with open_embedded(config, tokenizer, folder, trainer) as engine:
        yield engine


@asynccontextmanager
async def open_broken(config: Any, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Any]:
    raise EngineError("the engine does not know this architecture")
    yield


@asynccontextmanager
async def open_outside(config: Any, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Any]:
    raise LookupError("a planted fault that is in no table")
    yield


def attempt_tiny_in_child(folder: Path) -> None:
    attempt_in_child(Task("tiny", trials=("sft",)), folder, 1e6)


BOUNDED, FLAKY, BROKEN, OUTSIDE = (
    EngineRecord(each, "for the bugfixer") for each in (open_bounded, open_flaky, open_broken, open_outside)
)
