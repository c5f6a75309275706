"""Open the training backends of the registry: models loaded, sharded where there are several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

from oxrl.config import Config
from oxrl.config.registry import find_backend, resolved
from oxrl.models.load import check_tokenizer, load_model, resolve_device, resolve_dtype
from oxrl.models.lora import LoraSettings, attach_lora, attach_reference, save_adapter
from oxrl.run.placement import SHARE, sharding_of
from oxrl.run.spec import RunSpec, expected_samples, reference_is_adapter
from oxrl.types import ModelConfig


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
    compiles = spec.config.model.compile
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
        "compiles": None if compiles == "auto" else compiles,
        "expected_tokens": expected_tokens(spec),
        "temperature": spec.config.rollout.temperature if spec.online else 1.0,
    }


def expected_tokens(spec: RunSpec) -> float:
    """About how many tokens the run trains on: half of the allowed lengths."""
    config = spec.config
    if spec.online:
        return expected_samples(config, spec.num_steps) * config.train.iterations
    return 0.5 * spec.num_steps * config.batch_size * (config.data.max_seq_len or 2048)


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
def open_local(spec: RunSpec) -> Iterator[Any]:
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
def open_ranked(spec: RunSpec) -> Iterator[Any]:
    """Over the ranks that `launch` or torchrun started."""
    from oxrl.backends.distributed.ranked import RankedBackend
    from oxrl.run.launch import join

    yield RankedBackend(join(time_limit=spec.config.run.rank_time_limit), worker_of(spec))


@contextmanager
def open_ray(spec: RunSpec) -> Iterator[Any]:
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
    from oxrl.backends.distributed.worker import Settings, build_seeded

    loads = loads_of(spec, to_shard=True)
    build = find_backend(sharding_of(spec.config)).build_worker
    assert build is not None, "a backend that shards"
    worker = resolved(build)(loads.policy, loads.others, Settings(**training_settings(spec)), spec.config)
    return partial(build_seeded, spec.config.run.seed, worker)


def build_fsdp_worker(policy: Any, others: Mapping[str, Any], settings: Any, config: Config) -> Any:  # noqa: ARG001
    from oxrl.backends.distributed import fsdp

    return partial(fsdp.build_worker, policy, others, settings)


def fsdp_stage(config: Config) -> int:  # noqa: ARG001
    return 3


def build_deepspeed_worker(policy: Any, others: Mapping[str, Any], settings: Any, config: Config) -> Any:
    from oxrl.backends.distributed import deepspeed

    sections = config.deepspeed.others, config.deepspeed_ref.others
    return partial(deepspeed.build_worker, policy, others, settings, *sections)


def deepspeed_stage(config: Config) -> int:
    return int(config.deepspeed.others.get("zero_optimization", {}).get("stage", 3))
