"""Engines that die, hang, refuse or stay away: recovered from within a stated time, or a stop that names them."""

import fcntl
import json
import logging
import os
import re
import shutil
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import anyio
import pytest

from oxrl.concurrent import task_group
from oxrl.generators.connection import EngineError
from oxrl.generators.fleet import Limits, Replica, engine_at, engines_home, served_at
from oxrl.generators.http import HTTPGenerator, SGLangEngine, VLLMEngine, near_folder
from oxrl.generators.server import VLLMServer, free_ports
from oxrl.models.load import load_model
from oxrl.types import GenerationConfig, Request, Weights
from tests.engines import need_vllm, sglang_stand_in

pytestmark = pytest.mark.anyio
SAMPLING = GenerationConfig(max_new_tokens=6, seed=4)
REQUESTS = [Request((1, 50 + seed), seed=seed) for seed in range(6)]
START = 400  # seconds that a vLLM server may take to start on a busy machine; 45 on two idle cores


@pytest.fixture
def anyio_backend():
    return "trio"


class Driver:
    """The process of `driver.py`; `next("fault")` is the next line that has this key, within so many seconds."""

    def __init__(self, folder: Path, loop: str) -> None:
        self.said, self.complaints = folder / "said", folder / "complaints"
        with self.said.open("wb") as out, self.complaints.open("wb") as err:
            command = [sys.executable, "-m", "tests.faults.driver", str(folder / "logs"), loop]
            self.process = subprocess.Popen(command, stdout=out, stderr=err)
        self.read = 0

    def next(self, key: str, within: float) -> dict:
        deadline = time.monotonic() + within
        while time.monotonic() < deadline:
            lines = [line for line in self.said.read_text().splitlines(keepends=True) if line.endswith("\n")]
            for line in lines[self.read :]:
                self.read += 1
                if line.startswith("{") and key in (facts := json.loads(line)):
                    return facts
            assert self.process.poll() is None, f"the driver ended: {self.complaints.read_text()[-3000:]}"
            time.sleep(0.1)
        self.process.kill()
        return pytest.fail(f"nothing about {key!r} within {within:g} s: {self.complaints.read_text()[-3000:]}")


def lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def shared_memory(group: int) -> set[Path]:
    """What the processes of a group have mapped of it."""
    names = set()
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            if os.getpgid(int(process.name)) == group:
                names |= set(re.findall(r"/dev/shm/\S+", (process / "maps").read_text()))
    return {Path(name) for name in names}


