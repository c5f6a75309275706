"""Child processes that leave nothing behind: they end with whoever started them, in whatever way that ended."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import threading
from contextlib import suppress
from pathlib import Path

SERVER_PORTS = range(20_000, 32_768)  # above the ports of Ray's workers, below the default ephemeral range
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
    """Distinct free ports, outside the ephemeral range.

    An engine needs half a minute until it listens; meanwhile the kernel could give an ephemeral port to any process.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(SERVER_PORTS, len(SERVER_PORTS)):
        with socket.socket() as probe, suppress(OSError):  # taken
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} ports are free among {SERVER_PORTS}")
