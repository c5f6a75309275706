"""Failures of engines over HTTP: a real server on loopback with scripted responses."""

import os
import socket
import stat
import subprocess
import sys
import threading
from http.server import HTTPServer
from pathlib import Path
from urllib.parse import urlsplit

import anyio
import psutil
import pytest
import torch

from oxrl.generators.connection import Connection, EngineError, check_distinct
from oxrl.generators.engines import EngineOutput, EngineRequest, Facts, as_engine_request, check_logprobs
from oxrl.generators.http import SGLangEngine, VLLMEngine
from oxrl.generators.pool import HTTPGenerator, sglang_generator, sync_weights_to_engines
from oxrl.generators.probe import Probe, ProbeResult, StaleEngineError
from oxrl.generators.ray import RayGenerator
from oxrl.generators.vllm.worker import EXTENSION
from oxrl.models.builtin import prepare_builtin
from oxrl.models.load import load_model
from oxrl.types import GenerationConfig, Request, Weights
from oxrl.weights.checkpoint_names import ModuleWeights, trainer_logprobs, write_weights
from tests.engines import need_vllm, sglang_stand_in
from tests.holding import holding
from tests.waiting import HANG, wait_until, wait_until_async
from tests.web import Quiet, serving

pytestmark = pytest.mark.anyio
SAMPLING = GenerationConfig(max_new_tokens=4)


@pytest.fixture
def anyio_backend():
    return "trio"


class Scripted(Quiet):
    """Responds by the server's `script`: per request (status, content) or a function, the last one repeatedly."""

    def do_GET(self):
        server = self.server
        self.read()
        server.seen.append(self.path)
        step = server.script[min(len(server.seen), len(server.script)) - 1]
        if callable(step):
            return step(self)
        return self.reply(*step)

    do_POST = do_GET


def scripted(*script):
    return serving(Scripted, script=script, seen=[])


def hang_up(handler):
    handler.close_connection = True
    handler.connection.close()


async def test_transient_failures_are_retried_with_growing_pauses(monkeypatch):
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(anyio, "sleep", pause)
    retry_after = lambda handler: handler.reply(429, {}, Retry_After="7")  # noqa: E731
    with scripted((503, {"error": "busy"}), hang_up, (429, {}), retry_after, (200, {"fine": 1})) as server:
        assert await Connection(server.url, retries=4, backoff=0.5).post("/x") == {"fine": 1}
    assert pauses == [0.5, 1.0, 2.0, 7.0] and len(server.seen) == 5


async def test_calls_that_must_not_be_repeated_are_not_retried():
    with scripted((500, {"error": {"message": "out of memory"}})) as server:
        with pytest.raises(EngineError, match=r"127.0.0.1:\d+/x: status 500: out of memory$"):
            await Connection(server.url, backoff=0.01).post("/x", once=True)
        assert len(server.seen) == 1


async def test_a_call_to_an_engine_that_hangs_times_out_with_its_address():
    end = threading.Event()
    with scripted(lambda _handler: end.wait(HANG)) as server:
        with pytest.raises(EngineError, match=r"127.0.0.1:\d+/x: no response within 0.2 s \(tried 2 times\)"):
            await Connection(server.url, time_limit=0.2, retries=1, backoff=0.01).get("/x")
        end.set()


async def test_an_unreachable_engine_is_named():
    with pytest.raises(EngineError, match="127.0.0.1:9/health: no connection"):
        await VLLMEngine("http://127.0.0.1:9", retries=0).check_health()


async def test_a_request_that_the_engine_rejects_raises_a_value_error():
    with scripted((400, {"error": {"message": "max_tokens is negative"}})) as server:
        with pytest.raises(ValueError, match="the request: max_tokens is negative"):
            await Connection(server.url, backoff=0.01).post("/x")
        assert len(server.seen) == 1


@pytest.mark.parametrize(
    "url",
    [
        "127.0.0.1:8000",
        "http://host:99999",
        "http://host:port",
        "ftp://host",
        "http://user:secret@host",
        "http://host?key=1",
        "unix://host/socket",
        "unix:socket",
    ],
)
def test_an_invalid_address_is_rejected(url):
    with pytest.raises(ValueError, match="http://HOST:PORT"):
        VLLMEngine(url)


