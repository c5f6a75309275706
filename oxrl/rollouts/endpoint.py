"""An OpenAI-compatible endpoint on loopback that generates with the policy and records every turn.

Serves chat completions and the list of models, over HTTP/1.1, in plain JSON or as a stream of one chunk. Each
conversation keeps its turns with token ids and log-probs, and becomes a rollout. Sampling parameters are the
trainer's: a request can only lower the number of tokens and add stop texts. Other users of the machine and web pages
can connect to loopback too: the address contains a random token, which every request is checked for before its body is
read, and `Host` and `Origin` must be loopback.
"""

from __future__ import annotations

import ipaddress
import json
import logging
import re
import secrets
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
from oxrl.machine.loopback import is_loopback
from oxrl.rollouts.envs import GeneratorClient, assistant_message
from oxrl.rollouts.tool_calls import ToolParser, extract_tool_calls, parse_tools, tool_parser_for
from oxrl.rollouts.transcript import ToolPrompt, Tools, Transcript, begin, tool_prompt
from oxrl.seeds import mixed_seed
from oxrl.types import Generation, GenerationConfig, Generator, Message, Render, Rollout, Sample, Turn

logger = logging.getLogger(__name__)

_PATH = re.compile(r"/(?P<token>[^/]+)(?:/s/(?P<id>[^/]+))?/v1/(?P<what>chat/completions|models)/?")
_MAX_CONNECTIONS = 512  # more are closed: the process needs its file descriptors
_TRANSFER_LIMIT = 60.0  # seconds to receive a request, also the next one of a connection, or to send a response
_DISCONNECTED = (anyio.BrokenResourceError, anyio.ClosedResourceError, anyio.EndOfStream, h11.LocalProtocolError)


