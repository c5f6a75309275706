"""Child processes that leave nothing behind: they end with whoever started them, in whatever way that ended."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import threading
from contextlib import ExitStack, suppress
from pathlib import Path

MEETING = "OXRL_MEETING"  # names a file in which the ranks of one machine find each other, instead of at a port


def end_with_parent(home: str | None = None) -> None:
    """In a child whose standard input is a pipe of its parent: when that is closed, end this process group.

    `home` is a folder that goes with it.
    """
    threading.Thread(target=_watch, args=(home,), name="oxrl parent", daemon=True).start()


def _watch(home: str | None) -> None:
    while os.read(0, 1 << 10):
        pass
    if home is not None:
        shutil.rmtree(home, ignore_errors=True)
    for process in _group_members():
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _group_members() -> list[int]:
    """The others of this process group, without those who remove shared memory once everybody else is gone."""
    members = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            if (
                os.getpgid(int(entry.name)) == os.getpgrp()
                and b"resource_tracker" not in (entry / "cmdline").read_bytes()
            ):
                members.append(int(entry.name))
    return [process for process in members if process != os.getpid()]


def free_ports(count: int) -> list[int]:
    """Different ones, that nobody listens at now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
