"""Runs inside the fresh interpreter: applies the isolation layers, then runs the job.

It is started as `python -c SOURCE JOB STATUS` with two file descriptors: one to read the job from, one to write "ready"
or an error to before untrusted code runs. Only the standard library is available. Nothing in this process is secret:
the program may read all of it.
"""

from __future__ import annotations

import _queue
import _thread
import contextvars
import ctypes
import json
import marshal
import os
import resource
import sys
import types

TYPE_CHECKING = False  # `typing` costs more to import than all the rest
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

_NEW_NAMESPACES = 0x00020000 | 0x04000000 | 0x08000000 | 0x10000000 | 0x40000000  # mounts, uts, ipc, user, net
_RECURSIVE_PRIVATE = 0x4000 | 0x40000
_NO_SUID_DEV_EXEC = 0x2 | 0x4 | 0x8
_SET_PDEATHSIG, _SET_DUMPABLE, _SET_NO_NEW_PRIVS = 1, 4, 38
_SECCOMP, _SET_FILTER, _OF_ALL_THREADS = {"x86_64": 317, "aarch64": 277}, 1, 1
_STACK_BYTES = 1 << 20  # of a thread other than the first
_MOUNT_SETATTR, _CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 442, 444, 445, 446
_THIS_FOLDER, _AND_ALL_BELOW, _READ_ONLY = -100, 0x8000, 0x1
_NEWEST_LANDLOCK = 6  # the version of its interface that is used here
_ACCESS_BY_VERSION = {1: 0x1FFF, 2: 0x3FFF, 3: 0x7FFF, 4: 0x7FFF, 5: 0xFFFF}
_READ_FILE, _READ_DIR, _WRITE_FILE, _TRUNCATE = 0x4, 0x8, 0x2, 0x4000
_REMOVE_AND_MAKE = 0x10 | 0x20 | 0x80 | 0x100  # folders and plain files
SCRATCH = "/tmp"  # noqa: S108 - a new mount for each program

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


def enter_namespaces(scratch_bytes: int) -> None:
    """Enter new user, network, ipc, uts and mount namespaces: read-only, with an empty /tmp of `scratch_bytes`."""
    uid, gid = os.geteuid(), os.getegid()
    _check(_libc.unshare(_NEW_NAMESPACES), "unshare")
    for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        descriptor = os.open(f"/proc/self/{name}", os.O_WRONLY)
        os.write(descriptor, text.encode())
        os.close(descriptor)
    _check(_libc.mount(b"none", b"/", None, _RECURSIVE_PRIVATE, None), "mount /")
    attributes = _READ_ONLY.to_bytes(8, sys.byteorder) + bytes(24)
    _check(_libc.syscall(_MOUNT_SETATTR, _THIS_FOLDER, b"/", _AND_ALL_BELOW, attributes, 32), "read-only mounts")
    options = f"size={scratch_bytes},nr_inodes=1000,mode=0700".encode()
    _check(_libc.mount(b"tmpfs", SCRATCH.encode(), b"tmpfs", _NO_SUID_DEV_EXEC, options), "mount scratch")


def restrict_files(readable: list[str], writable: list[str]) -> None:
    """Landlock: allow only these paths; newer kernels also block TCP and signals to other processes."""
    version = min(_check(_libc.syscall(_CREATE_RULESET, None, 0, 1), "landlock"), _NEWEST_LANDLOCK)
    handled = _ACCESS_BY_VERSION[min(version, 5)]
    fields = [handled, 0x3, 0x3][: 1 if version < 4 else 2 if version < 6 else 3]
    attributes = b"".join(field.to_bytes(8, sys.byteorder) for field in fields)
    ruleset = _check(_libc.syscall(_CREATE_RULESET, attributes, len(attributes), 0), "landlock ruleset")
    for path in readable:
        _allow(ruleset, path, _READ_FILE | _READ_DIR)
    write = (_READ_FILE | _WRITE_FILE | _TRUNCATE) & handled
    _allow(ruleset, "/dev/null", write)
    for path in writable:
        _allow(ruleset, path, write | _READ_DIR | _REMOVE_AND_MAKE)
    _check(_libc.syscall(_RESTRICT_SELF, ruleset, 0), "landlock restrict")
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):  # noqa: PTH112 - pathlib costs milliseconds here
        access &= ~_READ_DIR
    rule = access.to_bytes(8, sys.byteorder) + descriptor.to_bytes(4, sys.byteorder)
    _check(_libc.syscall(_ADD_RULE, ruleset, 1, rule, 0), f"landlock rule for {path}")
    os.close(descriptor)


def drop_capabilities() -> None:
    """Root keeps its user id but no privileges."""
    version_3_of_self = (0x20080522).to_bytes(4, sys.byteorder) + bytes(4)
    _check(_libc.capset(version_3_of_self, bytes(24)), "capset")


