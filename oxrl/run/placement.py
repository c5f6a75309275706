"""Device placement: one process, one process per device, or Ray actors, from the config and this machine.

The decision is written into the config, so that a run resumed on another machine keeps it.
"""

from __future__ import annotations

import os
from typing import Any

from oxrl.algorithms import algorithm
from oxrl.config import Config, ConfigError
from oxrl.config.registry import (
    CLUSTER_BACKEND,
    DEFAULT_BACKEND,
    DEFAULT_ENGINE,
    ROLLOUT_ENGINE,
    find_backend,
    find_engine,
)
from oxrl.machine.hardware import detect_hardware
from oxrl.machine.packages import is_installed, require
from oxrl.run.launch import STARTED_BY_US

SHARE = 0.5  # of a device that trainer and engine share: of its compute, and of its memory while the engine is awake


def placed(config: Config, gpus: int | None = None) -> Config:
    """The config with `run.backend` and the number of devices decided, for `gpus` GPUs (default: this machine's).

    If there are fewer GPUs than it asks for, `auto` uses those that there are (`fewer_gpus` describes it). Backends and
    engines that are named are not changed; without a GPU their processes run on the CPU.
    """
    gpus = len(detect_hardware().gpus) if gpus is None else gpus
    config = _fitted(config, gpus)
    run = config.run
    if config.engine == ROLLOUT_ENGINE and not gpus and config.inference_engine.name == "auto" and not run.ray_address:
        config = _with(config, "inference_engine", name=DEFAULT_ENGINE)  # the GPUs for rollouts do not exist here
    wanted = _wanted(config, gpus)
    backend: str = run.backend
    if backend == "auto":
        several = sharding_of(config) if wanted > 1 and gpus else DEFAULT_BACKEND
        backend = several if run.ray_address is None else CLUSTER_BACKEND
    one = find_backend(backend).processes == "one"
    return _with(config, "run", backend=backend, **({} if one else {"training_gpus": max(1, wanted)}))


def _fitted(config: Config, gpus: int) -> Config:
    """The config with no more devices than there are; as it is if they suffice, or if it names its processes."""
    run, parallel = config.run, config.rollout.tensor_parallel_size
    chosen = run.backend == "auto" or (run.backend == DEFAULT_BACKEND and (run.training_gpus or 0) <= 1)
    elsewhere = run.ray_address is not None or _is_rank_of_torchrun()  # GPUs of other machines
    training = min(gpus, 1) if run.training_gpus is None else run.training_gpus
    rollout = _rollout_gpus(config)
    if not gpus and config.inference_engine.name != "auto":
        rollout = 0  # the replicas of a named engine run on the CPU
    if not chosen or elsewhere or config.model.device != "auto" or training + rollout <= gpus:
        return config
    if rollout:
        share = gpus * rollout // (training + rollout)
        rollout = min(max(share, parallel), gpus - 1) // parallel * parallel if gpus else 0
    if gpus and not rollout and _rollout_gpus(config) and config.inference_engine.name != "auto":
        raise ConfigError(
            f"run.rollout_gpus is {run.rollout_gpus}, but this machine has {_count(gpus)}, which leaves none for "
            f"inference_engine.name: {config.inference_engine.name}: leave run.rollout_gpus out and set "
            "inference_engine.colocated: true, or leave both out for the embedded engine"
        )
    decided: dict[str, int | None] = {}
    if run.training_gpus is not None:
        decided["training_gpus"] = min(training, gpus - rollout)
    if run.rollout_gpus and (gpus or config.inference_engine.name == "auto"):
        decided["rollout_gpus"] = rollout or None
    fitted = _with(config, "run", **decided)
    return fitted if find_engine(fitted.engine).replicated else _with(fitted, "rollout", tensor_parallel_size=1)


def _is_rank_of_torchrun() -> bool:
    return "RANK" in os.environ and STARTED_BY_US not in os.environ