@pytest.mark.parametrize("bad", [float("nan"), None, -9999.0])
async def test_missing_or_non_finite_log_probs_are_an_error(bad, tiny):
    about = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5, None], [bad, 6, None]]}
    replies = [(200, {"context_length": 64}), (200, {"meta_info": about})]
    with scripted(*replies) as server, pytest.raises(EngineError, match="log-probs"):
        await sglang_generator([server.url], tiny[1], retries=0).generate([Request((1, 2))], SAMPLING)


def test_log_probs_must_be_those_of_the_policy():
    """Neither mode of vLLM returns them for every sampling; the others are rejected."""
    processed, raw, full = (Facts(64, mode) for mode in ("processed", "raw", "full"))
    cut, cool = SAMPLING._replace(top_p=0.9), SAMPLING._replace(temperature=0.7)
    check_logprobs(SAMPLING, processed)
    check_logprobs(cool, processed)
    check_logprobs(cut, raw)
    check_logprobs(cut._replace(temperature=0), processed)
    check_logprobs(cut._replace(temperature=0.7), full)
    with pytest.raises(ValueError, match="raw_logprobs"):
        check_logprobs(cut, processed)
    with pytest.raises(ValueError, match="temperature 1, not 0.7"):
        check_logprobs(cool, raw)


def test_an_engine_seed_depends_on_both_seeds():
    facts = Facts(64, "full")
    seeds = {
        as_engine_request(Request((1,), seed), SAMPLING._replace(seed=other), facts, ()).seed
        for seed in range(20)
        for other in range(20)
    }
    assert len(seeds) == 400 and all(0 <= seed < 2**63 for seed in seeds)


async def test_weights_reach_all_engines_concurrently_and_each_reports_its_version(tiny, tmp_path):
    model = load_model(tiny[0])
    write_weights(model, tmp_path)
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as a, sglang_stand_in(load_model(tiny[0]), tiny[1]) as b:
        answers = await sync_weights_to_engines([SGLangEngine(a.url), SGLangEngine(b.url)], str(tmp_path), 3)
        assert [answer["version"] for answer in answers] == ["3", "3"]
        assert {"/pause_generation", "/update_weights_from_disk", "/flush_cache", "/continue_generation"} <= {
            path for path, _ in a.seen
        }


def changed(tiny, amount):
    torch.manual_seed(2)
    model = load_model(tiny[0])
    with torch.no_grad():
        for weight in model.parameters():
            weight += amount * torch.randn_like(weight)
    return model


@pytest.mark.parametrize("amount", [0.05, 1e-4])
async def test_an_engine_that_confirms_an_update_and_keeps_its_weights_is_named(tiny, amount):
    """Also if the update is smaller than the differences of the arithmetic."""
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as good, sglang_stand_in(load_model(tiny[0]), tiny[1]) as bad:
        generator = sglang_generator([good.url, bad.url], tiny[1])
        await generator.update_weights(Weights(load_model(tiny[0]), 1))
        bad.ignores_updates = True
        with pytest.raises(StaleEngineError, match=f"SGLang server at {bad.url}"):
            await generator.update_weights(Weights(changed(tiny, amount), 2))
        assert generator.version == 1
        await generator.close()


async def test_weight_files_are_removed_after_a_sync(tiny, tmp_path):
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as server:
        generator = HTTPGenerator([SGLangEngine(server.url)], tiny[1], folder=tmp_path)
        for version in (1, 2):
            await generator.update_weights(Weights(load_model(tiny[0]), version))
        paths = [body["model_path"] for path, body in server.seen if path == "/update_weights_from_disk"]
    assert len(set(paths)) == 2 and all(Path(path).parent == tmp_path for path in paths)
    assert not list(tmp_path.iterdir())


def test_a_probe_has_the_trainers_log_probs_and_does_not_change_the_trainer(tiny_model):
    tiny_model.train()
    probe = Probe.of(ModuleWeights(tiny_model))
    assert tiny_model.training and probe.logprobs == trainer_logprobs(tiny_model, probe.tokens)
    assert len(set(probe.tokens)) > 30
    off = [each + 0.01 for each in probe.logprobs]
    with pytest.raises(StaleEngineError, match=r"^replica 3 .* version 7 .* by 0.01"):
        probe.check("replica 3", off, 7, None)
    assert probe.check("replica 3", probe.logprobs, 7, ProbeResult(probe.logprobs, probe.logprobs, 0.0)).gap == 0


