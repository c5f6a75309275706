"""Which kinds of isolation work on this machine: each is probed once, by a program that tries forbidden actions."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from oxrl.rewards.sandbox.process import MAX_STATUS_BYTES, Job, Limits, SandboxError, read_all, sandboxed
from oxrl.rewards.sandbox.syscalls import MACHINES

logger = logging.getLogger(__name__)

Kind = Literal["bubblewrap", "namespaces", "landlock", "none"]
_LAYERS: Mapping[Kind, tuple[str, ...]] = {
    "bubblewrap": ("mounts", "seccomp"),
    "namespaces": ("namespaces", "landlock", "seccomp"),
    "landlock": ("landlock", "seccomp"),
    "none": (),
}
_EXPLANATIONS: Mapping[Kind, str] = {
    "bubblewrap": "bubblewrap (namespaces and private mounts) and a seccomp filter",
    "namespaces": "user, network, ipc, uts and mount namespaces, Landlock and a seccomp filter",
    "landlock": "Landlock and a seccomp filter, without namespaces: programs have no scratch folder",
    "none": "none: only resource limits",
}


class Isolation(NamedTuple):
    """`Isolation("namespaces", {"bubblewrap": "bwrap is not installed"})`; `missing`: why better kinds do not work."""

    kind: Kind
    missing: Mapping[str, str]
    bwrap: str | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        return _LAYERS[self.kind]

    @property
    def explanation(self) -> str:
        return _EXPLANATIONS[self.kind]


_PROBE = """
import decimal, json, os, random, socket
def refused(action):
    try:
        action()
    except OSError:
        return
    print("not isolated:", action.__name__)
def reads_a_file(): open("/etc/passwd").close()
def writes_a_file():
    name = "/var/tmp/oxrl-sandbox-%d" % os.getpid()
    open(name, "x").close()
    os.unlink(name)
def forks(): os.fork() or os._exit(0)
def opens_a_socket(): socket.socket()
def signals(): os.kill(os.getppid(), 0)
def truncates_a_file(): os.truncate(VICTIM, 0)
def truncates_by_opening(): os.open(VICTIM, os.O_TRUNC)
def truncates_by_opening_otherwise(): os.open(VICTIM, os.O_TRUNC | 3)
def changes_times(): os.utime(VICTIM, (0, 0))
for action in (
    reads_a_file, writes_a_file, forks, opens_a_socket, signals,
    truncates_a_file, truncates_by_opening, truncates_by_opening_otherwise, changes_times,
):
    refused(action)
print("done", end="")
"""


@cache
def available() -> Isolation:
    """The best kind of isolation that works on this machine; probed once, which takes a fraction of a second."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        system = f"{sys.platform} on {platform.machine()}"
        return Isolation(
            "none", {"all": f"programs are isolated on Linux ({', '.join(MACHINES)}) only, not on {system}"}
        )
    missing: dict[str, str] = {}
    bwrap = shutil.which("bwrap")
    kinds: tuple[Kind, ...] = ("bubblewrap", "namespaces", "landlock")
    for kind in kinds:
        if kind == "bubblewrap" and bwrap is None:
            missing[kind] = "bwrap is not installed"
            continue
        candidate = Isolation(kind, dict(missing), bwrap if kind == "bubblewrap" else None)
        problem = probe_isolation(candidate)
        if problem is None:
            return candidate
        missing[kind] = problem
    return Isolation("none", missing)


def probe_isolation(isolation: Isolation) -> str | None:
    """Why this isolation does not work on this machine, or None."""
    limits = Limits(seconds=10.0)
    pipe = subprocess.PIPE
    try:
        with (
            tempfile.NamedTemporaryFile(dir=_visible_folder()) as victim,
            sandboxed(
                Job({"source": f"VICTIM = {victim.name!r}\n{_PROBE}"}),
                isolation.layers,
                limits,
                bwrap=isolation.bwrap,
                stdout=pipe,
                stderr=pipe,
            ) as started,
        ):
            out, err = started.process.stdout, started.process.stderr
            assert out is not None, "stdout is a pipe"
            assert err is not None, "stderr is a pipe"
            sizes = {started.status: MAX_STATUS_BYTES, out.fileno(): limits.output, err.fileno(): limits.output}
            content, _ = read_all(sizes, time.monotonic() + limits.seconds)
            errors = content[err.fileno()].decode(errors="replace").strip()[-300:]
            if not content[started.status]:
                return errors or "the interpreter did not start"
            started.check_status(content[started.status])
            output = content[out.fileno()].decode(errors="replace")
            return None if output == "done" else output.strip() or errors or "the probe ended without output"
    except (SandboxError, OSError) as error:
        return str(error)


def _visible_folder() -> str | None:
    """A folder that no kind of isolation hides behind its own /tmp, so that a file in it can be attacked."""
    return "/var/tmp" if os.access("/var/tmp", os.W_OK) else None  # noqa: S108 - it names the file itself


def require_isolation(allow_unsandboxed: bool = False, found: Isolation | None = None) -> Isolation:
    """`found`, or what is `available`; raises a ValueError if there is none, unless `allow_unsandboxed`."""
    isolation = found or available()
    if sys.platform != "linux":
        raise ValueError(isolation.missing["all"])
    if isolation.kind == "none" and not allow_unsandboxed:
        reasons = "; ".join(f"{kind}: {reason}" for kind, reason in isolation.missing.items())
        raise ValueError(
            f"programs that a model wrote cannot be isolated here ({reasons}). Install bubblewrap, or allow user "
            "namespaces or Landlock; reward.allow_unsandboxed: true runs them with resource limits only: they can then "
            "read, write and send whatever this user can"
        )
    if isolation.kind == "none":
        _warn_unsandboxed()
    return isolation


@cache
def _warn_unsandboxed() -> None:
    """Once per process."""
    logger.warning(
        "reward.allow_unsandboxed: programs that the model writes run without isolation; they can read, write and send "
        "whatever this user can"
    )
