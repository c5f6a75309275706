"""Teach a model that reads images, from random weights, to name the colour and the number of circles in a picture.

In the control, pictures are exchanged between rows, and the same training stays at chance: the answers come from the
pictures. All numbers are of held-out pictures.

python examples/see_shapes.py [--steps 200]
"""

from __future__ import annotations

import argparse
import random

import anyio
from PIL import Image, ImageDraw

from oxrl import (
    EmbeddedGenerator,
    GenerationConfig,
    Message,
    ModelConfig,
    Renderer,
    Request,
    load_model,
    load_tokenizer,
)
from oxrl.algorithms import algorithm
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.media import as_media
from oxrl.data.pack import collate, count_units
from oxrl.types import Media

MODEL = ModelConfig("tiny-vlm", device="cpu", freeze="nothing")  # from random weights, the tower is trained too
COLOURS = {"red": (220, 30, 30), "green": (20, 150, 40), "blue": (30, 60, 220), "yellow": (230, 200, 20)}
BATCH = 24


def draw(rng: random.Random) -> tuple[Media, str]:
    """Return a picture of one to four circles of one colour, and its description: "blue 3"."""
    count, colour = rng.randint(1, 4), rng.choice(list(COLOURS))
    image = Image.new("RGB", (56, 56), (128, 128, 128))
    for cell in rng.sample(range(4), count):
        radius = rng.randint(9, 13)
        x, y = (28 * place + rng.randint(radius, 27 - radius) for place in (cell % 2, cell // 2))
        ImageDraw.Draw(image).ellipse((x - radius, y - radius, x + radius, y + radius), fill=COLOURS[colour])
    return as_media(image, "image"), f"{colour} {count}"


def question(picture: Media) -> Message:
    return Message("user", [{"type": "image", "image": picture}, {"type": "text", "text": "?"}])


class Pupil:
    """A model in training."""

    def __init__(self, steps: int) -> None:
        model, tokenizer = load_model(MODEL), load_tokenizer(MODEL)
        self.render, self.generator = Renderer(tokenizer), EmbeddedGenerator(model, tokenizer)
        self.backend = create_pytorch_backend(
            model, lr=2e-3, lr_scheduler="cosine", num_steps=2 * steps, warmup_steps=10
        )

    async def learn(self, pictures: list[tuple[Media, str]], steps: int, rng: random.Random) -> None:
        rows = [
            self.render.conversation([question(picture), Message("assistant", text)], id=f"picture {number}")[0]
            for number, (picture, text) in enumerate(pictures)
        ]
        for _ in range(steps):
            items = [(row,) for row in rng.sample(rows, BATCH)]
            await self.backend.forward_backward([collate(items)], algorithm("sft"), count_units(items))
            await self.backend.optim_step()

    async def describe(self, pictures: list[tuple[Media, str]]) -> list[str]:
        requests = [
            Request(tuple(self.render.prompt([question(picture)]).tolist()), seed=number, media=(picture,))
            for number, (picture, _) in enumerate(pictures)
        ]
        greedy = GenerationConfig(max_new_tokens=10, temperature=0.0)
        return [generation.text for generation in await self.generator.generate(requests, greedy)]


def numbers_right(answers: list[str], pictures: list[tuple[Media, str]]) -> float:
    return sum(answer[-1:] == text[-1:] for answer, (_, text) in zip(answers, pictures, strict=True)) / len(pictures)


def report(name: str, answers: list[str], pictures: list[tuple[Media, str]]) -> None:
    pairs = [(answer, text) for answer, (_, text) in zip(answers, pictures, strict=True)]
    right = sum(answer == text for answer, text in pairs) / len(pairs)
    numbers = numbers_right(answers, pictures)
    shown = ", ".join(f"{text}: {answer[:10]!r}" for answer, text in pairs[:4])
    print(f"{name}: right {right:.2f} (chance 0.06), number {numbers:.2f} (chance 0.25); {shown}", flush=True)


async def supervised(steps: int) -> tuple[list[tuple[Media, str]], list[tuple[Media, str]]]:
    rng, order = random.Random(0), random.Random(1)
    training, held_out = [draw(rng) for _ in range(600)], [draw(rng) for _ in range(100)]
    pupil = Pupil(steps)
    report("before", await pupil.describe(held_out), held_out)
    await pupil.learn(training, steps, order)
    report("after supervised training", await pupil.describe(held_out), held_out)
    return training, held_out


async def control(steps: int, training: list[tuple[Media, str]], held_out: list[tuple[Media, str]]) -> None:
    texts = [text for _, text in training]
    exchanged = random.Random(2).sample(texts, len(texts))
    pupil = Pupil(steps)
    pairs = [(picture, text) for (picture, _), text in zip(training, exchanged, strict=True)]
    await pupil.learn(pairs, steps, random.Random(1))
    report("after the same with exchanged pictures", await pupil.describe(held_out), held_out)


async def main(steps: int) -> None:
    await control(steps, *await supervised(steps))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=200)
    anyio.run(main, parser.parse_args().steps)