def limit_resources(limits: Mapping[str, int]) -> None:
    is_init = os.getpid() == 1  # of its namespace: the kernel drops unhandled signals to it, except SIGKILL
    for name, limit in {"CORE": 0, "NPROC": 0, "MEMLOCK": 0, "MSGQUEUE": 0, **limits}.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        maximum = limit + 1 if name == "CPU" and not is_init else limit  # SIGXCPU, which names the cause, first
        maximum = maximum if hard == resource.RLIM_INFINITY else min(maximum, hard)
        resource.setrlimit(kind, (min(limit, maximum), maximum))


def start_threads(count: int) -> None:
    """Start all threads that the program may use, while that is possible: the filter refuses it.

    `threading` then hands its functions to them. If all are busy, a function waits for one.
    """
    functions: Any = _queue.SimpleQueue()
    ends: dict[int, Any] = {}  # locks that `Thread.join` waits for, by thread
    state = ctypes.pythonapi.PyThreadState_GetDict
    state.restype = ctypes.c_void_p  # borrowed

    def work() -> None:
        while True:
            function, arguments, keywords = functions.get()
            try:  # noqa: SIM105 - contextlib is slow to import
                contextvars.Context().run(function, *arguments, **keywords)
            except BaseException:  # noqa: BLE001, S110 - `threading` has reported it
                pass
            ctypes.cast(state(), ctypes.py_object).value.clear()  # values of `threading.local`
            if (end := ends.pop(_thread.get_ident(), None)) is not None and end.locked():
                end.release()

    def start_new_thread(function: Any, arguments: Any, keywords: Mapping[str, Any] = {}) -> int:
        functions.put((function, arguments, keywords))
        return 0

    def set_sentinel() -> Any:
        end = ends[_thread.get_ident()] = _thread.allocate_lock()
        return end

    _thread.stack_size(_STACK_BYTES)
    for _ in range(count):
        _thread.start_new_thread(work, ())
    vars(_thread).update(start_new_thread=start_new_thread, start_new=start_new_thread, _set_sentinel=set_sentinel)


def filter_syscalls(program: bytes) -> None:
    """Refuse all other system calls, in every thread."""

    class Filter(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_char_p))

    loaded = Filter(len(program) // 8, program)
    number = _SECCOMP[os.uname().machine]
    if _check(_libc.syscall(number, _SET_FILTER, _OF_ALL_THREADS, ctypes.byref(loaded)), "seccomp"):
        raise OSError("seccomp: a thread could not be filtered")


def forbid_new_privileges() -> None:
    """No setuid program; without it an unprivileged process may restrict nothing."""
    _check(_libc.prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no new privileges")


def isolate(job: Mapping[str, Any]) -> None:
    """Apply every isolation layer of the job; raises an OSError if one fails."""
    layers = job["layers"]
    forbid_new_privileges()
    if "namespaces" in layers:
        enter_namespaces(job["scratch"])
    has_scratch = "namespaces" in layers or "mounts" in layers
    if has_scratch:
        os.chdir(SCRATCH)
    if "landlock" in layers:
        restrict_files(job["readable"], [SCRATCH] if has_scratch else [])
    drop_capabilities()
    _check(_libc.prctl(_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")
    _check(_libc.prctl(_SET_PDEATHSIG, 9, 0, 0, 0), "parent death signal")
    if "mounts" not in layers and os.getppid() != job["parent"]:
        raise OSError("the parent process has exited")
    start_threads(job["threads"])
    limit_resources(job["limits"])
    if "seccomp" in layers:
        filter_syscalls(bytes.fromhex(job["filter"]))


class PackageFinder:
    """Imports the packages that a program may use, from folders whose surroundings cannot be read."""

    def __init__(self, folders: Mapping[str, str]):
        self.folders = folders

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002 - a protocol
        if name not in self.folders:
            return None
        from importlib.util import spec_from_file_location

        os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
        folder = self.folders[name]
        return spec_from_file_location(name, f"{folder}/__init__.py", submodule_search_locations=[folder])


def read_all(descriptor: int) -> bytes:
    with os.fdopen(descriptor, "rb") as file:
        return file.read()


def main(job_descriptor: int, status: int) -> None:
    job = json.loads(read_all(job_descriptor))
    try:
        isolate(job)
    except OSError as error:
        os.write(status, str(error).encode())
        os._exit(1)
    os.environ.clear()
    sys.meta_path.append(PackageFinder(job["packages"]))
    os.write(status, b"ready")
    os.close(status)
    for name, code in job["modules"].items():
        module = sys.modules[name] = types.ModuleType(name)
        exec(marshal.loads(bytes.fromhex(code)), module.__dict__)  # noqa: S102, S302 - compiled by the parent process
    if job["entry_point"]:
        module, function = job["entry_point"]
        getattr(sys.modules[module], function)(**job["arguments"])
    else:
        program = sys.modules["__main__"] = types.ModuleType("__main__")
        sys.argv[:] = ["program"]
        exec(compile(job["arguments"]["source"], "<program>", "exec", dont_inherit=True), vars(program))  # noqa: S102


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
