"""JSON over HTTP to an engine: time limits, retries with back-off, and one kind of error that names the engine.

The endpoints of each kind of engine are in `http`.
"""

from __future__ import annotations

import logging
import os
import re
import socket
from collections.abc import Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import urlsplit

import anyio

from oxrl.machine.secrets import without_secrets

if TYPE_CHECKING:
    import ssl

logger = logging.getLogger(__name__)

_RETRY_STATUS = {408, 425, 429, *range(500, 600)}
_MAX_WAIT = 60.0
_EMPTY: Mapping[str, Any] = MappingProxyType({})


class EngineError(RuntimeError):
    """An engine does not respond, or responds with an error; the message begins with its address."""


class NoSuchPathError(EngineError):
    """The server responds with 404 to this path."""


class Connection(NamedTuple):
    """`Connection("http://127.0.0.1:8000", retries=2)`, or the path of a Unix socket: `unix:///tmp/mine/socket`.

    Proxies of the environment are not used: engines are local.
    Network errors, time-outs (`time_limit` is for each attempt), 408, 425, 429 and 5xx are retried up to `retries`
    times, after `backoff` seconds, doubled each time.
    """

    url: str
    time_limit: float = 600.0
    retries: int = 4
    backoff: float = 0.5

    def checked(self) -> Connection:
        """Return itself with a normalized URL; raise ValueError if a field is not valid."""
        if not _is_address(self.url):
            shown = without_secrets(self.url)
            raise ValueError(f"{shown!r} is not an engine's address: write http://HOST:PORT or unix:///SOCKET")
        if self.retries < 0 or self.backoff < 0 or not self.time_limit > 0:
            raise ValueError("an engine's connection needs retries >= 0, backoff >= 0 and time_limit > 0")
        return self._replace(url=self.url.rstrip("/"))

    @property
    def host(self) -> str:
        return urlsplit(self.url).hostname or "127.0.0.1"  # a Unix socket is on this machine

    async def get(self, path: str, *, time_limit: float | None = None) -> Any:
        return await self._request("GET", path, None, _EMPTY, time_limit, self.retries)

    async def post(
        self,
        path: str,
        body: Mapping[str, Any] = _EMPTY,
        *,
        query: Mapping[str, str] = _EMPTY,
        once: bool = False,
        time_limit: float | None = None,
    ) -> Any:
        """Return the reply's JSON; `once` disables retries, for calls that must not be repeated."""
        return await self._request("POST", path, body, query, time_limit, 0 if once else self.retries)

    async def _request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None,
        query: Mapping[str, str],
        time_limit: float | None,
        retries: int,
    ) -> Any:
        limit = self.time_limit if time_limit is None else time_limit
        failure = _Failure("not tried")
        for attempt in range(retries + 1):
            try:
                with anyio.fail_after(limit):
                    reply = await self._attempt(method, path, body, query)
                if isinstance(reply, _Reply):
                    return reply.content
                failure = reply
            except TimeoutError:
                failure = _Failure(f"no response within {limit:g} s")
            if attempt == retries:
                break
            logger.warning("%s%s: %s; retrying", self.url, path, failure.reason)
            await anyio.sleep(min(_MAX_WAIT, max(failure.wait, self.backoff * 2**attempt)))
        times = f" (tried {retries + 1} times)" if retries else ""
        raise EngineError(f"{self.url}{path}: {failure.reason}{times}")

    async def _attempt(
        self, method: str, path: str, body: Mapping[str, Any] | None, query: Mapping[str, str]
    ) -> _Reply | _Failure:
        import httpx

        socket_path = _socket_path(self.url)
        base = self.url if socket_path is None else "http://localhost"
        transport = httpx.AsyncHTTPTransport(verify=_ssl_context(), trust_env=False, uds=socket_path)
        # The caller sets one time limit for the whole request.
        async with httpx.AsyncClient(timeout=None, trust_env=False, transport=transport) as client:  # noqa: S113
            try:
                response = await client.request(
                    method, f"{base}{path}", json=None if body is None else dict(body), params=dict(query) or None
                )
            except httpx.TransportError as error:
                return _Failure(f"no connection, or it was closed: {type(error).__name__}")
        if response.status_code in _RETRY_STATUS:
            wait = response.headers.get("retry-after", "")
            seconds = float(wait) if re.fullmatch(r"\d{1,5}(\.\d{1,3})?", wait) else 0.0
            return _Failure(f"status {response.status_code}: {_error_message(response)}", seconds)
        if response.status_code == 400:
            raise ValueError(f"{self.url} rejected the request: {_error_message(response)}")
        if not response.is_success:
            kind = NoSuchPathError if response.status_code == 404 else EngineError
            raise kind(f"{self.url}{path}: status {response.status_code}: {_error_message(response)}")
        if not response.content:
            return _Reply(None)
        try:
            return _Reply(response.json())
        except ValueError:
            return _Reply(response.text)


def check_distinct(urls: Sequence[str]) -> None:
    """Raise ValueError if two addresses are one server: its two weight updates would wait for each other."""
    known: dict[tuple[Any, ...], int] = {}
    for index, url in enumerate(urls):
        for address in _addresses(url):
            if (other := known.setdefault(address, index)) != index:
                raise ValueError(f"{urls[other]} and {url} are one server: list it once")


def _addresses(url: str) -> set[tuple[Any, ...]]:
    """Return its resolved addresses with the path; empty if the host name does not resolve."""
    parts = urlsplit(url)
    if (socket_path := _socket_path(url)) is not None:
        return {(os.path.realpath(socket_path),)}
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port or parts.scheme, type=socket.SOCK_STREAM)
    except OSError:
        return set()
    return {(*address[:2], parts.path.rstrip("/")) for *_, address in found}


def _socket_path(url: str) -> str | None:
    parts = urlsplit(url)
    return parts.path if parts.scheme == "unix" else None


def _is_address(url: str) -> bool:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return parts.path.startswith("/") and not (parts.netloc or parts.query)
    try:
        valid_port = parts.port != 0
    except ValueError:  # not a number, or out of range
        return False
    plain = not (parts.username or parts.query)
    return valid_port and plain and parts.scheme in ("http", "https") and bool(parts.hostname)


class _Reply(NamedTuple):
    content: Any


class _Failure(NamedTuple):
    reason: str
    wait: float = 0.0


@cache
def _ssl_context() -> ssl.SSLContext:
    """Cached: reading certificates takes longer than a request."""
    import ssl

    return ssl.create_default_context()


def _error_message(response: Any) -> str:
    """Return the human-readable part of an error's body."""
    try:
        body = response.json()
    except ValueError:
        return str(response.text)[:300]
    if isinstance(body, dict):
        error = body.get("error", body)
        body = error.get("message", error) if isinstance(error, dict) else error
    return str(body)[:300]
