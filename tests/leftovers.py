"""What a test run leaves behind: nothing. Checked at its end, and removed by a watcher if it is interrupted or killed.

Every process of a run inherits `OXRL_TEST_RUN`, by which it is found. Temporary files go to a folder of the run.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

VARIABLE = "OXRL_TEST_RUN"  # "PID:folder" of the run
MEMORY = Path("/dev/shm")
INTERVAL = 10.0  # seconds between two checks of what the run uses


def processes(run: str, variable: str = VARIABLE) -> dict[int, str]:
    """Living processes of a run, with their command lines."""
    found = {}
    mark = f"{variable}={run}".encode()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # ended meanwhile, or of another user
            ours = mark in (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_text(errors="replace").replace("\0", " ").split()
            if ours and command:  # a zombie has none
                found[int(folder.name)] = " ".join(command)[:200]
    return found


def shared_memory_of(pids: Iterable[int | str]) -> set[Path]:
    """Entries of /dev/shm that these processes have mapped or opened."""
    names: set[str] = set()
    for pid in pids:
        with suppress(OSError):
            names |= {line.split(None, 5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()}
            names |= {str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()}
    return {MEMORY / Path(name).parts[3] for name in names if name.startswith(f"{MEMORY}/")}


class Watch:
    """From the start of a run to its end, beside a process that outlives it."""

    def __init__(self, grace: float = 60.0) -> None:
        """`grace`: seconds that processes may take to end after the run."""
        folder = tempfile.mkdtemp(prefix="oxrl-test-")
        run = f"{os.getpid()}:{folder}"
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # `tmp_path` stays where pytest has it
        self.watcher = subprocess.Popen(
            [sys.executable, "-S", __file__, run, folder, str(grace)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the run
        )
        os.environ[VARIABLE] = run
        os.environ["TMPDIR"] = tempfile.tempdir = folder

    def end(self) -> list[str]:
        """What was left behind, now removed."""
        return self.watcher.communicate()[0].splitlines()


def watch(run: str, folder: str, grace: str) -> None:
    """Wait for the end of a run, however it comes; name and remove what it left."""
    for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(sign, signal.SIG_IGN)
    parent, memory = os.getppid(), set[Path]()
    while os.getppid() == parent and not select.select([sys.stdin], [], [], INTERVAL)[0]:
        memory |= shared_memory_of(processes(run))
    killed = os.getppid() != parent
    deadline = time.monotonic() + (0 if killed else float(grace))
    while (alive := processes(run)) and time.monotonic() < deadline:
        memory |= shared_memory_of(alive)
        time.sleep(0.2)
    left = [f"process {pid}: {command}" for pid, command in alive.items()]
    while alive := processes(run):
        memory |= shared_memory_of(alive)
        for pid in alive:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    for path in sorted(path for path in memory if path.exists()):
        left.append(f"shared memory {path}")
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)
    with suppress(BrokenPipeError):
        sys.stdout.write("\n".join(left))
        sys.stdout.flush()


if __name__ == "__main__":
    watch(*sys.argv[1:])
