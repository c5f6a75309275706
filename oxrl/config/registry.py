"""Engines and backends by name: one record each, from which config choices, checks, planning and construction follow.

A custom one is named by the import path of its record, `my_engine.py:ENGINE`, or added with `register_engine` and
`register_backend`. Functions are import paths, so that a record imports nothing until its engine or backend is used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, TypeVar

from oxrl.names import did_you_mean, import_object

T = TypeVar("T")
Function = Callable[..., Any] | str  # a function, or its import path


class EngineRecord(NamedTuple):
    """`EngineRecord("my_engine.py:open_engine", "samples from ...")`."""

    open: Function  # (config, tokenizer, folder, trainer) -> async context manager of `oxrl.run.build.Engine`
    description: str
    shares_weights: bool = False  # it samples from the trainer's module, so no weights are sent
    external: bool = False  # its servers are started by the user, and are on other devices
    replicated: bool = False  # oxRL starts it, perhaps several times, with tensor parallelism, on devices of its own
    keys: frozenset[str] = frozenset()  # keys of `inference_engine` that it uses
    required: frozenset[str] = frozenset()  # those that must be set
    check_settings: Function | None = None  # (settings) -> None: further keys of `inference_engine`; None: it has none
    package: str | None = None  # an optional package that must be installed, named like its extra
    reads_media: bool = False  # it takes images and audio beside token ids; external servers are asked before a run
    image_package: str | None = None  # an optional package that it needs for models that read images


class BackendRecord(NamedTuple):
    """`BackendRecord("my_backend.py:open_backend", "trains with ...")`."""

    open: Function  # (spec) -> context manager of a `Backend`
    description: str
    processes: Literal["one", "ranks", "actors"] = "one"  # who computes: this process, launched ranks, Ray actors
    build_worker: Function | None = None  # (policy, others, settings, config) -> a rank's worker, if it shards models
    zero_stage: Function | None = None  # (config) -> 0 to 3: what is sharded, for memory estimates
    sections: frozenset[str] = frozenset()  # config sections that only it uses
    package: str | None = None  # an optional package that must be installed, named like its extra


ENGINES: dict[str, EngineRecord] = {
    "embedded": EngineRecord(
        "oxrl.run.engines:open_embedded",
        "samples with the trainer's module",
        shares_weights=True,
        reads_media=True,
        keys=frozenset({"precision", "capture", "compile", "cache_gib"}),
    ),
    "vllm": EngineRecord(
        "oxrl.run.engines:open_vllm",
        "vLLM, started for the run",
        replicated=True,
        keys=frozenset({"replicas", "place", "folder", "adapter", "colocated"}),
        check_settings="oxrl.generators.vllm.settings:check_settings",
        package="vllm",
        reads_media=True,
        image_package="torchvision",
    ),
    "http": EngineRecord(
        "oxrl.run.engines:open_http",
        "vLLM or SGLang servers at urls",
        external=True,
        keys=frozenset({"urls", "folder", "transfer"}),
        required=frozenset({"urls"}),
        reads_media=True,
    ),
}
BACKENDS: dict[str, BackendRecord] = {
    "local": BackendRecord("oxrl.run.backends:open_local", "one device, in this process"),
    "fsdp": BackendRecord(
        "oxrl.run.backends:open_ranked",
        "FSDP2 over one process per device",
        "ranks",
        "oxrl.run.backends:build_fsdp_worker",
        "oxrl.run.backends:fsdp_stage",
    ),
    "deepspeed": BackendRecord(
        "oxrl.run.backends:open_ranked",
        "DeepSpeed ZeRO over one process per device",
        "ranks",
        "oxrl.run.backends:build_deepspeed_worker",
        "oxrl.run.backends:deepspeed_stage",
        frozenset({"deepspeed", "deepspeed_ref"}),
        package="deepspeed",
    ),
    "ray": BackendRecord("oxrl.run.backends:open_ray", "Ray actors, sharded by run.sharding", "actors", package="ray"),
}
DEFAULT_ENGINE, ROLLOUT_ENGINE = "embedded", "vllm"  # what `auto` chooses, without and with rollout_gpus
DEFAULT_BACKEND, CLUSTER_BACKEND = "local", "ray"  # what `auto` chooses, on one device and with ray_address


def register_engine(name: str, record: EngineRecord) -> None:
    """Make an engine available as `inference_engine.name: NAME` in this process."""
    ENGINES[name] = record


def register_backend(name: str, record: BackendRecord) -> None:
    """Make a backend available as `run.backend: NAME` in this process."""
    BACKENDS[name] = record


def find_engine(name: str) -> EngineRecord:
    return _find("engine", name, ENGINES, EngineRecord)


def find_backend(name: str) -> BackendRecord:
    return _find("backend", name, BACKENDS, BackendRecord)


def shardings() -> list[str]:
    """The backends that shard a model."""
    return [name for name, record in BACKENDS.items() if record.build_worker is not None]


def engines_with(key: str) -> str:
    """The engines that use a key of `inference_engine`: "vllm or http"."""
    return " or ".join(name for name, record in ENGINES.items() if key in record.keys)


def choices(table: Mapping[str, EngineRecord] | Mapping[str, BackendRecord]) -> str:
    """The names of a table with their descriptions, for the documentation of a key."""
    return "; ".join(f"{name}: {record.description}" for name, record in table.items())


def resolved(function: Function) -> Callable[..., Any]:
    return import_object(function) if isinstance(function, str) else function


def _find(kind: str, name: str, table: dict[str, T], record_type: type[T]) -> T:
    if name in table:
        return table[name]
    if ":" not in name:
        hint, names = did_you_mean(name, table), ", ".join(table)
        raise ValueError(f"no {kind} is called {name!r}{hint}; there are: {names}; a custom one is FILE.py:RECORD")
    record = import_object(name)
    if not isinstance(record, record_type):
        raise ValueError(f"{name} is {record!r}; it must be of type {record_type.__name__}")
    return record
