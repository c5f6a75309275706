"""An agent uses the endpoint like any other; its turns are recorded with token ids."""

from __future__ import annotations

import http.client
import json
import socket
from functools import partial
from urllib.parse import urlsplit

import anyio
import pytest
from anyio import to_thread

from oxrl.data.render import Renderer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.rollouts.endpoint import _TRANSFER_LIMIT, recording_endpoint
from oxrl.rollouts.tools import calculator, tool_schema
from oxrl.types import GenerationConfig, Message, Sample, Status
from tests.clock import expire
from tests.data import chat_templates as styles
from tests.data.chat_templates import byte_level
from tests.rollouts.scripted_text import ScriptedText
from tests.waiting import HANG, wait_until_async

pytestmark = pytest.mark.anyio

SAMPLING = GenerationConfig(max_new_tokens=16, temperature=0.7)
QUESTION = {"role": "user", "content": "What is 12 * 12?"}
CALL = '<tool_call>{"name": "calculator", "arguments":{"expression": "12 * 12"}}</tool_call>'
TOOLS = [tool_schema(calculator)]
COMPLETIONS = "/v1/chat/completions"


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


def port_of(endpoint) -> int:
    return urlsplit(endpoint.url).port


def token_of(endpoint) -> str:
    return urlsplit(endpoint.url).path


async def ask(endpoint, body, path=COMPLETIONS, method="POST", headers=(), token=None):
    """One request over a real connection: (status, body)."""
    path = (token_of(endpoint) if token is None else token) + path

    def send():
        connection = http.client.HTTPConnection("127.0.0.1", port_of(endpoint), timeout=HANG)
        sent = body if isinstance(body, bytes | type(None)) else json.dumps(body).encode()
        connection.request(method, path, sent, {"Content-Type": "application/json", **dict(headers)})
        response = connection.getresponse()
        read = response.read()
        connection.close()
        return response.status, json.loads(read) if response.headers["content-type"] == "application/json" else read

    return await to_thread.run_sync(send)


def opened(tiny, texts, **kwargs):
    generator = ScriptedText(tiny[1], texts)
    return generator, recording_endpoint(generator, Renderer(tiny[1]), SAMPLING, **kwargs)


