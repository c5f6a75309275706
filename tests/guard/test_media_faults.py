"""Planted faults of rows with images, each noticed with its name.

Others have their tests where they are noticed: places without an image and images without a place, sizes and formats
of files in `tests/data`, cut rows in `tests/data/test_processor.py`, shared prompts in `tests/test_media.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import anyio
import numpy as np
import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.forward import LanguageModel
from oxrl.backends.layout import prepare_layout
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.buffer import DataBuffer
from oxrl.data.media_features import attach_towers
from oxrl.data.pack import collate
from oxrl.data.processor import MediaProcessor, processor_of
from oxrl.data.render import Renderer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.loops.online import OnlineConfig, run_online
from oxrl.models.load import load_model, load_processor, load_tokenizer
from oxrl.rollouts.collect import RolloutConfig, RolloutSampler, sampling_manager
from oxrl.types import GenerationConfig, Item, Media, Message, ModelConfig, Request, Row, Sample
from tests.drawings import png

Built = tuple[ModelConfig, Any]
IMAGE = 262  # <|image_pad|>
RED, BLUE, WIDE = png("red"), png("blue"), png("red", 112, 56)


def trained_items(render: Renderer) -> list[Item]:
    """The same question about two images of one size."""
    question = Message("user", [{"type": "image"}, {"type": "text", "text": "?"}])
    rows = [
        render.conversation([question, Message("assistant", text)], id=f"rows:{number}", media=(medium,))
        for number, (medium, text) in enumerate(((RED, "red"), (BLUE, "blue")), 1)
    ]
    return [tuple(own) for own in rows]


@pytest.fixture(scope="module")
def taught(tiny_vlm: Built) -> Any:
    """A model that sees: its answers depend on the image."""
    backend = create_pytorch_backend(load_model(tiny_vlm[0]._replace(freeze="nothing")), lr=3e-3)
    items, sft = trained_items(Renderer(tiny_vlm[1])), algorithm("sft")

    async def teach() -> None:
        for _ in range(20):
            await backend.forward_backward([collate(items)], sft, {"token": 10})
            await backend.optim_step()

    anyio.run(teach)
    return backend.model


def online(model: Any, tokenizer: Any, change: Callable[[Sequence[Row]], Sequence[Row]], generator: Any = None) -> Any:
    """One step of GRPO on the two questions, with an own function from rollouts to rows."""
    grpo = algorithm("grpo")

    def items(rollouts: Any, render: Any) -> list[Item]:
        rows = [row for item in grpo.online.items(rollouts, render) for row in item]
        return [(row,) for row in change(rows)]

    samples = [
        Sample(f"s{number}", (Message("user", [{"type": "image"}, {"type": "text", "text": "?"}]),), media=(medium,))
        for number, medium in enumerate((RED, BLUE))
    ]
    generator = generator or EmbeddedGenerator(model, tokenizer)
    sampler = RolloutSampler(generator, Renderer(tokenizer), GenerationConfig(max_new_tokens=6))
    rollouts = RolloutConfig(batch_size=2, n_samples_per_prompt=4, reward_fn=lambda rollout: float(rollout.index))
    manager = sampling_manager(DataBuffer(samples), sampler, rollouts)
    own = replace(grpo, online=grpo.online._replace(items=items))
    backend = create_pytorch_backend(model, lr=0.0)
    return anyio.run(partial(run_online, backend, own, manager, [generator], sampler.render, OnlineConfig(num_steps=1)))


def exchanged(rows: Sequence[Row]) -> list[Row]:
    other = {RED: BLUE, BLUE: RED}
    return [replace(row, media=tuple(other[medium] for medium in row.media)) for row in rows]


def dropped(rows: Sequence[Row]) -> list[Row]:
    return [replace(rows[0], media=()), *rows[1:]]


def cut_inside(rows: Sequence[Row]) -> list[Row]:
    """Without the first placeholder."""
    row = rows[0]
    kept = np.arange(len(row)) != int(np.flatnonzero(row.tokens == IMAGE)[0])
    streams = {name: stream[kept] for name, stream in row.streams.items()}
    return [replace(row, tokens=row.tokens[kept], mask=row.mask[kept], streams=streams), *rows[1:]]


FAULTS: Mapping[str, tuple[Callable[[Sequence[Row]], Sequence[Row]], str]] = {
    "images exchanged between rows": (exchanged, "logprob_gap: sampler and trainer differ"),
    "an image dropped": (dropped, r"row s\d#\d/\d has 4 image placeholders .token 262., but its 0 media have 0"),
    "a row cut inside of an image": (cut_inside, r"row s\d#\d/\d has 3 image placeholders .*, but its medium has 4"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_between_sampler_and_trainer(taught: Any, tiny_vlm: Built, fault: str) -> None:
    change, named = FAULTS[fault]
    with pytest.raises((RuntimeError, ValueError), match=named):
        online(taught, tiny_vlm[1], change)


def test_without_a_fault_the_step_is_trained(taught: Any, tiny_vlm: Built) -> None:
    (metrics,) = online(taught, tiny_vlm[1], list)
    assert metrics["logprob_gap"] < 1e-5


class SamplesPlaceholders:
    """An engine that does not forbid placeholders: it appends one to every answer."""

    version = 0

    def __init__(self, generator: EmbeddedGenerator) -> None:
        self.inner, self.tokenizer = generator, generator.tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> Any:
        return [
            each._replace(token_ids=(*each.token_ids, IMAGE), logprobs=(*each.logprobs, -1.0), versions=())
            for each in await self.inner.generate(requests, sampling)
        ]


def test_a_placeholder_that_was_sampled(taught: Any, tiny_vlm: Built) -> None:
    engine = SamplesPlaceholders(EmbeddedGenerator(taught, tiny_vlm[1]))
    with pytest.raises(ValueError, match=r"row s\d#\d/\d has 5 image placeholders .*, but its medium has 4 features"):
        online(taught, tiny_vlm[1], list, engine)


def with_larger_patches(config: ModelConfig) -> MediaProcessor:
    """The processor of another model of the same family: one token for 56 x 56 pixels instead of four."""
    reader = processor_of(load_tokenizer(config))
    assert reader is not None
    reader.processor.image_processor.merge_size = 4
    return MediaProcessor(reader.processor)


def test_ids_by_the_processor_of_another_model(tiny_vlm: Built) -> None:
    render = Renderer(tiny_vlm[1], processor=with_larger_patches(tiny_vlm[0]))
    items = trained_items(render)
    with pytest.raises(ValueError, match=r"row rows:1 has 1 image placeholders .*, but its medium has 4 features"):
        LanguageModel(load_model(tiny_vlm[0]))(collate(items))


class Exchanged:
    """A reader of files that confuses two images."""

    def __init__(self, processor: MediaProcessor) -> None:
        self.processor, self.placeholders = processor, processor.placeholders

    def features(self, media: Sequence[Media]) -> Mapping[str, torch.Tensor]:
        (medium,) = media
        return self.processor.features((RED if medium == BLUE else BLUE if medium == RED else medium,))


def test_a_reader_that_confuses_images_gives_another_loss(taught: Any, tiny_vlm: Built) -> None:
    """No count can notice it, for images of one size; what was learned does not fit any more."""
    items = trained_items(Renderer(tiny_vlm[1]))
    processor = load_processor(tiny_vlm[0])
    assert processor is not None

    def loss(reader: Any) -> float:
        attach_towers(taught, reader)
        module = LanguageModel(taught).eval()
        assert prepare_layout(module).layout == "shared"
        with torch.no_grad():
            return -float(module(collate(items)).logprob.sum())

    assert loss(Exchanged(processor)) > 2 * loss(processor)
