"""Build the backend that trains and the engine that samples from a `RunSpec`.

Both are context managers that release everything at the end of the block. `launch` has started the ranks before.
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
from oxrl.loops.online import OffloadFn, no_offload, sleeping_engine
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
from oxrl.run.spec import RunSpec, model_config, reference_is_adapter
from oxrl.types import Generator, ModelConfig, SleepingGenerator

logger = logging.getLogger(__name__)

SERVER_SECONDS = 10.0  # for the health check of an external server


class Engine(NamedTuple):
    """A generator, whether it samples from the trainer's own module, and how it frees device memory for training."""

    generator: Generator
    shares_weights: bool
    offload: OffloadFn = no_offload


def load_policy(
    config: ModelConfig,
    lora: LoraSettings | None,
    seed: int,
    tokenizer: Any,
    *,
    adapter_reference: bool = False,
    to_shard: bool = False,
) -> Any:
    """The model to train, with its adapter and, where asked for, a second adapter as reference; equal on every rank."""
    model = load_model(off_device(config) if to_shard else config)
    check_tokenizer(model, tokenizer)
    if lora is None:
        return model
    adapted = attach_lora(model, lora, seed=seed)
    return attach_reference(adapted) if adapter_reference else adapted


def load_other(config: ModelConfig, tokenizer: Any, *, to_shard: bool = False) -> Any:
    """A frozen model: a reference or a teacher."""
    model = load_model(off_device(config) if to_shard else config, is_trainable=False)
    check_tokenizer(model, tokenizer)
    return model


def off_device(config: ModelConfig) -> ModelConfig:
    """In the precision of its device, but on the CPU: shards go to the device, where the whole may not fit."""
    dtype = resolve_dtype(config.dtype, resolve_device(config.device))
    return config._replace(device="cpu", dtype=str(dtype).removeprefix("torch."))


def training_settings(spec: RunSpec) -> dict[str, Any]:
    """The optimizer settings that every backend takes."""
    train = spec.config.train
    num_steps = spec.num_steps * (train.iterations * train.mini_batches if spec.online else 1)
    return {
        "lr": train.lr,
        "weight_decay": train.weight_decay,
        "betas": (train.betas[0], train.betas[1]),
        "eps": train.adam_epsilon,
        "lr_scheduler": train.lr_scheduler,
        "num_steps": num_steps,
        "warmup_steps": int(train.warmup_steps_ratio * num_steps),
        "max_grad_norm": train.clip_grad_norm or float("inf"),
        "heads": sorted({head for each in spec.schedule.values() for head in each.heads}),
        "temperature": spec.config.rollout.temperature if spec.online else 1.0,
    }


@contextmanager
def open_backend(spec: RunSpec) -> Iterator[Any]:
    """The backend that `run.backend` names, with the model loaded."""
    from oxrl.backends.forward import HEADS

    config = spec.config
    opened = {"local": _local, "fsdp": _ranked, "deepspeed": _ranked, "ray": _on_ray}[config.run.backend]
    with opened(spec) as backend:
        weights = Path(spec.model.name)
        if (weights / HEADS).exists():  # a value or reward head that was trained before
            backend.load_heads(weights)
        separate_engine = spec.online and config.engine != "embedded"
        if separate_engine and not isinstance(backend, QueuedBackend):
            # Sampling and grading continue while the trainer computes.
            backend = QueuedBackend(backend, time_limit=10 * config.run.rank_time_limit)
        yield backend
        if hasattr(backend, "close"):  # not after a failure, when ranks may be gone
            backend.close()


class Loads(NamedTuple):
    """Functions that load the models of a run; picklable, because every rank calls them."""

    policy: Any
    others: Mapping[str, Any]


def loads_of(spec: RunSpec, *, to_shard: bool) -> Loads:
    others = {
        role: partial(
            load_other,
            spec.model._replace(name=name, gradient_checkpointing=False),
            spec.tokenizer,
            to_shard=to_shard,
        )
        for role, name in spec.other_models.items()
    }
    policy = partial(
        load_policy,
        spec.model,
        spec.lora,
        spec.config.run.seed,
        spec.tokenizer,
        adapter_reference=reference_is_adapter(spec.config),
        to_shard=to_shard,
    )
    return Loads(policy, others)


@contextmanager
def _local(spec: RunSpec) -> Iterator[Any]:
    from oxrl.backends.local import create_pytorch_backend, write_plain

    loads = loads_of(spec, to_shard=False)
    model = loads.policy()
    backend = create_pytorch_backend(
        model,
        others={role: load() for role, load in loads.others.items()},
        write_model=save_adapter if hasattr(model, "peft_config") else write_plain,
        **training_settings(spec),
    )
    yield backend


@contextmanager
def _ranked(spec: RunSpec) -> Iterator[Any]:
    """Over the ranks that `launch` or torchrun started."""
    from oxrl.backends.distributed.ranked import RankedBackend
    from oxrl.run.launch import join

    yield RankedBackend(join(time_limit=spec.config.run.rank_time_limit), worker_of(spec))


@contextmanager
def _on_ray(spec: RunSpec) -> Iterator[Any]:
    """Over Ray actors, on a cluster that engines use too."""
    from oxrl.backends.distributed.ray import RayRanks, create_ray_backend
    from oxrl.machine.ray_cluster import ray_cluster

    config = spec.config
    run, colocated = config.run, config.inference_engine.colocated
    with ray_cluster(run.ray_address, processes=config.ranks + (0 if colocated else config.replicas)):
        ranks = RayRanks(config.ranks, share=SHARE if colocated else 1.0, time_limit=run.rank_time_limit)
        try:
            yield create_ray_backend(ranks, worker_of(spec))
        finally:
            ranks.stop()


