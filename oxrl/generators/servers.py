"""Engines as one generator for a run: vLLM servers that we start and start again, or servers of somebody else.

A replica that ended or hangs is killed with all that it started, started again, given the newest weights from files
that are kept for that, proved by the probe sequence, and asked again for what it owed. Whoever else's servers are only
asked again: `http` moves their requests to another one, or stops with the address.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import anyio

from oxrl.concurrency import in_thread, task_group
from oxrl.generators.connection import Connection, EngineError, NoSuchPathError, check_apart
from oxrl.generators.pool import (
    EngineOutput,
    EngineRequest,
    Facts,
    HTTPGenerator,
    InferenceEngine,
    SGLangEngine,
    VLLMEngine,
)
from oxrl.generators.probe import Probe, StaleEngineError
from oxrl.generators.vllm.server import VLLMServer, log_tail, start_vllm_server, until_ready
from oxrl.machine.processes import free_ports
from oxrl.weights.checkpoint_names import shm_dir

logger = logging.getLogger(__name__)

T = TypeVar("T")
_HOMES = "oxrl-engines-"
_HOUR = 3600.0
_SAME_WEIGHTS = 0.01  # log-probs of one engine over the same weights, before and after it was started again


class Limits(NamedTuple):
    """How many seconds things may take, and how often a replica may be started again: `Limits(stall=10)`."""

    start: float = 600.0
    answer: float = 600.0  # to a request, or to new weights
    stall: float = 30.0  # without a sign of life; after a failure also without drawing one token
    look: float = 5.0  # between two looks
    restarts: int = 5  # of one replica, within an hour


class Replica:
    """One vLLM server of ours, as an `InferenceEngine` that recovers while `watch` runs."""

    def __init__(self, number: int, start: Callable[[], VLLMServer], home: Path, limits: Limits) -> None:
        self.number, self.home, self.limits = number, home, limits
        self.restarts = 0
        self.server: VLLMServer
        self._engine: VLLMEngine
        self._start = start
        self._well = False
        self._given_up: str | None = None
        self._recoveries = self._looks = 0
        self._times: list[float] = []  # of restarts, within the last hour
        self._calls: set[anyio.CancelScope] = set()
        self._doubt, self._news = anyio.Event(), anyio.Event()
        self._updating = self._asleep = False
        self._kept: _Kept | None = None
        self._proof: _Proof | None = None

    @property
    def name(self) -> str:
        return f"vLLM replica {self.number} at {self.server.url}"

    @property
    def recoveries(self) -> int:
        return self._recoveries

    async def open(self) -> None:
        """Start it, and wait until it can be asked: it answers, and has the weights that it had before."""
        self.server = self._start()  # noted at once, so that it is stopped whatever comes now
        self._engine = VLLMEngine(self.server.url, time_limit=self.limits.answer, retries=0)
        await until_ready(self.server, self.limits.start)
        await self._catch_up()
        self._well = True

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            if hasattr(self, "server"):
                await in_thread(self.server.stop)

    async def facts(self) -> Facts:
        return await self._try(VLLMEngine.facts)

    async def complete(self, ask: EngineRequest) -> EngineOutput:
        return await self._try(lambda engine: engine.complete(ask))

    async def prompt_logprobs(self, tokens: Sequence[int]) -> tuple[float, ...]:
        said = await self._retry(lambda engine: engine.prompt_logprobs(tokens))
        if self._kept is not None:
            self._proof = _Proof(self._kept.version, tuple(tokens), said)
        return said

    async def abort(self) -> None:
        if self._well:  # else everything has been cut off already
            await self._try(VLLMEngine.abort)

    async def pause(self) -> None:
        await self._retry(VLLMEngine.pause)

    async def resume(self) -> None:
        await self._retry(VLLMEngine.resume)

    async def sleep(self) -> None:
        await self._retry(VLLMEngine.sleep)
        self._asleep = True

    async def wake_up(self) -> None:
        self._asleep = False
        await self._retry(VLLMEngine.wake_up)

    async def check_health(self) -> None:
        await self._retry(VLLMEngine.check_health)

    async def update_weights_from_checkpoint(self, checkpoint_path: str, version: int | None = None) -> dict[str, Any]:
        """Also through a restart: the files are kept, as links where that is possible, until the next ones come."""
        before, self._kept = self._kept, await in_thread(partial(_keep, Path(checkpoint_path), self.home, version))
        if before is not None:
            await in_thread(partial(shutil.rmtree, before.folder, ignore_errors=True))
        return await self._retry(self._update)

    async def _update(self, engine: VLLMEngine) -> dict[str, Any]:
        assert self._kept is not None
        self._updating = True  # it draws nothing meanwhile, and is well
        try:
            return await engine.update_weights_from_checkpoint(str(self._kept.folder), self._kept.version)
        finally:
            self._updating = False

    async def recovered(self, error: EngineError) -> None:
        """Have it looked at; answers when it is well, raises when it was started again too often."""
        looks = self._looks
        self._doubt.set()
        while self._looks == looks:
            if self._given_up is not None:
                raise EngineError(self._given_up) from error
            await self._news.wait()

    async def _retry(self, call: Callable[[VLLMEngine], Awaitable[T]]) -> T:
        """For what is harmless when done twice; after a failure it is looked at, and started again if needed."""
        for _ in range(3):
            try:
                return await self._try(call)
            except EngineError as error:
                await self.recovered(error)
        return await self._try(call)

    async def _try(self, call: Callable[[VLLMEngine], Awaitable[T]]) -> T:
        if not self._well:
            raise EngineError(self._given_up or f"{self.name} is being started again")
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await call(self._engine)
            except EngineError:
                self._doubt.set()
                raise
            finally:
                self._calls.discard(scope)
        raise EngineError(f"{self.name} was cut off: it is being started again")

    async def watch(self) -> None:
        """Look after it for as long as it lasts; a doubt is looked into at once."""
        while self._given_up is None:
            with anyio.move_on_after(self.limits.look):
                await self._doubt.wait()
            doubted, self._doubt = self._doubt.is_set(), anyio.Event()
            # Started again beside a trainer at work, it would find no memory: that waits until it is woken.
            trouble = "" if self._asleep else await self._trouble(thorough=doubted)
            if trouble:
                await self._start_again(trouble)
            if trouble or doubted:
                self._recoveries += 1
            self._looks += self._well
            self._news.set()
            self._news = anyio.Event()

    async def _trouble(self, *, thorough: bool) -> str:
        """What is wrong with it, if anything."""
        for _ in range(20 if thorough else 1):  # a connection breaks a moment before its process has ended
            if (code := self.server.process.poll()) is not None:
                return f"its process ended with {code}"
            await anyio.sleep(0.1 if thorough else 0)
        with anyio.move_on_after(self.limits.stall) as healthy:
            await self._sign_of_life()
        if (code := self.server.process.poll()) is not None:
            return f"its process ended with {code}"
        if healthy.cancelled_caught:
            return f"there was no sign of life for {self.limits.stall:g} s"
        if not thorough or self._updating:
            return ""
        with anyio.move_on_after(self.limits.stall):
            try:
                await self._engine.prompt_logprobs((1, 2))
            except EngineError as error:
                return str(error)
            return ""
        return f"it draws no token within {self.limits.stall:g} s"

    async def _sign_of_life(self) -> None:
        while self.server.process.poll() is None:
            try:
                await self._engine.check_health()
                break
            except EngineError:
                await anyio.sleep(0.5)

    async def _start_again(self, why: str) -> None:
        self._well = False
        for scope in list(self._calls):
            scope.cancel()
        refused = 0
        while not self._well:
            started = time.monotonic()
            self._times = [when for when in self._times if started - when < _HOUR]
            if len(self._times) >= self.limits.restarts or refused == 2:
                often = f"{self.name} was started again {len(self._times)} times within an hour, and failed once more"
                words = "" if str(self.server.log) in why else f"; {log_tail(self.server.log)}"
                self._given_up = f"{often}: {why}{words}"
                return
            self._times.append(started)
            self.restarts += 1
            logger.warning("%s: %s; starting it again (restart %d)", self.name, why, self.restarts)
            try:
                await in_thread(self.server.stop)
                await self.open()
            except (EngineError, StaleEngineError) as error:
                why = str(error)
                refused += self.server.process.poll() is None  # it is up, and does not take the weights
        version = self._kept.version if self._kept else 0
        logger.warning("%s is back after %.1f s, with version %s", self.name, time.monotonic() - started, version)

    async def _catch_up(self) -> None:
        """The weights it had, and the proof that it has them."""
        if self._kept is None:
            return
        await self._update(self._engine)
        if self._proof is not None and self._proof.version == self._kept.version:
            probe = Probe(self._proof.tokens, self._proof.said, _SAME_WEIGHTS)
            said = await self._engine.prompt_logprobs(probe.tokens)
            probe.check(self.name, said, self._kept.version or 0, None)


class _Kept(NamedTuple):
    """Weights in files of our own."""

    folder: Path
    version: int | None


class _Proof(NamedTuple):
    """What an engine said about the probe sequence when its weights were proved."""

    version: int | None
    tokens: tuple[int, ...]
    said: tuple[float, ...]


def _keep(source: Path, home: Path, version: int | None) -> _Kept:
    folder = Path(tempfile.mkdtemp(prefix=f"kept-{version}-", dir=home))
    for file in source.iterdir():
        try:
            os.link(file, folder / file.name)
        except OSError:  # another file system
            shutil.copy(file, folder / file.name)
    return _Kept(folder, version)


@asynccontextmanager
async def serving(
    model: str | Path,
    tokenizer: Any,
    *,
    replicas: int = 1,
    arguments: Sequence[str] = (),
    devices: Sequence[str] = (),
    log_folder: str | Path | None = None,
    limits: Limits = Limits(),  # noqa: B008 - immutable
    **options: Any,
) -> AsyncIterator[HTTPGenerator]:
    """`async with serving(folder, tokenizer, replicas=2) as generator:`, vLLM in processes of their own on loopback.

    `arguments` are vLLM's. `devices` has a replica's own CUDA_VISIBLE_DEVICES, one each; without it all see all.
    `options` are `HTTPGenerator`'s. What they leave in memory lies in one folder, which goes with the last of them.
    """
    if replicas < 1 or (devices and len(devices) != replicas):
        raise ValueError(f"{replicas} replicas on {len(devices)} sets of devices: give 1 or more, and one set each")
    with engines_home() as home:
        logs = Path(log_folder) if log_folder is not None else home
        logs.mkdir(parents=True, exist_ok=True)
        fleet = [
            Replica(number, _starter(number, port, model, arguments, devices, logs, home), home, limits)
            for number, port in enumerate(free_ports(replicas))
        ]
        try:
            async with task_group() as starts:
                for replica in fleet:
                    starts.start_soon(replica.open)
            async with task_group() as tasks:
                for replica in fleet:
                    tasks.start_soon(replica.watch)
                yield HTTPGenerator(fleet, tokenizer, **{"folder": home, **options})
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                async with task_group() as ends:
                    for replica in fleet:
                        ends.start_soon(replica.close)


def _starter(
    number: int, port: int, model: str | Path, arguments: Sequence[str], devices: Sequence[str], logs: Path, home: Path
) -> Callable[[], VLLMServer]:
    environment = {"CUDA_VISIBLE_DEVICES": devices[number]} if devices else {}
    ports = iter([port])  # for the first time; somebody else may have it later

    def start() -> VLLMServer:
        return start_vllm_server(
            model,
            arguments=arguments,
            log=logs / f"vllm-{number}.log",
            port=next(ports, None),
            environment=environment,
            home=home,
        )

    return start


@contextmanager
def engines_home() -> Iterator[Path]:
    """A folder in memory that is gone afterwards. Those of runs that could not remove theirs are removed first."""
    root = shm_dir()
    for left in root.glob(f"{_HOMES}*"):
        if _is_nobodys(left):
            shutil.rmtree(left, ignore_errors=True)
    home = Path(tempfile.mkdtemp(prefix=_HOMES, dir=root))
    try:
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for as long as this process lives
            yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _is_nobodys(home: Path) -> bool:
    try:
        with (home / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return time.time() - home.stat().st_mtime > 60  # a new one is locked in a moment
    except OSError:  # held, or another user's
        return False


@asynccontextmanager
async def served_at(
    urls: Sequence[str],
    tokenizer: Any,
    *,
    time_limit: float = 600.0,
    retries: int = 4,
    backoff: float = 0.5,
    **options: Any,
) -> AsyncIterator[HTTPGenerator]:
    """`async with served_at(["http://127.0.0.1:8000"], tokenizer) as generator:`, servers that somebody else started.

    Each is asked whether it is vLLM or SGLang. `options` are `HTTPGenerator`'s: `folder` must be one that they read,
    unless `transfer` is another than files.
    """
    check_apart(urls)
    engines = [await engine_at(url, time_limit=time_limit, retries=retries, backoff=backoff) for url in urls]
    generator = HTTPGenerator(engines, tokenizer, time_limit=time_limit, **options)
    try:
        yield generator
    finally:
        with anyio.CancelScope(shield=True):
            await generator.close()


async def engine_at(url: str, **connection: Any) -> InferenceEngine:
    """The engine at an address, by what it answers."""
    asked = Connection(url, **connection).checked()
    for path, kind in (("/version", VLLMEngine), ("/get_server_info", SGLangEngine)):
        try:
            await asked.get(path, time_limit=min(60.0, asked.time_limit))
            return kind(url, **connection)
        except NoSuchPathError:
            continue
    raise EngineError(
        f"{asked.url} is neither a vLLM nor an SGLang server: it knows neither /version nor /get_server_info"
    )
