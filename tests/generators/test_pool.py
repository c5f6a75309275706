"""Engines over HTTP that misbehave: a real server on loopback, whose script says how."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import anyio
import pytest
import torch

from oxrl.generators.connection import Connection, EngineError, check_distinct
from oxrl.generators.engines import EngineRequest, Facts, as_engine_request, check_logprobs
from oxrl.generators.http import SGLangEngine, VLLMEngine
from oxrl.generators.pool import HTTPGenerator, sglang_generator, sync_weights_to_engines
from oxrl.generators.probe import Probe, ProbeResult, StaleEngineError
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
    """Answers by the server's `script`, one entry per request, the last for ever: (status, content) or a function."""

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


async def test_what_may_pass_is_tried_again_with_growing_pauses(monkeypatch):
    pauses = []

    async def pause(seconds):
        pauses.append(seconds)
        await anyio.lowlevel.checkpoint()

    monkeypatch.setattr(anyio, "sleep", pause)
    asks_for_patience = lambda handler: handler.reply(429, {}, Retry_After="7")  # noqa: E731
    with scripted((503, {"error": "busy"}), hang_up, (429, {}), asks_for_patience, (200, {"fine": 1})) as server:
        assert await Connection(server.url, retries=4, backoff=0.5).post("/x") == {"fine": 1}
    assert pauses == [0.5, 1.0, 2.0, 7.0] and len(server.seen) == 5


async def test_what_must_not_be_done_twice_is_tried_once():
    with scripted((500, {"error": {"message": "out of memory"}})) as server:
        with pytest.raises(EngineError, match=r"127.0.0.1:\d+/x: it answered 500: out of memory$"):
            await Connection(server.url, backoff=0.01).post("/x", once=True)
        assert len(server.seen) == 1


async def test_an_engine_that_hangs_is_given_up_on_in_time_and_named():
    end = threading.Event()
    with scripted(lambda _handler: end.wait(HANG)) as server:
        with pytest.raises(EngineError, match=r"127.0.0.1:\d+/x: no answer within 0.2 s \(tried 2 times\)"):
            await Connection(server.url, time_limit=0.2, retries=1, backoff=0.01).get("/x")
        end.set()


async def test_an_engine_that_is_not_there_is_named():
    with pytest.raises(EngineError, match="127.0.0.1:9/health: no connection"):
        await VLLMEngine("http://127.0.0.1:9", retries=0).check_health()


async def test_a_request_that_the_engine_refuses_is_the_users_mistake():
    with scripted((400, {"error": {"message": "max_tokens is negative"}})) as server:
        with pytest.raises(ValueError, match="refuses the request: max_tokens is negative"):
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
    ],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="no engine's address"):
        VLLMEngine(url)


@pytest.mark.parametrize("bad", [float("nan"), None, -9999.0])
async def test_log_probs_that_are_missing_or_not_numbers_are_an_error(bad, tiny):
    about = {"finish_reason": {"type": "stop"}, "output_token_logprobs": [[-1.0, 5, None], [bad, 6, None]]}
    replies = [(200, {"context_length": 64}), (200, {"meta_info": about})]
    with scripted(*replies) as server, pytest.raises(EngineError, match="log-probs"):
        await sglang_generator([server.url], tiny[1], retries=0).generate([Request((1, 2))], SAMPLING)


def test_log_probs_must_be_those_of_the_policy():
    """Neither mode of vLLM gives them for every sampling; what it cannot give is refused."""
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


def test_a_seed_is_a_function_of_both_seeds_and_of_what_was_drawn_before():
    facts = Facts(64, "full")
    seeds = {
        as_engine_request(Request((1,), seed), SAMPLING._replace(seed=other), facts, ()).seed
        for seed in range(20)
        for other in range(20)
    }
    assert len(seeds) == 400 and all(0 <= seed < 2**63 for seed in seeds)