def worker_of(spec: RunSpec) -> Any:
    """The function that builds one rank's part of the backend, on that rank."""
    from oxrl.backends.distributed import deepspeed, fsdp
    from oxrl.backends.distributed.worker import Settings

    config, loads = spec.config, loads_of(spec, to_shard=True)
    settings = Settings(**training_settings(spec))
    if sharding_of(config) == "fsdp":
        return partial(fsdp.build_worker, loads.policy, loads.others, settings)
    sections = config.deepspeed.others, config.deepspeed_ref.others
    return partial(deepspeed.build_worker, loads.policy, loads.others, settings, *sections)


@asynccontextmanager
async def open_engine(config: Config, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Engine]:
    """The engine that `inference_engine.name` names; `folder` holds the model config and logs of a separate engine.

    The embedded engine samples from `trainer.model`; any other has no weights before the first `update_weights`.
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
    """In the trainer's process, as server processes, or as Ray actors on the trainer's cluster."""
    write_model_config(config, tokenizer, folder)
    sleeps = sleeps_beside(config, trainer)
    options = engine_options(config)
    if sleeps:
        options = {"enable_sleep_mode": True, "gpu_memory_utilization": SHARE, **options}
        await trainer.release_memory()  # vLLM measures free memory when it starts
    elif config.inference_engine.colocated:
        logger.info("inference_engine.colocated: the engine stays awake beside the trainer: vLLM sleeps on GPUs only")
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
    """Whether the engine shares the trainer's devices and can sleep meanwhile: vLLM does not sleep on a CPU."""
    if not config.inference_engine.colocated:
        return False
    if config.run.backend == "ray":
        return bool(trainer.ranks.bundles.on_gpus)
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
        concurrency=config.rollout.slots
        * config.replicas,  # requests that wait inside an engine would look like a stalled engine
        **transfer_options(config),
    ) as generator:
        yield generator


@asynccontextmanager
async def _as_actors(
    config: Config, tokenizer: Any, folder: Path, ends: Sequence[int], options: Mapping[str, Any], trainer: Any
) -> AsyncIterator[SleepingGenerator]:
    """On their own placement bundles, or on the trainer's."""
    from oxrl.generators.ray import ray_generator

    placed = {"bundles": trainer.ranks.bundles, "share": SHARE} if config.inference_engine.colocated else {}
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
        **transfer_options(config),
    ) as generator:
        yield Engine(generator, False)


def adapter_rank(config: Config) -> int:
    """The rank of an adapter that is sent alone; 0 where all weights are sent."""
    return config.lora.r if config.lora.enabled and config.inference_engine.adapter else 0


def check_servers(config: Config) -> None:
    """Refuse a run whose external servers do not respond, before anything is loaded."""
    from oxrl.generators.connection import Connection, EngineError

    for url in config.inference_engine.urls if config.engine == "http" else ():
        connection = Connection(url, time_limit=SERVER_SECONDS, retries=0).checked()
        try:
            run_blocking(connection.get, "/health")
        except EngineError as error:
            raise ConfigError(
                f"inference_engine.urls: no healthy server: {error}; start the server, or correct the address"
            ) from error


def transfer_options(config: Config) -> dict[str, Any]:
    """How weights reach engines: files in a given folder or in shared memory, or over the network."""
    folder, transfer = config.inference_engine.folder, config.inference_engine.transfer
    if config.engine == "http" and transfer != "files":
        return {"transfer": transfer}
    return {} if folder is None else {"folder": folder}


def rollout_devices(config: Config, *, shared: bool = False) -> list[str]:
    """CUDA_VISIBLE_DEVICES of each replica: devices after the training ones, or shared with them; empty for all."""
    first, count = (0, config.replicas) if shared else (config.ranks, config.run.rollout_gpus or 0)
    if shared and count > (here := int(os.environ.get("LOCAL_WORLD_SIZE", config.ranks))):
        raise ConfigError(
            f"inference_engine.colocated: {count} engines would start on this machine, but {here} ranks train here: "
            f"set inference_engine.replicas: {here}, or run.backend: ray, which uses all machines"
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


def write_model_config(config: Config, tokenizer: Any, folder: Path) -> None:
    """What an engine needs to start without weights: the model's config and its tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    load_model_config(model_config(config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def engine_options(config: Config) -> dict[str, Any]:
    """vLLM's settings: derived from other sections, and all further keys of `inference_engine`.

    No weights are read at the start; the first sync sends the trainer's.
    """
    model = model_config(config)
    device = resolve_device(model.device)
    options: dict[str, Any] = {
        "load_format": "dummy",
        "dtype": str(resolve_dtype(model.dtype, device)).removeprefix("torch."),
        "max_num_seqs": config.rollout.slots,
        "tensor_parallel_size": config.rollout.tensor_parallel_size,
        "seed": config.run.seed,
        "trust_remote_code": model.trust_remote_code,
    }
    if config.data.max_seq_len is not None:
        options["max_model_len"] = min(config.data.max_seq_len, _max_position(model))
    if device == "cpu":
        options["enforce_eager"] = True
    return options | config.inference_engine.others


def _max_position(model: ModelConfig) -> int:
    return int(load_model_config(model).get_text_config().max_position_embeddings)
