"""Device placement: one process, one process per device, or Ray actors, from the config and this machine.

The decision is written into the config, so that a run resumed on another machine keeps it.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from oxrl.config import Config, ConfigError
from oxrl.config.registry import CLUSTER_BACKEND, DEFAULT_BACKEND, DEFAULT_ENGINE, ROLLOUT_ENGINE, find_backend
from oxrl.machine.hardware import detect_hardware

SHARE = 0.5  # of a device that trainer and engine share: of its compute, and of its memory while the engine is awake


def placed(config: Config, gpus: int | None = None) -> Config:
    """The config with `run.backend` and the number of devices decided, for `gpus` GPUs (default: this machine's)."""
    gpus = len(detect_hardware().gpus) if gpus is None else gpus
    run = config.run
    if config.engine == ROLLOUT_ENGINE and not gpus and config.inference_engine.name == "auto" and not run.ray_address:
        config = _with(config, "inference_engine", name=DEFAULT_ENGINE)  # the GPUs for rollouts do not exist here
    wanted = _wanted(config, gpus)
    backend: str = run.backend
    if backend == "auto":
        several = sharding_of(config) if wanted > 1 and gpus else DEFAULT_BACKEND
        backend = several if run.ray_address is None else CLUSTER_BACKEND
    if find_backend(backend).processes == "one":
        return _with(config, "run", backend=backend)
    return _with(config, "run", backend=backend, training_gpus=max(1, wanted))


def _with(config: Config, section: str, **decided: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=decided)})


def _wanted(config: Config, gpus: int) -> int:
    """Training devices: as many as configured, else all that are not used for rollouts."""
    if config.run.training_gpus is not None:
        return config.run.training_gpus
    if config.model.device != "auto":
        return 1
    return max(gpus - (config.run.rollout_gpus or 0), min(gpus, 1))


def _check_room(ranks: int, rollout_gpus: int) -> None:
    gpus = len(detect_hardware().gpus)
    if gpus and ranks + rollout_gpus > gpus:
        raise ConfigError(
            f"run.training_gpus is {ranks} and run.rollout_gpus {rollout_gpus}, but this machine has {gpus} GPUs"
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
    return "deepspeed" if find_spec("deepspeed") is not None else "fsdp"


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
    _check_room(config.ranks, config.run.rollout_gpus or 0)
    return config.ranks
