"""Real web servers on loopback for tests: a subclass of `Quiet` defines the responses, `serving` runs it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Quiet(BaseHTTPRequestHandler):
    """Keeps connections open and logs nothing."""

    protocol_version = "HTTP/1.1"

    def read(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def reply(self, status: int, content: Any = b"", **headers: str) -> None:
        """`content` as JSON unless it is bytes; `Retry_After="1"` is the header Retry-After."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**headers, "Content_Length": str(len(body))}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextmanager
def serving(handler: type[Quiet], **facts: Any) -> Iterator[Any]:
    """The server, with its `url` and the `facts`, which handlers read as `self.server.NAME`."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    server.url = f"http://127.0.0.1:{server.server_port}"
    vars(server).update(facts)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
