"""A judge behind an OpenAI-compatible endpoint: rollouts to scores from 0 to 1, over plain HTTP(S) in threads.

What goes wrong on the way is tried again where that can help, and otherwise leaves the answer ungraded. The key is read
from the environment for each request; it is in no parameter, message or log. Nothing is streamed.
"""

from __future__ import annotations

import hashlib
import http.client
import json
import logging
import os
import re
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import anyio
from anyio.lowlevel import RunVar

from oxrl.concurrency import in_thread, task_group
from oxrl.rewards.grade import Reward, Ungraded
from oxrl.rewards.judge import RUBRIC, judge_messages, judged_score
from oxrl.types import Message, Rollout, Score

logger = logging.getLogger(__name__)

SCALE = (0.0, 10.0)
DEFAULTS: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": 512}
_AGAIN = {408, 409, 425, 429, *range(500, 600)}
_LONGEST_REPLY = 1 << 20
_LONGEST_WAIT = 60.0
_MOST_REMEMBERED = 100_000


class Failed(Exception):  # noqa: N818 - it is told as "failed: ..."
    """Why there is no reply; `again` says whether another try may help, `wait` how long the server asks to wait."""

    def __init__(self, why: str, *, again: bool = False, wait: float | None = None) -> None:
        super().__init__(why)
        self.again, self.wait = again, wait


class Endpoint(NamedTuple):
    """`Endpoint("https://api.openai.com/v1", "gpt-4.1-mini", "OPENAI_API_KEY")`; without a key's name none is sent."""

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
    options: Mapping[str, Any] = {},
) -> Reward:
    """From 0 to 1, what a model behind an OpenAI-compatible endpoint thinks of the answer, by `rubric`.

    `base_url` is as in `https://api.openai.com/v1`; `api_key_env` names the environment variable that holds the key.
    What fails by 429, 5xx, the network or the time limit (`reward.time_limit`, for each try) is tried `retries` times
    more, after `backoff` seconds, then twice as many; what fails for good is ungraded, never 0. Equal questions are
    asked once: answers are remembered, and kept in the folder `cache` if it is set. `options` go into the request.
    """
    endpoint = Endpoint(base_url.rstrip("/"), model, api_key_env, options)
    _check_endpoint(endpoint)
    if retries < 0 or backoff < 0 or concurrency < 1:
        raise ValueError("llm_judge needs retries >= 0, backoff >= 0 and concurrency >= 1")
    remembered = Remembered(cache)
    places: RunVar[anyio.CapacityLimiter] = RunVar(f"oxrl judge {id(remembered)}")

    async def outcomes(rollouts: Sequence[Rollout], time_limit: float) -> list[Score | Ungraded]:
        said: dict[int, Score | Ungraded] = {}

        async def one(index: int) -> None:
            async with _place(places, concurrency):  # waiting for one's turn does not count as the judge's time
                said[index] = await judged(rollouts[index], time_limit)

        async with task_group() as tasks:
            for index in range(len(rollouts)):
                tasks.start_soon(one, index)
        return [said[index] for index in range(len(rollouts))]

    async def judged(rollout: Rollout, time_limit: float) -> Score | Ungraded:
        messages = judge_messages(rollout, rubric, SCALE)
        key = content_key(endpoint, messages)
        score = remembered.get(key)
        if score is None:
            try:
                score = judged_score(await ask(endpoint, messages, time_limit, retries, backoff), SCALE)
            except (Failed, ValueError) as error:
                return Ungraded(f"reward llm_judge failed: {error}")
            remembered.put(key, score)
        return Score((score - SCALE[0]) / (SCALE[1] - SCALE[0]))

    return Reward("llm_judge", outcomes)


def _place(places: RunVar[anyio.CapacityLimiter], concurrency: int) -> anyio.CapacityLimiter:
    """One limit per event loop, which all groups that are graded in it share."""
    try:
        return places.get()
    except LookupError:
        places.set(anyio.CapacityLimiter(concurrency))
        return places.get()


def _check_endpoint(endpoint: Endpoint) -> None:
    parts = urlsplit(endpoint.base_url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError("llm_judge: base_url must look like https://HOST/v1")
    if parts.username or parts.password or parts.query:
        raise ValueError("llm_judge: base_url must hold no user, password or query; a key goes through api_key_env")
    _headers(endpoint)


def _headers(endpoint: Endpoint) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "Accept": "application/json", "User-Agent": "oxrl"}
    name = endpoint.api_key_env
    if not name:
        return headers
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]{0,63}", name):
        raise ValueError("llm_judge: api_key_env is the name of an environment variable, not the key itself")
    key = os.environ.get(name, "").strip()
    if not key:
        known = name if name.isupper() else "that api_key_env names"  # it may be a key after all
        raise ValueError(f"llm_judge: the environment variable {known} is not set; it should hold the endpoint's key")
    if not re.fullmatch(r"[!-~]+", key):  # the library's own message about it would show the key
        raise ValueError(f"llm_judge: the key in {name} has characters that no key has, such as spaces or line breaks")
    return {**headers, "Authorization": f"Bearer {key}"}


