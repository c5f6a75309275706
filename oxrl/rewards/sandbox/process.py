"""A caged interpreter as a child process: how it is started, watched, and ended for certain.

The parent may be a large process with many threads, so nothing is forked from it: a small fresh interpreter is
started, which shuts itself in (`cage.py`) before it runs what it was given.
"""

from __future__ import annotations

import json
import math
import os
import platform
import select
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import IO, Any, NamedTuple

from oxrl.rewards.sandbox.syscalls import MACHINES, seccomp_filter

_LARGEST_FILE = 8 << 20
LONGEST_STATUS = 4096


class Limits(NamedTuple):
    """`Limits(seconds=2.0)`: what a program may use; it is always one process with one thread."""

    seconds: float = 5.0  # by the clock
    cpu_seconds: float | None = None  # None: as many; both are rounded up here
    memory: int = 512 << 20  # bytes of address space
    output: int = 64 << 10  # bytes, each on stdout and stderr
    scratch: int = 16 << 20  # bytes in /tmp, where namespaces can be had; elsewhere nothing can be written
    open_files: int = 64


class SandboxError(RuntimeError):
    """The cage could not be shut, so the program was not run."""


class Job(NamedTuple):
    """What an interpreter is to run: source as `__main__`, or a function of modules that are sent along."""

    given: Mapping[str, Any]
    door: tuple[str, str] | None = None
    modules: tuple[str, ...] = ()


class Caged(NamedTuple):
    process: subprocess.Popen[bytes]
    status: int  # a file descriptor that says "ready", or why not, and ends before the program starts

    def confirm(self, said: bytes) -> None:
        if said != b"ready":
            raise SandboxError(f"the sandbox could not be shut: {said.decode(errors='replace') or 'it did not start'}")


@cache
def module_source(name: str) -> str:
    return (files("oxrl.rewards.sandbox") / f"{name}.py").read_text()


def readable_paths() -> list[str]:
    """What an interpreter reads while it runs: the standard library and shared libraries."""
    places = sysconfig.get_paths(vars={"platbase": sys.base_exec_prefix})  # and not a virtual environment's packages
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    own = [places["stdlib"], places["platstdlib"], str(sysconfig.get_config_var("LIBDIR") or "")]
    installed = [str(Path(sys.base_prefix) / "lib"), str(Path(sys.base_exec_prefix) / "lib")]
    devices = ["/dev/zero", "/dev/urandom"]
    return [path for path in dict.fromkeys([*libraries, *own, *installed, *devices]) if path and Path(path).exists()]


def interpreter() -> str:
    """The interpreter itself and not a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def bubblewrap(executable: str, limits: Limits) -> list[str]:
    """The command that comes before the interpreter's own."""
    paths = [path for path in [*readable_paths(), interpreter()] if not path.startswith("/dev/")]  # it makes its own
    return [
        executable,
        *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        "--as-pid-1",  # a process between would be left for init to bury, which in many containers nobody does
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--dev", "/dev"),
        *[part for path in paths for part in ("--ro-bind-try", path, path)],
        *("--size", str(limits.scratch), "--tmpfs", "/tmp", "--chdir", "/tmp"),  # noqa: S108 - its own, not ours
        *("--remount-ro", "/dev", "--remount-ro", "/"),  # else both are memory that anybody may fill
        "--",
    ]


@contextmanager
def caged(
    job: Job,
    layers: Sequence[str],
    limits: Limits,
    *,
    bwrap: str | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    pass_on: Sequence[int] = (),
) -> Iterator[Caged]:
    """A running interpreter, which is dead when the block is left, however it is left."""
    with in_memory(json.dumps(_order(job, layers, limits)).encode()) as order, pipe() as (status, say_status):
        command = [interpreter(), "-P", "-s", "-S", "-B", "-X", "utf8", "-c", module_source("cage")]
        process = subprocess.Popen(
            [*(bubblewrap(bwrap, limits) if bwrap else []), *command, str(order.fileno()), str(say_status.fileno())],
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            env={"PYTHONHASHSEED": "0"},  # the order of sets does not change from one grading to the next
            cwd="/",
            pass_fds=(order.fileno(), say_status.fileno(), *pass_on),
            start_new_session=True,
        )
        try:
            say_status.close()
            order.close()
            yield Caged(process, status.fileno())
        finally:
            end(process)


def _order(job: Job, layers: Sequence[str], limits: Limits) -> dict[str, Any]:
    return {
        "given": dict(job.given),
        "door": job.door,
        "modules": {name: _source_of(name) for name in job.modules},
        "layers": list(layers),
        "readable": readable_paths(),
        "filter": seccomp_filter(platform.machine()).hex() if platform.machine() in MACHINES else "",
        "scratch": limits.scratch,
        "parent": os.getpid(),
        "limits": {
            "CPU": math.ceil(limits.seconds if limits.cpu_seconds is None else limits.cpu_seconds),
            "AS": limits.memory,
            "FSIZE": min(limits.scratch, _LARGEST_FILE),
            "NOFILE": limits.open_files,
        },
    }


def _source_of(module: str) -> str:
    """An empty package, or a module of this one."""
    return "__path__ = []" if module in ("oxrl", "oxrl.rewards.sandbox") else module_source(module.rpartition(".")[2])


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill whatever is left of it. Its group is its own session, and a killed process cannot be waited for in vain."""
    if process.poll() is None:
        _end_children(process)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 9)
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _end_children(process: subprocess.Popen[bytes]) -> None:
    """bubblewrap's child first, so that bubblewrap buries it."""
    with suppress(OSError):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), 9)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)


def gather(sources: Mapping[int, int], deadline: float) -> tuple[dict[int, bytes], str]:
    """What each file descriptor says, to its end: also why it stopped, "end", "time" or "output".

    `sources` has the most bytes that each may say; reading stops as soon as one says more.
    """
    said = {source: bytearray() for source in sources}
    poll = select.poll()
    for source in sources:
        poll.register(source, select.POLLIN)
    open_sources = set(sources)
    reason = "end"
    while open_sources and reason == "end":
        left = deadline - time.monotonic()
        if left <= 0:
            reason = "time"
            break
        for source, _ in poll.poll(left * 1000 + 1):
            part = os.read(source, 1 << 16)
            said[source] += part
            if not part:
                poll.unregister(source)
                open_sources.discard(source)
            elif len(said[source]) > sources[source]:
                reason = "output"
    return {source: bytes(text[: sources[source]]) for source, text in said.items()}, reason


@contextmanager
def in_memory(content: bytes) -> Iterator[IO[bytes]]:
    with os.fdopen(os.memfd_create("oxrl"), "wb+") as file:
        file.write(content)
        file.flush()
        file.seek(0)
        yield file


@contextmanager
def pipe() -> Iterator[tuple[IO[bytes], IO[bytes]]]:
    reading, writing = os.pipe()
    with os.fdopen(reading, "rb", buffering=0) as receive, os.fdopen(writing, "wb", buffering=0) as send:
        yield receive, send
