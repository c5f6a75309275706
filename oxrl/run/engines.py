"""Open the inference engines of the registry for a run: the embedded one, vLLM, and servers of the user."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from oxrl.config import Config, ConfigError
from oxrl.config.registry import find_engine
from oxrl.data.processor import processor_of, save_tokenizer
from oxrl.loops.online import no_offload, sleeping_engine
from oxrl.models.load import context_length, end_tokens, load_model_config, resolve_device, resolve_dtype
from oxrl.run.build import Engine
from oxrl.run.placement import SHARE
from oxrl.run.spec import expected_samples, model_config
from oxrl.types import SleepingGenerator

logger = logging.getLogger(__name__)

USUAL_STEPS = 100  # of an epoch whose length the config does not have


@asynccontextmanager
async def open_embedded(config: Config, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Engine]:  # noqa: ARG001
    from oxrl.generators.embedded.generator import EmbeddedGenerator

    if not hasattr(trainer, "model"):
        raise ConfigError(
            f"run.backend: {config.run.backend} has no attribute `model`, from which the embedded engine samples: add "
            "it, or choose an engine with its own weights (inference_engine.name)"
        )
    rollout = config.rollout
    model, engine = trainer.model, config.inference_engine
    own = {"slots": rollout.slots, "mode": rollout.mode, "capture": capture_options(config, model.device.type)}
    dtype = model.dtype if engine.precision == "auto" else resolve_dtype(engine.precision, model.device.type)
    if dtype == model.dtype:
        yield Engine(EmbeddedGenerator(model, tokenizer, **own))
        return
    from oxrl.generators.embedded.rounded import RoundedGenerator

    if config.train.alg_params.get("correction", "none") == "none":
        logger.warning(
            "inference_engine.precision: %s samples from rounded weights without train.alg_params.correction: the "
            "loss takes the samples for on-policy ones; set correction: truncated",
            engine.precision,
        )
    yield Engine(RoundedGenerator(model, tokenizer, dtype, **own))


def capture_options(config: Config, device: str) -> Any:
    """How the embedded engine decodes on a GPU; on other devices the keys have no effect."""
    from oxrl.generators.embedded.captured import Capture

    engine, train = config.inference_engine, config.train
    if device != "cuda":
        if engine.capture is True:
            raise ConfigError(
                f"inference_engine.capture: true needs a GPU, and the device is {device}: set auto or false"
            )
        return Capture()
    steps = train.total_number_of_epochs * (train.train_steps_per_epoch or USUAL_STEPS)
    return Capture(
        None if engine.capture == "auto" else engine.capture,
        None if engine.compile == "auto" else engine.compile,
        expected_tokens=expected_samples(config, steps),
        cache_bytes=None if engine.cache_gib is None else int(engine.cache_gib * 2**30),
    )


@asynccontextmanager
async def open_vllm(config: Config, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Engine]:
    """In the trainer's process, as server processes, or as Ray actors on the trainer's cluster."""
    write_model_config(config, tokenizer, folder)
    sleeps = sleeps_beside(config, trainer)
    options = {**media_settings(tokenizer), **engine_options(config)}
    if sleeps:
        options = {"enable_sleep_mode": True, "gpu_memory_utilization": SHARE, **options}
        await trainer.release_memory()  # vLLM measures free memory when it starts
    elif config.inference_engine.colocated:
        logger.info("inference_engine.colocated: the engine stays awake beside the trainer: vLLM sleeps on GPUs only")
    common = (config, tokenizer, folder, end_tokens(model_config(config)), options)
    if config.processes == "actors":
        opened = _as_actors(*common, trainer)
    elif config.in_process:
        opened = _in_process(*common)
    else:
        opened = _as_servers(*common)
    async with opened as generator:
        yield Engine(generator, partial(sleeping_engine, generator, trainer) if sleeps else no_offload)


def sleeps_beside(config: Config, trainer: Any) -> bool:
    """Whether the engine shares the trainer's devices and can sleep meanwhile: vLLM does not sleep on a CPU."""
    if not config.inference_engine.colocated:
        return False
    if config.processes == "actors":
        return bool(trainer.ranks.bundles.on_gpus)
    return resolve_device(config.model.device) != "cpu"


@asynccontextmanager
async def _in_process(
    config: Config, tokenizer: Any, folder: Path, ends: Sequence[int], options: Mapping[str, Any]
) -> AsyncIterator[SleepingGenerator]:
    from oxrl.generators.vllm.engine import create_vllm_engine

    own = {"end_token_ids": ends, "lora": adapter_rank(config), "time_limit": config.run.rank_time_limit}
    generator = await create_vllm_engine(folder, tokenizer, **own, **options)
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
async def open_http(config: Config, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Engine]:  # noqa: ARG001
    from oxrl.generators.servers import served_at

    async with served_at(
        config.inference_engine.urls,
        tokenizer,
        time_limit=config.run.rank_time_limit,
        end_token_ids=end_tokens(model_config(config)),
        **transfer_options(config),
    ) as generator:
        yield Engine(generator)


def adapter_rank(config: Config) -> int:
    """The rank of an adapter that is sent alone; 0 where all weights are sent."""
    return config.lora.r if config.lora.enabled and config.inference_engine.adapter else 0


def transfer_options(config: Config) -> dict[str, Any]:
    """How weights reach engines: files in a given folder or in shared memory, or over the network."""
    folder, transfer = config.inference_engine.folder, config.inference_engine.transfer
    if "transfer" in find_engine(config.engine).keys and transfer != "files":
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
    save_tokenizer(tokenizer, folder)


def media_settings(tokenizer: Any) -> dict[str, Any]:
    """vLLM's settings for a model that reads media.

    By default vLLM (0.32) normalises pixels in the model, by numbers that a start without weights overwrites with
    random ones, and that no later update restores.
    """
    return {} if processor_of(tokenizer) is None else {"mm_device_do_normalize": False}


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
        options["max_model_len"] = min(config.data.max_seq_len, context_length(model) or config.data.max_seq_len)
    if device == "cpu":
        options["enforce_eager"] = True
    return options | config.inference_engine.others
