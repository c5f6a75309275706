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

from oxrl.config import Config
from oxrl.devices import sharding_of
from oxrl.inputs import Inputs, algorithm_schedule, lora_of, model_config, other_models
from oxrl.models.load import check_tokenizer, load_model
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
        yield backend


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
async def open_engine(config: Config, inputs: Inputs, backend: Any, folder: Path) -> AsyncIterator[Engine]:
    """The engine that `inference_engine.name` names."""
    from oxrl.generators.embedded import EmbeddedGenerator

    rollout = config.rollout
    yield Engine(EmbeddedGenerator(backend.model, inputs.tokenizer, slots=rollout.slots, mode=rollout.mode), True)