async def test_a_vllm_server_loads_weights_from_disk_and_is_verified(vllm_url, tiny, tmp_path):
    model = changed(tiny, 0.05)
    write_weights(model, tmp_path)
    engine = VLLMEngine(vllm_url)
    await engine.check_health()
    answer = await engine.update_weights_from_checkpoint(str(tmp_path), 41)
    assert answer["version"] == "41"
    probe = Probe.of(ModuleWeights(model))
    assert probe.check("vllm", await engine.prompt_logprobs(probe.tokens), 41, None).gap < 1e-4


async def test_a_vllm_server_receives_weights_over_the_network_without_files(vllm_url, tiny, tmp_path):
    nowhere = tmp_path / "nowhere"
    generator = HTTPGenerator([VLLMEngine(vllm_url)], tiny[1], transfer="gloo", folder=nowhere, time_limit=HANG)
    await generator.update_weights(Weights(changed(tiny, 0.05), 42))
    assert generator.version == 42 and generator.gap < 1e-4
    assert not nowhere.exists()


def facts_replies(**parallel):
    """The responses of a vLLM server from which `facts` are read."""
    parallel = {"world_size": 1, "data_parallel_size": 1, "worker_extension_cls": EXTENSION} | parallel
    about = {"parallel_config": parallel, "model_config": {"logprobs_mode": "processed_logprobs"}}
    models = {"data": [{"id": "tiny", "max_model_len": 64}]}
    return (200, models), (200, {"vllm_config": about}), (200, {"paths": {}})


async def test_a_server_that_dies_during_a_broadcast_is_named(tiny):
    """It accepts the call, never joins the group and ends: the sender does not wait for its time limit."""
    with scripted((200, {}), *facts_replies(), (200, {}), hang_up) as server:
        generator = HTTPGenerator([VLLMEngine(server.url)], tiny[1], transfer="gloo", time_limit=HANG)
        with pytest.raises(EngineError, match=f"{server.url}/collective_rpc: no connection"):
            await generator.update_weights(Weights(changed(tiny, 0.05), 1))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"worker_extension_cls": "another.Extension"}, f"start it with --worker-extension-cls {EXTENSION}"),
        ({"data_parallel_size": 2}, "has 2 copies of the model"),
    ],
)
async def test_the_error_of_a_vllm_server_that_cannot_receive_weights_has_the_remedy(parallel, message):
    with scripted(*facts_replies(**parallel)) as server, pytest.raises(ValueError, match=message):
        await VLLMEngine(server.url).receivers()


def test_one_server_under_two_addresses_is_rejected():
    check_distinct(["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:1/gateway", "http://no.such.invalid"])
    check_distinct(["unix:///tmp/a", "unix:///tmp/b"])
    with pytest.raises(ValueError, match="one server"):
        check_distinct(["unix:///tmp/a", "unix:///tmp/../tmp/a"])
    for same in ("http://127.0.0.1:1", "http://127.0.0.1:1/", "http://localhost:1"):
        with pytest.raises(ValueError, match="are one server"):
            check_distinct(["http://127.0.0.1:1", same])


async def test_the_smallest_max_length_of_all_engines_is_used(tiny, caplog):
    """Else the length of an answer would depend on the engine that it is routed to."""
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as one, sglang_stand_in(load_model(tiny[0]), tiny[1]) as two:
        two.generator.model.config.max_position_embeddings = 12
        generator = HTTPGenerator([SGLangEngine(one.url), SGLangEngine(two.url)], tiny[1])
        requests = [Request((5, 6, 7, 8), seed) for seed in range(6)]
        answers = await generator.generate(requests, GenerationConfig(max_new_tokens=20, seed=1))
    assert max(len(answer.token_ids) for answer in answers) == 8
    assert all(len(answer.token_ids) == 8 or answer.finish_reason == "stop" for answer in answers)
    assert "12 to" in caplog.text and "using 12" in caplog.text


def test_invalid_transfers_are_rejected(tiny):
    with pytest.raises(ValueError, match="the SGLang server at http://127.0.0.1:1 .* files only"):
        HTTPGenerator([SGLangEngine("http://127.0.0.1:1")], tiny[1], transfer="gloo")
    with pytest.raises(ValueError, match="'mpi' .* files, gloo, nccl"):
        HTTPGenerator([VLLMEngine("http://127.0.0.1:1")], tiny[1], transfer="mpi")