async def test_a_conversation_with_a_tool_is_recorded_as_sampled(tiny):
    tokenizer = tiny[1]
    generator, opening = opened(tiny, ["Hm. " + CALL, "144"])
    async with opening as endpoint:
        path = endpoint.base_url("run 7").removeprefix(endpoint.url) + "/chat/completions"
        assert path == "/s/run%207/v1/chat/completions"
        status, first = await ask(endpoint, {"messages": [QUESTION], "tools": TOOLS, "model": "mine"}, path)
        reply = first["choices"][0]["message"]
        assert status == 200 and first["model"] == "mine"
        assert first["choices"][0]["finish_reason"] == "tool_calls"
        assert reply["content"] == "Hm."
        (call,) = reply["tool_calls"]
        assert json.loads(call["function"]["arguments"]) == {"expression": "12 * 12"}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "144"}
        chat = [QUESTION, {**reply, "refusal": None}, result]
        status, second = await ask(endpoint, {"messages": chat, "tools": TOOLS}, path)
        assert second["choices"][0] == {
            "index": 0,
            "message": {"role": "assistant", "content": "144"},
            "finish_reason": "stop",
        }
        rollout = endpoint.rollout("run 7")
    one, two = rollout.turns
    assert two.prompt_ids[: len(one.prompt_ids) + len(one.generation.token_ids)] == (
        one.prompt_ids + one.generation.token_ids
    )
    trained = [token for token, on in zip(rollout.tokens, rollout.loss_mask, strict=True) if on]
    assert tokenizer.decode(trained, skip_special_tokens=False) == f"Hm. {CALL}<|im_end|>144<|im_end|>"
    assert [request.tokens for request in generator.requests] == [one.prompt_ids, two.prompt_ids]
    assert len({request.seed for request in generator.requests}) == 2
    assert [message.role for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert first["usage"]["prompt_tokens"] == len(one.prompt_ids)
    assert one.generation.logprobs[1] == -0.501
    assert rollout.status is Status.COMPLETED and rollout.metadata == {"rewritten": 0}


async def test_conversations_are_told_apart(tiny):
    _, opening = opened(tiny, ["a", "b", "c", "d", "e"])
    async with opening as endpoint:
        body = {"messages": [QUESTION]}
        key = {"Authorization": "Bearer key"}
        await ask(endpoint, body, "/s/path" + COMPLETIONS, headers={"X-Rollout-Id": "header"})
        await ask(endpoint, {**body, "user": "field"}, headers={"X-Rollout-Id": "header"})
        await ask(endpoint, {**body, "user": "field"}, headers=key)
        await ask(endpoint, body, headers=key)
        await ask(endpoint, body)
        responses = {id: endpoint.rollout(id).response for id in ("path", "header", "field", "key", "default")}
        assert responses == {"path": "a", "header": "b", "field": "c", "key": "d", "default": "e"}
        endpoint.drop("key")
        with pytest.raises(ValueError, match="no conversation 'key'; conversations so far: path, header, field"):
            endpoint.rollout("key")
        sample = Sample("train:3", answer="144")
        assert endpoint.rollout("path", sample).sample is sample


async def test_branches_continue_from_their_common_turn(tiny):
    _, opening = opened(tiny, ["one", "two", "three"])
    async with opening as endpoint:
        await ask(endpoint, {"messages": [QUESTION]})
        chat = [QUESTION, {"role": "assistant", "content": "one"}]
        await ask(endpoint, {"messages": [*chat, {"role": "user", "content": "left?"}]})
        await ask(endpoint, {"messages": [*chat, {"role": "user", "content": "right?"}]})
        first, left, right = endpoint.rollout("default").turns
    seen = first.prompt_ids + first.generation.token_ids
    assert left.prompt_ids[: len(seen)] == right.prompt_ids[: len(seen)] == seen
    assert left.prompt_ids != right.prompt_ids
    assert first.messages == (Message("assistant", "one"), Message("user", "left?"))


async def test_a_request_with_other_tools_gets_its_own_prompt(tiny):
    _, opening = opened(tiny, ["one", "two"])
    async with opening as endpoint:
        await ask(endpoint, {"messages": [QUESTION]})
        chat = [QUESTION, {"role": "assistant", "content": "one"}, QUESTION]
        await ask(endpoint, {"messages": chat, "tools": TOOLS})
        _, second = endpoint.rollout("default").turns
    assert '"name": "calculator"' in tiny[1].decode(second.prompt_ids)


async def test_a_stream_is_one_chunk(tiny):
    _, opening = opened(tiny, [CALL])
    async with opening as endpoint:
        status, read = await ask(endpoint, {"messages": [QUESTION], "tools": TOOLS, "stream": True})
    chunk, done, rest = read.decode().split("\n\n")
    choice = json.loads(chunk.removeprefix("data: "))["choices"][0]
    assert (status, done, rest) == (200, "data: [DONE]", "")
    assert choice["finish_reason"] == "tool_calls"
    assert choice["delta"]["tool_calls"][0]["index"] == 0


async def test_a_request_can_lower_max_tokens_and_add_stop_texts_only(tiny, caplog):
    generator, opening = opened(tiny, ["a", "b"])
    async with opening as endpoint:
        await ask(endpoint, {"messages": [QUESTION], "max_tokens": 4, "stop": "x", "temperature": 0})
        await ask(endpoint, {"messages": [QUESTION], "max_tokens": 400, "temperature": 0.7})
    assert generator.samplings == [SAMPLING._replace(max_new_tokens=4, stop=("x",)), SAMPLING]
    assert "sets {'temperature': 0}; ignored" in caplog.text


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        ("POST", "/v1/completions", {}, 404, "there is no /v1/completions"),
        ("GET", COMPLETIONS, None, 405, "takes POST"),
        ("POST", COMPLETIONS, b"{", 400, "not valid JSON"),
        ("POST", COMPLETIONS, [], 400, "JSON object"),
        ("POST", COMPLETIONS, {}, 400, "messages must be"),
        ("POST", COMPLETIONS, {"messages": [{"content": "x"}]}, 400, "messages must be"),
        ("POST", COMPLETIONS, {"messages": [{"role": "user", "content": 5}]}, 400, "content a text or a list"),
        ("POST", COMPLETIONS, {"messages": [{"role": "user", "content": ["x"]}]}, 400, "messages must be"),
        ("POST", COMPLETIONS, {"messages": [QUESTION, {**QUESTION, "tool_calls": 5}]}, 400, "tool_calls a list"),
        ("POST", COMPLETIONS, {"messages": [QUESTION], "tools": ["x"]}, 400, "tools must be"),
        ("POST", COMPLETIONS, {"messages": [QUESTION], "n": 2}, 400, "n must be 1"),
        ("POST", COMPLETIONS, {"messages": [QUESTION], "stop": 5}, 400, "stop must be"),
        ("POST", COMPLETIONS, {"messages": [QUESTION], "max_tokens": -1}, 400, "max_tokens is -1"),
        ("POST", COMPLETIONS, {"messages": [{"role": "user", "content": "<|im_end|>"}]}, 400, "special token"),
        ("POST", COMPLETIONS, {"messages": [QUESTION], "user": "x" * 3000}, 413, "larger than 2000 bytes"),
    ],
)
async def test_errors_are_json_with_a_status(tiny, method, path, body, status, message):
    _, opening = opened(tiny, [], max_body=2000)
    async with opening as endpoint:
        got, error = await ask(endpoint, body, path, method)
        assert (got, error["error"]["code"]) == (status, status)
        assert message in error["error"]["message"]
        assert (await ask(endpoint, None, "/v1/models", "GET"))[0] == 200


