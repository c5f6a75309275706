"""Which walls can be had on this machine: each kind is really tried once, with a program that pushes against them."""

from __future__ import annotations

import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import cache
from typing import Literal, NamedTuple

from oxrl.rewards.sandbox.process import LONGEST_STATUS, Job, Limits, SandboxError, caged, gather
from oxrl.rewards.sandbox.syscalls import MACHINES

Kind = Literal["bubblewrap", "namespaces", "landlock", "none"]
_LAYERS: Mapping[Kind, tuple[str, ...]] = {
    "bubblewrap": ("mounts", "seccomp"),
    "namespaces": ("namespaces", "landlock", "seccomp"),
    "landlock": ("landlock", "seccomp"),
    "none": (),
}
_EXPLANATIONS: Mapping[Kind, str] = {
    "bubblewrap": "bubblewrap (namespaces and mounts of its own) and a seccomp filter",
    "namespaces": "user, network, ipc, uts and mount namespaces, Landlock and a seccomp filter",
    "landlock": "Landlock and a seccomp filter, without namespaces: programs have no scratch folder",
    "none": "none: only limits on resources",
}


class Isolation(NamedTuple):
    """`Isolation("namespaces", {"bubblewrap": "bwrap is not installed"})`: the best that works here.

    `missing` says of the better ones why they do not work.
    """

    kind: Kind
    missing: Mapping[str, str]
    bwrap: str | None = None

    @property
    def layers(self) -> tuple[str, ...]:
        return _LAYERS[self.kind]

    @property
    def explanation(self) -> str:
        return _EXPLANATIONS[self.kind]


_TRIAL = """
import decimal, json, os, random, socket
def refused(action):
    try:
        action()
    except OSError:
        return
    print("a wall is missing:", action.__name__)
def reads_a_file(): open("/etc/passwd").close()
def writes_a_file():
    name = "/var/tmp/oxrl-sandbox-%d" % os.getpid()
    open(name, "x").close()
    os.unlink(name)
def forks(): os.fork() or os._exit(0)
def opens_a_socket(): socket.socket()
def signals(): os.kill(os.getppid(), 0)
for action in (reads_a_file, writes_a_file, forks, opens_a_socket, signals):
    refused(action)
print("done", end="")
"""


@cache
def available() -> Isolation:
    """The best kind of isolation that works here; tried once, which takes a fraction of a second."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        where = f"{sys.platform} on {platform.machine()}"
        return Isolation(
            "none", {"all": f"programs are isolated on Linux ({', '.join(MACHINES)}) only, not on {where}"}
        )
    missing: dict[str, str] = {}
    bwrap = shutil.which("bwrap")
    kinds: tuple[Kind, ...] = ("bubblewrap", "namespaces", "landlock")
    for kind in kinds:
        if kind == "bubblewrap" and bwrap is None:
            missing[kind] = "bwrap is not installed"
            continue
        candidate = Isolation(kind, dict(missing), bwrap if kind == "bubblewrap" else None)
        problem = try_isolation(candidate)
        if problem is None:
            return candidate
        missing[kind] = problem
    return Isolation("none", missing)


def try_isolation(isolation: Isolation) -> str | None:
    """What is wrong with it here, or None."""
    limits = Limits(seconds=10.0)
    pipe = subprocess.PIPE
    try:
        with caged(
            Job({"source": _TRIAL}), isolation.layers, limits, bwrap=isolation.bwrap, stdout=pipe, stderr=pipe
        ) as started:
            out, err = started.process.stdout, started.process.stderr
            assert out is not None, "it was asked for"
            assert err is not None, "it was asked for"
            wanted = {started.status: LONGEST_STATUS, out.fileno(): limits.output, err.fileno(): limits.output}
            said, _ = gather(wanted, time.monotonic() + limits.seconds)
            complaint = said[err.fileno()].decode(errors="replace").strip()[-300:]
            if not said[started.status]:
                return complaint or "it did not start"
            started.confirm(said[started.status])
            told = said[out.fileno()].decode(errors="replace")
            return None if told == "done" else told.strip() or complaint or "it ended without a word"
    except (SandboxError, OSError) as error:
        return str(error)


def isolation_or_refusal(allow_unsandboxed: bool = False, found: Isolation | None = None) -> Isolation:
    """What was `found`, else what is `available`; without any isolation a ValueError, unless that is allowed."""
    isolation = found or available()
    if sys.platform != "linux":
        raise ValueError(isolation.missing["all"])
    if isolation.kind == "none" and not allow_unsandboxed:
        reasons = "; ".join(f"{kind}: {why}" for kind, why in isolation.missing.items())
        raise ValueError(
            f"programs that a model wrote cannot be isolated here ({reasons}). Install bubblewrap, or allow user "
            "namespaces or Landlock; reward.allow_unsandboxed: true runs them all the same, with limits on resources "
            "only: they can then read, write and send whatever this user can"
        )
    return isolation
