"""An LLM judge behind an OpenAI-compatible endpoint: rollouts to scores from 0 to 1.

Transient failures are retried; any other failure leaves the completion ungraded. The API key is read from the
environment for each request; it is in no parameter, message or log. Replies are not streamed. Images and sounds are
sent as they are in their files, in base64; a file that does not begin like an image or a sound is never sent.
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
import os
import re
import ssl
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
import httpx
from anyio.lowlevel import RunVar

from oxrl.concurrency import task_group
from oxrl.rewards.grade import Reward, Ungraded
from oxrl.rewards.judge import (
    RUBRIC,
    comparison_messages,
    comparison_order,
    comparison_scores,
    judge_messages,
    judged_score,
)
from oxrl.types import Media, Message, Rollout, Sample, Score

logger = logging.getLogger(__name__)

SCALE = (0.0, 10.0)
DEFAULTS: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 512}
_RETRYABLE = {408, 409, 425, 429, *range(500, 600)}
_MAX_REPLY_BYTES = 1 << 20
_MAX_WAIT = 60.0
_MAX_CACHED = 100_000
_FORMATS: Mapping[str, Mapping[str, re.Pattern[bytes]]] = {
    "image": {
        "png": re.compile(rb"\x89PNG\r\n\x1a\n"),
        "jpeg": re.compile(rb"\xff\xd8\xff"),
        "webp": re.compile(rb"RIFF....WEBP", re.DOTALL),
        "gif": re.compile(rb"GIF8[79]a"),
    },
    "audio": {
        "wav": re.compile(rb"RIFF....WAVE", re.DOTALL),
        "mp3": re.compile(rb"ID3|\xff[\xfb\xf3\xf2]"),
        "flac": re.compile(rb"fLaC"),
        "ogg": re.compile(rb"OggS"),
    },
}
"""What chat endpoints read, by the first bytes of a file."""


class JudgeError(Exception):
    """Why there is no reply. `retryable`: whether a retry may help; `retry_after`: seconds the server requests."""

    def __init__(self, reason: str, *, retryable: bool = False, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retryable, self.retry_after = retryable, retry_after


class Endpoint(NamedTuple):
    """`Endpoint("https://api.openai.com/v1", "gpt-4.1-mini", "OPENAI_API_KEY")`; no `api_key_env`: no key is sent."""

    base_url: str
    model: str
    api_key_env: str = ""
    options: Mapping[str, Any] = {}


def llm_judge(
    *,
    base_url: str,
    model: str,
    api_key_env: str = "",
    rubric: str = RUBRIC,
    retries: int = 4,
    backoff: float = 1.0,
    concurrency: int = 8,
    cache: str = "",
    compare: bool = False,
    options: Mapping[str, Any] = {},
) -> Reward:
    """Score from 0 to 1 that a model behind an OpenAI-compatible endpoint gives to the response, by `rubric`.

    `base_url` is as in `https://api.openai.com/v1`; `api_key_env` names the environment variable that holds the key.
    Network errors, 429, 5xx and time-outs (`reward.time_limit`, per attempt) are retried `retries` times, after
    `backoff` seconds that double with each retry; any other failure is ungraded, never 0. Equal requests are sent once:
    scores are cached in memory, and in the folder `cache` if it is set. `options` are added to the request. With
    `compare` all completions of a prompt are scored in one request, relative to each other (RULER).
    """
    endpoint = Endpoint(base_url.rstrip("/"), model, api_key_env, options)
    _check_endpoint(endpoint)
    if retries < 0 or backoff < 0 or concurrency < 1:
        raise ValueError("llm_judge needs retries >= 0, backoff >= 0 and concurrency >= 1")
    scores = ScoreCache(cache)
    limiter: RunVar[anyio.CapacityLimiter] = RunVar(f"oxrl judge {id(scores)}")

    async def outcomes(rollouts: Sequence[Rollout], time_limit: float) -> list[Score | Ungraded]:
        results: dict[int, Score | Ungraded] = {}

        async def one(index: int) -> None:
            async with _shared_limiter(limiter, concurrency):  # time spent in the queue does not count
                results[index] = await judged(rollouts[index], time_limit)

        async with task_group() as tasks:
            for index in range(len(rollouts)):
                tasks.start_soon(one, index)
        return [results[index] for index in range(len(rollouts))]

    async def compared(rollouts: Sequence[Rollout], time_limit: float) -> list[Score | Ungraded]:
        order = comparison_order(rollouts)
        try:
            messages = chat_messages(comparison_messages(rollouts, order, rubric))
            async with _shared_limiter(limiter, concurrency):
                reply = await send_with_retries(endpoint, messages, time_limit, retries, backoff)
            return [Score(each) for each in comparison_scores(reply, order)]
        except (JudgeError, OSError, ValueError) as error:
            return [Ungraded(f"reward llm_judge failed: {error}")] * len(rollouts)

    async def judged(rollout: Rollout, time_limit: float) -> Score | Ungraded:
        try:
            messages = chat_messages(judge_messages(rollout, rubric, SCALE))
        except (OSError, ValueError) as error:
            return Ungraded(f"reward llm_judge failed: {error}")
        key = content_key(endpoint, messages)
        score = scores.get(key)
        if score is None:
            try:
                score = judged_score(await send_with_retries(endpoint, messages, time_limit, retries, backoff), SCALE)
            except (JudgeError, ValueError) as error:
                return Ungraded(f"reward llm_judge failed: {error}")
            scores.put(key, score)
        return Score((score - SCALE[0]) / (SCALE[1] - SCALE[0]))

    return Reward("llm_judge", compared if compare else outcomes, check_media)


def check_media(sample: Sample) -> None:
    """Raise a ValueError that names the row if one of its media cannot be sent to an endpoint."""
    for medium in sample.media:
        try:
            _read_medium(medium)
        except (OSError, ValueError) as error:
            raise ValueError(f"llm_judge cannot send the {medium.kind} of {sample.id}: {error}") from error


def chat_messages(messages: Sequence[Message]) -> list[Message]:
    """The messages in the format of chat endpoints: media as data URLs, or as base64 with their format."""
    return [
        message
        if isinstance(message.content, str)
        else message._replace(content=[_chat_part(part) for part in message.content])
        for message in messages
    ]


def _chat_part(part: Mapping[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return dict(part)
    raw, form = _read_medium(part[part["type"]])
    encoded = base64.b64encode(raw).decode()
    if part["type"] == "image":
        return {"type": "image_url", "image_url": {"url": f"data:image/{form};base64,{encoded}"}}
    return {"type": "input_audio", "input_audio": {"data": encoded, "format": form}}


def _read_medium(medium: Media) -> tuple[bytes, str]:
    """The bytes of its file, and their format."""
    raw = medium.data if isinstance(medium.data, bytes) else Path(medium.data).read_bytes()
    for form, first_bytes in _FORMATS[medium.kind].items():
        if first_bytes.match(raw):
            return raw, form
    named = f"{len(raw)} bytes" if isinstance(medium.data, bytes) else medium.data
    raise ValueError(f"{named} is no {', '.join(_FORMATS[medium.kind])} file, which endpoints read; convert it")


def _shared_limiter(limiter: RunVar[anyio.CapacityLimiter], concurrency: int) -> anyio.CapacityLimiter:
    """One limiter per event loop, shared by all groups that are graded in it."""
    try:
        return limiter.get()
    except LookupError:
        limiter.set(anyio.CapacityLimiter(concurrency))
        return limiter.get()


def _check_endpoint(endpoint: Endpoint) -> None:
    parts = urlsplit(endpoint.base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("llm_judge: base_url must look like https://HOST/v1")
    if parts.username or parts.password or parts.query:
        raise ValueError("llm_judge: base_url must hold no user, password or query; a key goes through api_key_env")
    _headers(endpoint)


def _headers(endpoint: Endpoint) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "oxrl"}
    headers["Accept-Encoding"] = "identity"  # a compressed reply could expand beyond its limit in memory
    name = endpoint.api_key_env
    if not name:
        return headers
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
        raise ValueError("llm_judge: api_key_env is the name of an environment variable, not the key itself")
    key = os.environ.get(name, "").strip()
    if not key:
        shown = name if name.isupper() else "named by api_key_env"  # it may be the key itself
        raise ValueError(f"llm_judge: the environment variable {shown} is not set; it must hold the endpoint's key")
    if not re.fullmatch(r"[!-~]+", key):  # the HTTP library's own message would show the key
        raise ValueError(f"llm_judge: the key in {name} has invalid characters, such as spaces or newlines")
    return {**headers, "Authorization": f"Bearer {key}"}


async def send_with_retries(
    endpoint: Endpoint, messages: Sequence[Message], time_limit: float, retries: int, backoff: float
) -> str:
    """The text of the judge's reply; transient failures are retried with exponential backoff."""
    for attempt in range(retries + 1):
        try:
            with anyio.fail_after(time_limit):
                return await send_once(endpoint, messages)
        except TimeoutError:
            failure = JudgeError(f"no reply within {time_limit:g} s", retryable=True)
        except JudgeError as error:
            failure = error
        if not failure.retryable or attempt == retries:
            raise JudgeError(f"{failure} (after {attempt + 1} attempts)" if attempt else str(failure))
        await anyio.sleep(min(_MAX_WAIT, max(failure.retry_after, backoff * 2**attempt)))
    raise AssertionError("the last attempt returns or raises")


