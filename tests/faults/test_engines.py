"""Engines that die, hang, refuse weights or are unreachable: recovery in time, or an error that names them."""

import fcntl
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from oxrl.concurrency import task_group
from oxrl.generators.connection import EngineError
from oxrl.generators.http import SGLangEngine, VLLMEngine
from oxrl.generators.pool import HTTPGenerator
from oxrl.generators.servers import Limits, Replica, engine_at, engines_home, served_at
from oxrl.generators.vllm.server import VLLMServer
from oxrl.machine.processes import free_ports
from oxrl.models.load import load_model
from oxrl.types import GenerationConfig, Request, Weights
from oxrl.weights.checkpoint_names import shm_dir
from tests.engines import need_vllm, sglang_stand_in
from tests.faults import driver as driver_process
from tests.forks import Server
from tests.waiting import EXPIRES, HANG, wait_until, wait_until_async

pytestmark = pytest.mark.anyio
SAMPLING = GenerationConfig(max_new_tokens=6, seed=4)
REQUESTS = [Request((1, 50 + seed), seed=seed) for seed in range(6)]


@pytest.fixture
def anyio_backend():
    return "trio"


class Driver:
    """The process of `driver.py`, which runs the commands of `send` and writes the reports that `next` reads."""

    def __init__(self, forks: Server, folder: Path) -> None:
        self.folder, self.read, self.group = folder, 0, 0
        self.process = forks.start([(driver_process.run, (folder,))])
        self.home = Path(self.next("ready")["home"])

    def send(self, command: str) -> None:
        (self.folder / command).touch()

    def next(self, key: str) -> dict:
        """Return the next report that has this key."""

        def found() -> dict | None:
            reports = self.folder / "reports"
            lines = reports.read_text().splitlines(keepends=True) if reports.exists() else []
            for line in [line for line in lines if line.endswith("\n")][self.read :]:
                self.read += 1
                if line.startswith("{") and key in (facts := json.loads(line)):
                    return facts
            return None

        def failed() -> str:
            return self.log()[-3000:] if self.process.has_ended else ""

        facts = wait_until(lambda: found() or failed(), f"the driver reports {key!r}")
        assert isinstance(facts, dict), f"the driver ended: {facts}"
        self.group = facts.get("group", self.group)
        return facts

    def log(self) -> str:
        return (self.folder / "log").read_text()

    def kill(self) -> None:
        self.process.kill()


class Drivers:
    """One for all tests, until a test kills it: its server takes long to start."""

    def __init__(self, forks: Server, factory: pytest.TempPathFactory) -> None:
        self._forks, self._factory, self._driver = forks, factory, None

    def running(self) -> Driver:
        if self._driver is None or not self._driver.process.pids:
            self._driver = Driver(self._forks, self._factory.mktemp("driver"))
        return self._driver

    def close(self) -> None:
        if self._driver is not None and self._driver.process.pids:
            self._driver.kill()


@pytest.fixture(scope="module")
def drivers(forks, tmp_path_factory):
    need_vllm()
    drivers = Drivers(forks, tmp_path_factory)
    yield drivers
    drivers.close()


@pytest.fixture
def driver(drivers):
    return drivers.running()


def lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def shared_memory(group: int) -> set[Path]:
    """Return the files of shared memory that the processes of a group have mapped."""
    names = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            if os.getpgid(int(process.name)) == group:
                names |= set(re.findall(r"/dev/shm/\S+", (process / "maps").read_text()))
    return {Path(name) for name in names}


def test_a_vllm_server_that_dies_is_restarted_with_its_weights_and_its_requests_are_retried(driver):
    driver.send("fault")
    seen = driver.next("fault")
    assert seen["restarts"] == 1
    assert seen["meanwhile"], "a request was answered with other weights during the restart"
    assert seen["equal"] and seen["gap"] < 1e-4 and seen["versions"] == [5]
    assert not lives(seen["old_group"]), "child processes of the old server have ended"
    assert "restart 1" in driver.log()
    assert shared_memory(driver.group), "this server has processes that share memory, which are killed with the driver"