class _HTTPError(Exception):
    """Becomes the response to the request."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class _Response(NamedTuple):
    status: int
    body: bytes
    kind: str = "application/json"


class _ChatRequest(NamedTuple):
    """A parsed request for a chat completion."""

    messages: tuple[Message, ...] = ()
    tools: Tools = ()
    sampling: GenerationConfig = GenerationConfig()
    model: str = "oxrl"
    stream: bool = False


class _RecordedTurn(NamedTuple):
    """One recorded turn, with what is needed to recognise and continue it."""

    request: _ChatRequest
    prompt: ToolPrompt
    before: Transcript
    generation: Generation
    message: Message
    turn: int  # its index among the turns of the session


@dataclass
class _Session:
    number: int = 0  # of requests so far
    recorded: list[_RecordedTurn] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    error: str | None = None


class RecordingEndpoint:
    """Result of `recording_endpoint`: `endpoint.base_url("run 7")` for the agent, then `endpoint.rollout("run 7")`.

    A conversation is identified by the path (`/s/<id>/v1`), the header `X-Rollout-Id`, the field `user` or the API
    key, whichever comes first; without any of them its id is "default".
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
        max_sessions: int,
        time_limit: float,
        policy: GeneratorClient | None = None,
    ) -> None:
        self._policy = policy
        self._token = secrets.token_urlsafe(16)
        self.url = f"{url}/{self._token}"
        self._generator, self._render, self._sampling, self._seed = generator, render, sampling, seed
        self._tool_parser, self._max_body = tool_parser, max_body
        self._max_sessions, self._time_limit = max_sessions, time_limit
        self._sessions: dict[str, _Session] = {}
        self._connections = 0
        self._warned = False

    def base_url(self, id: str) -> str:
        """Return the base URL of one conversation, for an OpenAI client."""
        return f"{self.url}/s/{quote(id, safe='')}/v1"

    def rollout(self, id: str, sample: Sample | None = None) -> Rollout:
        """Return all turns of one conversation so far; `sample` defaults to its first request."""
        if id not in self._sessions:
            known = ", ".join(self._sessions) or "none"
            raise ValueError(f"there is no conversation {id!r}; conversations so far: {known}")
        session = self._sessions[id]
        first = session.recorded[0].request if session.recorded else None
        prompt = sample or Sample(
            id, messages=first.messages if first else (), tools=tuple(first.tools) if first else ()
        )
        rewritten = sum(recorded.before.rewritten > 0 for recorded in session.recorded)
        return Rollout(prompt, tuple(session.turns), error=session.error, metadata={"rewritten": rewritten})

    @property
    def ids(self) -> tuple[str, ...]:
        """The conversations so far."""
        return tuple(self._sessions)

    def drop(self, id: str) -> None:
        """Delete a conversation."""
        self._sessions.pop(id, None)

    async def serve(self, stream: ByteStream) -> None:
        """Serve one connection until either side closes it."""
        async with stream:
            if self._connections >= _MAX_CONNECTIONS:
                return
            self._connections += 1
            connection = h11.Connection(h11.SERVER)
            try:
                with suppress(*_DISCONNECTED, TimeoutError):
                    while await self._exchange(connection, stream):
                        connection.start_next_cycle()
            finally:
                self._connections -= 1

    async def _exchange(self, connection: h11.Connection, stream: ByteStream) -> bool:
        try:
            with anyio.fail_after(_TRANSFER_LIMIT):
                received = await self._receive(connection, stream)
            if received is None:
                return False
            response = await self._respond(*received)
        except h11.RemoteProtocolError as error:
            response = _error(error.error_status_hint, str(error))
        except _HTTPError as error:
            response = _error(error.status, str(error))
        last = connection.their_state is not h11.DONE  # the rest of the request is not read
        headers = [("content-type", response.kind), ("content-length", str(len(response.body)))]
        headers += [("connection", "close")] if last else []
        for event in (
            h11.Response(status_code=response.status, headers=headers),
            h11.Data(response.body),
            h11.EndOfMessage(),
        ):
            with anyio.fail_after(_TRANSFER_LIMIT):
                await stream.send(connection.send(event) or b"")
        return not last and connection.our_state is not h11.MUST_CLOSE

    async def _receive(self, connection: h11.Connection, stream: ByteStream) -> tuple[h11.Request, bytes] | None:
        """Return the next request and its body; None if the client has disconnected."""
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
                self._check(event)
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._max_body:
                    raise _HTTPError(413, f"the request is larger than {self._max_body} bytes")
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                return request, bytes(body)
            else:
                return None

    def _check(self, request: h11.Request) -> None:
        """Refuse requests of web pages and of other users, and unknown paths."""
        headers = _headers(request)
        if not is_loopback(f"//{headers.get('host', '')}") or not is_loopback(headers.get("origin", "//localhost")):
            raise _HTTPError(403, "Host and Origin must be loopback addresses")
        path = _path(request)
        found = _PATH.fullmatch(path)
        if found is None or not secrets.compare_digest(found["token"], self._token):
            asked = path.removeprefix(f"/{self._token}")
            raise _HTTPError(
                404,
                f"there is no {asked}; available: /v1/chat/completions and /v1/models below the endpoint's url, which "
                "ends with a token, and below url/s/<id>",
            )
        allowed = "GET" if found["what"] == "models" else "POST"
        if (method := request.method.decode()) != allowed:
            raise _HTTPError(405, f"{found['what']} takes {allowed}, not {method}")

    async def _respond(self, request: h11.Request, body: bytes) -> _Response:
        found = _PATH.fullmatch(_path(request))
        assert found is not None, "checked when the request arrived"
        if found["what"] == "models":
            model = {"id": "oxrl", "object": "model", "created": 0, "owned_by": "oxrl"}
            return _Response(200, _json({"object": "list", "data": [model]}))
        try:
            raw = _parsed(body)
            id = unquote(found["id"] or "") or _conversation_id(request, raw)
            return await self._complete(id, self._parse(raw))
        except _HTTPError:
            raise
        except Exception as error:
            logger.exception("a request to the recording endpoint failed")
            raise _HTTPError(500, f"the request failed: {type(error).__name__}: {error}") from error

    async def _complete(self, id: str, request: _ChatRequest) -> _Response:
        session = self._session(id)
        number, session.number = session.number, session.number + 1
        try:
            prompt, transcript = self._continued(session, request)
            seed = mixed_seed(self._seed, zlib.crc32(id.encode()), number)
            policy = self._policy or GeneratorClient(self._generator, self._render, request.sampling, seed)
            with anyio.fail_after(self._time_limit):
                generation = await policy.generate(transcript.prompt_ids, request.sampling, media=transcript.media)
        except ValueError as error:
            raise _HTTPError(400, str(error)) from error
        except TimeoutError as error:
            session.error = f"no generation within {self._time_limit:g} s"
            raise _HTTPError(504, session.error) from error
        except Exception as error:
            session.error = f"generation failed: {type(error).__name__}: {error}"
            raise _HTTPError(500, session.error) from error
        session.error = "the generation could not be parsed"  # if the next line raises
        message = self._message(request, prompt, transcript, generation)
        session.error = None
        session.recorded.append(_RecordedTurn(request, prompt, transcript, generation, message, len(session.turns)))
        session.turns.append(Turn(transcript.prompt_ids, generation, (message,), transcript.media))
        if generation.finish_reason == "aborted":
            raise _HTTPError(503, "the generation was aborted; its tokens so far are recorded")
        return _completion(f"{id}-{number}", request, message, transcript, generation)

    def _session(self, id: str) -> _Session:
        if id not in self._sessions and len(self._sessions) >= self._max_sessions:
            raise _HTTPError(429, f"there are {self._max_sessions} conversations: delete finished ones with drop(id)")
        return self._sessions.setdefault(id, _Session())

    def _continued(self, session: _Session, request: _ChatRequest) -> tuple[ToolPrompt, Transcript]:
        """Return the prompt that continues a recorded turn, if the request does; else that of a new conversation."""
        for recorded in reversed(session.recorded):
            known = (*recorded.request.messages, recorded.message)
            replies = request.messages[len(known) :]
            same_tools = request.tools == recorded.request.tools
            if replies and same_tools and _same_messages(known, request.messages[: len(known)]):
                turn = session.turns[recorded.turn]
                if len(turn.messages) == 1:
                    session.turns[recorded.turn] = turn._replace(messages=(recorded.message, *replies))
                results = recorded.prompt.results(replies)
                return recorded.prompt, recorded.before.extend(recorded.generation, recorded.message, results)
        prompt = tool_prompt(self._render, request.messages, request.tools)
        return prompt, begin(self._render, prompt.messages, tools=prompt.tools)

    def _message(
        self, request: _ChatRequest, prompt: ToolPrompt, before: Transcript, generation: Generation
    ) -> Message:
        text = before.text_of(generation)
        if generation.finish_reason != "stop" or not request.tools:
            return Message("assistant", before.plain(text))
        parse = self._tool_parser or (tool_parser_for(self._render) if prompt.by_template else parse_tools)
        return assistant_message(text, extract_tool_calls(text, parse), before)

    def _parse(self, raw: Mapping[str, Any]) -> _ChatRequest:
        messages, tools, stop = raw.get("messages"), raw.get("tools") or [], raw.get("stop") or []
        if not isinstance(messages, list) or not messages or not all(_is_message(each) for each in messages):
            raise _HTTPError(
                400,
                "messages must be a list of objects, and not empty: role is a text, content a text or a list of "
                "objects, tool_calls a list of objects",
            )
        if not _are_objects(tools):
            raise _HTTPError(400, "tools must be a list of objects")
        if raw.get("n") not in (None, 1) or raw.get("logprobs"):
            raise _HTTPError(
                400, "n must be 1, and log-probs are recorded here, not returned: leave out n and logprobs"
            )
        stops = [stop] if isinstance(stop, str) else stop
        if not isinstance(stops, list) or not all(isinstance(each, str) for each in stops):
            raise _HTTPError(400, "stop must be a text or a list of texts")
        limit = raw.get("max_completion_tokens") or raw.get("max_tokens") or self._sampling.max_new_tokens
        if not isinstance(limit, int) or limit < 1:
            raise _HTTPError(400, f"max_tokens is {limit!r}; give a whole number of 1 or more")
        self._warn_of_sampling(raw)
        sampling = self._sampling._replace(
            max_new_tokens=min(limit, self._sampling.max_new_tokens), stop=(*self._sampling.stop, *stops)
        )
        model, stream = str(raw.get("model") or "oxrl"), bool(raw.get("stream"))
        return _ChatRequest(tuple(_message(each) for each in messages), tuple(tools), sampling, model, stream)

    def _warn_of_sampling(self, raw: Mapping[str, Any]) -> None:
        names = ("temperature", "top_p", "top_k", "min_p")
        ignored = {name: raw[name] for name in names if raw.get(name) not in (None, getattr(self._sampling, name))}
        if ignored and not self._warned:
            self._warned = True
            logger.warning("a request sets %s; ignored, the trainer's sampling is used: %s", ignored, self._sampling)


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
    max_sessions: int = 10_000,
    time_limit: float = 600.0,
    policy: GeneratorClient | None = None,
) -> AsyncIterator[RecordingEndpoint]:
    """`async with recording_endpoint(generator, render, sampling) as endpoint:`; port 0 selects a free port.

    `tool_parser` parses calls if a request has tools; it defaults to the parser of the chat template. Requests of more
    than `max_body` bytes are refused, and those for a new conversation while `max_sessions` are kept (see `drop`); a
    generation that takes longer than `time_limit` seconds is cancelled. The address has a token: pass it to the agent
    alone. Inside of an environment, `policy` is that of the episode: its seeds, limits and recorded turns are used.
    """
    address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    if not address.is_loopback:
        raise ValueError(f"host is {host}, which other machines can reach; give 127.0.0.1, ::1 or localhost")
    listener = await anyio.create_tcp_listener(local_host=str(address), local_port=port)
    async with listener:
        bound = listener.extra(SocketAttribute.local_port)  # noqa: S610 - anyio's, not a database's
        url = f"http://{f'[{address}]' if address.version == 6 else address}:{bound}"
        endpoint = RecordingEndpoint(
            generator,
            render,
            sampling,
            url=url,
            seed=seed,
            tool_parser=tool_parser,
            max_body=max_body,
            max_sessions=max_sessions,
            time_limit=time_limit,
            policy=policy,
        )
        async with task_group() as tasks:
            tasks.start_soon(partial(listener.serve, endpoint.serve))
            yield endpoint
            tasks.cancel_scope.cancel()