async def ask(endpoint: Endpoint, messages: Sequence[Message], time_limit: float, retries: int, backoff: float) -> str:
    """What the judge replies, at the first or a later try."""
    for tried in range(retries + 1):
        try:
            with anyio.fail_after(time_limit):
                return await in_thread(partial(request, endpoint, messages, time_limit))
        except TimeoutError:
            failure = Failed(f"no reply within {time_limit:g} s", again=True)
        except Failed as error:
            failure = error
        if not failure.again or tried == retries:
            raise Failed(f"{failure} (tried {tried + 1} times)" if tried else str(failure))
        await anyio.sleep(min(_LONGEST_WAIT, max(failure.wait or 0.0, backoff * 2**tried)))
    raise AssertionError("the last try returns or raises")


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A redirect would take the key to another host."""

    def redirect_request(self, *_: Any) -> None:
        return None


def request(endpoint: Endpoint, messages: Sequence[Message], time_limit: float) -> str:
    """One try, which blocks for about `time_limit` seconds at most."""
    given = {**DEFAULTS, **endpoint.options, "model": endpoint.model, "messages": [m.to_dict() for m in messages]}
    body = json.dumps({name: value for name, value in given.items() if value is not None}).encode()
    url = f"{endpoint.base_url}/chat/completions"
    asked = urllib.request.Request(url, body, _headers(endpoint), method="POST")  # noqa: S310 - http(s), checked
    opener = urllib.request.build_opener(_NoRedirect)
    try:
        with opener.open(asked, timeout=time_limit) as response:
            return _reply(_read(response, time.monotonic() + time_limit))
    except urllib.error.HTTPError as error:
        with error:
            raise _refusal(endpoint, error) from None
    except ssl.SSLCertVerificationError as error:
        raise Failed(f"its certificate is not trusted: {error.verify_message}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise Failed(f"its certificate is not trusted: {reason.verify_message}") from None
        raise Failed(f"no connection, or one that broke: {type(reason).__name__}", again=True) from None


def _read(response: http.client.HTTPResponse, deadline: float) -> bytes:
    """The body, piece by piece: a server that drips would keep a single read busy for ever."""
    body = b""
    while piece := response.read1(1 << 16):
        body += piece
        if time.monotonic() > deadline:
            raise Failed("the reply came too slowly", again=True)
        if len(body) > _LONGEST_REPLY:
            raise Failed("the reply has no end")
    return body


def _reply(body: bytes) -> str:
    try:
        content = json.loads(body)["choices"][0]["message"]["content"]
    except (ValueError, LookupError, TypeError, RecursionError):
        raise Failed("the reply is not what a chat completion looks like", again=True) from None
    if not isinstance(content, str):
        raise Failed("the reply has no text")
    return content


def _refusal(endpoint: Endpoint, error: urllib.error.HTTPError) -> Failed:
    """By its number alone: what a server writes about a key may show it."""
    if error.code in (401, 403):
        key = f"the key in {endpoint.api_key_env}" if endpoint.api_key_env else "api_key_env: no key was sent"
        return Failed(f"the endpoint answered {error.code}: check {key}")
    if 300 <= error.code < 400:
        return Failed(f"the endpoint answered {error.code}, a redirect, which is not followed: mend base_url")
    hint = {404: ": check base_url and model", 400: ": check model and options"}.get(error.code, "")
    asked = (error.headers.get("Retry-After") or "").strip()
    wait = float(asked) if re.fullmatch(r"\d{1,5}(\.\d{1,3})?", asked) else None
    return Failed(f"the endpoint answered {error.code}{hint}", again=error.code in _AGAIN, wait=wait)


def content_key(endpoint: Endpoint, messages: Sequence[Message]) -> str:
    """All that the reply depends on, as one number."""
    options = {**DEFAULTS, **endpoint.options}
    asked = [endpoint.base_url, endpoint.model, options, [message.to_dict() for message in messages]]
    return hashlib.sha256(json.dumps(asked, sort_keys=True, default=str).encode()).hexdigest()


class Remembered:
    """Scores by content, in memory and, with a folder, in one small file each."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).expanduser() if folder else None
        self.scores: dict[str, float] = {}
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ValueError(f"llm_judge: the cache {folder} is no folder to write to: {error.strerror}") from error

    def get(self, key: str) -> float | None:
        if key not in self.scores and self.folder is not None:
            try:
                self.scores[key] = float((self.folder / key).read_text(encoding="utf-8"))
            except (FileNotFoundError, ValueError):  # not asked yet, or a file that somebody spoilt
                return None
        return self.scores.get(key)

    def put(self, key: str, score: float) -> None:
        if len(self.scores) >= _MOST_REMEMBERED:
            del self.scores[next(iter(self.scores))]
        self.scores[key] = score
        if self.folder is not None:
            written = self.folder / f".{key}.{os.getpid()}"
            try:
                written.write_text(repr(score), encoding="utf-8")
                written.replace(self.folder / key)
            except OSError as error:
                logger.warning("the judge's cache cannot be written: %s", error.strerror)