def test_a_killed_driver_leaves_nothing(driver):
    """Also after the test above, if both run in one process: training goes on with the restarted server."""
    driver.send("train")
    for _ in range(2):
        assert driver.next("step")["gap"] < 1e-4
    assert driver.home.exists()
    ours = {driver.home, *shared_memory(driver.group)}
    driver.kill()
    wait_until(lambda: not lives(driver.group), "its server ends with it")
    wait_until(lambda: not any(each.exists() for each in ours), "its files in memory are removed")


HEALTHY = """
import os, subprocess, sys, threading
from http.server import BaseHTTPRequestHandler, HTTPServer

class Fine(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

subprocess.Popen(["cat"])  # as vLLM has child processes; both end with the test
threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
HTTPServer(("127.0.0.1", int(sys.argv[1])), Fine).serve_forever()
"""
BROKEN = "import sys; sys.exit('no such device')"
NEVER_READY = "import sys; sys.stdin.read()"


def starting(folder, scripts):
    """Start a replica's server as the next of some scripts: real processes with nothing but vLLM's health check."""

    def start():
        (port,) = free_ports(1)
        log = folder / "vllm-0.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-S", "-E", "-c", next(scripts), str(port)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return VLLMServer(f"http://127.0.0.1:{port}", process, log)

    return start


def kill(replica):
    replica.server.process.kill()
    replica.server.process.wait()  # else it may respond once more


@asynccontextmanager
async def watched(folder, scripts, before_it_is_watched=lambda replica: None, **limits):
    """A replica that runs these scripts one after the other, watched inside the block."""
    limits = {"start": HANG, "answer": HANG, "stall": HANG, "look": 0.05} | limits
    replica = Replica(0, starting(folder, iter(scripts)), folder, Limits(**limits))
    try:
        with anyio.fail_after(HANG):
            async with task_group() as tasks:
                await replica.open()
                before_it_is_watched(replica)
                tasks.start_soon(replica.watch)
                yield replica
                tasks.cancel_scope.cancel()
    finally:
        await replica.close()


@pytest.mark.engine
async def test_a_replica_that_hangs_is_killed_with_its_child_processes_and_restarted(tmp_path):
    def stop(replica):
        os.killpg(replica.server.process.pid, signal.SIGSTOP)

    async with watched(tmp_path, [HEALTHY, HEALTHY], stop, stall=EXPIRES) as replica:
        hung = replica.server.process.pid
        await wait_until_async(lambda: replica.restarts == 1 and replica._healthy, "it is restarted")
        assert replica.server.process.pid != hung and not lives(hung)
        assert replica.server.process.poll() is None


@pytest.mark.engine
async def test_a_replica_that_fails_repeatedly_raises_with_the_end_of_its_log(tiny, tmp_path):
    async with watched(tmp_path, [HEALTHY, BROKEN, BROKEN], kill, restarts=2) as replica:
        generator = HTTPGenerator([replica], tiny[1])
        with pytest.raises(EngineError, match=r"(?s)replica 0 .* restarted 2 times .*ends with:.*\nno such device$"):
            await generator.generate(REQUESTS, SAMPLING)
        assert generator.restarts == 2


@pytest.mark.engine
async def test_a_replica_that_died_asleep_is_restarted_at_wake_up(tiny, tmp_path):
    """Not before: the trainer uses its memory."""
    async with watched(tmp_path, [HEALTHY, HEALTHY]) as replica:
        generator = HTTPGenerator([replica], tiny[1])
        await generator.sleep()
        kill(replica)
        checks = replica._checks
        await wait_until_async(lambda: replica._checks > checks + 2, "its health is checked again")
        assert replica.restarts == 0
        await generator.wake_up()
        assert replica.restarts == 1 and replica.server.process.poll() is None


async def test_a_replica_that_falls_asleep_and_dies_during_a_check_is_not_restarted(tmp_path):
    checking, proceed = anyio.Event(), anyio.Event()

    def pause_checks(replica):
        async def wait_for_health():
            checking.set()
            await proceed.wait()

        replica._wait_for_health = wait_for_health

    async with watched(tmp_path, [HEALTHY, HEALTHY], pause_checks) as replica:
        await checking.wait()
        await replica.sleep()
        kill(replica)
        checks = replica._checks
        proceed.set()
        await wait_until_async(lambda: replica._checks > checks, "the check is finished")
        assert replica.restarts == 0