def _headers(request: h11.Request) -> dict[str, str]:
    return {name.decode().lower(): value.decode("latin-1") for name, value in request.headers}


def _path(request: h11.Request) -> str:
    target: str = request.target.decode()
    return target.partition("?")[0]


def _conversation_id(request: h11.Request, raw: Mapping[str, Any]) -> str:
    headers = _headers(request)
    key = headers.get("authorization", "").removeprefix("Bearer ").strip()
    return headers.get("x-rollout-id") or str(raw.get("user") or "") or key or "default"


def _parsed(body: bytes) -> Mapping[str, Any]:
    try:
        raw = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise _HTTPError(400, f"the body is not valid JSON: {error}") from error
    if not isinstance(raw, dict):
        raise _HTTPError(400, "the body must be a JSON object")
    return raw


def _is_message(raw: Any) -> bool:
    if not isinstance(raw, dict) or not isinstance(raw.get("role"), str):
        return False
    content, calls = raw.get("content"), raw.get("tool_calls")
    return (content is None or isinstance(content, str) or _are_objects(content)) and (
        calls is None or _are_objects(calls)
    )


def _are_objects(raw: Any) -> bool:
    return isinstance(raw, list) and all(isinstance(each, dict) for each in raw)


def _message(raw: Mapping[str, Any]) -> Message:
    """Return the message as chat templates expect it: text as one string, arguments of calls as objects, not JSON."""
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


