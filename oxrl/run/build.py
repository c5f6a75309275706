"""The live parts of a run, by its config: the backend that trains, and the engine that samples.

Both are opened for the length of a block and leave nothing behind. Ranks were started before (`launch`); what is
sampled and trained is the loops' affair.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.backends.distributed.queued import QueuedBackend
from oxrl.concurrency import run_blocking
from oxrl.config import Config, ConfigError
from oxrl.loops.online import AsideFn, no_offload, sleeping_engine
from oxrl.models.load import (
    check_tokenizer,
    end_tokens,
    load_model,
    load_model_config,
    resolve_device,
    resolve_dtype,
)
from oxrl.models.lora import LoraSettings, attach_lora, attach_reference, save_adapter
from oxrl.run.placement import SHARE, sharding_of
from oxrl.run.spec import Inputs, algorithm_schedule, follows_by_adapter, lora_of, model_config, other_models
from oxrl.types import Generator, ModelConfig, SleepingGenerator

logger = logging.getLogger(__name__)

SERVER_SECONDS = 10.0  # that a server has to say that it is there


class Engine(NamedTuple):
    """What samples, whether it speaks with the trainer's own weights, and how it makes room while that computes."""

    generator: Generator
    shares_weights: bool
    aside: AsideFn = no_offload


def load_policy(
    config: ModelConfig,
    lora: LoraSettings | None,
    seed: int,
    tokenizer: Any,
    *,
    follower: bool = False,
    to_spread: bool = False,
) -> Any:
    """The model that is trained, with its adapter, and with a `follower` of that as reference; alike on every rank."""
    model = load_model(off_device(config) if to_spread else config)
    check_tokenizer(model, tokenizer)
    if lora is None:
        return model
    adapted = attach_lora(model, lora, seed=seed)
    return attach_reference(adapted) if follower else adapted


def load_other(config: ModelConfig, tokenizer: Any, *, to_spread: bool = False) -> Any:
    """A frozen model to compare with."""
    model = load_model(off_device(config) if to_spread else config, is_trainable=False)
    check_tokenizer(model, tokenizer)
    return model


def off_device(config: ModelConfig) -> ModelConfig:
    """In the precision of its device, and not on it: its parts will go there, and the whole may not fit."""
    dtype = resolve_dtype(config.dtype, resolve_device(config.device))
    return config._replace(device="cpu", dtype=str(dtype).removeprefix("torch."))


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
    from oxrl.backends.forward import HEADS

    opened = {"local": _local, "fsdp": _ranked, "deepspeed": _ranked, "ray": _on_ray}[config.run.backend]
    with opened(config, inputs) as backend:
        weights = Path(model_config(config).name)
        if (weights / HEADS).exists():  # a model that was trained with heads goes on with them
            backend.load_heads(weights)
        elsewhere = inputs.online and config.engine != "embedded"
        if elsewhere and not isinstance(backend, QueuedBackend):
            # Whoever asks the engine and grades its answers goes on while the trainer computes.
            backend = QueuedBackend(backend, time_limit=10 * config.run.rank_time_limit)
        yield backend
        if hasattr(backend, "close"):  # not after a failure, when there may be nobody left to tell
            backend.close()


class Loads(NamedTuple):
    """How a process gets its models; functions that travel, because every rank calls them."""

    policy: Any
    others: Mapping[str, Any]


def loads_of(config: Config, inputs: Inputs, *, to_spread: bool) -> Loads:
    place = model_config(config)
    others = {
        role: partial(
            load_other,
            place._replace(name=name, gradient_checkpointing=False),
            inputs.tokenizer,
            to_spread=to_spread,
        )
        for role, name in other_models(config).items()
    }
    policy = partial(
        load_policy,
        place,
        lora_of(config),
        config.run.seed,
        inputs.tokenizer,
        follower=follows_by_adapter(config),
        to_spread=to_spread,
    )
    return Loads(policy, others)


@contextmanager
def _local(config: Config, inputs: Inputs) -> Iterator[Any]:
    from oxrl.backends.local import create_pytorch_backend, write_plain

    loads = loads_of(config, inputs, to_spread=False)
    model = loads.policy()
    backend = create_pytorch_backend(
        model,
        others={role: load() for role, load in loads.others.items()},
        write_model=save_adapter if hasattr(model, "peft_config") else write_plain,
        **training_settings(config, inputs),
    )
    yield backend


