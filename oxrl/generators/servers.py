"""Servers as one generator for a run: vLLM servers that oxRL starts and restarts, or external servers.

A replica that ended or hangs is killed with its child processes, restarted, given the newest weights from files that
are kept for that, and verified by the probe sequence; its requests are then retried. External servers are retried,
never restarted: `pool` moves their requests to another server, or raises with the address.
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
from oxrl.generators.connection import Connection, EngineError, NoSuchPathError, check_distinct
from oxrl.generators.engines import EngineOutput, EngineRequest, Facts, InferenceEngine, MediaPrompt
from oxrl.generators.http import SGLangEngine, VLLMEngine
from oxrl.generators.pool import HTTPGenerator
from oxrl.generators.probe import Probe, StaleEngineError
from oxrl.generators.vllm.server import VLLMServer, log_tail, start_vllm_server, until_ready
from oxrl.weights.checkpoint_names import shm_dir

logger = logging.getLogger(__name__)

T = TypeVar("T")
_HOME_PREFIX = "oxrl-engines-"
_HOUR = 3600.0
_MAX_ATTEMPTS = 4  # of a call that is repeated after a recovery
_SAME_WEIGHTS = 0.01  # tolerance of one engine's log-probs over the same weights, before and after a restart


class Limits(NamedTuple):
    """Time limits in seconds, and how often a replica may be restarted: `Limits(stall=10)`."""

    start: float = 600.0
    answer: float = 600.0  # for a request, or for new weights
    stall: float = 30.0  # for a health check; after a failure also for one token
    look: float = 5.0  # between two health checks
    restarts: int = 5  # of one replica, within an hour


class Replica:
    """A vLLM server that oxRL started, as an `InferenceEngine` that recovers while `watch` runs."""

    def __init__(self, number: int, start: Callable[[], VLLMServer], home: Path, limits: Limits) -> None:
        self.number, self.home, self.limits = number, home, limits
        self.restarts = 0
        self.server: VLLMServer
        self._engine: VLLMEngine
        self._start = start
        self._healthy = False
        self._fatal_error: str | None = None
        self._recoveries = self._checks = 0
        self._restart_times: list[float] = []  # within the last hour
        self._calls: set[anyio.CancelScope] = set()
        self._check_requested, self._check_done = anyio.Event(), anyio.Event()
        self._updating = self._asleep = False
        self._weights: _SavedWeights | None = None
        self._probe_record: _ProbeRecord | None = None

    @property
    def name(self) -> str:
        return f"vLLM replica {self.number} at {self.server.url}"

    @property
    def recoveries(self) -> int:
        return self._recoveries

    async def open(self) -> None:
        """Start the server, and wait until it is ready and has the weights that it had before."""
        self.server = self._start()  # assigned first, so that `close` stops it whatever fails below
        self._engine = VLLMEngine(self.server.url, time_limit=self.limits.answer, retries=0)
        await until_ready(self.server, self.limits.start)
        await self._restore_weights()
        self._healthy = True

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            if hasattr(self, "server"):
                await in_thread(self.server.stop)

    async def facts(self) -> Facts:
        return await self._call(VLLMEngine.facts)

    async def complete(self, request: EngineRequest) -> EngineOutput:
        return await self._call(lambda engine: engine.complete(request))

    async def prompt_logprobs(self, tokens: Sequence[int], media: MediaPrompt | None = None) -> tuple[float, ...]:
        logprobs = await self._call_with_recovery(lambda engine: engine.prompt_logprobs(tokens, media))
        if self._weights is not None:
            self._probe_record = _ProbeRecord(
                self._weights.version, Probe(tuple(tokens), logprobs, _SAME_WEIGHTS, media)
            )
        return logprobs

    async def abort(self) -> None:
        if self._healthy:  # else all calls have been cancelled already
            await self._call(VLLMEngine.abort)

    async def pause(self) -> None:
        await self._call_with_recovery(VLLMEngine.pause)

    async def resume(self) -> None:
        await self._call_with_recovery(VLLMEngine.resume)

    async def sleep(self) -> None:
        await self._call_with_recovery(VLLMEngine.sleep)
        self._asleep = True

    async def wake_up(self) -> None:
        self._asleep = False
        await self._call_with_recovery(VLLMEngine.wake_up)

    async def check_health(self) -> None:
        await self._call_with_recovery(VLLMEngine.check_health)

    async def update_weights_from_checkpoint(self, checkpoint_path: str, version: int | None = None) -> dict[str, Any]:
        """Load the weights, also after a restart: the files are kept (as hard links if possible) until the next."""
        before = self._weights
        self._weights = await in_thread(partial(_save, Path(checkpoint_path), self.home, version))
        if before is not None:
            await in_thread(partial(shutil.rmtree, before.folder, ignore_errors=True))
        return await self._call_with_recovery(self._update)

    async def _update(self, engine: VLLMEngine) -> dict[str, Any]:
        assert self._weights is not None
        self._updating = True  # it samples nothing meanwhile, and is healthy
        try:
            return await engine.update_weights_from_checkpoint(str(self._weights.folder), self._weights.version)
        finally:
            self._updating = False

    async def recovered(self, error: EngineError) -> None:
        """Request a health check and wait until it is healthy; raise if it was restarted too often."""
        checks = self._checks
        self._check_requested.set()
        while self._checks == checks:
            if self._fatal_error is not None:
                raise EngineError(self._fatal_error) from error
            await self._check_done.wait()

    async def _call_with_recovery(self, call: Callable[[VLLMEngine], Awaitable[T]]) -> T:
        """For calls that can be repeated: after a failure, wait for the recovery and call again."""
        for _ in range(_MAX_ATTEMPTS - 1):
            try:
                return await self._call(call)
            except EngineError as error:
                await self.recovered(error)
        return await self._call(call)

    async def _call(self, call: Callable[[VLLMEngine], Awaitable[T]]) -> T:
        if not self._healthy:
            raise EngineError(self._fatal_error or f"{self.name} is restarting")
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await call(self._engine)
            except EngineError:
                self._check_requested.set()
                raise
            finally:
                self._calls.discard(scope)
        raise EngineError(f"{self.name}: the call was cancelled by a restart")

    async def watch(self) -> None:
        """Check the server's health until it is given up; a requested check runs immediately."""
        while self._fatal_error is None:
            with anyio.move_on_after(self.limits.look):
                await self._check_requested.wait()
            requested, self._check_requested = self._check_requested.is_set(), anyio.Event()
            problem = "" if self._asleep else await self._problem(thorough=requested)
            if self._asleep:  # perhaps since the check started; the trainer has its memory: restart at `wake_up`
                problem = ""
            if problem:
                await self._restart(problem)
            if problem or requested:
                self._recoveries += 1
            self._checks += self._healthy
            self._check_done.set()
            self._check_done = anyio.Event()

    async def _problem(self, *, thorough: bool) -> str:
        """Return what is wrong with the server, or an empty string."""
        for _ in range(20 if thorough else 1):  # a connection breaks a moment before its process has ended
            if (code := self.server.process.poll()) is not None:
                return f"its process ended with {code}"
            await anyio.sleep(0.1 if thorough else 0)
        with anyio.move_on_after(self.limits.stall) as healthy:
            await self._wait_for_health()
        if (code := self.server.process.poll()) is not None:
            return f"its process ended with {code}"
        if healthy.cancelled_caught:
            return f"no successful health check for {self.limits.stall:g} s"
        if not thorough or self._updating:
            return ""
        with anyio.move_on_after(self.limits.stall):
            try:
                await self._engine.prompt_logprobs((1, 2))
            except EngineError as error:
                return str(error)
            return ""
        return f"no token sampled within {self.limits.stall:g} s"

    async def _wait_for_health(self) -> None:
        while self.server.process.poll() is None:
            try:
                await self._engine.check_health()
                break
            except EngineError:
                await anyio.sleep(0.5)

    async def _restart(self, reason: str) -> None:
        self._healthy = False
        for scope in list(self._calls):
            scope.cancel()
        refused = 0
        while not self._healthy:
            started = time.monotonic()
            self._restart_times = [when for when in self._restart_times if started - when < _HOUR]
            if len(self._restart_times) >= self.limits.restarts or refused == 2:
                count = f"{self.name} was restarted {len(self._restart_times)} times within an hour and failed again"
                tail = "" if str(self.server.log) in reason else f"; {log_tail(self.server.log)}"
                self._fatal_error = f"{count}: {reason}{tail}"
                return
            self._restart_times.append(started)
            self.restarts += 1
            logger.warning("%s: %s; restarting it (restart %d)", self.name, reason, self.restarts)
            try:
                await in_thread(self.server.stop)
                await self.open()
            except (EngineError, StaleEngineError) as error:
                reason = str(error)
                refused += self.server.process.poll() is None  # it runs, and does not load the weights
        version = self._weights.version if self._weights else 0
        logger.warning("%s recovered after %.1f s, with version %s", self.name, time.monotonic() - started, version)

    async def _restore_weights(self) -> None:
        """Load the weights that it had, and verify them."""
        if self._weights is None:
            return
        await self._update(self._engine)
        if self._probe_record is not None and self._probe_record.version == self._weights.version:
            probe = self._probe_record.probe
            logprobs = await self._engine.prompt_logprobs(probe.tokens, probe.media)
            probe.check(self.name, logprobs, self._weights.version or 0, None)