async def test_models_are_listed_on_a_connection_that_stays_open(tiny):
    _, opening = opened(tiny, [])

    def twice(endpoint):
        connection = http.client.HTTPConnection("127.0.0.1", port_of(endpoint), timeout=HANG)
        read = []
        for _ in range(2):
            connection.request("GET", f"{token_of(endpoint)}/s/x/v1/models")
            read.append(json.loads(connection.getresponse().read())["data"][0]["id"])
        return read

    async with opening as endpoint:
        assert await to_thread.run_sync(twice, endpoint) == ["oxrl", "oxrl"]


async def test_invalid_http_gets_a_response_and_does_no_harm(tiny):
    _, opening = opened(tiny, [])

    def send_garbage(port):
        with socket.create_connection(("127.0.0.1", port), timeout=HANG) as raw:
            raw.sendall(b"HELLO THERE\r\n\r\n\r\n")
            return raw.recv(1000)

    def disconnect(endpoint):
        with socket.create_connection(("127.0.0.1", port_of(endpoint)), timeout=HANG) as raw:
            path = f"{token_of(endpoint)}{COMPLETIONS}".encode()
            raw.sendall(b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{" % path)

    async with opening as endpoint:
        assert (await to_thread.run_sync(send_garbage, port_of(endpoint))).startswith(b"HTTP/1.1 400")
        await to_thread.run_sync(disconnect, endpoint)
        assert (await ask(endpoint, None, "/v1/models", "GET"))[0] == 200


async def test_a_failed_generation_is_an_error_of_the_rollout(tiny):
    _, opening = opened(tiny, [RuntimeError("busy")] * 4)
    async with opening as endpoint:
        status, error = await ask(endpoint, {"messages": [QUESTION]})
        rollout = endpoint.rollout("default")
    assert status == 500 and "RuntimeError: busy" in error["error"]["message"]
    assert rollout.status is Status.FAILED and rollout.score is None


class UnexpectedError(Exception):
    """An error of no kind that the endpoint knows."""


def broken_parser(_text):
    raise UnexpectedError("broken")


async def test_an_unexpected_error_ends_its_request_and_no_other(tiny):
    _, opening = opened(tiny, [UnexpectedError("broken"), "b", "c"], tool_parser=broken_parser)
    async with opening as endpoint:
        for body in ({"messages": [QUESTION]}, {"messages": [QUESTION], "tools": TOOLS}):
            status, error = await ask(endpoint, body)
            assert status == 500 and "UnexpectedError: broken" in error["error"]["message"]
            assert endpoint.rollout("default").status is Status.FAILED
        assert (await ask(endpoint, {"messages": [QUESTION]}))[0] == 200
        assert endpoint.rollout("default").status is Status.COMPLETED


@pytest.mark.parametrize(
    ("token", "headers", "status"),
    [
        ("", {}, 404),
        ("/wrong", {}, 404),
        (None, {"Host": "attacker.example"}, 403),
        (None, {"Host": "127.0.0.1.attacker.example:80"}, 403),
        (None, {"Host": "[x"}, 403),
        (None, {"Origin": "https://attacker.example"}, 403),
        (None, {"Origin": "null"}, 403),
        (None, {"Host": "localhost", "Origin": "http://127.0.0.1:3000"}, 200),
        (None, {"Host": "[::1]:80"}, 200),
    ],
)
async def test_a_request_needs_the_token_and_loopback_as_host_and_origin(tiny, token, headers, status):
    generator, opening = opened(tiny, ["a"])
    async with opening as endpoint:
        path = "/s/x" + COMPLETIONS
        body = {"messages": [QUESTION]}
        assert (await ask(endpoint, body, path, headers=headers, token=token))[0] == status
        assert len(generator.requests) == (status == 200)


async def test_a_refused_request_is_answered_before_its_body_arrives(tiny):
    _, opening = opened(tiny, [])

    def announce(port):
        with socket.create_connection(("127.0.0.1", port), timeout=HANG) as raw:
            raw.sendall(b"POST /wrong/v1/models HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9999\r\n\r\n")
            return raw.makefile("rb").read()

    async with opening as endpoint:
        assert (await to_thread.run_sync(announce, port_of(endpoint))).startswith(b"HTTP/1.1 404")


async def test_every_endpoint_has_its_own_token(tiny):
    async with opened(tiny, [])[1] as one, opened(tiny, [])[1] as other:
        assert len(token_of(one)) > 20 and token_of(one) != token_of(other)


async def test_conversations_are_limited_until_some_are_dropped(tiny):
    _, opening = opened(tiny, ["a", "b", "c"], max_sessions=2)
    async with opening as endpoint:
        asked = [await ask(endpoint, {"messages": [QUESTION], "user": name}) for name in ("one", "two", "three")]
        assert [status for status, _ in asked] == [200, 200, 429]
        assert "2 conversations" in asked[2][1]["error"]["message"]
        endpoint.drop("one")
        assert (await ask(endpoint, {"messages": [QUESTION], "user": "three"}))[0] == 200


async def test_connections_are_limited(tiny, monkeypatch):
    monkeypatch.setattr("oxrl.rollouts.endpoint._MAX_CONNECTIONS", 1)
    _, opening = opened(tiny, [])

    def connect(port):
        with socket.create_connection(("127.0.0.1", port), timeout=HANG) as first:
            first.sendall(b"GET / HTTP/1.1\r\n")
            with socket.create_connection(("127.0.0.1", port), timeout=HANG) as second:
                assert second.recv(1) == b""
            first.sendall(b"Host: localhost\r\n\r\n")
            return first.recv(100)

    async with opening as endpoint:
        assert (await to_thread.run_sync(connect, port_of(endpoint))).startswith(b"HTTP/1.1 404")


class Endless(ScriptedText):
    """Its generations do not end until they are cancelled."""

    async def generate(self, requests, sampling):
        await super().generate(requests, sampling)
        await anyio.sleep_forever()


async def test_a_generation_and_an_idle_connection_have_a_time_limit(tiny):
    generator, asked = Endless(tiny[1], ["a"]), []

    async def ask_once(endpoint):
        asked.append(await ask(endpoint, {"messages": [QUESTION]}))

    async with recording_endpoint(generator, Renderer(tiny[1]), SAMPLING, time_limit=5.0) as endpoint:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask_once, endpoint)
            await wait_until_async(lambda: generator.requests, "the generation has started")
            await expire(5.0)
        assert asked[0][0] == 504 and "no generation within 5 s" in asked[0][1]["error"]["message"]
        assert endpoint.rollout("default").status is Status.FAILED
        await wait_until_async(lambda: endpoint._connections == 0, "the first connection has ended")
        async with await anyio.connect_tcp("127.0.0.1", port_of(endpoint)) as idle:
            await idle.send(b"GET /")
            await wait_until_async(lambda: endpoint._connections == 1, "the connection is served")
            await expire(_TRANSFER_LIMIT)
            with pytest.raises(anyio.EndOfStream):
                await idle.receive()


async def test_an_aborted_generation_is_recorded_and_reported(tiny):
    generator, opening = opened(tiny, ["14"])
    generator.change = lambda generation: generation._replace(finish_reason="aborted")
    async with opening as endpoint:
        assert (await ask(endpoint, {"messages": [QUESTION]}))[0] == 503
        assert endpoint.rollout("default").status is Status.ABORTED


async def test_tools_work_without_support_in_the_template(anyio_backend):
    tokenizer = byte_level(styles.CHATML)
    async with recording_endpoint(ScriptedText(tokenizer, [CALL, "144"]), Renderer(tokenizer), SAMPLING) as endpoint:
        _, first = await ask(endpoint, {"messages": [QUESTION], "tools": TOOLS})
        reply = first["choices"][0]["message"]
        assert reply["content"] is None and reply["tool_calls"]
        chat = [QUESTION, reply, {"role": "tool", "content": "144", "tool_call_id": "call_0"}]
        await ask(endpoint, {"messages": chat, "tools": TOOLS})
        one, two = endpoint.rollout("default").turns
    tail = tokenizer.decode(two.prompt_ids[len(one.prompt_ids) + len(one.generation.token_ids) :])
    assert tail.startswith("\n<|im_start|>user\n<tool_response>\n144\n</tool_response>")


@pytest.mark.parametrize("host", ["0.0.0.0", "192.168.1.5", "::"])
async def test_only_loopback_addresses_are_allowed(tiny, host):
    with pytest.raises(ValueError, match="host is .*127.0.0.1"):
        async with opened(tiny, [], host=host)[1]:
            pass


async def test_exceptions_of_the_with_block_are_raised_unchanged(tiny):
    with pytest.raises(KeyError, match="mine"):
        async with opened(tiny, [])[1]:
            raise KeyError("mine")


async def test_several_agents_use_a_real_model_concurrently(tiny, tiny_model):
    tokenizer = tiny[1]
    generator = EmbeddedGenerator(tiny_model, tokenizer)
    async with recording_endpoint(generator, Renderer(tokenizer), SAMPLING, seed=1) as endpoint:
        async with anyio.create_task_group() as tasks:
            for number in range(3):
                path = f"/s/{number}{COMPLETIONS}"
                tasks.start_soon(partial(ask, endpoint, {"messages": [QUESTION], "max_tokens": 5}, path))
        rollouts = [endpoint.rollout(str(number)) for number in range(3)]
    await generator.close()
    assert all(len(rollout.generation.token_ids) <= 5 for rollout in rollouts)
    assert len({rollout.generation.token_ids for rollout in rollouts}) == 3
