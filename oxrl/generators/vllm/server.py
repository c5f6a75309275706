"""A vLLM server as a child process: ready inside the block, ended when it is left or its parent dies.

It listens on a Unix socket in a folder that only this user can open: its endpoints for weights read files and call
methods of its workers, and vLLM's API key does not cover them. It and its child processes are one process group. The
child waits for the end of its standard input, which closes when its parent ends for any reason; then it removes the
folder that it was given, and kills the whole group.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import anyio

from oxrl.concurrency import in_thread
from oxrl.generators.connection import Connection, EngineError
from oxrl.generators.vllm.worker import EXTENSION
from oxrl.machine.packages import require
from oxrl.machine.processes import LOOPBACK_INTERFACE, end_with_parent, kill_group
from oxrl.weights.checkpoint_names import shm_dir

_NO_VARIABLES: Mapping[str, str] = MappingProxyType({})
_HOME = "OXRL_ENGINES_HOME"
# On a CPU: vLLM's own thread binding was ten times slower; spinning threads starve the trainer.
CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
}
_LAST_START = 300  # lines of a log that belong to the last start of the server
_ERROR = re.compile(r"\b\w*(?:Error|Exception): ")
SETTINGS = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}  # enables the endpoints for weights; disables usage reports


class VLLMServer(NamedTuple):
    """`server.url` is for `VLLMEngine`; `server.log` is the file with its output."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path
    folder: Path | None = None  # with its socket; removed by `stop`

    def stop(self, patience: float = 10.0) -> None:
        """End it and its child processes: by SIGTERM first, so that no shared memory is left behind."""
        group = self.process.pid
        steps: Sequence[tuple[Callable[[], None], float]] = (
            (partial(os.killpg, group, signal.SIGTERM), patience),
            (partial(kill_group, group), 10.0),
            (partial(os.killpg, group, signal.SIGKILL), 10.0),
        )
        for end, wait in steps:
            with suppress(ProcessLookupError):
                end()
                os.killpg(group, signal.SIGCONT)  # a stopped process does not handle signals
            if self._ended_within(wait):
                break
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _ended_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None and not _group_exists(self.process.pid):
                return True
            time.sleep(0.05)
        return False


@asynccontextmanager
async def vllm_server(
    model: str | Path,
    *,
    arguments: Sequence[str] = (),
    log: str | Path | None = None,
    time_limit: float = 600.0,
) -> AsyncIterator[VLLMServer]:
    """`async with vllm_server(folder, arguments=["--dtype", "float32"]) as server:`, ready for requests.

    Only processes of this user can connect to it.
    """
    server = start_vllm_server(model, arguments=arguments, log=log)
    try:
        await until_ready(server, time_limit)
        yield server
    finally:
        with anyio.CancelScope(shield=True):
            await in_thread(server.stop)


def start_vllm_server(
    model: str | Path,
    *,
    arguments: Sequence[str] = (),
    log: str | Path | None = None,
    environment: Mapping[str, str] = _NO_VARIABLES,
    home: str | Path | None = None,
) -> VLLMServer:
    """Start a server without waiting: `until_ready` does that. The caller stops it.

    `log` is appended to; `home` is a folder for its sockets, which it removes if its parent dies (default: its own).
    """
    require("vllm")
    folder = Path(tempfile.mkdtemp(prefix="oxrl-vllm-", dir=home or shm_dir()))  # mode 0700
    file = Path(log) if log is not None else Path(tempfile.mkdtemp(prefix="oxrl-vllm-")) / "server.log"
    # The last value of an option wins, and vLLM ignores host and port beside a socket.
    command = [sys.executable, "-m", __name__, "--generation-config", "vllm", "--enable-scale-out", *arguments]
    command += ["--uds", str(folder / "socket"), "--model", str(model)]
    command += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION]
    sockets = str(home or folder)
    settings = {**_cpu_settings(), "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE, **os.environ, **SETTINGS, **environment}
    settings |= {"VLLM_RPC_BASE_PATH": sockets, _HOME: sockets}
    settings.pop("VLLM_API_KEY", None)  # for other servers of the user: requests to this one have no key
    with file.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=settings, start_new_session=True
        )
    return VLLMServer(f"unix://{folder / 'socket'}", process, file, folder)


async def until_ready(server: VLLMServer, time_limit: float = 600.0) -> None:
    """Wait until it responds; raise with the end of its log if it ends first or takes too long."""
    connection = Connection(server.url, retries=0).checked()
    deadline = time.monotonic() + time_limit
    while True:
        if (code := server.process.poll()) is not None:
            raise EngineError(f"the vLLM server ended with {code} before it was ready; {log_tail(server.log)}")
        try:
            await connection.get("/health", time_limit=5.0)
            return
        except EngineError:
            if time.monotonic() > deadline:
                raise EngineError(
                    f"the vLLM server was not ready after {time_limit:g} s; {log_tail(server.log)}"
                ) from None
        await anyio.sleep(0.5)


def log_tail(log: Path, lines: int = 12) -> str:
    """Return the end of a log, preceded by the first error since the last start, which is usually the cause."""
    log_lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    end = log_lines[-lines:]
    cause = next((line for line in log_lines[-_LAST_START:-lines] if _ERROR.search(line)), None)
    return f"its log, {log}, ends with:\n" + "\n".join(end if cause is None else [cause, "...", *end])


def _cpu_settings() -> dict[str, str]:
    import torch

    return {} if torch.cuda.is_available() else CPU_SETTINGS


def _group_exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """In the child: watch the parent, and run vLLM's server."""
    end_with_parent(os.environ.get(_HOME))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