class _SavedWeights(NamedTuple):
    """A replica's copy of the current weights."""

    folder: Path
    version: int | None


class _ProbeRecord(NamedTuple):
    """An engine's log-probs of the probe sequence when its weights were verified."""

    version: int | None
    probe: Probe


def _save(source: Path, home: Path, version: int | None) -> _SavedWeights:
    folder = Path(tempfile.mkdtemp(prefix=f"kept-{version}-", dir=home))
    for file in source.iterdir():
        try:
            os.link(file, folder / file.name)
        except OSError:  # another file system
            shutil.copy(file, folder / file.name)
    return _SavedWeights(folder, version)


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
    """`async with serving(folder, tokenizer, replicas=2) as generator:`, vLLM servers as child processes.

    Only processes of this user can connect to them. `arguments` are vLLM's. `devices` has the CUDA_VISIBLE_DEVICES of
    each replica; without it all replicas see all devices. `options` are `HTTPGenerator`'s. Their files in shared memory
    are in one folder, removed at the end.
    """
    if replicas < 1 or (devices and len(devices) != replicas):
        raise ValueError(f"{replicas} replicas on {len(devices)} sets of devices: use 1 or more, with one set each")
    with engines_home() as home:
        logs = Path(log_folder) if log_folder is not None else home
        logs.mkdir(parents=True, exist_ok=True)
        servers = [
            Replica(number, _starter(number, model, arguments, devices, logs, home), home, limits)
            for number in range(replicas)
        ]
        try:
            async with task_group() as starts:
                for replica in servers:
                    starts.start_soon(replica.open)
            async with task_group() as tasks:
                for replica in servers:
                    tasks.start_soon(replica.watch)
                yield HTTPGenerator(servers, tokenizer, **{"folder": home, **options})
                tasks.cancel_scope.cancel()
        finally:
            with anyio.CancelScope(shield=True):
                async with task_group() as ends:
                    for replica in servers:
                        ends.start_soon(replica.close)


