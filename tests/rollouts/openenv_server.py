"""Servers with the messages of OpenEnv, which pay for actions that end with a vowel.

`python openenv_server.py PORT FILE` is one in a process of its own, which is killed in the next step once FILE exists.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

SCHEMA = {"action": {"properties": {"message": {"type": "string"}, "metadata": {"type": "object"}}}}


class Environment:
    def __init__(self) -> None:
        self.steps = 0

    def answer(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        if kind == "reset":
            self.seed = data["seed"]
            return {"observation": {"text": f"seed {self.seed}"}, "reward": None, "done": False}
        self.steps += 1
        reward = float(data["message"][-1:] in set("aeiou"))
        return {"observation": {"text": f"step {self.steps}"}, "reward": reward, "done": self.steps == 2}


def _talk(connection: ServerConnection) -> None:
    env = Environment()
    for message in connection:
        asked = json.loads(message)
        if asked["type"] == "close":
            return
        connection.send(json.dumps({"type": "observation", "data": env.answer(asked["type"], asked["data"])}))


def _schema(connection: ServerConnection, request: Request) -> Response | None:
    if request.path == "/schema":
        return connection.respond(200, json.dumps(SCHEMA))
    return None


@contextmanager
def served_by_sockets() -> Iterator[tuple[str, Any]]:
    with serve(_talk, "127.0.0.1", 0, process_request=_schema) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}", server
        server.shutdown()
        thread.join()


def serve_until_killed(port: int, doomed: Path) -> None:
    def talk(connection: ServerConnection) -> None:
        env = Environment()
        for message in connection:
            asked = json.loads(message)
            if asked["type"] == "close":
                return
            if asked["type"] == "step" and doomed.exists():
                os.kill(os.getpid(), signal.SIGKILL)
            connection.send(json.dumps({"type": "observation", "data": env.answer(asked["type"], asked["data"])}))

    with serve(talk, "127.0.0.1", port, process_request=_schema) as server:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        server.serve_forever()


@contextmanager
def served_by_a_process(port: int, doomed: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, str(port), str(doomed)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


@contextmanager
def served_by_http() -> Iterator[str]:
    environments: dict[str, Environment] = {}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            env = environments.setdefault(asked["episode_id"], Environment())
            self._send(200, env.answer(self.path[1:], asked if self.path == "/reset" else asked["action"]))

        def do_GET(self) -> None:
            self._send(200, SCHEMA) if self.path == "/schema" else self._send(404, {})

        def _send(self, status: int, body: Any) -> None:
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


if __name__ == "__main__":
    serve_until_killed(int(sys.argv[1]), Path(sys.argv[2]))
