"""Child processes that leave nothing behind: they end with their parent, however that ends."""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path

LOOPBACK_INTERFACE = "lo" if sys.platform == "linux" else "lo0"
SERVER_PORTS = range(20_000, 32_768)  # above the ports of Ray's workers, below the default ephemeral range
RENDEZVOUS_FILE = "OXRL_MEETING"  # variable with the path of a file for the rendezvous of local ranks, not a port


def end_with_parent(home: str | None = None) -> None:
    """In a child whose standard input is a pipe of its parent: when that is closed, kill this process group.

    The folder `home` is removed first.
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
    """Kill a process group, except for the caller and the resource trackers, which remove shared memory afterwards."""
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile
            process = int(entry.name)
            tracker = b"resource_tracker" in (entry / "cmdline").read_bytes()
            if os.getpgid(process) == group and process != os.getpid() and not tracker:
                os.kill(process, signal.SIGKILL)


def free_ports(count: int) -> list[int]:
    """Return distinct free ports, outside the ephemeral range.

    An engine listens after about half a minute; meanwhile the kernel could give an ephemeral port to any process.
    """
    found: list[int] = []
    for port in random.SystemRandom().sample(SERVER_PORTS, len(SERVER_PORTS)):
        with socket.socket() as probe, suppress(OSError):  # in use
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise OSError(f"fewer than {count} ports are free among {SERVER_PORTS}")