def _starter(
    number: int, model: str | Path, arguments: Sequence[str], devices: Sequence[str], logs: Path, home: Path
) -> Callable[[], VLLMServer]:
    environment = {"CUDA_VISIBLE_DEVICES": devices[number]} if devices else {}
    log = logs / f"vllm-{number}.log"
    return partial(start_vllm_server, model, arguments=arguments, log=log, environment=environment, home=home)


@contextmanager
def engines_home() -> Iterator[Path]:
    """Yield a folder in shared memory and remove it afterwards; remove those that ended runs left behind first."""
    root = shm_dir()
    for left in root.glob(f"{_HOME_PREFIX}*"):
        if _is_abandoned(left):
            shutil.rmtree(left, ignore_errors=True)
    home = Path(tempfile.mkdtemp(prefix=_HOME_PREFIX, dir=root))
    try:
        with (home / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # held for as long as this process lives
            yield home
    finally:
        shutil.rmtree(home, ignore_errors=True)


def _is_abandoned(home: Path) -> bool:
    try:
        with (home / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return time.time() - home.stat().st_mtime > 60  # a new one is locked a moment later
    except OSError:  # locked, or another user's
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
    """`async with served_at(["http://127.0.0.1:8000"], tokenizer) as generator:`, external servers.

    Whether a server is vLLM or SGLang is detected. `options` are `HTTPGenerator`'s: the servers must be able to read
    `folder`, unless `transfer` is gloo or nccl.
    """
    check_distinct(urls)
    engines = [await engine_at(url, time_limit=time_limit, retries=retries, backoff=backoff) for url in urls]
    generator = HTTPGenerator(engines, tokenizer, time_limit=time_limit, **options)
    try:
        yield generator
    finally:
        with anyio.CancelScope(shield=True):
            await generator.close()


async def engine_at(url: str, **connection: Any) -> InferenceEngine:
    """Detect the kind of server at an address."""
    server = Connection(url, **connection).checked()
    for path, kind in (("/version", VLLMEngine), ("/get_server_info", SGLangEngine)):
        try:
            await server.get(path, time_limit=min(60.0, server.time_limit))
            return kind(url, **connection)
        except NoSuchPathError:
            continue
    raise EngineError(
        f"{server.url} is neither a vLLM nor an SGLang server: it has neither /version nor /get_server_info"
    )
