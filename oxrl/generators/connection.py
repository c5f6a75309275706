"""JSON over HTTP to an engine: time limits, retries with back-off, and one kind of error that names the engine.

What an engine's endpoints are called and what they answer is left to `http`.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import anyio

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger(__name__)

_AGAIN = {408, 425, 429, *range(500, 600)}
_LONGEST_WAIT = 60.0
_NOTHING: Mapping[str, Any] = MappingProxyType({})


class EngineError(RuntimeError):
    """An engine that does not answer, or not what it should; the message begins with its address."""


class NoSuchPathError(EngineError):
    """It answers, and knows nothing of what was asked for."""


class Connection(NamedTuple):
    """`Connection("http://127.0.0.1:8000", retries=2)`. Proxies of the environment are not used: engines are near.

    What fails by the network, the time limit (for each try), 429 or 5xx is tried `retries` times more, after `backoff`
    seconds, then twice as many.
    """

    url: str
    time_limit: float = 600.0
    retries: int = 4
    backoff: float = 0.5

    def checked(self) -> Connection:
        """Itself, if an engine can be there."""
        if not _is_address(self.url):
            raise ValueError(f"{self.url!r} is no engine's address: it looks like http://HOST:PORT")
        if self.retries < 0 or self.backoff < 0 or not self.time_limit > 0:
            raise ValueError("an engine's connection needs retries >= 0, backoff >= 0 and time_limit > 0")
        return self._replace(url=self.url.rstrip("/"))

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or ""

    async def get(self, path: str, *, time_limit: float | None = None) -> Any:
        return await self._ask("GET", path, None, _NOTHING, time_limit, self.retries)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] = _NOTHING,
        *,
        query: Mapping[str, str] = _NOTHING,
        once: bool = False,
        time_limit: float | None = None,
    ) -> Any:
        """The reply's JSON; `once` for what must not be done twice."""
        return await self._ask("POST", path, body, query, time_limit, 0 if once else self.retries)

    async def _ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str],
        time_limit: float | None,
        retries: int,
    ) -> Any:
        limit = self.time_limit if time_limit is None else time_limit
        trouble = _Trouble("not tried")
        for tried in range(retries + 1):
            try:
                with anyio.fail_after(limit):
                    reply = await self._once(method, path, body, query)
                if isinstance(reply, _Reply):
                    return reply.content
                trouble = reply
            except TimeoutError:
                trouble = _Trouble(f"no answer within {limit:g} s")
            if tried == retries:
                break
            logger.warning("%s%s: %s; trying again", self.url, path, trouble.why)
            await anyio.sleep(min(_LONGEST_WAIT, max(trouble.wait, self.backoff * 2**tried)))
        times = f" (tried {retries + 1} times)" if retries else ""
        raise EngineError(f"{self.url}{path}: {trouble.why}{times}")

    async def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str]
    ) -> _Reply | _Trouble:
        import httpx

        # The time limit is the caller's, over all of it.
        async with httpx.AsyncClient(timeout=None, trust_env=False, verify=_trusted()) as client:  # noqa: S113
            try:
                response = await client.request(
                    method, f"{self.url}{path}", json=None if body is None else dict(body), params=dict(query) or None
                )
            except httpx.TransportError as error:
                return _Trouble(f"no connection, or one that broke: {type(error).__name__}")
        if response.status_code in _AGAIN:
            wait = response.headers.get("retry-after", "")
            seconds = float(wait) if re.fullmatch(r"\d{1,5}(\.\d{1,3})?", wait) else 0.0
            return _Trouble(f"it answered {response.status_code}: {_said(response)}", seconds)
        if response.status_code == 400:
            raise ValueError(f"{self.url} refuses the request: {_said(response)}")
        if not response.is_success:
            kind = NoSuchPathError if response.status_code == 404 else EngineError
            raise kind(f"{self.url}{path}: it answered {response.status_code}: {_said(response)}")
        if not response.content:
            return _Reply(None)
        try:
            return _Reply(response.json())
        except ValueError:
            return _Reply(response.text)


def check_apart(urls: Sequence[str]) -> None:
    """Refuse one server under two names: of two things that it does in turn, each would wait for the other."""
    known: dict[tuple[Any, ...], int] = {}
    for number, url in enumerate(urls):
        for place in _places(url):
            if (other := known.setdefault(place, number)) != number:
                raise ValueError(f"{urls[other]} and {url} are one server: name it once")


def _places(url: str) -> set[tuple[Any, ...]]:
    """Where it is; nothing where nobody knows its name."""
    parts = urlsplit(url)
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or parts.scheme, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {(*address[:2], parts.path.rstrip("/")) for *_, address in found}


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    try:
        fine = parts.port != 0
    except ValueError:  # no number, or one that no port has
        return False
    return fine and parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.username or parts.query)


class _Reply(NamedTuple):
    content: Any


class _Trouble(NamedTuple):
    why: str
    wait: float = 0.0


@cache
def _trusted() -> ssl.SSLContext:
    """Certificates are read once: that takes longer than a request."""
    import ssl

    return ssl.create_default_context()


def _said(response: Any) -> str:
    """The part of an error's body that is meant for people."""
    try:
        said = response.json()
    except ValueError:
        return str(response.text)[:300]
    if isinstance(said, dict):
        error = said.get("error", said)
        said = error.get("message", error) if isinstance(error, dict) else error
    return str(said)[:300]
