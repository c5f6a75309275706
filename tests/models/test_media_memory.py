"""What is kept of media: each is computed once, and memory does not grow with their number."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import anyio
import numpy as np
import torch
from torch._subclasses import FakeTensor

from oxrl.algorithms import algorithm
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.buffer import DataBuffer
from oxrl.data.media import as_media
from oxrl.data.media_features import media_towers
from oxrl.data.pack import collate, count_units
from oxrl.data.render import Renderer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.loops.online import OnlineConfig, run_online
from oxrl.models.load import load_model, load_processor, load_tokenizer
from oxrl.rollouts.collect import RolloutConfig, RolloutSampler, sampling_manager
from oxrl.types import GenerationConfig, Item, Media, Message, ModelConfig, Sample

Built = tuple[ModelConfig, Any]
QUESTION = Message("user", [{"type": "image"}, {"type": "text", "text": "?"}])


def question(media: Media) -> Message:
    return Message("user", [{"type": "image", "image": media}, {"type": "text", "text": "?"}])


def noise(seed: int, size: int = 56) -> Media:
    return as_media(np.random.default_rng(seed).integers(0, 256, (size, size, 3), dtype=np.uint8), "image")


def test_a_frozen_tower_runs_once_for_each_picture_of_a_run(tiny_vlm: Built) -> None:
    """Not once for each of the four answers, nor for sampling and for training, nor in the second epoch."""
    model, render = load_model(tiny_vlm[0]), Renderer(tiny_vlm[1])
    generator, backend = EmbeddedGenerator(model, tiny_vlm[1]), create_pytorch_backend(model, lr=1e-3)
    towers = media_towers(model)
    assert towers is not None

    def train(samples: list[Sample], steps: int) -> None:
        sampler = RolloutSampler(generator, render, GenerationConfig(max_new_tokens=4))
        config = RolloutConfig(batch_size=2, n_samples_per_prompt=4, reward_fn=lambda rollout: float(rollout.index))
        manager = sampling_manager(DataBuffer(samples), sampler, config)
        settings, grpo = OnlineConfig(num_steps=steps), algorithm("grpo", kl_coef=0.0)
        anyio.run(partial(run_online, backend, grpo, manager, [generator], render, settings))

    train([Sample(f"first:{seed}", (QUESTION,), media=(noise(100 + seed),)) for seed in range(2)], 1)
    before = towers.passes  # those of the probes, too
    train([Sample(f"s{seed}", (QUESTION,), media=(noise(seed),)) for seed in range(4)], 4)
    assert towers.passes - before == 4


def test_a_trained_tower_runs_once_a_pass_over_the_pictures_of_all_answers(tiny_vlm: Built) -> None:
    model, render = load_model(tiny_vlm[0]._replace(freeze="nothing")), Renderer(tiny_vlm[1])
    backend, towers = create_pytorch_backend(model, lr=1e-3), media_towers(model)
    assert towers is not None
    rows = [
        render.conversation([QUESTION, Message("assistant", text)], id=text, media=(noise(seed),))[0]
        for seed in range(2)
        for text in ("a", "b", "c", "d")
    ]
    items: list[Item] = [(row,) for row in rows]
    before = towers.passes
    backend.forward_backward([collate(items)], algorithm("sft"), count_units(items))
    assert towers.passes == before + 1


def test_placeholders_are_counted_by_one_pass_for_all_pictures_of_a_size(tiny_vlm: Built) -> None:
    """With trained towers, whose features are not kept."""
    model, render = load_model(tiny_vlm[0]._replace(freeze="nothing")), Renderer(tiny_vlm[1])
    generator, towers = EmbeddedGenerator(model, tiny_vlm[1]), media_towers(model)
    assert towers is not None

    def passes(*media: Media) -> int:
        before = towers.passes
        prompts = [render.prompt([question(each)]) for each in media]
        generator.complete(prompts, GenerationConfig(max_new_tokens=1), media=[(each,) for each in media])
        return towers.passes - before

    passes(noise(0))
    assert passes(noise(1), noise(2), noise(3)) == 1, "the one that computes their features"
    assert passes(noise(4, 84), noise(5, 84)) == 2


def bytes_of_tensors() -> int:
    gc.collect()
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes()
        for each in gc.get_objects()
        if isinstance(each, torch.Tensor) and not isinstance(each, FakeTensor)  # of tests that trace a graph
    }
    return sum(storages.values())


def test_what_is_kept_of_media_does_not_grow_with_their_number(tiny_vlm: Built) -> None:
    """With room for a few pictures, as many bytes of tensors live after 8 steps with new pictures as after 24."""
    tokenizer = load_tokenizer(tiny_vlm[0])
    model, render, processor = load_model(tiny_vlm[0]), Renderer(tokenizer), load_processor(tiny_vlm[0], tokenizer)
    backend, towers = create_pytorch_backend(model, lr=1e-3), media_towers(model)
    assert towers is not None and processor is not None
    readers = {id(each): each for each in (processor, towers.processor)}.values()
    for reader in readers:
        reader._features.limit = 10 * 56 * 56 * 3 * 4  # type: ignore[attr-defined]
    towers._outputs.limit = 10 * 4 * 128 * 4
    alive = []
    for step in range(24):
        rows = [
            render.conversation([QUESTION, Message("assistant", "a")], id=f"{seed}", media=(noise(seed),))[0]
            for seed in range(4 * step, 4 * step + 4)
        ]
        items: list[Item] = [(row,) for row in rows]
        backend.forward_backward([collate(items)], algorithm("sft"), count_units(items))
        backend.optim_step()
        if step % 8 == 7:
            alive.append(bytes_of_tensors())
    assert alive[0] == alive[1] == alive[2]
    assert towers._outputs.size <= towers._outputs.limit
