"""The server of the page: HTTP on loopback, read-only, for requests with the token in their address.

Other users of the machine and web pages can connect to loopback, too: the token is checked first, and `Host` and
`Origin`, so that no other site can read through a name that it lets resolve to this machine.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from threading import BoundedSemaphore, Thread
from typing import Any

from oxrl.machine.loopback import is_loopback
from oxrl.view.page import Page, build_page
from oxrl.view.runs import NotFoundError, Response, Runs

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
MOST_CONNECTIONS = 64
IDLE = 60.0  # seconds after which a silent connection is closed
ALWAYS: Mapping[str, str] = {
    "Cache-Control": "no-store",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",  # the address has the token
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class ViewServer(ThreadingHTTPServer):
    """`ViewServer(runs).url` is the address of the page, with its token."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CONNECTIONS

    def __init__(self, runs: Runs, port: int = 0) -> None:
        self.runs = runs
        self.page: Page = build_page()
        self.token = secrets.token_urlsafe(24)
        self._free = BoundedSemaphore(MOST_CONNECTIONS)
        try:
            super().__init__((HOST, port), _Handler)
        except OSError as error:
            raise ValueError(
                f"port {port} cannot be opened ({error.strerror}): choose another --port, or leave it out"
            ) from error
        self.url = f"http://{HOST}:{self.server_port}/{self.token}/"

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:  # noqa: ARG002
        logger.debug("a connection to the page ended", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD below the token; everything else is refused with one line."""

    server: ViewServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "oxrl", ""
    timeout = IDLE

    def do_GET(self) -> None:
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        token, _, rest = self.path.removeprefix("/").partition("/")
        path, _, query = rest.partition("?")
        if not is_loopback(f"//{host}") or (origin is not None and origin != f"http://{host}"):
            self._refuse(403, "Host and Origin must be the address that `oxrl view` printed")
        elif not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(404, "there is nothing here: open the whole address that `oxrl view` printed")
        elif path == "":
            page = self.server.page
            policy = f"{page.policy}; frame-ancestors 'none'"
            body = page.html.encode()
            self._send(200, Response(body, "text/html; charset=utf-8", {"Content-Security-Policy": policy}))
        else:
            self._respond(path, query)

    do_HEAD = do_GET

    def _respond(self, path: str, query: str) -> None:
        try:
            response = self.server.runs.respond(path, query)
        except (NotFoundError, FileNotFoundError) as error:
            self._refuse(404, str(error))
        except (ValueError, OSError) as error:
            self._refuse(500, f"the files of the run cannot be read: {error}")
        else:
            self._send(200, response)

    def _refuse(self, status: int, message: str) -> None:
        self._send(status, Response(f"{message}\n".encode("utf-8", "replace"), "text/plain; charset=utf-8"))

    def _send(self, status: int, response: Response) -> None:
        self.close_connection = True  # a thread is busy for one response only; a body may follow, which is not read
        self.send_response(status)
        headers = {**ALWAYS, **response.headers, "Content-Type": response.kind, "Content-Length": len(response.body)}
        for name, value in headers.items():
            self.send_header(name, str(value))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(response.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:  # noqa: ARG002
        """Refuse a request that the standard library could not parse, and every other method."""
        allowed = "this page is read-only: GET and HEAD are allowed"
        if code == 501:
            self._refuse(405, allowed)
        else:
            self.command = getattr(self, "command", None) or "GET"
            self._refuse(code, "the request could not be read")

    def log_message(self, *_: Any) -> None:
        """Log nothing: requests of the page come every second."""


@contextmanager
def serving(runs: Runs, port: int = 0) -> Iterator[ViewServer]:
    """Serve in a thread, for tests and notebooks."""
    with ViewServer(runs, port) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def serve_until_interrupted(server: ViewServer) -> None:
    """Serve until Ctrl-C."""
    with server, suppress(KeyboardInterrupt):
        server.serve_forever(poll_interval=0.2)