def fewer_gpus(asked: Config, decided: Config, gpus: int | None = None) -> str | None:
    """What is used instead of the devices that the config asks for; None if it gets them."""
    gpus = len(detect_hardware().gpus) if gpus is None else gpus
    counts = {key: count for key in ("training_gpus", "rollout_gpus") if (count := getattr(asked.run, key))}
    if asked.engine == decided.engine and all(getattr(decided.run, key) == count for key, count in counts.items()):
        return None
    keys = [f"run.{key} is {count}" for key, count in counts.items()]
    uses = f"training runs on {decided.ranks if gpus else 'the CPU'} (run.backend: {decided.run.backend})"
    if asked.run.rollout_gpus:
        where = decided.run.rollout_gpus if gpus and decided.run.rollout_gpus else "the same"
        uses += f", sampling on {where} (inference_engine.name: {decided.engine})"
    if (rows := asked.batch_size // asked.ranks * max(1, asked.run.training_gpus or 1)) != decided.batch_size:
        uses += f"; a step has {decided.batch_size} rows instead of {rows}"
    return f"{' and '.join(keys)}, but this machine has {_count(gpus)}: {uses}"


def _count(gpus: int) -> str:
    return {0: "no GPU", 1: "1 GPU"}.get(gpus, f"{gpus} GPUs")


def _with(config: Config, section: str, **decided: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=decided)})


def _wanted(config: Config, gpus: int) -> int:
    """Training devices: as many as configured, else all that are not used for rollouts."""
    if config.run.training_gpus is not None:
        return config.run.training_gpus
    if config.model.device != "auto":
        return 1
    return max(gpus - (config.run.rollout_gpus or 0), min(gpus, 1))


def _rollout_gpus(config: Config) -> int:
    """Devices for sampling only; an engine that oxRL does not start takes none."""
    return (config.run.rollout_gpus or 0) if find_engine(config.engine).replicated else 0


def _check_room(ranks: int, rollout_gpus: int) -> None:
    gpus = len(detect_hardware().gpus)
    if gpus and ranks + rollout_gpus > gpus:
        raise ConfigError(
            f"run.training_gpus is {ranks} and run.rollout_gpus {rollout_gpus}, but this machine has {_count(gpus)}: "
            "set fewer, or leave run.backend out"
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not gpus and ranks > 2 * cores:
        raise ConfigError(f"run.training_gpus is {ranks}, but this machine has no GPU and {cores} cores: set fewer")


def sharding_of(config: Config) -> str:
    """The sharding backend: as configured, else DeepSpeed if it is installed, else FSDP2."""
    run = config.run
    if run.backend != "auto" and find_backend(run.backend).build_worker is not None:
        return run.backend
    if run.sharding != "auto":
        return run.sharding
    return "deepspeed" if is_installed("deepspeed") else "fsdp"


def check_installed(config: Config, *, online: bool | None = None) -> None:
    """Raise a ValueError if the backend, its sharding or the engine of an online run needs a package that is missing.

    `config` is placed; `online` is the algorithm's by default, before rows are read.
    """
    if online is None:
        online = algorithm(config.train.alg_name, **config.train.alg_params).online is not None
    records = [find_backend(config.run.backend)]
    if config.processes != "one":
        records.append(find_backend(sharding_of(config)))
    packages = [record.package for record in records]
    if online:
        packages.append(find_engine(config.engine).package)
    for package in packages:
        if package is not None:
            require(package)


def ranks_to_start(config: Config) -> int:
    """The number of ranks that this process has to start; 0 if it is one itself, or if one process is enough."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        if not os.environ.get(name, "0").isdecimal():
            raise ConfigError(
                f"the environment variable {name} is {os.environ[name]!r:.60}, not a number: unset it, or start the "
                "processes with torchrun"
            )
    started = "RANK" in os.environ
    if started and (world := int(os.environ.get("WORLD_SIZE", "1"))) != config.ranks and config.processes != "actors":
        raise ConfigError(
            f"{world} processes were started, but run.training_gpus is {config.run.training_gpus or 1} with "
            f"run.backend: {config.run.backend}: both must be the same"
        )
    if started or config.processes != "ranks":
        return 0
    _check_room(config.ranks, _rollout_gpus(config))
    return config.ranks