def test_a_vllm_server_that_dies_or_hangs_comes_back_and_a_killed_driver_leaves_nothing(tmp_path):
    """One launch for all: a start takes most of a minute."""
    need_vllm()
    driver = Driver(tmp_path, "asyncio")
    try:
        first = driver.next("ready", START)
        for count, fault in enumerate(("SIGKILL", "SIGSTOP"), start=1):
            assert driver.next("asked", START)["asked"], "the fault came too late to cut anything off"
            seen = driver.next("fault", START + 60)
            assert seen["fault"] == fault and seen["restarts"] == count
            assert seen["meanwhile"], "somebody was answered with other weights while it was started"
            assert seen["equal"] and seen["gap"] < 1e-4 and seen["versions"] == [5]
            assert not lives(seen["old_group"]), "what the old server had started is gone"
        assert "restart 2" in driver.complaints.read_text()
        assert driver.next("step", 60)["gap"] < 1e-4 and driver.next("step", 60)["restarts"] == 2
        deadline, ours = time.monotonic() + 20, set()
        while len(ours) < 2 and time.monotonic() < deadline:
            mapped = shared_memory(seen["group"])
            ours = {each for each in (Path(first["home"]), *mapped) if each.exists()}
        assert len(ours) > 1, f"its home, and what vLLM shares between its processes; mapped: {mapped}"
    finally:
        driver.process.kill()
        driver.process.wait(20)
    deadline = time.monotonic() + 20
    while (lives(seen["group"]) or any(each.exists() for each in ours)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not lives(seen["group"]), "its server outlived it"
    assert not [each for each in ours if each.exists()], "left in memory"


HEALTHY = """
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Fine(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

HTTPServer(("127.0.0.1", int(sys.argv[1])), Fine).serve_forever()
"""
BROKEN = "import sys; sys.exit('no such device')"


def starting(folder, scripts):
    """A replica's server as the next of some scripts: real processes, which know no more of vLLM than its health."""

    def start():
        (port,) = free_ports(1)
        log = folder / "vllm-0.log"
        with log.open("ab") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", next(scripts), str(port)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return VLLMServer(f"http://127.0.0.1:{port}", process, log)

    return start


@asynccontextmanager
async def watched(folder, scripts, **limits):
    """A replica that runs these one after the other, looked after while the block lasts."""
    replica = Replica(0, starting(folder, iter(scripts)), folder, Limits(stall=2, **limits))
    try:
        with anyio.fail_after(60):
            async with task_group() as tasks:
                await replica.open()
                tasks.start_soon(replica.watch)
                yield replica
                tasks.cancel_scope.cancel()
    finally:
        await replica.close()


async def test_a_replica_that_fails_again_and_again_is_given_up_with_its_last_words(tiny, tmp_path):
    async with watched(tmp_path, [HEALTHY, BROKEN, BROKEN], look=0.2, restarts=2) as replica:
        generator = HTTPGenerator([replica], tiny[1])
        replica.server.process.kill()
        with pytest.raises(
            EngineError, match=r"(?s)replica 0 .* started again 2 times .*ends with:.*\nno such device$"
        ):
            await generator.generate(REQUESTS, SAMPLING)
        assert generator.restarts == 2


async def test_a_replica_that_died_asleep_is_started_again_when_it_is_woken(tiny, tmp_path):
    """Not before: the trainer has its memory."""
    async with watched(tmp_path, [HEALTHY, HEALTHY], look=0.1) as replica:
        generator = HTTPGenerator([replica], tiny[1])
        await generator.sleep()
        replica.server.process.kill()
        await anyio.sleep(1)
        assert replica.restarts == 0
        await generator.wake_up()
        assert replica.restarts == 1 and replica.server.process.poll() is None


async def test_an_abort_does_not_wait_for_a_replica_that_is_being_started(tiny, tmp_path):
    said = []
    async with watched(tmp_path, [HEALTHY, "import time; time.sleep(60)"], look=0.2) as replica:
        generator = HTTPGenerator([replica], tiny[1])

        async def ask():
            said.extend(await generator.generate(REQUESTS, SAMPLING))

        replica.server.process.kill()
        with anyio.fail_after(30):
            async with task_group() as asked:
                asked.start_soon(ask)
                await anyio.sleep(3)
                await generator.abort()
    assert [(each.finish_reason, each.token_ids) for each in said] == [("aborted", ())] * 6


def test_memory_of_runs_that_are_gone_is_given_back_and_that_of_others_is_not():
    def forsaken(name):
        home = near_folder() / f"oxrl-engines-{name}-{os.getpid()}"
        home.mkdir()
        (home / "lock").touch()
        os.utime(home, (1, 1))
        return home

    dead, living = forsaken("dead"), forsaken("living")
    try:
        with (living / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with engines_home() as home:
                assert home.exists() and not dead.exists() and living.exists()
        assert not home.exists()
    finally:
        shutil.rmtree(living)


async def test_requests_of_a_server_that_is_gone_go_to_another_one_with_a_warning(tiny, caplog):
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as good:
        with sglang_stand_in(load_model(tiny[0]), tiny[1]) as gone:
            urls = [gone.url, good.url]
        async with served_at(urls[1:], tiny[1]) as alone:
            expected = await alone.generate(REQUESTS, SAMPLING)
        async with served_at(urls[1:], tiny[1], retries=1, backoff=0.01) as generator:
            generator.engines.insert(0, SGLangEngine(urls[0], retries=1, backoff=0.01))
            generator._load.insert(0, 0)
            with caplog.at_level(logging.WARNING):
                said = await generator.generate(REQUESTS, SAMPLING)
                await generator.update_weights(Weights(load_model(tiny[0]), 3))
        assert [each.token_ids for each in said] == [each.token_ids for each in expected]
        assert generator.version == 3
    assert caplog.text.count(f"SGLang server at {urls[0]} does not answer") == 1
    assert f"SGLang server at {urls[0]} is left out" in caplog.text


async def test_where_no_server_answers_it_stops_with_the_address(tiny):
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
        server.refuses = True
        async with served_at([server.url], tiny[1]) as generator:
            with pytest.raises(EngineError, match=f"SGLang server at {server.url} did not take the weights: no room"):
                await generator.update_weights(Weights(load_model(tiny[0]), 1))
        assert generator.version == 0


async def test_servers_are_told_apart_by_what_they_answer(tiny):
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as server:
        assert isinstance(await engine_at(server.url), SGLangEngine)


async def test_a_vllm_server_is_told_apart(vllm_url):
    assert isinstance(await engine_at(vllm_url), VLLMEngine)


async def test_vllm_in_this_process_that_hangs_is_given_up_on_in_time(vllm_in_process):
    worker = vllm_in_process._worker
    limit, worker.time_limit = worker.time_limit, 0.5
    held = worker.submit(lambda: time.sleep(6))
    try:
        started = time.monotonic()
        with pytest.raises(EngineError, match="vLLM in this process hangs: it has not moved for 0.5 s"):
            await vllm_in_process.generate(REQUESTS, SAMPLING)
        assert time.monotonic() - started < 5
    finally:
        worker.time_limit = limit
    worker.wait(held)
    assert len(await vllm_in_process.generate(REQUESTS, SAMPLING)) == 6
