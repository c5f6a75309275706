"""Checks across config keys: contradictions stop a run, remarks report keys that have no effect.

Reads neither files nor hardware; checks that depend on them are made where they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from oxrl.algorithms import algorithm
from oxrl.config.registry import BACKENDS, ENGINES, engines_with, find_backend, find_engine
from oxrl.config.schema import Config
from oxrl.types import Algorithm

DEEPSPEED_KEYS_SET_ELSEWHERE = {
    "optimizer": "train.lr, betas, adam_epsilon and weight_decay",
    "scheduler": "train.lr_scheduler and warmup_steps_ratio",
    "gradient_clipping": "train.clip_grad_norm",
    "train_batch_size": "train.train_batch_size_per_gpu and gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "train.train_batch_size_per_gpu",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps",
    "bf16": "model.dtype",
    "fp16": "model.dtype",
}
"""DeepSpeed settings that are refused in its sections -> the keys of this config that set them."""

RESERVED_ENGINE_KEYS = {
    "host",
    "port",
    "uds",
    "api_key",
    "load_format",
    "worker_extension_cls",
    "tensor_parallel_size",
    "logprobs_mode",
    "enable_sleep_mode",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
}
"""vLLM settings that oxRL sets itself."""
RESERVED_REASON = (
    "engines listen on a socket of their own and receive their weights from the trainer (use "
    "rollout.tensor_parallel_size, inference_engine.colocated and inference_engine.adapter)"
)


MAX_ROWS = 1_000_000  # rows, prompts or completions of one step
MAX_TOKENS = 10_000_000  # of one row


class InactiveKey(NamedTuple):
    """A key that has an effect only in combination with another one."""

    key: str  # "section.key"
    is_active: Callable[[Config, set[str]], bool]  # of the config and the roles of models that its algorithms need
    condition: str  # completes "KEY has no effect ..."


def _uses(key: str, config: Config) -> bool:
    return key in find_engine(config.engine).keys


def _engine_key(key: str) -> InactiveKey:
    return InactiveKey(
        f"inference_engine.{key}", lambda config, _: _uses(key, config), f"without name: {engines_with(key)}"
    )


def _replicated() -> str:
    return " or ".join(name for name, record in ENGINES.items() if record.replicated)


def _actors(config: Config) -> bool:
    return config.processes == "actors"


def _may_use_actors(config: Config) -> bool:
    return config.run.backend == "auto" or _actors(config)


def _sharding_is_active(config: Config, _: set[str]) -> bool:
    run = config.run
    return run.backend in ("auto", run.sharding) or config.processes == "actors"


INACTIVE_KEYS = (
    InactiveKey("model.ref_decay", lambda config, _: config.model.ref_update == "ema", "without model.ref_update: ema"),
    InactiveKey(
        "model.ref_every", lambda config, _: config.model.ref_update == "periodic", "without ref_update: periodic"
    ),
    InactiveKey("model.ref_model", lambda _, roles: "ref" in roles, "with an algorithm that has no reference"),
    InactiveKey("model.teacher", lambda _, roles: "teacher" in roles, "with an algorithm that has no teacher"),
    InactiveKey("train.patience", lambda config, _: config.has_held_out, "without data.val_files_path"),
    InactiveKey("train.eval_every", lambda config, _: config.has_held_out, "without data.val_files_path"),
    InactiveKey("train.iterations", lambda _, roles: "sampler" in roles, "with an algorithm that does not sample"),
    InactiveKey("train.mini_batches", lambda _, roles: "sampler" in roles, "with an algorithm that does not sample"),
    InactiveKey("lora.r", lambda config, _: config.lora.enabled, "without lora.enabled: true"),
    InactiveKey("lora.alpha", lambda config, _: config.lora.enabled, "without lora.enabled: true"),
    InactiveKey("lora.dropout", lambda config, _: config.lora.enabled, "without lora.enabled: true"),
    InactiveKey("lora.target_modules", lambda config, _: config.lora.enabled, "without lora.enabled: true"),
    InactiveKey("data.env_rows", lambda config, _: config.makes_rows, "without a rollout.env that makes its rows"),
    InactiveKey("data.env_val_rows", lambda config, _: config.makes_rows, "without a rollout.env that makes its rows"),
    InactiveKey("reward.rubric", lambda config, _: config.reward.judge is not None, "without reward.judge"),
    InactiveKey("run.ray_address", lambda config, _: _may_use_actors(config), "without run.backend: ray"),
    InactiveKey("run.sharding", _sharding_is_active, "with this run.backend"),
    InactiveKey(
        "run.rollout_gpus",
        lambda config, _: find_engine(config.engine).replicated,
        f"without inference_engine.name: {_replicated()}",
    ),
    _engine_key("urls"),
    InactiveKey("inference_engine.name", lambda _, roles: "sampler" in roles, "with an algorithm that does not sample"),
    _engine_key("transfer"),
    _engine_key("replicas"),
    _engine_key("precision"),
    _engine_key("capture"),
    _engine_key("compile"),
    _engine_key("cache_gib"),
    InactiveKey("inference_engine.adapter", lambda config, _: config.lora.enabled, "without lora.enabled: true"),
    InactiveKey(
        "inference_engine.place",
        lambda config, _: _uses("place", config) and not _actors(config),
        f"without name: {engines_with('place')}, or under Ray",
    ),
    InactiveKey(
        "inference_engine.folder",
        lambda config, _: (
            _uses("folder", config) and config.inference_engine.transfer == "files" and not _actors(config)
        ),
        "with name: embedded, with vllm under Ray, or with another transfer than files",
    ),
)


def contradictions(config: Config) -> list[str]:
    """Return one message per combination of keys that cannot work, with its remedy; imports torch."""
    chosen = algorithm(config.train.alg_name, **config.train.alg_params)
    later = [algorithm(each.alg_name, **each.alg_params) for each in config.train.alg_schedule]
    return [
        *_sizes(config, chosen),
        *_devices(config),
        *_engine(config, chosen),
        *(_colocated(config) if config.inference_engine.colocated else ()),
        *_reference(config, [chosen, *later]),
        *_sampling(config, chosen),
    ]


def _sizes(config: Config, chosen: Algorithm) -> Iterator[str]:
    """Sizes that could only exhaust time or memory, before anything of that size is made."""
    rollout = config.rollout
    started = config.batch_size * rollout.n_samples * rollout.over_sampling_factor
    if config.batch_size > MAX_ROWS:
        yield (
            f"train.train_batch_size_per_gpu x gradient_accumulation_steps makes steps of {config.batch_size:,} rows; "
            f"at most {MAX_ROWS:,}: lower one of them"
        )
    elif chosen.online is not None and started > MAX_ROWS:
        yield (
            f"rollout.n_samples {rollout.n_samples:,} x over_sampling_factor {rollout.over_sampling_factor:,g} x "
            f"{config.batch_size:,} prompts start {started:,.0f} completions per step; at most {MAX_ROWS:,}: lower one "
            "of them"
        )
    for key, tokens in (("rollout.max_tokens", rollout.max_tokens), ("data.max_seq_len", config.data.max_seq_len)):
        if tokens is not None and tokens > MAX_TOKENS:
            yield f"{key} is {tokens:,}; at most {MAX_TOKENS:,} tokens: lower it"


def _devices(config: Config) -> Iterator[str]:
    run = config.run
    if run.training_gpus and config.model.device == "cpu" and run.backend in ("auto", "local"):
        yield f"model.device: cpu and run.training_gpus: {run.training_gpus} contradict each other: leave one out"
    if run.training_gpus == 0 and config.model.device not in ("auto", "cpu"):
        yield f"run.training_gpus: 0 and model.device: {config.model.device} contradict each other: leave one out"
    if run.training_gpus is not None and run.training_gpus > 1 and run.backend == "local":
        yield f"run.backend: local trains on one device, and run.training_gpus is {run.training_gpus}: leave one out"
    if config.ranks > 1 and config.model.device not in ("auto", "cpu", "cuda"):
        yield f"model.device: {config.model.device} is one device, and run.backend takes {config.ranks}: set auto"
    for section, given in (("deepspeed", config.deepspeed), ("deepspeed_ref", config.deepspeed_ref)):
        for key in sorted(DEEPSPEED_KEYS_SET_ELSEWHERE.keys() & given.others):
            yield f"{section}.{key} is not set here: {DEEPSPEED_KEYS_SET_ELSEWHERE[key]} sets it for all backends"
    world_size = config.deepspeed.others.get("world_size")
    if world_size is not None and run.training_gpus is not None and world_size != run.training_gpus:
        yield f"deepspeed.world_size {world_size} is not run.training_gpus {run.training_gpus}: leave world_size out"


def _engine(config: Config, chosen: Algorithm) -> Iterator[str]:
    run, rollout, engine = config.run, config.rollout, config.inference_engine
    parallel, record = rollout.tensor_parallel_size, find_engine(config.engine)
    if run.rollout_gpus and run.rollout_gpus % parallel:
        yield (
            f"rollout.tensor_parallel_size {parallel} does not divide run.rollout_gpus {run.rollout_gpus}: each "
            "replica takes that many devices"
        )
    elif parallel > 1 and not record.replicated:
        names = _replicated()
        yield f"rollout.tensor_parallel_size {parallel} needs inference_engine.name: {names}: set 1, or leave it out"
    if "urls" in record.required and not engine.urls:
        yield f"inference_engine.name: {config.engine} needs inference_engine.urls, such as [http://127.0.0.1:8000]"
    if engine.transfer == "nccl" and config.model.device == "cpu":
        yield "inference_engine.transfer: nccl needs GPUs, and model.device is cpu: set gloo, or files"
    if _actors(config) and record.shares_weights and chosen.online is not None:
        yield (
            f"run.backend: {run.backend} trains in other processes, and the {config.engine} engine needs the trainer's "
            "weights in this one: set inference_engine.name: vllm or http"
        )
    for key in sorted(RESERVED_ENGINE_KEYS & engine.others.keys()):
        yield f"inference_engine.{key} is not set here: {RESERVED_REASON}"
    if engine.place == "process" and parallel > 1:
        yield "inference_engine.place: process uses one device: set server for rollout.tensor_parallel_size above 1"
    if record.replicated and run.rollout_gpus and engine.replicas not in (None, run.rollout_gpus // parallel):
        yield (
            f"inference_engine.replicas {engine.replicas} x rollout.tensor_parallel_size {parallel} is not "
            f"run.rollout_gpus {run.rollout_gpus}: leave replicas out"
        )
    if run.ray_address is not None and config.model.dtype == "auto":
        yield "run.ray_address: the devices of the cluster may differ from those of this machine: set model.dtype"
    if engine.place == "process" and (config.ranks > 1 or engine.replicas not in (None, 1) or run.rollout_gpus):
        yield (
            "inference_engine.place: process runs one vLLM in a single-process trainer: set server for several "
            "replicas, separate rollout devices or several ranks"
        )
    if engine.adapter and "adapter" not in record.keys:
        names = engines_with("adapter")
        yield f"inference_engine.adapter: {config.engine} takes full weights: set inference_engine.name: {names}"
    elif engine.adapter and not _may_use_actors(config) and not config.in_process:
        yield (
            "inference_engine.adapter: servers take full weights: leave it out, or run vLLM in the trainer's process "
            "(run.backend: local, without lag and rollout_gpus) or with run.backend: ray"
        )
    if not record.shares_weights and rollout.mode != "shrinking":
        yield f"rollout.mode: {rollout.mode} is for the embedded engine only: leave it out"


def _colocated(config: Config) -> Iterator[str]:
    run, engine = config.run, config.inference_engine
    key = "inference_engine.colocated"
    if engine.name == "auto" or not _uses("colocated", config):
        yield f"{key} needs an engine that can sleep: set inference_engine.name: {engines_with('colocated')}"
    if config.rollout.lag:
        yield f"{key}: the engine sleeps during training, and rollout.lag samples during it: leave one out"
    if run.rollout_gpus:
        yield f"{key} samples on the training devices, and run.rollout_gpus on separate ones: leave one out"
    if config.rollout.tensor_parallel_size > 1:
        yield f"{key} uses one training device per replica: set rollout.tensor_parallel_size: 1"
    devices = 1 if run.backend == "local" else run.training_gpus
    if devices and engine.replicas is not None and engine.replicas > devices:
        yield f"{key}: inference_engine.replicas {engine.replicas} exceeds the {devices} training devices: lower it"
    if config.model.device not in ("auto", "cpu", "cuda", "cuda:0"):
        yield f"{key} starts at the first device: set model.device: auto, and choose with CUDA_VISIBLE_DEVICES"


def _reference(config: Config, algorithms: list[Algorithm]) -> Iterator[str]:
    model, names = config.model, ", ".join(each.name for each in algorithms)
    if model.ref_update == "fixed":
        return
    if not any("ref" in each.others and each.online is not None for each in algorithms):
        yield (
            f"model.ref_update: {model.ref_update} needs an online algorithm with a reference, and {names} has none: "
            "set it to fixed, or choose another (online_dpo; for most, train.alg_params: {kl_coef: 0.05})"
        )
    elif config.lora.enabled and model.ref_model is not None:
        yield (
            "model.ref_model is a separate model, which cannot follow an adapter: set model.ref_update: fixed, or "
            "leave model.ref_model out; the reference is then a second adapter, initialised as the base model"
        )


def _sampling(config: Config, chosen: Algorithm) -> Iterator[str]:
    reward, rollout, train = config.reward, config.rollout, config.train
    if chosen.online is None:
        if given := [key for key in ("reward_func", "model", "judge") if getattr(reward, key) is not None]:
            yield (
                f"reward.{given[0]}: {chosen.name} trains on dataset rows and uses no reward: leave the section out, "
                "or choose an algorithm that samples, such as sgrpo"
            )
        return
    updates, completions = train.iterations * train.mini_batches, config.batch_size * rollout.n_samples
    if train.mini_batches > completions:
        yield (
            f"train.mini_batches {train.mini_batches} exceeds the {completions} completions of a step "
            "(train_batch_size_per_gpu x gradient_accumulation_steps x rollout.n_samples): lower it"
        )
    if rollout.max_draws is not None and rollout.max_draws < config.batch_size:
        yield f"rollout.max_draws {rollout.max_draws} is less than the {config.batch_size} prompts of a step: raise it"
    if config.data.max_seq_len is not None and rollout.max_tokens >= config.data.max_seq_len:
        yield (
            f"no prompt leaves room for rollout.max_tokens={rollout.max_tokens} in data.max_seq_len="
            f"{config.data.max_seq_len}: raise the latter or lower the former"
        )
    if rollout.filter is None and rollout.filter_params:
        yield "rollout.filter_params are set, but rollout.filter is not: set it, or leave them out"
    if rollout.force_strict_on_policy:
        strict = {"rollout.lag": rollout.lag, "rollout.partial_rollouts": rollout.partial_rollouts}
        for key in (key for key, value in strict.items() if value):
            yield f"{key} samples with older weights, which rollout.force_strict_on_policy forbids: leave one out"
        if updates > 1:
            yield (
                f"train.iterations x mini_batches takes {updates} optimizer steps per batch, and the later ones are "
                "not on-policy: set both to 1, or leave rollout.force_strict_on_policy out"
            )


def _uses_section(config: Config, section: str) -> bool:
    """Whether the backend, or one that `auto` or Ray may choose, reads a section."""
    names = list(BACKENDS) if _may_use_actors(config) else [config.run.backend]
    return any(section in find_backend(name).sections for name in names)


def remarks(config: Config) -> list[str]:
    """Return one message per key that has no effect or is probably a mistake; imports torch."""
    schedule = [(config.train.alg_name, config.train.alg_params)]
    schedule += [(each.alg_name, each.alg_params) for each in config.train.alg_schedule]
    algorithms = [algorithm(name, **parameters) for name, parameters in schedule]
    roles = set().union(*(each.others for each in algorithms)) | ({"sampler"} if algorithms[0].online else set())
    messages = [
        f"{each.key} has no effect {each.condition}"
        for each in INACTIVE_KEYS
        if _is_set(config, each.key) and not each.is_active(config, roles)
    ]
    if algorithms[0].online is None:
        keys_set = [key for key in type(config.rollout).model_fields if _is_set(config, f"rollout.{key}")]
        messages += [f"rollout.{key} has no effect with an algorithm that does not sample" for key in keys_set]
    if config.lora.enabled and config.lora.dropout and any(each.compares_logprobs for each in algorithms):
        messages.append(
            f"lora.dropout has no effect with algorithms that compare log-probs, such as {algorithms[0].name}"
        )
    if find_engine(config.engine).check_settings is None:
        for key in sorted(config.inference_engine.others):
            messages.append(f"inference_engine.{key} has no effect with the {config.engine} engine")
    for section, keys in (("deepspeed", config.deepspeed.others), ("deepspeed_ref", config.deepspeed_ref.others)):
        if keys and not _uses_section(config, section):
            messages.append(
                f"{section} ({', '.join(sorted(keys))}) has no effect with run.backend: {config.run.backend}"
            )
    if algorithms[0].online and config.rollout.lag and find_engine(config.engine).shares_weights:
        messages.append(
            "rollout.lag: the embedded engine shares the trainer's weights, so sampling and training do not overlap"
        )
    if same := sorted(set(config.data.val_files.values()) & set(config.data.train_files.values())):
        messages.append(f"{same[0]} is used for training and for evaluation: use held-out rows for evaluation")
    return messages


def _is_set(config: Config, key_path: str) -> bool:
    section, key = key_path.split(".")
    keys: Any = getattr(config, section)
    return bool(getattr(keys, key) != type(keys).model_fields[key].default)
