"""`oxrl chat` and `oxrl generate`: sample from a model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from oxrl.cli.base import FormerMaxTokens, MaxTokens, ModelArgument, Sampling, Seed, exit_on_user_error, path

Images = Annotated[list[Path] | None, typer.Option(parser=path, help="A picture to show to the model; repeatable.")]
Sounds = Annotated[list[Path] | None, typer.Option(parser=path, help="A sound for the model to hear; repeatable.")]


def chat(
    model: ModelArgument,
    system: Annotated[str | None, typer.Option(help="System prompt.")] = None,
    image: Images = None,
    audio: Sounds = None,
    max_tokens: MaxTokens = 256,
    max_new_tokens: FormerMaxTokens = None,
    temperature: Sampling = 0.7,
    seed: Seed = 0,
) -> None:
    """Chat with a model; an empty line or Ctrl-D ends the session.

    oxrl chat smollm2-135m

    oxrl chat runs/first --system "Answer briefly." --temperature 0

    oxrl chat runs/vlm --image picture.png
    """
    from oxrl.data.parts import take_media
    from oxrl.run.train import open_model
    from oxrl.types import GenerationConfig, Message

    with exit_on_user_error():
        media = _media(image or [], audio or [])
        generator, render = open_model(model)
        if media:
            render.prompt(take_media([Message("user", "")], media)[0], media=media)  # refuses what it cannot read
    history = [Message("system", system)] if system else []
    for turn in range(1_000_000):
        try:
            text = input("you> ").strip()
        except (EOFError, KeyboardInterrupt):
            break
        if not text:
            break
        history.append(Message("user", text))
        if media and not any(isinstance(message.content, list) for message in history):
            history = list(take_media(history, media)[0])  # what is shown belongs to the first message
        sampling = GenerationConfig(max_new_tokens or max_tokens, temperature, seed=seed + turn)
        typer.echo("model> ", nl=False)
        try:
            stream = _TokenStream(generator.tokenizer)
            generation = generator.complete([render.prompt(history, media=media)], sampling, stream, media=[media])[0]
        except ValueError as error:  # the message cannot be rendered: continue without it
            typer.secho(str(error), fg="red", err=True)
            history.pop()
            continue
        typer.echo("")
        history.append(Message("assistant", generation.text))


class _TokenStream:
    """Prints text as tokens arrive; a character of several tokens is printed with its last one."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.ids, self.shown = tokenizer, list[int](), ""

    def __call__(self, _prompt: int, token: int) -> None:
        self.ids.append(token)
        text = self.tokenizer.decode(self.ids, skip_special_tokens=True)
        if not text.endswith("�"):
            typer.echo(text[len(self.shown) :], nl=False)
            self.shown = text


def generate(
    model: ModelArgument,
    prompt: Annotated[list[str] | None, typer.Option(help="A user message; repeatable.")] = None,
    image: Images = None,
    audio: Sounds = None,
    data: Annotated[
        Path | None, typer.Option(parser=path, help="A file of prompts, in any format that `oxrl train` reads.")
    ] = None,
    max_tokens: MaxTokens = 256,
    max_new_tokens: FormerMaxTokens = None,
    temperature: Sampling = 0.0,
    seed: Seed = 0,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first rows of --data.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print one JSON object per line.")] = False,
) -> None:
    """Generate replies to prompts, and print them.

    oxrl generate smollm2-135m --prompt "What is the capital of Peru?"

    oxrl generate runs/first --data prompts.jsonl --limit 20 --json > replies.jsonl
    """
    from oxrl.run.train import open_model
    from oxrl.types import GenerationConfig

    with exit_on_user_error():
        samples = _prompts(prompt or [], data, limit, _media(image or [], audio or []))
        generator, render = open_model(model)
        ids = [render.prompt(sample.messages, media=sample.media) for sample in samples]
    for start in range(0, len(ids), 16):
        part = slice(start, start + 16)
        sampling = GenerationConfig(max_new_tokens or max_tokens, temperature, seed=seed + start)
        shown = [sample.media for sample in samples[part]]
        generations = generator.complete(ids[part], sampling, media=shown)
        for sample, generation in zip(samples[part], generations, strict=True):
            question, text = sample.messages[-1].text, generation.text
            if json_:
                typer.echo(json.dumps({"prompt": question, "text": text, "finish_reason": generation.finish_reason}))
            else:
                typer.echo(f"{typer.style(str(question), dim=True)}\n{text}\n")


def _media(images: list[Path], sounds: list[Path]) -> tuple[Any, ...]:
    from oxrl.data.media import as_media, measure

    media = (*(as_media(file, "image") for file in images), *(as_media(file, "audio") for file in sounds))
    for medium in media:
        measure(medium)
    return media


def _prompts(texts: list[str], data: Path | None, limit: int | None, media: tuple[Any, ...]) -> list[Any]:
    from oxrl.data.parts import take_media
    from oxrl.data.sources import load_samples
    from oxrl.types import Message, Sample

    if bool(texts) == (data is not None):
        raise ValueError("give --prompt TEXT or --data FILE, one of the two")
    if data is None:
        return [Sample(text, *take_media([Message("user", text)], media)[:1], media=media) for text in texts]
    if media:
        raise ValueError("--image and --audio belong to --prompt; rows of --data have their own")
    samples = load_samples(str(data), limit=limit).samples
    return [replace(sample, messages=_without_reply(sample.messages, sample.id)) for sample in samples]


def _without_reply(messages: tuple[Any, ...], row: str) -> tuple[Any, ...]:
    prompt = messages[:-1] if messages and messages[-1].role == "assistant" else messages
    if not prompt:
        raise ValueError(f"{row}: there is no prompt")
    return prompt
