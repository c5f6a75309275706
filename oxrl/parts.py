"""The live parts of a run, by its config: the backend that trains, and the engine that samples.

Both are opened for the length of a block and leave nothing behind. Ranks were started before (`launch`); what is
sampled and trained is the loops' affair.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.backends.queued import QueuedBackend
from oxrl.config import Config
from oxrl.devices import sharding_of
from oxrl.inputs import Inputs, algorithm_schedule, lora_of, model_config, other_models
from oxrl.models.load import (
    check_tokenizer,
    end_tokens,
    load_model,
    load_model_config,
    resolve_device,
    resolve_dtype,
)
from oxrl.models.lora import LoraSettings, attach_lora, save_adapter
from oxrl.types import Generator, ModelConfig


class Engine(NamedTuple):
    """What samples, and whether it speaks with the trainer's own weights."""

    generator: Generator
    taking_turns: bool


def load_policy(config: ModelConfig, lora: LoraSettings | None, seed: int, tokenizer: Any) -> Any:
    """The model that is trained, with its adapter; the same on every rank."""
    model = load_model(config)
    check_tokenizer(model, tokenizer)
    return model if lora is None else attach_lora(model, lora, seed=seed)


def load_other(config: ModelConfig, tokenizer: Any) -> Any:
    """A frozen model to compare with."""
    model = load_model(config, is_trainable=False)
    check_tokenizer(model, tokenizer)
    return model


def training_settings(config: Config, inputs: Inputs) -> dict[str, Any]:
    """What every backend is told in the same words."""
    train = config.train
    num_steps = inputs.num_steps * (train.iterations * train.mini_batches if inputs.online else 1)
    return {
        "lr": train.lr,
        "weight_decay": train.weight_decay,
        "betas": (train.betas[0], train.betas[1]),
        "eps": train.adam_epsilon,
        "lr_scheduler": train.lr_scheduler,
        "num_steps": num_steps,
        "warmup_steps": int(train.warmup_steps_ratio * num_steps),
        "max_grad_norm": train.clip_grad_norm or float("inf"),
        "heads": sorted({head for each in algorithm_schedule(config).values() for head in each.heads}),
        "temperature": config.rollout.temperature if inputs.online else 1.0,
    }


@contextmanager
def open_backend(config: Config, inputs: Inputs) -> Iterator[Any]:
    """The backend that `run.backend` names, with the model that the config names in it."""
    place = model_config(config)
    load = partial(load_policy, place, lora_of(config), config.run.seed, inputs.tokenizer)
    others = {
        role: partial(load_other, place._replace(name=name, gradient_checkpointing=False), inputs.tokenizer)
        for role, name in other_models(config).items()
    }
    settings = training_settings(config, inputs)
    opened = {"local": _local, "fsdp": _ranked, "deepspeed": _ranked}[config.run.backend]
    with opened(config, load, others, settings) as backend:
        if config.inference_engine.name == "embedded" or not inputs.online:
            yield backend
        else:  # whoever asks an engine and grades its answers goes on while the trainer computes
            queued = QueuedBackend(backend, time_limit=10 * config.run.rank_time_limit)
            yield queued
            queued.close()


@contextmanager
def _local(config: Config, load: Any, others: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Any]:
    from oxrl.backends._forward import HEADS
    from oxrl.backends.local import create_pytorch_backend, write_plain

    model = load()
    backend = create_pytorch_backend(
        model,
        others={role: load_one() for role, load_one in others.items()},
        write_model=save_adapter if hasattr(model, "peft_config") else write_plain,
        **settings,
    )
    weights = Path(model_config(config).name)
    if (weights / HEADS).exists():  # a model that was trained with heads goes on with them
        backend.module.load_heads(weights)
    yield backend


@contextmanager
def _ranked(config: Config, load: Any, others: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[Any]:
    from oxrl.backends.fsdp import FSDPTrainingBackend
    from oxrl.launch import join

    ranks = join(time_limit=config.run.rank_time_limit)
    assert sharding_of(config) == "fsdp"
    backend = FSDPTrainingBackend(ranks, load, others=others, **settings)
    try:
        yield backend
    finally:
        backend.close()


@asynccontextmanager
async def open_engine(config: Config, inputs: Inputs, folder: Path, backend: Any) -> AsyncIterator[Engine]:
    """The engine that `inference_engine.name` names; `folder` keeps what an engine of its own needs and says."""
    opened = {"embedded": _embedded, "vllm": _vllm, "http": _http}[config.inference_engine.name]
    async with opened(config, inputs, folder / "engine", backend) as engine:
        yield engine


@asynccontextmanager
async def _embedded(config: Config, inputs: Inputs, folder: Path, backend: Any) -> AsyncIterator[Engine]:  # noqa: ARG001
    from oxrl.generators.embedded import EmbeddedGenerator

    rollout = config.rollout
    yield Engine(EmbeddedGenerator(backend.model, inputs.tokenizer, slots=rollout.slots, mode=rollout.mode), True)


@asynccontextmanager
async def _vllm(config: Config, inputs: Inputs, folder: Path, backend: Any) -> AsyncIterator[Engine]:  # noqa: ARG001
    from oxrl.generators.vllm import vllm_generator

    write_shape(config, inputs, folder)
    options = {"end_token_ids": end_tokens(model_config(config)), **engine_options(config)}
    generator = await vllm_generator(folder, inputs.tokenizer, **options)
    try:
        yield Engine(generator, False)
    finally:
        await generator.close()


@asynccontextmanager
async def _http(config: Config, inputs: Inputs, folder: Path, backend: Any) -> AsyncIterator[Engine]:  # noqa: ARG001
    from oxrl.generators.http import HTTPGenerator, VLLMEngine

    limit = config.run.rank_time_limit
    engines = [VLLMEngine(url, time_limit=limit) for url in config.inference_engine.urls]
    ends = end_tokens(model_config(config))
    generator = HTTPGenerator(engines, inputs.tokenizer, end_token_ids=ends, folder=config.inference_engine.folder)
    try:
        yield Engine(generator, False)
    finally:
        await generator.close()


def write_shape(config: Config, inputs: Inputs, folder: Path) -> None:
    """What an engine has to know before it gets weights: the model's config and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    load_model_config(model_config(config)).save_pretrained(folder)
    inputs.tokenizer.save_pretrained(folder)


def engine_options(config: Config) -> dict[str, Any]:
    """vLLM's settings: what the config says elsewhere, and whatever stands in `inference_engine` beside its own keys.

    Weights are the trainer's, from the first sync on; none are read before.
    """
    place = model_config(config)
    device = resolve_device(place.device)
    options: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": str(resolve_dtype(place.dtype, device)).removeprefix("torch."),
        "max_num_seqs": config.rollout.slots,
        "tensor_parallel_size": config.rollout.tensor_parallel_size,
        "seed": config.run.seed,
        "trust_remote_code": place.trust_remote_code,
    }
    if config.data.max_seq_len is not None:
        options["max_model_len"] = min(config.data.max_seq_len, _longest(place))
    if device == "cpu":
        options["enforce_eager"] = True
    return options | config.inference_engine.others


def _longest(place: ModelConfig) -> int:
    return int(load_model_config(place).get_text_config().max_position_embeddings)