@contextmanager
def _ranked(config: Config, inputs: Inputs) -> Iterator[Any]:
    """Over the processes that were started for it."""
    from oxrl.backends.distributed.ranked import RankedBackend
    from oxrl.run.launch import join

    yield RankedBackend(join(time_limit=config.run.rank_time_limit), worker_of(config, inputs))


@contextmanager
def _on_ray(config: Config, inputs: Inputs) -> Iterator[Any]:
    """Over actors; the cluster is there for whoever samples, too."""
    from oxrl.backends.distributed.ray import RayRanks, create_ray_backend
    from oxrl.machine.ray_cluster import ray_cluster

    run, colocated = config.run, config.inference_engine.colocated
    with ray_cluster(run.ray_address, processes=config.ranks + (0 if colocated else config.replicas)):
        ranks = RayRanks(config.ranks, share=SHARE if colocated else 1.0, time_limit=run.rank_time_limit)
        try:
            yield create_ray_backend(ranks, worker_of(config, inputs))
        finally:
            ranks.stop()


def worker_of(config: Config, inputs: Inputs) -> Any:
    """What makes one rank's part of the backend, there."""
    from oxrl.backends.distributed import deepspeed, fsdp
    from oxrl.backends.distributed.worker import Settings

    loads = loads_of(config, inputs, to_spread=True)
    settings = Settings(**training_settings(config, inputs))
    if sharding_of(config) == "fsdp":
        return partial(fsdp.build_worker, loads.policy, loads.others, settings)
    sections = config.deepspeed.others, config.deepspeed_ref.others
    return partial(deepspeed.build_worker, loads.policy, loads.others, settings, *sections)


@asynccontextmanager
async def open_engine(config: Config, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Engine]:
    """The engine that `inference_engine.name` names; `folder` keeps what an engine of its own needs and says.

    The embedded one speaks with `trainer.model`; any other has no weights before the first `update_weights`.
    """
    opened = {"embedded": _embedded, "vllm": _vllm, "http": _http}[config.engine]
    async with opened(config, tokenizer, folder / "engine", trainer) as engine:
        yield engine


@asynccontextmanager
async def _embedded(config: Config, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Engine]:  # noqa: ARG001
    from oxrl.generators.embedded.generator import EmbeddedGenerator

    rollout = config.rollout
    yield Engine(EmbeddedGenerator(trainer.model, tokenizer, slots=rollout.slots, mode=rollout.mode), True)


@asynccontextmanager
async def _vllm(config: Config, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Engine]:
    """In the trainer's process, in processes of its own, or as actors of the cluster that the trainer is on."""
    write_shape(config, tokenizer, folder)
    sleeps = sleeps_beside(config, trainer)
    options = engine_options(config)
    if sleeps:
        options = {"enable_sleep_mode": True, "gpu_memory_utilization": SHARE, **options}
        await trainer.release_memory()  # which the engine has to find free when it starts
    elif config.inference_engine.colocated:
        logger.info("inference_engine.colocated: the engine is beside the trainer, and awake: it sleeps on GPUs only")
    common = (config, tokenizer, folder, end_tokens(model_config(config)), options)
    if config.run.backend == "ray":
        opened = _as_actors(*common, trainer)
    elif config.in_process:
        opened = _in_process(*common)
    else:
        opened = _as_servers(*common)
    async with opened as generator:
        yield Engine(generator, False, partial(sleeping_engine, generator, trainer) if sleeps else no_offload)


def sleeps_beside(config: Config, trainer: Any) -> bool:
    """Whether the engine has to leave the trainer's devices to it, and can: vLLM does not sleep on a processor."""
    if not config.inference_engine.colocated:
        return False
    if config.run.backend == "ray":
        return bool(trainer.ranks.places.on_gpus)
    return resolve_device(config.model.device) != "cpu"


@asynccontextmanager
async def _in_process(
    config: Config, tokenizer: Any, folder: Path, ends: Sequence[int], options: Mapping[str, Any]
) -> AsyncIterator[SleepingGenerator]:
    from oxrl.generators.vllm.engine import vllm_generator

    own = {"end_token_ids": ends, "lora": adapter_rank(config), "time_limit": config.run.rank_time_limit}
    generator = await vllm_generator(folder, tokenizer, **own, **options)
    try:
        yield generator
    finally:
        await generator.close()