async def test_weights_reach_all_engines_side_by_side_and_each_tells_its_version(tiny, tmp_path):
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
async def test_an_engine_that_says_yes_and_keeps_its_weights_stops_the_run_with_its_name(tiny, amount):
    """Also where the update is too small to show beside the arithmetic's own differences."""
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as good, sglang_stand_in(load_model(tiny[0]), tiny[1]) as bad:
        generator = sglang_generator([good.url, bad.url], tiny[1])
        await generator.update_weights(Weights(load_model(tiny[0]), 1))
        bad.deaf = True
        with pytest.raises(StaleEngineError, match=f"SGLang server at {bad.url}"):
            await generator.update_weights(Weights(changed(tiny, amount), 2))
        assert generator.version == 1
        await generator.close()


async def test_files_of_weights_do_not_pile_up(tiny, tmp_path):
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as server:
        generator = HTTPGenerator([SGLangEngine(server.url)], tiny[1], folder=tmp_path)
        for version in (1, 2):
            await generator.update_weights(Weights(load_model(tiny[0]), version))
        paths = [body["model_path"] for path, body in server.seen if path == "/update_weights_from_disk"]
    assert len(set(paths)) == 2 and all(Path(path).parent == tmp_path for path in paths)
    assert not list(tmp_path.iterdir())


def test_a_probe_is_the_trainers_word_and_leaves_the_trainer_as_it_was(tiny_model):
    tiny_model.train()
    probe = Probe.of(ModuleWeights(tiny_model))
    assert tiny_model.training and probe.logprobs == trainer_logprobs(tiny_model, probe.tokens)
    assert len(set(probe.tokens)) > 30
    off = [each + 0.01 for each in probe.logprobs]
    with pytest.raises(StaleEngineError, match=r"^replica 3 does not speak with version 7 .* off by 0.01"):
        probe.check("replica 3", off, 7, None)
    assert probe.check("replica 3", probe.logprobs, 7, ProbeResult(probe.logprobs, probe.logprobs, 0.0)).gap == 0


async def test_a_vllm_server_takes_weights_from_disk_and_proves_it(vllm_url, tiny, tmp_path):
    model = changed(tiny, 0.05)
    write_weights(model, tmp_path)
    engine = VLLMEngine(vllm_url)
    await engine.check_health()
    answer = await engine.update_weights_from_checkpoint(str(tmp_path), 41)
    assert answer["version"] == "41"
    probe = Probe.of(ModuleWeights(model))
    assert probe.check("vllm", await engine.prompt_logprobs(probe.tokens), 41, None).gap < 1e-4


async def test_a_vllm_server_takes_weights_over_the_network_and_nothing_is_written(vllm_url, tiny, tmp_path):
    nowhere = tmp_path / "nowhere"
    generator = HTTPGenerator([VLLMEngine(vllm_url)], tiny[1], transfer="gloo", folder=nowhere, time_limit=HANG)
    await generator.update_weights(Weights(changed(tiny, 0.05), 42))
    assert generator.version == 42 and generator.gap < 1e-4
    assert not nowhere.exists()


def about_itself(**parallel):
    """What a vLLM server answers when it is asked for facts."""
    parallel = {"world_size": 1, "data_parallel_size": 1, "worker_extension_cls": EXTENSION} | parallel
    about = {"parallel_config": parallel, "model_config": {"logprobs_mode": "processed_logprobs"}}
    models = {"data": [{"id": "tiny", "max_model_len": 64}]}
    return (200, models), (200, {"vllm_config": about}), (200, {"paths": {}})


async def test_a_server_that_dies_while_weights_are_sent_is_named(tiny):
    """It takes the call, meets nobody and is gone: who sends does not wait until its time is over."""
    with scripted((200, {}), *about_itself(), (200, {}), hang_up) as server:
        generator = HTTPGenerator([VLLMEngine(server.url)], tiny[1], transfer="gloo", time_limit=HANG)
        with pytest.raises(EngineError, match=f"{server.url}/collective_rpc: no connection, or one that broke"):
            await generator.update_weights(Weights(changed(tiny, 0.05), 1))


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        ({"worker_extension_cls": "another.Extension"}, f"start it with --worker-extension-cls {EXTENSION}"),
        ({"data_parallel_size": 2}, "has 2 copies of the model"),
    ],
)
async def test_a_vllm_server_that_cannot_receive_says_how_to_start_it(parallel, message):
    with scripted(*about_itself(**parallel)) as server, pytest.raises(ValueError, match=message):
        await VLLMEngine(server.url).receivers()