async def send_once(endpoint: Endpoint, messages: Sequence[Message]) -> str:
    """One attempt, without a time limit of its own."""
    settings = {**DEFAULTS, **endpoint.options, "model": endpoint.model, "messages": [m.to_dict() for m in messages]}
    body = json.dumps({name: value for name, value in settings.items() if value is not None}).encode()
    url, headers = f"{endpoint.base_url}/chat/completions", _headers(endpoint)
    try:
        # A redirect would send the key to another host. The caller's time limit covers the whole request.
        async with (
            httpx.AsyncClient(timeout=None, follow_redirects=False, verify=_tls_context()) as client,  # noqa: S113
            client.stream("POST", url, content=body, headers=headers) as response,
        ):
            if not response.is_success:
                raise _status_error(endpoint, response)
            return _reply_text(await _read(response))
    except (httpx.RequestError, httpx.InvalidURL) as error:
        raise _connection_error(error) from None


@cache
def _tls_context() -> ssl.SSLContext:
    """The system's certificates, read once: that takes longer than a request."""
    return ssl.create_default_context()


async def _read(response: httpx.Response) -> bytes:
    body = b""
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > _MAX_REPLY_BYTES:
            raise JudgeError(f"the reply is larger than {_MAX_REPLY_BYTES} bytes")
    return body