def _same_messages(ours: Sequence[Message], theirs: Sequence[Message]) -> bool:
    """Compare role, content and calls only: clients add fields and drop empty ones."""
    return len(ours) == len(theirs) and all(_compared(a) == _compared(b) for a, b in zip(ours, theirs, strict=True))


def _compared(message: Message) -> tuple[Any, ...]:
    calls = [call.get("function") for call in message.extra.get("tool_calls") or () if isinstance(call, dict)]
    named = [(call.get("name"), call.get("arguments")) for call in calls if isinstance(call, dict)]
    return message.role, message.content, named


def _completion(
    id: str, request: _ChatRequest, message: Message, before: Transcript, generation: Generation
) -> _Response:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.extra.get("tool_calls", ())
    ]
    body = {
        "role": "assistant",
        "content": message.content or (None if calls else ""),
        **({"tool_calls": calls} if calls else {}),
    }
    prompt, sampled = len(before.prompt_ids), len(generation.token_ids)
    fields = {
        "id": f"chatcmpl-{id}",
        "object": "chat.completion.chunk" if request.stream else "chat.completion",
        "created": int(time.time()),
        "model": request.model,
        "usage": {"prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled},
    }
    reason = "tool_calls" if calls else generation.finish_reason
    if not request.stream:
        return _Response(200, _json({**fields, "choices": [{"index": 0, "message": body, "finish_reason": reason}]}))
    delta = {**body, "tool_calls": [{"index": index, **call} for index, call in enumerate(calls)]}
    chunk = _json({**fields, "choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})
    return _Response(200, b"data: " + chunk + b"\n\ndata: [DONE]\n\n", "text/event-stream")


def _error(status: int, message: str) -> _Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return _Response(status, _json({"error": {"message": message, "type": kind, "code": status}}))


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()