def test_one_server_under_two_names_is_refused():
    check_distinct(["http://127.0.0.1:1", "http://127.0.0.1:2", "http://127.0.0.1:1/gateway", "http://no.such.invalid"])
    for same in ("http://127.0.0.1:1", "http://127.0.0.1:1/", "http://localhost:1"):
        with pytest.raises(ValueError, match="are one server: name it once"):
            check_distinct(["http://127.0.0.1:1", same])


async def test_the_shortest_engine_says_for_all_how_long_an_answer_may_be(tiny, caplog):
    """Else groups would be cut off by chance, as their answers fall to one or the other."""
    with sglang_stand_in(load_model(tiny[0]), tiny[1]) as one, sglang_stand_in(load_model(tiny[0]), tiny[1]) as two:
        two.speaker.model.config.max_position_embeddings = 12
        generator = HTTPGenerator([SGLangEngine(one.url), SGLangEngine(two.url)], tiny[1])
        requests = [Request((5, 6, 7, 8), seed) for seed in range(6)]
        answers = await generator.generate(requests, GenerationConfig(max_new_tokens=20, seed=1))
    assert max(len(answer.token_ids) for answer in answers) == 8
    assert all(len(answer.token_ids) == 8 or answer.finish_reason == "stop" for answer in answers)
    assert "engines take sequences of 12 to" in caplog.text


def test_engines_that_cannot_receive_and_transfers_that_are_not_there_are_refused(tiny):
    with pytest.raises(ValueError, match="the SGLang server at http://127.0.0.1:1 takes weights from files only"):
        HTTPGenerator([SGLangEngine("http://127.0.0.1:1")], tiny[1], transfer="gloo")
    with pytest.raises(ValueError, match="no transfer 'mpi': weights go by files, gloo, nccl"):
        HTTPGenerator([VLLMEngine("http://127.0.0.1:1")], tiny[1], transfer="mpi")


async def test_a_paused_vllm_server_goes_on_after_it_is_resumed(vllm_url, tiny):
    """Which tokens it draws after the pause is seen by the name that its weights get meanwhile."""
    engine, server = VLLMEngine(vllm_url), Connection(vllm_url).checked()
    said = []

    async def ask():
        said.append(await engine.complete(EngineRequest((1, 2), SAMPLING, 1, 40, ())))

    await HTTPGenerator([engine], tiny[1]).update_weights(Weights(load_model(tiny[0]), 70))
    with anyio.fail_after(HANG), holding(3) as hold:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await wait_until_async(lambda: hold.reached == 1, "three tokens")
            await engine.pause()
            hold.release()
            await server.post("/update_weight_version", {"new_version": "71"})
            assert not said
            await engine.resume()
    assert said[0].versions == (70,) * 3 + (71,) * 37


async def test_a_vllm_server_that_sleeps_is_woken_by_whoever_asks(vllm_url, tiny):
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
        assert answer.logprobs == pytest.approx(expected, abs=5e-4), "also without new weights it speaks as before"


async def test_an_engine_that_is_not_known_to_sleep_says_so(tiny):
    with pytest.raises(ValueError, match="the SGLang server at .* is not known to sleep"):
        await HTTPGenerator([SGLangEngine("http://127.0.0.1:1")], tiny[1]).sleep()


PARENT = """
import sys
from oxrl.generators.vllm.server import start_vllm_server
server = start_vllm_server({model!r}, log={log!r})
print(server.process.pid, flush=True)
sys.stdin.read()
"""


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


async def test_a_server_that_cannot_start_is_reported_with_the_end_of_its_log(tmp_path, monkeypatch):
    from oxrl.generators.vllm.server import vllm_server

    need_vllm()
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho there is no such model >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(EngineError, match=r"(?s)ended with 3 before it was ready.*ends with:\nthere is no such model$"):
        async with vllm_server(tmp_path / "no-such-model", log=tmp_path / "log"):
            pass
