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
    kill_group(os.getpgrp())
    os.kill(os.getpid(), signal.SIGKILL)


def kill_group(group: int) -> None:
    """At once, all of a process group but the caller and those who remove shared memory when everybody else is gone."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            process = int(entry.name)
            tracker = b"resource_tracker" in (entry / "cmdline").read_bytes()
            if os.getpgid(process) == group and process != os.getpid() and not tracker:
                os.kill(process, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Different ones, that nobody listens at now."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
