"""Processes that start immediately: forks of one process that has imported torch, transformers and the trainer.

A test requests the fixture `forks` and calls `forks.run(function, ...)`; the function's module should import nothing
else at its top. Everything ends with the process that the tests run in.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import HANG

ROOT = Path(__file__).parents[1]
Call = tuple[Callable[..., Any], tuple[Any, ...]]


def has_ended(process: int) -> bool:
    """Whether a process that was not waited for yet has ended."""
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


class Remote:
    """A process at the other end of a pipe, which calls functions."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self.connection.send((function, arguments))
        return self.answer()

    def answer(self) -> Any:
        if not self.connection.poll(HANG):
            pytest.fail(f"no answer within {HANG:g} s")
        value, error = self.connection.recv()
        if error:
            pytest.fail(f"in another process: {error}", pytrace=False)
        return value


class Forked(Remote):
    """Processes that were forked together; the first one answers calls."""

    def __init__(self, connection: Connection, server: Server, pids: Sequence[int]) -> None:
        super().__init__(connection)
        self.server, self.pids = server, list(pids)

    @property
    def has_ended(self) -> bool:
        """The first one, which was not waited for yet."""
        return has_ended(self.pids[0])

    def end(self) -> list[int]:
        """No more calls; the exit codes of all, once all have ended by themselves."""
        self.connection.close()
        codes: list[int] = self.server.call(wait_for, self.pids)
        self.pids = []
        return codes

    def kill(self) -> None:
        self.connection.close()
        for pid in self.pids:  # not waited for yet, so the numbers are theirs
            os.kill(pid, signal.SIGKILL)
        self.server.call(wait_for, self.pids)
        self.pids = []


class Server(Remote):
    """The process that is forked."""

    def __init__(self, log: Path) -> None:
        ours, theirs = Pipe()
        self.log = log
        settings = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.forks", str(theirs.fileno())],
                cwd=ROOT,
                env={**settings, "OMP_NUM_THREADS": "1"},
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
            )
        theirs.close()
        super().__init__(ours)
        try:
            self.answer()  # it has imported everything
        except EOFError:
            pytest.fail(f"the process that is to be forked ended: {log.read_text()[-3000:]}", pytrace=False)

    def start(self, mains: Sequence[Call], **settings: str) -> Forked:
        """A fork for each `(function, arguments)`; the first one gets a connection as its first argument."""
        ours, theirs = Pipe()
        self.connection.send((fork, (list(mains), settings)))
        send_handle(self.connection, theirs.fileno(), self.process.pid)
        theirs.close()
        return Forked(ours, self, self.answer())

    def run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """The function's value, in a fork."""
        forked = self.start([(answer_calls, ())])
        try:
            return forked.call(function, *arguments)
        finally:
            forked.kill()

    def command(self, log: Path, *arguments: str, **settings: str) -> Forked:
        """`oxrl` with these arguments; what it prints goes to a file."""
        return self.start([(command_line, (log, arguments))], **settings)

    def close(self) -> None:
        """Its forks end with it."""
        self.connection.close()
        self.process.kill()
        self.process.wait()


SERVER: list[Server] = []  # of this test run, once it was needed


def server(config: pytest.Config) -> Server:
    if not SERVER:
        folder = config._tmp_path_factory.mktemp("forks")  # type: ignore[attr-defined]
        SERVER.append(Server(folder / "log"))
    return SERVER[0]


def close() -> None:
    while SERVER:
        SERVER.pop().close()


@pytest.fixture(scope="session")
def forks(pytestconfig: pytest.Config) -> Server:
    """It ends with the run, after the engines that consist of its forks (`conftest`)."""
    return server(pytestconfig)


# In the process that is forked, and in the forks

CALLER: list[Connection] = []  # of the process that is forked


def answer_calls(connection: Connection) -> None:
    """Until the other end is closed."""
    with suppress(EOFError):
        while True:
            function, arguments = connection.recv()
            try:
                answer = (function(*arguments), "")
            except BaseException:  # noqa: BLE001 - fails in the test that called
                answer = (None, traceback.format_exc())
            connection.send(answer)


def command_line(_connection: Connection, log: Path, arguments: Sequence[str]) -> None:
    from oxrl.cli import main

    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that runs tests in the background disables it
    sys.argv = ["oxrl", *arguments]
    try:
        main()
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)


def fork(mains: Sequence[Call], settings: dict[str, str]) -> list[int]:
    connection = Connection(recv_handle(CALLER[0]))
    pids = []
    for number, (function, arguments) in enumerate(mains):
        if (pid := os.fork()) == 0:
            code = 1
            try:
                end_with_parent()
                os.setsid()  # what is sent to its process group does not reach the tests
                CALLER.pop().close()
                os.environ.update(settings)
                if number:
                    connection.close()
                function(*(() if number else (connection,)), *arguments)
                code = 0
            except BaseException:  # noqa: BLE001 - in the log
                traceback.print_exc()
            finally:
                os._exit(code)
        pids.append(pid)
    connection.close()
    return pids


def wait_for(pids: Sequence[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def end_with_parent() -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def main(descriptor: str) -> None:
    end_with_parent()
    import safetensors.torch  # noqa: F401

    from oxrl.models.load import load_model, load_tokenizer

    load_model("tiny")
    load_tokenizer("tiny")
    with suppress(ImportError):
        import deepspeed  # noqa: F401
    gc.freeze()  # as in `conftest`
    CALLER.append(Connection(int(descriptor)))
    CALLER[0].send((None, ""))
    answer_calls(CALLER[0])


if __name__ == "__main__":
    from tests import forks as module  # its functions are known by this name, not as __main__'s

    module.main(*sys.argv[1:])
