"""An OpenAI-compatible endpoint on loopback: what an agent asks of it is answered by the policy, and recorded.

Serves chat completions and the list of models, over HTTP/1.1, in plain JSON or as a stream of one chunk. Each
conversation keeps its turns with token ids and log-probs, and becomes a rollout. How to sample is the trainer's
affair: an agent may ask for fewer tokens and for stop texts, and nothing else.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import time
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import anyio
import h11
from anyio.abc import ByteStream, SocketAttribute

from oxrl.concurrency import task_group
from oxrl.rollouts.envs import GeneratorClient, said_message
from oxrl.rollouts.tools import ToolParser, extract_tool_calls, parse_tools, tool_parser_for
from oxrl.rollouts.transcript import Told, Tools, Transcript, begin, tell_tools
from oxrl.seeds import mixed_seed
from oxrl.types import Generation, GenerationConfig, Generator, Message, Render, Rollout, Sample, Turn

logger = logging.getLogger(__name__)

_PATH = re.compile(r"(?:/s/(?P<id>[^/]+))?/v1/(?P<what>chat/completions|models)/?")
_GONE = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, h11.LocalProtocolError)


class _Refused(Exception):  # noqa: N818 - it becomes an answer
    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Reply(NamedTuple):
    status: int
    body: bytes
    kind: str = "application/json"
    last: bool = False  # close the connection behind it


class _Ask(NamedTuple):
    """A request that was understood."""

    messages: tuple[Message, ...] = ()
    tools: Tools = ()
    sampling: GenerationConfig = GenerationConfig()
    model: str = "oxrl"
    stream: bool = False


class _Said(NamedTuple):
    """One recorded turn, and what a request that goes on from it looks like."""

    ask: _Ask
    told: Told
    before: Transcript
    generation: Generation
    message: Message
    turn: int  # its place among the turns of the session


@dataclass
class _Session:
    number: int = 0  # of requests so far
    said: list[_Said] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    error: str | None = None


class RecordingEndpoint:
    """What `recording_endpoint` gives: `endpoint.base_url("run 7")` for the agent, `endpoint.rollout("run 7")` then.

    A conversation is told by the path (`/s/<id>/v1`), the header `X-Rollout-Id`, the field `user` or the API key,
    whichever comes first; without any of them it is "default".
    """

    def __init__(
        self,
        generator: Generator,
        render: Render,
        sampling: GenerationConfig,
        *,
        url: str,
        seed: int,
        tool_parser: ToolParser | None,
        max_body: int,
    ) -> None:
        self.url = url
        self._generator, self._render, self._sampling, self._seed = generator, render, sampling, seed
        self._tool_parser, self._max_body = tool_parser, max_body
        self._sessions: dict[str, _Session] = {}
        self._warned = False

    def base_url(self, id: str) -> str:
        """What an OpenAI client takes as its base URL, for one conversation."""
        return f"{self.url}/s/{quote(id, safe='')}/v1"

    def rollout(self, id: str, sample: Sample | None = None) -> Rollout:
        """All that was said in one conversation so far; `sample` is what it was about."""
        if id not in self._sessions:
            known = ", ".join(self._sessions) or "none"
            raise ValueError(f"nobody has talked as {id!r}; conversations so far: {known}")
        session = self._sessions[id]
        asked = session.said[0].ask if session.said else None
        about = sample or Sample(
            id, messages=asked.messages if asked else (), tools=tuple(asked.tools) if asked else ()
        )
        rewritten = sum(said.before.rewritten > 0 for said in session.said)
        return Rollout(about, tuple(session.turns), error=session.error, metadata={"rewritten": rewritten})

    def drop(self, id: str) -> None:
        """Forget a conversation."""
        self._sessions.pop(id, None)

    async def serve(self, stream: ByteStream) -> None:
        """One connection, until either side closes it."""
        connection = h11.Connection(h11.SERVER)
        async with stream:
            with suppress(*_GONE):
                while await self._exchange(connection, stream):
                    connection.start_next_cycle()

    async def _exchange(self, connection: h11.Connection, stream: ByteStream) -> bool:
        try:
            asked = await _received(connection, stream, self._max_body)
            if asked is None:
                return False
            reply = await self._answer(*asked)
        except h11.RemoteProtocolError as error:
            reply = _error(error.error_status_hint, str(error), last=True)
        except _Refused as refusal:
            reply = _error(refusal.status, str(refusal), last=refusal.status == 413)
        headers = [("content-type", reply.kind), ("content-length", str(len(reply.body)))]
        headers += [("connection", "close")] if reply.last else []
        for event in (
            h11.Response(status_code=reply.status, headers=headers),
            h11.Data(reply.body),
            h11.EndOfMessage(),
        ):
            await stream.send(connection.send(event) or b"")
        return not reply.last and connection.our_state is not h11.MUST_CLOSE

    async def _answer(self, request: h11.Request, body: bytes) -> _Reply:
        method, path = request.method.decode(), request.target.decode().partition("?")[0]
        found = _PATH.fullmatch(path)
        if found is None:
            raise _Refused(
                404, f"there is no {path}; there are /v1/chat/completions and /v1/models, also below /s/<id>"
            )
        allowed = "GET" if found["what"] == "models" else "POST"
        if method != allowed:
            raise _Refused(405, f"{path} takes {allowed}, not {method}")
        if found["what"] == "models":
            model = {"id": "oxrl", "object": "model", "created": 0, "owned_by": "oxrl"}
            return _Reply(200, _json({"object": "list", "data": [model]}))
        raw = _parsed(body)
        id = unquote(found["id"] or "") or _told_id(request, raw)
        return await self._complete(id, self._understood(raw))

    async def _complete(self, id: str, ask: _Ask) -> _Reply:
        session = self._sessions.setdefault(id, _Session())
        number, session.number = session.number, session.number + 1
        try:
            told, transcript = self._going_on(session, ask)
            seed = mixed_seed(self._seed, zlib.crc32(id.encode()), number)
            generation = await GeneratorClient(self._generator, self._render, ask.sampling, seed).say(
                transcript.prompt_ids
            )
        except ValueError as error:
            raise _Refused(400, str(error)) from error
        except (RuntimeError, OSError) as error:
            session.error = f"generation failed: {type(error).__name__}: {error}"
            raise _Refused(500, session.error) from error
        session.error = None
        said = self._message(ask, told, transcript, generation)
        session.said.append(_Said(ask, told, transcript, generation, said, len(session.turns)))
        session.turns.append(Turn(transcript.prompt_ids, generation, (said,)))
        if generation.finish_reason == "aborted":
            raise _Refused(503, "the generation was aborted; what was said until then is recorded")
        return _completion(f"{id}-{number}", ask, said, transcript, generation)

    def _going_on(self, session: _Session, ask: _Ask) -> tuple[Told, Transcript]:
        """The prompt that goes on from a recorded turn, if the request does; else a new conversation."""
        for said in reversed(session.said):
            known = (*said.ask.messages, said.message)
            answers = ask.messages[len(known) :]
            if answers and ask.tools == said.ask.tools and _alike(known, ask.messages[: len(known)]):
                turn = session.turns[said.turn]
                if len(turn.messages) == 1:
                    session.turns[said.turn] = turn._replace(messages=(said.message, *answers))
                return said.told, said.before.go_on(said.generation, said.message, said.told.answers(answers))
        told = tell_tools(self._render, ask.messages, ask.tools)
        return told, begin(self._render, told.messages, tools=told.tools)

    def _message(self, ask: _Ask, told: Told, before: Transcript, generation: Generation) -> Message:
        if generation.finish_reason != "stop" or not ask.tools:
            return Message("assistant", before.plain(before.said(generation)))
        words = before.said(generation)
        parse = self._tool_parser or (tool_parser_for(self._render) if told.by_template else parse_tools)
        return said_message(words, extract_tool_calls(words, parse), before)

    def _understood(self, raw: Mapping[str, Any]) -> _Ask:
        messages, tools, stop = raw.get("messages"), raw.get("tools") or [], raw.get("stop") or []
        if not isinstance(messages, list) or not messages or not all(_is_message(each) for each in messages):
            raise _Refused(400, "messages must be a list of objects with a role, and not empty")
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise _Refused(400, "tools must be a list of objects")
        if raw.get("n") not in (None, 1) or raw.get("logprobs"):
            raise _Refused(
                400, "one answer at a time, and its log-probs are recorded here, not returned: leave out n and logprobs"
            )
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
            raise _Refused(400, "stop must be a text or a list of texts")
        most = raw.get("max_completion_tokens") or raw.get("max_tokens") or self._sampling.max_new_tokens
        if not isinstance(most, int) or most < 1:
            raise _Refused(400, f"max_tokens is {most!r}; give a whole number of 1 or more")
        self._warn_of_sampling(raw)
        sampling = self._sampling._replace(
            max_new_tokens=min(most, self._sampling.max_new_tokens), stop=(*self._sampling.stop, *stops)
        )
        model, stream = str(raw.get("model") or "oxrl"), bool(raw.get("stream"))
        return _Ask(tuple(_message(each) for each in messages), tuple(tools), sampling, model, stream)

    def _warn_of_sampling(self, raw: Mapping[str, Any]) -> None:
        names = ("temperature", "top_p", "top_k", "min_p")
        asked = {name: raw[name] for name in names if raw.get(name) not in (None, getattr(self._sampling, name))}
        if asked and not self._warned:
            self._warned = True
            logger.warning("an agent asked for %s; it gets the sampling that is trained on: %s", asked, self._sampling)


@asynccontextmanager
async def recording_endpoint(
    generator: Generator,
    render: Render,
    sampling: GenerationConfig,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    seed: int = 0,
    tool_parser: ToolParser | None = None,
    max_body: int = 16 * 2**20,
) -> AsyncIterator[RecordingEndpoint]:
    """`async with recording_endpoint(generator, render, sampling) as endpoint:`; port 0 takes a free one.

    `tool_parser` reads calls where a request has tools: the one of the chat template unless given. Requests of more
    than `max_body` bytes are refused.
    """
    address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    if not address.is_loopback:
        raise ValueError(f"host is {host}: anyone could use the model; give 127.0.0.1, ::1 or localhost")
    listener = await anyio.create_tcp_listener(local_host=str(address), local_port=port)
    async with listener:
        bound = listener.extra(SocketAttribute.local_port)  # noqa: S610 - anyio's, not a database's
        url = f"http://{f'[{address}]' if address.version == 6 else address}:{bound}"
        endpoint = RecordingEndpoint(
            generator, render, sampling, url=url, seed=seed, tool_parser=tool_parser, max_body=max_body
        )
        async with task_group() as tasks:
            tasks.start_soon(partial(listener.serve, endpoint.serve))
            yield endpoint
            tasks.cancel_scope.cancel()


async def _received(connection: h11.Connection, stream: ByteStream, max_body: int) -> tuple[h11.Request, bytes] | None:
    """The next request and its body; None when the client has left."""
    request, body = None, bytearray()
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            if connection.they_are_waiting_for_100_continue:
                await stream.send(connection.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            try:
                connection.receive_data(await stream.receive())
            except anyio.EndOfStream:
                connection.receive_data(b"")
        elif isinstance(event, h11.Request):
            request = event
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > max_body:
                raise _Refused(413, f"the request is larger than {max_body} bytes")
        elif isinstance(event, h11.EndOfMessage) and request is not None:
            return request, bytes(body)
        else:
            return None


def _told_id(request: h11.Request, raw: Mapping[str, Any]) -> str:
    headers = {name.decode().lower(): value.decode("latin-1") for name, value in request.headers}
    key = headers.get("authorization", "").removeprefix("Bearer ").strip()
    return headers.get("x-rollout-id") or str(raw.get("user") or "") or key or "default"


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _Refused(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise _Refused(400, "the body must be a JSON object")
    return raw


def _is_message(raw: Any) -> bool:
    return isinstance(raw, dict) and isinstance(raw.get("role"), str)


def _message(raw: Mapping[str, Any]) -> Message:
    """As chat templates take it: text in one piece, and arguments of calls as objects instead of as JSON text."""
    message = Message.from_dict(raw)
    content = message.content
    if not isinstance(content, str) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        message = message._replace(content=message.text)
    calls = message.extra.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return message._replace(extra={**message.extra, "tool_calls": [_with_arguments(call) for call in calls]})


def _with_arguments(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    with suppress(ValueError, RecursionError):
        return {**call, "function": {**function, "arguments": json.loads(function["arguments"] or "{}")}}
    return call


def _alike(ours: Sequence[Message], theirs: Sequence[Message]) -> bool:
    """The same conversation; clients add fields and drop empty ones, so that only what matters is compared."""
    return len(ours) == len(theirs) and all(_essence(a) == _essence(b) for a, b in zip(ours, theirs, strict=True))


def _essence(message: Message) -> tuple[Any, ...]:
    calls = [call.get("function") for call in message.extra.get("tool_calls") or () if isinstance(call, dict)]
    named = [(call.get("name"), call.get("arguments")) for call in calls if isinstance(call, dict)]
    return message.role, message.content, named


def _completion(id: str, ask: _Ask, said: Message, before: Transcript, generation: Generation) -> _Reply:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in said.extra.get("tool_calls", ())
    ]
    message = {
        "role": "assistant",
        "content": said.content or (None if calls else ""),
        **({"tool_calls": calls} if calls else {}),
    }
    prompted, sampled = len(before.prompt_ids), len(generation.token_ids)
    whole = {
        "id": f"chatcmpl-{id}",
        "object": "chat.completion.chunk" if ask.stream else "chat.completion",
        "created": int(time.time()),
        "model": ask.model,
        "usage": {"prompt_tokens": prompted, "completion_tokens": sampled, "total_tokens": prompted + sampled},
    }
    reason = "tool_calls" if calls else generation.finish_reason
    if not ask.stream:
        return _Reply(200, _json({**whole, "choices": [{"index": 0, "message": message, "finish_reason": reason}]}))
    delta = {**message, "tool_calls": [{"index": place, **call} for place, call in enumerate(calls)]}
    chunk = _json({**whole, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    return _Reply(200, b"data: " + chunk + b"\n\ndata: [DONE]\n\n", "text/event-stream")


def _error(status: int, message: str, *, last: bool = False) -> _Reply:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _Reply(status, _json({"error": {"message": message, "type": kind, "code": status}}), last=last)


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