@asynccontextmanager
async def _as_servers(
    config: Config, tokenizer: Any, folder: Path, ends: Sequence[int], options: Mapping[str, Any]
) -> AsyncIterator[SleepingGenerator]:
    from oxrl.generators.servers import Limits, serving

    async with serving(
        folder,
        tokenizer,
        replicas=config.replicas,
        arguments=as_arguments(options),
        devices=rollout_devices(config, shared="enable_sleep_mode" in options),
        log_folder=folder,
        limits=Limits(answer=config.run.rank_time_limit),
        end_token_ids=ends,
        concurrency=config.rollout.slots * config.replicas,  # what waits in an engine would count as its silence
        **handed_over(config),
    ) as generator:
        yield generator


@asynccontextmanager
async def _as_actors(
    config: Config, tokenizer: Any, folder: Path, ends: Sequence[int], options: Mapping[str, Any], trainer: Any
) -> AsyncIterator[SleepingGenerator]:
    """On places of their own, or on the trainer's."""
    from oxrl.generators.ray import ray_generator

    placed = {"bundles": trainer.ranks.places, "share": SHARE} if config.inference_engine.colocated else {}
    generator = await ray_generator(
        folder,
        tokenizer,
        replicas=config.replicas,
        tensor_parallel_size=config.rollout.tensor_parallel_size,
        lora=adapter_rank(config),
        time_limit=config.run.rank_time_limit,
        engine_options={key: value for key, value in options.items() if key != "tensor_parallel_size"},
        end_token_ids=ends,
        concurrency=config.rollout.slots * config.replicas,
        **placed,
    )
    try:
        yield generator
    finally:
        await generator.close()


@asynccontextmanager
async def _http(config: Config, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Engine]:  # noqa: ARG001
    from oxrl.generators.servers import served_at

    async with served_at(
        config.inference_engine.urls,
        tokenizer,
        time_limit=config.run.rank_time_limit,
        end_token_ids=end_tokens(model_config(config)),
        **handed_over(config),
    ) as generator:
        yield Engine(generator, False)


def adapter_rank(config: Config) -> int:
    """Of the adapter that travels alone; 0 where all weights travel."""
    return config.lora.r if config.lora.enabled and config.inference_engine.adapter else 0


def check_servers(config: Config) -> None:
    """Refuse a run whose servers are not there, before anything is loaded for it."""
    from oxrl.generators.connection import Connection, EngineError

    for url in config.inference_engine.urls if config.engine == "http" else ():
        connection = Connection(url, time_limit=SERVER_SECONDS, retries=0).checked()
        try:
            run_blocking(connection.get, "/health")
        except EngineError as error:
            raise ConfigError(
                f"inference_engine.urls: nobody is well there: {error}; start the server, or correct the address"
            ) from error


def handed_over(config: Config) -> dict[str, Any]:
    """How weights reach engines: in a folder that was named or this machine's memory, or over the network."""
    folder, transfer = config.inference_engine.folder, config.inference_engine.transfer
    if config.engine == "http" and transfer != "files":
        return {"transfer": transfer}
    return {} if folder is None else {"folder": folder}


def rollout_devices(config: Config, *, shared: bool = False) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each replica: behind those that train, or one of these; none where all see all."""
    first, count = (0, config.replicas) if shared else (config.ranks, config.run.rollout_gpus or 0)
    if shared and count > (here := int(os.environ.get("LOCAL_WORLD_SIZE", config.ranks))):
        raise ConfigError(
            f"inference_engine.colocated: {count} engines are started on this machine, and {here} ranks train here: "
            f"set inference_engine.replicas: {here}, or run.backend: ray, which puts them on all machines"
        )
    each, visible = config.rollout.tensor_parallel_size, os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(first + count)]
    left = names[first : first + count]
    return [",".join(left[start : start + each]) for start in range(0, len(left), each)]


def as_arguments(options: Mapping[str, Any]) -> list[str]:
    """`as_arguments({"enforce_eager": True, "dtype": "float32"}) == ["--enforce-eager", "--dtype", "float32"]`."""
    arguments: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return arguments


def write_shape(config: Config, tokenizer: Any, folder: Path) -> None:
    """What an engine has to know before it gets weights: the model's config and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    load_model_config(model_config(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


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
