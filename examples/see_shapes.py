"""Teach a model that reads images, from random weights, to name the colour and the number of circles in a picture.

Or, with `--hear`, one that reads audio to name the pitch of a tone. In the control, media are exchanged between rows,
and the same training stays at chance: the answers come from the media. All numbers are of held-out media.

With `--practise`, supervised training stops when it knows the colours and only half of the numbers, and GRPO goes on,
from rewards alone.

python examples/see_shapes.py [--steps 200] [--hear] [--practise 60] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping

import anyio
import numpy as np
from PIL import Image, ImageDraw

from oxrl import (
    DataBuffer,
    EmbeddedGenerator,
    GenerationConfig,
    Message,
    ModelConfig,
    OnlineConfig,
    Renderer,
    Request,
    Rollout,
    RolloutConfig,
    RolloutSampler,
    create_pytorch_backend,
    load_model,
    load_samples,
    load_tokenizer,
    run_online,
    sampling_manager,
)
from oxrl.algorithms import algorithm
from oxrl.data.media import as_media
from oxrl.data.pack import collate, count_units
from oxrl.types import Media

COLOURS = {"red": (220, 30, 30), "green": (20, 150, 40), "blue": (30, 60, 220), "yellow": (230, 200, 20)}
HERTZ = (250, 370, 550, 800, 1200, 1800, 2700, 4000)
RATE, BATCH = 16000, 24
Pairs = list[tuple[Media, str]]


def draw(rng: random.Random) -> tuple[Media, str]:
    """Return a picture of one to four circles of one colour, and its description: "blue 3"."""
    count, colour = rng.randint(1, 4), rng.choice(list(COLOURS))
    image = Image.new("RGB", (56, 56), (128, 128, 128))
    for cell in rng.sample(range(4), count):
        radius = rng.randint(9, 13)
        x, y = (28 * place + rng.randint(radius, 27 - radius) for place in (cell % 2, cell // 2))
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
    return as_media(image, "image"), f"{colour} {count}"


def sound(rng: random.Random) -> tuple[Media, str]:
    """Return a tone of one of eight pitches, a little too low or high, in some noise, and its description: "550 Hz"."""
    hertz, length = rng.choice(HERTZ), rng.randint(RATE // 5, RATE // 2)
    start, exact = rng.randint(0, RATE // 2 - length), hertz * rng.uniform(0.92, 1.08)
    samples = np.random.default_rng(rng.getrandbits(32)).normal(0, 0.01, RATE // 2)
    samples[start : start + length] += rng.uniform(0.2, 0.8) * np.sin(2 * np.pi * exact * np.arange(length) / RATE)
    return as_media({"array": samples.astype(np.float32), "sampling_rate": RATE}, "audio"), f"{hertz} Hz"


def question(medium: Media) -> Message:
    return Message("user", [{"type": medium.kind, medium.kind: medium}, {"type": "text", "text": "?"}])


def is_right(rollout: Rollout) -> float:
    return float(rollout.response == rollout.sample.answer)


def show_reward(step: int, metrics: Mapping[str, float]) -> None:
    if step % 10 == 0:
        print(f"  step {step}: reward {metrics['reward']:.2f}", flush=True)


class Pupil:
    """A model in training, from random weights; the tower is trained, too."""

    def __init__(self, name: str, steps: int) -> None:
        config = ModelConfig(name, device="cpu", freeze="nothing")
        self.model, tokenizer = load_model(config), load_tokenizer(config)
        self.render, self.generator = Renderer(tokenizer), EmbeddedGenerator(self.model, tokenizer)
        self.backend = create_pytorch_backend(
            self.model, lr=2e-3, lr_scheduler="cosine", num_steps=2 * steps, warmup_steps=10
        )

    async def learn(self, pairs: Pairs, steps: int, rng: random.Random) -> None:
        rows = [
            self.render.conversation([question(medium), Message("assistant", text)], id=f"row {number}")[0]
            for number, (medium, text) in enumerate(pairs)
        ]
        for _ in range(steps):
            items = [(row,) for row in rng.sample(rows, BATCH)]
            await self.backend.forward_backward([collate(items)], algorithm("sft"), count_units(items))
            await self.backend.optim_step()

    async def practise(self, pairs: Pairs, steps: int) -> None:
        """GRPO with a new optimizer: 16 answers to each of 16 pictures a step, 1 for a description that is right."""
        rows = [{"prompt": "?", medium.kind: medium.data, "answer": text} for medium, text in pairs]
        sampler = RolloutSampler(self.generator, self.render, GenerationConfig(max_new_tokens=10))
        rollouts = RolloutConfig(batch_size=16, n_samples_per_prompt=16, reward_fn=is_right)
        manager = sampling_manager(DataBuffer(load_samples(rows).samples), sampler, rollouts)
        config = OnlineConfig(num_steps=steps, micro_batch_tokens=4096)
        backend = create_pytorch_backend(self.model, lr=3e-4)
        await run_online(backend, algorithm("grpo"), manager, [self.generator], self.render, config, log=show_reward)

    async def describe(self, pairs: Pairs) -> list[str]:
        requests = [
            Request(tuple(self.render.prompt([question(medium)]).tolist()), seed=number, media=(medium,))
            for number, (medium, _) in enumerate(pairs)
        ]
        greedy = GenerationConfig(max_new_tokens=10, temperature=0.0)
        return [generation.text for generation in await self.generator.generate(requests, greedy)]


def share_right(answers: list[str], pairs: Pairs) -> float:
    return sum(answer == text for answer, (_, text) in zip(answers, pairs, strict=True)) / len(pairs)


def report(name: str, answers: list[str], pairs: Pairs, chance: float) -> None:
    shown = ", ".join(f"{text}: {answer[:10]!r}" for answer, (_, text) in list(zip(answers, pairs, strict=True))[:4])
    print(f"{name}: right {share_right(answers, pairs):.2f} (chance {chance:.2f}); {shown}", flush=True)


async def practise(steps: int, seed: int) -> None:
    rng, order = random.Random(3 * seed), random.Random(3 * seed + 1)
    training, held_out = [draw(rng) for _ in range(600)], [draw(rng) for _ in range(100)]
    pupil = Pupil("tiny-vlm", 160)
    while share_right(await pupil.describe(training[:100]), training[:100]) < 0.4:
        await pupil.learn(training, 5, order)
    report("half taught", await pupil.describe(held_out), held_out, 1 / 16)
    await pupil.practise(training, steps)
    report("after practice", await pupil.describe(held_out), held_out, 1 / 16)


async def main(steps: int, hear: bool, seed: int) -> None:
    name, example, media = ("tiny-audio", sound, "sounds") if hear else ("tiny-vlm", draw, "pictures")
    chance = 1 / 8 if hear else 1 / 16
    rng = random.Random(3 * seed)
    training, held_out = [example(rng) for _ in range(600)], [example(rng) for _ in range(100)]
    pupil = Pupil(name, steps)
    report("before", await pupil.describe(held_out), held_out, chance)
    await pupil.learn(training, steps, random.Random(3 * seed + 1))
    report("after supervised training", await pupil.describe(held_out), held_out, chance)

    texts = random.Random(3 * seed + 2).sample([text for _, text in training], len(training))
    exchanged = [(medium, text) for (medium, _), text in zip(training, texts, strict=True)]
    control = Pupil(name, steps)
    await control.learn(exchanged, steps, random.Random(3 * seed + 1))
    report(f"after the same with exchanged {media}", await control.describe(held_out), held_out, chance)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hear", action="store_true", help="tones instead of pictures")
    parser.add_argument("--practise", type=int, metavar="STEPS", help="of GRPO, from a model that is half taught")
    parser.add_argument("--seed", type=int, default=0, help="of the media and of the order of rows")
    arguments = parser.parse_args()
    if arguments.practise:
        anyio.run(practise, arguments.practise, arguments.seed)
    else:
        anyio.run(main, arguments.steps, arguments.hear, arguments.seed)
