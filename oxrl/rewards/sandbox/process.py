"""A sandboxed interpreter as a child process: how it is started, read from, and reliably terminated.

The parent may be a large process with many threads, so it is not forked: a fresh interpreter is started, which isolates
itself (`bootstrap.py`) before it runs the job.
"""

from __future__ import annotations

import json
import marshal
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
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any, NamedTuple

from oxrl.rewards.sandbox.syscalls import MACHINES, seccomp_filter

_MAX_FILE_BYTES = 8 << 20
MAX_STATUS_BYTES = 4096


class Limits(NamedTuple):
    """`Limits(seconds=2.0)`: what a program may use; it is always one process."""

    seconds: float = 5.0  # wall-clock time
    cpu_seconds: float | None = None  # None: the same as `seconds`; rounded up
    memory: int = 512 << 20  # bytes of address space
    output: int = 64 << 10  # bytes, each on stdout and stderr
    scratch: int = 16 << 20  # bytes in /tmp, with bubblewrap or namespaces; otherwise nothing can be written
    open_files: int = 64
    threads: int = 16  # besides the first


class SandboxError(RuntimeError):
    """The sandbox could not be set up, so the program was not run."""


class Job(NamedTuple):
    """What an interpreter runs: `source` as `__main__`, or the function `entry_point` of modules sent along."""

    arguments: Mapping[str, Any]
    entry_point: tuple[str, str] | None = None
    modules: tuple[str, ...] = ()


class SandboxedProcess(NamedTuple):
    process: subprocess.Popen[bytes]
    status: int  # file descriptor: "ready" or an error is written to it, and it is closed before the program starts

    def check_status(self, status: bytes) -> None:
        if status != b"ready":
            reason = status.decode(errors="replace") or "the interpreter did not start"
            raise SandboxError(f"the sandbox could not be set up: {reason}")


@cache
def module_source(name: str) -> str:
    return (files("oxrl.rewards.sandbox") / f"{name}.py").read_text()


@cache
def _module_code(name: str) -> str:
    """Compiled once: the sandboxed interpreter is of the same version as this one."""
    source = module_source(name.rpartition(".")[2])
    return marshal.dumps(compile(source, f"<{name}>", "exec", dont_inherit=True)).hex()


def readable_paths() -> list[str]:
    """Paths that an interpreter needs to read: the standard library, shared libraries, and a few packages."""
    standard = sysconfig.get_paths(vars={"platbase": sys.base_exec_prefix})  # without a virtual environment's packages
    libraries = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache"]
    own = [standard["stdlib"], standard["platstdlib"], str(sysconfig.get_config_var("LIBDIR") or "")]
    installed = [str(Path(sys.base_prefix) / "lib"), str(Path(sys.base_exec_prefix) / "lib")]
    others = ["/usr/share/zoneinfo", "/dev/zero", "/dev/urandom"]
    packages = [part for folder in packages_of_programs().values() for part in (folder, f"{folder}.libs")]
    paths = dict.fromkeys([*libraries, *own, *installed, *packages, *others])
    return [path for path in paths if path and Path(path).exists()]


@cache
def packages_of_programs() -> dict[str, str]:
    """The third-party packages that programs may import, where they are installed, and their folders.

    Not below /tmp, where a program has its scratch folder.
    """
    specs = {name: find_spec(name) for name in ("numpy", "tzdata")}
    found = {name: Path(spec.origin).parent for name, spec in specs.items() if spec and spec.origin}
    return {name: str(folder) for name, folder in found.items() if not folder.is_relative_to("/tmp")}  # noqa: S108


