"""Build the backend that trains and the engine that samples from a `RunSpec`, by their records in the registry.

Both are context managers that release everything at the end of the block. `launch` has started the ranks before.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.backends.distributed.queued import QueuedBackend
from oxrl.concurrency import run_blocking
from oxrl.config import Config, ConfigError
from oxrl.config.registry import find_backend, find_engine, resolved
from oxrl.loops.online import OffloadFn, no_offload
from oxrl.loops.step import check_backend, needed_methods
from oxrl.run.spec import RunSpec
from oxrl.types import Generator

SERVER_SECONDS = 10.0  # for the health check of an external server


class Engine(NamedTuple):
    """A generator, and how it frees device memory for training."""

    generator: Generator
    offload: OffloadFn = no_offload


@contextmanager
def open_backend(spec: RunSpec) -> Iterator[Any]:
    """The backend that `run.backend` names, with the model loaded."""
    from oxrl.backends.forward import HEADS

    config = spec.config
    with resolved(find_backend(config.run.backend).open)(spec) as backend:
        check_backend(backend, needed_methods(spec.algorithm) | {"get_weights", "save", "load"})
        weights = Path(spec.model.name)
        if (weights / HEADS).exists():  # a value or reward head that was trained before
            backend.load_heads(weights)
        separate_engine = spec.online and not find_engine(config.engine).shares_weights
        if separate_engine and not isinstance(backend, QueuedBackend):
            # Sampling and grading continue while the trainer computes.
            backend = QueuedBackend(backend, time_limit=10 * config.run.rank_time_limit)
        yield backend
        if hasattr(backend, "close"):  # not after a failure, when ranks may be gone
            backend.close()


async def _reads_media(url: str) -> bool:
    from oxrl.generators.servers import engine_at

    return (await (await engine_at(url, time_limit=SERVER_SECONDS, retries=0)).facts()).reads_media


@asynccontextmanager
async def open_engine(config: Config, tokenizer: Any, folder: Path, trainer: Any) -> AsyncIterator[Engine]:
    """The engine that `inference_engine.name` names; `folder` holds the model config and logs of a separate engine.

    One that shares weights samples from `trainer.model`; any other has no weights before the first `update_weights`.
    """
    opened = resolved(find_engine(config.engine).open)
    async with opened(config, tokenizer, folder / "engine", trainer) as engine:
        yield engine


def check_servers(config: Config, with_media: str | None = None) -> None:
    """Refuse a run whose external servers do not respond, before anything is loaded.

    `with_media` names a row with images or audio, which they have to take.
    """
    from oxrl.generators.connection import Connection, EngineError

    for url in config.inference_engine.urls if find_engine(config.engine).external else ():
        connection = Connection(url, time_limit=SERVER_SECONDS, retries=0).checked()
        try:
            run_blocking(connection.get, "/health")
        except EngineError as error:
            raise ConfigError(
                f"inference_engine.urls: no healthy server: {error}; start the server, or correct the address"
            ) from error
        if with_media is not None and not run_blocking(_reads_media, url):
            raise ConfigError(
                f"{with_media} has images or audio, and the server at {url} takes token ids only: start vLLM with "
                "--enable-scale-out, or set inference_engine.name to embedded"
            )