async def test_an_abort_does_not_wait_for_a_replica_that_is_being_started(tiny, tmp_path):
    answers = []
    async with watched(tmp_path, [HEALTHY, NEVER_READY], kill) as replica:
        generator = HTTPGenerator([replica], tiny[1])

        async def ask():
            answers.extend(await generator.generate(REQUESTS, SAMPLING))

        async with task_group() as calls:
            calls.start_soon(ask)
            await wait_until_async(lambda: replica.restarts == 1 and len(generator._waiting) == 6, "all wait for it")
            await generator.abort()
    assert [(each.finish_reason, each.token_ids) for each in answers] == [("aborted", ())] * 6


def test_shared_memory_of_ended_runs_is_removed_and_that_of_others_is_not():
    def old_home(name):
        home = shm_dir() / f"oxrl-engines-{name}-{os.getpid()}"
        home.mkdir()
        (home / "lock").touch()
        os.utime(home, (1, 1))
        return home

    dead, living = old_home("dead"), old_home("living")
    try:
        with (living / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with engines_home() as home:
                assert home.exists() and not dead.exists() and living.exists()
        assert not home.exists()
    finally:
        shutil.rmtree(living)


async def test_requests_of_an_unreachable_server_are_sent_to_another_one_with_a_warning(tiny, caplog):
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as good:
        with sglang_stand_in(load_model(tiny[0]), tiny[1]) as gone:
            urls = [gone.url, good.url]
        async with served_at(urls[1:], tiny[1]) as alone:
            expected = await alone.generate(REQUESTS, SAMPLING)
        async with served_at(urls[1:], tiny[1], retries=1, backoff=0.01) as generator:
            generator.engines.insert(0, SGLangEngine(urls[0], retries=1, backoff=0.01))
            generator._load.insert(0, 0)
            with caplog.at_level(logging.WARNING):
                answers = await generator.generate(REQUESTS, SAMPLING)
                await generator.update_weights(Weights(load_model(tiny[0]), 3))
        assert [each.token_ids for each in answers] == [each.token_ids for each in expected]
        assert generator.version == 3
    assert caplog.text.count(f"SGLang server at {urls[0]} failed") == 1
    assert f"SGLang server at {urls[0]} is skipped" in caplog.text


async def test_if_no_server_responds_it_raises_with_the_address(tiny):
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as gone:
        async with served_at([gone.url], tiny[1], retries=1, backoff=0.01) as generator:
            gone.shutdown()
            gone.server_close()
            with pytest.raises(EngineError, match=rf"{gone.url}/\w+: no connection.*tried 2 times"):
                await generator.generate(REQUESTS, SAMPLING)
            with pytest.raises(EngineError, match=gone.url):
                await generator.update_weights(Weights(load_model(tiny[0]), 1))


async def test_a_server_that_refuses_weights_stops_the_run_with_its_name(tiny):
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as server:
        server.refuses_updates = True
        async with served_at([server.url], tiny[1]) as generator:
            with pytest.raises(EngineError, match=f"SGLang server at {server.url} .* weights: no room"):
                await generator.update_weights(Weights(load_model(tiny[0]), 1))
        assert generator.version == 0


async def test_the_kind_of_a_server_is_detected(tiny):
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as server:
        assert isinstance(await engine_at(server.url), SGLangEngine)


async def test_a_vllm_server_is_detected(vllm_url):
    assert isinstance(await engine_at(vllm_url), VLLMEngine)


async def test_a_call_to_vllm_in_this_process_that_hangs_times_out(vllm_in_process):
    worker, end = vllm_in_process._worker, threading.Event()
    limit, worker.time_limit = worker.time_limit, 0.5
    held = worker.submit(lambda: end.wait(HANG))
    try:
        with pytest.raises(EngineError, match="vLLM in this process hangs: .* 0.5 s"):
            await vllm_in_process.generate(REQUESTS, SAMPLING)
    finally:
        worker.time_limit = limit
        end.set()
    worker.wait(held)
    assert len(await vllm_in_process.generate(REQUESTS, SAMPLING)) == 6