def interpreter() -> str:
    """Path of the interpreter itself, not of a virtual environment's link to it."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def bubblewrap(executable: str, limits: Limits) -> list[str]:
    """The command that the interpreter's command line is appended to."""
    paths = [path for path in [*readable_paths(), interpreter()] if not path.startswith("/dev/")]  # --dev creates them
    return [
        executable,
        *("--unshare-user", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"),
        "--as-pid-1",  # an extra process would be left for init to reap, which does not happen in many containers
        *("--die-with-parent", "--new-session", "--cap-drop", "ALL", "--dev", "/dev"),
        *[part for path in paths for part in ("--ro-bind-try", path, path)],
        *("--size", str(limits.scratch), "--tmpfs", "/tmp", "--chdir", "/tmp"),  # noqa: S108 - a private mount
        *("--remount-ro", "/dev", "--remount-ro", "/"),  # otherwise both could be filled up to the size of memory
        "--",
    ]


@contextmanager
def sandboxed(
    job: Job,
    layers: Sequence[str],
    limits: Limits,
    *,
    bwrap: str | None = None,
    stdout: int = subprocess.DEVNULL,
    stderr: int = subprocess.DEVNULL,
    pass_fds: Sequence[int] = (),
) -> Iterator[SandboxedProcess]:
    """A running interpreter, which is terminated when the block is left, also by an exception."""
    payload = json.dumps(_payload(job, layers, limits)).encode()
    with memory_file(payload) as job_file, pipe() as (status, status_writer):
        command = [interpreter(), "-P", "-s", "-S", "-B", "-X", "utf8", "-c", module_source("bootstrap")]
        descriptors = (job_file.fileno(), status_writer.fileno())
        process = subprocess.Popen(
            [*(bubblewrap(bwrap, limits) if bwrap else []), *command, *map(str, descriptors)],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            # Sets iterate in the same order when graded again; threads reserve no address space of their own.
            env={"PYTHONHASHSEED": "0", "MALLOC_ARENA_MAX": "1"},
            cwd="/",
            pass_fds=(*descriptors, *pass_fds),
            start_new_session=True,
        )
        try:
            status_writer.close()
            job_file.close()
            yield SandboxedProcess(process, status.fileno())
        finally:
            terminate(process)


def _payload(job: Job, layers: Sequence[str], limits: Limits) -> dict[str, Any]:
    return {
        "arguments": dict(job.arguments),
        "entry_point": job.entry_point,
        "modules": {name: _module_code(name) for name in job.modules},
        "layers": list(layers),
        "readable": readable_paths(),
        "filter": seccomp_filter(platform.machine()).hex() if platform.machine() in MACHINES else "",
        "packages": packages_of_programs(),
        "threads": limits.threads,
        "scratch": limits.scratch,
        "parent": os.getpid(),
        "limits": {
            "CPU": math.ceil(limits.seconds if limits.cpu_seconds is None else limits.cpu_seconds),
            "AS": limits.memory,
            "FSIZE": min(limits.scratch, _MAX_FILE_BYTES),
            "NOFILE": limits.open_files,
        },
    }


def terminate(process: subprocess.Popen[bytes]) -> None:
    """Kill the process and its group, which is its own session, and wait for it: SIGKILL cannot be ignored."""
    if process.poll() is None:
        _kill_children(process)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, 9)
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout, process.stderr):
        if stream is not None:
            stream.close()


def _kill_children(process: subprocess.Popen[bytes]) -> None:
    """Kill bubblewrap's child first, so that bubblewrap reaps it."""
    with suppress(OSError):
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            os.kill(int(child), 9)
            with suppress(subprocess.TimeoutExpired):
                process.wait(1.0)


def read_all(limits: Mapping[int, int], deadline: float) -> tuple[dict[int, bytes], str]:
    """Read file descriptors to their end; returns their content and why reading stopped: "end", "time" or "output".

    `limits` maps each descriptor to its maximum of bytes; reading stops as soon as one exceeds it.
    """
    content = {source: bytearray() for source in limits}
    poll = select.poll()
    for source in limits:
        poll.register(source, select.POLLIN)
    open_sources = set(limits)
    reason = "end"
    while open_sources and reason == "end":
        left = deadline - time.monotonic()
        if left <= 0:
            reason = "time"
            break
        for source, _ in poll.poll(left * 1000 + 1):
            part = os.read(source, 1 << 16)
            content[source] += part
            if not part:
                poll.unregister(source)
                open_sources.discard(source)
            elif len(content[source]) > limits[source]:
                reason = "output"
    return {source: bytes(data[: limits[source]]) for source, data in content.items()}, reason


@contextmanager
def memory_file(content: bytes) -> Iterator[IO[bytes]]:
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