async def test_a_paused_vllm_server_continues_after_resume(vllm_url, tiny):
    """Tokens that are sampled after the pause have the version that is set meanwhile."""
    engine, server = VLLMEngine(vllm_url), Connection(vllm_url).checked()
    outputs = []

    async def ask():
        outputs.append(await engine.complete(EngineRequest((1, 2), SAMPLING, 1, 40, ())))

    await HTTPGenerator([engine], tiny[1]).update_weights(Weights(load_model(tiny[0]), 70))
    with anyio.fail_after(HANG), holding(3) as hold:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await wait_until_async(lambda: hold.reached == 1, "three tokens")
            await engine.pause()
            hold.release()
            await server.post("/update_weight_version", {"new_version": "71"})
            assert not outputs
            await engine.resume()
    assert outputs[0].versions == (70,) * 3 + (71,) * 37


async def test_a_sleeping_vllm_server_is_woken_by_the_next_call(vllm_url, tiny):
    generator, server = HTTPGenerator([VLLMEngine(vllm_url)], tiny[1]), Connection(vllm_url).checked()
    model = changed(tiny, 0.05)
    for version in (61, 62):
        await generator.sleep()
        assert (await server.get("/is_sleeping"))["is_sleeping"]
        with anyio.fail_after(HANG):
            if version == 61:
                await generator.update_weights(Weights(model, version))
            (answer,) = await generator.generate([Request((1, 2))], SAMPLING)
        assert answer.version == 61 and not (await server.get("/is_sleeping"))["is_sleeping"]
        expected = trainer_logprobs(model, (1, 2, *answer.token_ids))[1:]
        assert answer.logprobs == pytest.approx(expected, abs=5e-4), (
            "it has the same weights after waking up without new ones"
        )


async def test_sleep_is_rejected_for_engines_without_it(tiny):
    with pytest.raises(ValueError, match="the SGLang server at .* sleep"):
        await HTTPGenerator([SGLangEngine("http://127.0.0.1:1")], tiny[1]).sleep()


class FailingEngine:
    """An engine whose first `failures` requests fail; `hook` runs before each."""

    restarts = 0

    def __init__(self, name="engine", failures=0, hook=lambda _engine: None):
        self.name, self.failures, self.hook = name, failures, hook
        self.recoveries = self.completed = 0
        self.recoverable = True

    async def facts(self):
        return Facts(64, "full")

    async def complete(self, request):
        await anyio.lowlevel.checkpoint()
        self.hook(self)
        if self.failures:
            self.failures -= 1
            raise EngineError(f"{self.name} is down")
        self.completed += 1
        return EngineOutput((request.tokens[0],), (-1.0,), "stop")

    async def recovered(self, error):
        if not self.recoverable:
            raise EngineError(f"{self.name} was restarted too often") from error
        await anyio.lowlevel.checkpoint()
        self.recoveries += 1


async def test_a_failed_request_waits_for_the_only_engines_recovery_and_is_retried(tiny):
    engine = FailingEngine(failures=3)
    (answer,) = await HTTPGenerator([engine], tiny[1]).generate([Request((5,))], SAMPLING)
    assert answer.token_ids == (5,) and (engine.recoveries, engine.completed) == (3, 1)


async def test_a_request_that_failed_before_a_recovery_is_retried_without_another_one(tiny):
    def recover_meanwhile(engine):
        engine.recoveries += engine.failures

    engine = FailingEngine(failures=1, hook=recover_meanwhile)
    (answer,) = await HTTPGenerator([engine], tiny[1]).generate([Request((5,))], SAMPLING)
    assert answer.token_ids == (5,) and engine.recoveries == 1


@pytest.mark.parametrize(("kind", "recoveries"), [(HTTPGenerator, 0), (RayGenerator, 1)])
async def test_only_actors_are_recovered_by_the_failed_request_while_another_engine_is_healthy(tiny, kind, recoveries):
    engines = [FailingEngine("first", failures=1), FailingEngine("second")]
    options = {"own_bundles": None} if kind is RayGenerator else {}
    answers = await kind(engines, tiny[1], **options).generate([Request((5,)), Request((6,))], SAMPLING)
    assert [answer.token_ids for answer in answers] == [(5,), (6,)]
    assert engines[0].recoveries == recoveries