def _reply_text(body: bytes) -> str:
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise JudgeError("the reply is not a chat completion", retryable=True) from None
    if not isinstance(content, str):
        raise JudgeError("the reply has no text")
    return content


def _connection_error(error: Exception) -> JudgeError:
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLCertVerificationError):
        cause = cause.__context__
    if cause is None:
        return JudgeError(f"connection failed: {type(error).__name__}", retryable=True)
    return JudgeError(f"the endpoint's certificate is not trusted: {cause.verify_message}")


def _status_error(endpoint: Endpoint, response: httpx.Response) -> JudgeError:
    """By status code alone: the body of an error may show the key."""
    status = response.status_code
    if status in (401, 403):
        key = f"the key in {endpoint.api_key_env}" if endpoint.api_key_env else "api_key_env: no key was sent"
        return JudgeError(f"the endpoint returned status {status}: check {key}")
    if 300 <= status < 400:
        return JudgeError(f"the endpoint returned status {status}; redirects are not followed: correct base_url")
    hint = {404: ": check base_url and model", 400: ": check model and options"}.get(status, "")
    header = response.headers.get("retry-after", "").strip()
    seconds = float(header) if re.fullmatch(r"\d{1,5}(\.\d{1,3})?", header) else 0.0
    reason = f"the endpoint returned status {status}{hint}"
    return JudgeError(reason, retryable=status in _RETRYABLE, retry_after=seconds)


def content_key(endpoint: Endpoint, messages: Sequence[Message]) -> str:
    """Hash of everything that the reply depends on."""
    options = {**DEFAULTS, **endpoint.options}
    content = [endpoint.base_url, endpoint.model, options, [message.to_dict() for message in messages]]
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()


class ScoreCache:
    """Scores by content key, in memory and, with a folder, in one small file each."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).expanduser().absolute() if folder else None
        self.scores: dict[str, float] = {}
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"llm_judge: cannot create the cache folder {folder}: {error.strerror}") from error

    def get(self, key: str) -> float | None:
        if key not in self.scores and self.folder is not None:
            try:
                self.scores[key] = float((self.folder / key).read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):  # not cached yet, or a corrupt file
                return None
        return self.scores.get(key)

    def put(self, key: str, score: float) -> None:
        if len(self.scores) >= _MAX_CACHED:
            del self.scores[next(iter(self.scores))]
        self.scores[key] = score
        if self.folder is not None:
            temporary = self.folder / f".{key}.{os.getpid()}"
            try:
                temporary.write_text(repr(score), encoding="utf-8")
                temporary.replace(self.folder / key)
            except OSError as error:
                logger.warning("cannot write to the cache of llm_judge: %s", error.strerror)