async def test_an_engine_that_cannot_be_recovered_stops_the_run_only_if_it_is_the_last(tiny):
    bad, good = FailingEngine("bad", failures=9), FailingEngine("good")
    bad.recoverable = False
    generator = RayGenerator([bad, good], tiny[1], own_bundles=None)
    assert len(await generator.generate([Request((5,)), Request((6,))], SAMPLING)) == 2 and good.completed == 2
    with pytest.raises(EngineError, match="bad was restarted too often"):
        await HTTPGenerator([bad], tiny[1]).generate([Request((5,))], SAMPLING)


PARENT = """
import sys
from oxrl.generators.vllm.server import start_vllm_server
server = start_vllm_server({model!r}, log={log!r})
print(server.process.pid, flush=True)
sys.stdin.read()
"""


@pytest.mark.engine
def test_a_server_dies_with_its_parent(tmp_path):
    need_vllm()
    script = PARENT.format(model=str(prepare_builtin("tiny")), log=str(tmp_path / "log"))
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        child = int(parent.stdout.readline())
        parent.kill()

    def gone():
        try:
            os.killpg(child, 0)
        except ProcessLookupError:
            return True
        return False

    wait_until(gone, f"the server's process group {child} ends with its parent")


class SocketServer(HTTPServer):
    """Listens at a path."""

    address_family = socket.AF_UNIX

    def server_bind(self):
        self.socket.bind(self.server_address)


class Hello(Quiet):
    def do_GET(self):
        self.reply(200, {"path": self.path, "host": self.headers["Host"]})


async def test_an_engine_can_listen_on_a_unix_socket(tmp_path):
    with SocketServer(str(tmp_path / "socket"), Hello) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        connection = Connection(f"unix://{tmp_path}/socket").checked()
        assert await connection.get("/health") == {"path": "/health", "host": "localhost"}
    assert connection.host == "127.0.0.1"
    with pytest.raises(EngineError, match=f"^unix://{tmp_path}/socket/health: no connection"):
        await connection._replace(retries=0).get("/health")


async def test_a_vllm_server_that_oxrl_started_is_reached_by_its_user_only(vllm_url):
    address = Path(urlsplit(vllm_url).path)
    assert address.is_socket()
    assert stat.S_IMODE(address.parent.stat().st_mode) == 0o700
    (server,) = [process for process in psutil.process_iter() if str(address) in process.cmdline()]
    sockets = [each for process in (server, *server.children(recursive=True)) for each in process.net_connections()]
    listening = {each.laddr.ip for each in sockets if each.status == psutil.CONN_LISTEN}
    assert listening <= {"127.0.0.1"}, "only gloo, between the processes of the engine"


def in_place_of_python(tmp_path, monkeypatch, script):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\n{script}\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))


def test_the_command_of_a_server_names_a_socket_and_no_port_and_it_gets_no_key(tmp_path, monkeypatch):
    from oxrl.generators.vllm.server import start_vllm_server

    need_vllm()
    in_place_of_python(tmp_path, monkeypatch, 'echo "$@ key=$VLLM_API_KEY"')
    monkeypatch.setenv("VLLM_API_KEY", "of-another-server")
    server = start_vllm_server("model", arguments=["--uds", "/tmp/elsewhere"], log=tmp_path / "log")
    server.process.wait()
    path = urlsplit(server.url).path
    assert stat.S_IMODE(Path(path).parent.stat().st_mode) == 0o700
    words = server.log.read_text().split()
    assert words[len(words) - words[::-1].index("--uds")] == path
    assert "--port" not in words and words[-1] == "key="
    server.stop()
    assert not Path(path).parent.exists()


async def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(tmp_path, monkeypatch):
    from oxrl.generators.vllm.server import vllm_server

    need_vllm()
    in_place_of_python(tmp_path, monkeypatch, "echo no such model >&2")
    with pytest.raises(EngineError, match=r"(?s)ended with 3 before it was ready.*ends with:\nno such model$"):
        async with vllm_server(tmp_path / "no-such-model", log=tmp_path / "log"):
            pass
