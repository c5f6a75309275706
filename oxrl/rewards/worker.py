"""The process of `workers.py`: reads calls of one function, and writes two replies to each: ready, then the value.

It is run as a script and imports nothing of this package but the sandbox, so that it starts fast. It restricts itself
before the first call, since what it computes comes from a model; a reply is a line of JSON, in which the parent trusts
nothing. The kernel ends it with its parent, also during a call that holds the interpreter: a pipe that only the parent
keeps open raises SIGIO when it closes. Calls have a pipe of their own: SIGIO of what was written can come after it was
read.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import platform
import re
import resource
import select
import signal
import sys
from contextlib import suppress
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

_MAX_MEMORY = 2 << 30  # bytes of address space


def equal_by_algebra(gold: str, answer: str) -> bool:
    math_verify = import_module("math_verify")
    # No time limits of its own: they are Python's signal handlers, which a call into C delays.
    parsed = [math_verify.parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in (gold, answer)]
    return bool(math_verify.verify(*parsed, timeout_seconds=None))


def found_by_regex(pattern: str, flags: int, whole: bool, text: str) -> bool:
    compiled = re.compile(pattern, flags)
    return (compiled.fullmatch(text) if whole else compiled.search(text)) is not None


def gym_score(task: str, answer: str, entry: dict[str, Any]) -> float:
    return float(import_module("reasoning_gym").get_score_answer_fn(task)(answer, entry))


def warm_gym() -> None:
    import_module("reasoning_gym")


def warm_algebra() -> None:
    equal_by_algebra("x", "y")  # the first comparison builds the parser's tables


def nothing() -> None:
    pass


FUNCTIONS: Mapping[str, tuple[Callable[[], None], Callable[..., Any]]] = {
    "equal_by_algebra": (warm_algebra, equal_by_algebra),
    "gym_score": (warm_gym, gym_score),
    "found_by_regex": (nothing, found_by_regex),
}
"""Name -> preparation, which is done once and does not count as time of the call, and the function itself."""


def end_with_parent(pipe: int) -> None:
    """End when the other end of this pipe, to which nothing is written, is closed."""
    signal.signal(signal.SIGIO, signal.SIG_DFL)
    fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([pipe], [], [], 0)[0]:  # closed before it could raise a signal
        sys.exit()


def limit_resources() -> None:
    for kind, limit in ((resource.RLIMIT_AS, _MAX_MEMORY), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0)):
        hard = resource.getrlimit(kind)[1]
        resource.setrlimit(kind, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def confine() -> None:
    """Refuse sockets, programs, new processes, and files other than those of packages, as far as the kernel can.

    Some of reasoning-gym's scorers evaluate a model's answer as Python; sympy evaluates what its parser returns.
    """
    folder = Path(__file__).with_name("sandbox")
    bootstrap, syscalls = (import_file(folder / f"{name}.py") for name in ("bootstrap", "syscalls"))
    system = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", f"{sys.base_prefix}/lib", "/dev/urandom"]
    with suppress(OSError):
        bootstrap.forbid_new_privileges()
        bootstrap.restrict_files([path for path in (*sys.path, *system) if os.access(path, os.R_OK)], [])
    if platform.machine() in syscalls.MACHINES:
        with suppress(OSError):
            bootstrap.filter_syscalls(syscalls.seccomp_filter(platform.machine()))


def import_file(path: Path) -> Any:
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None, f"{path} ends with .py"
    assert spec.loader is not None, f"{path} ends with .py"
    module = sys.modules[path.stem] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def computed(function: str, args: tuple[Any, ...], prepared: set[str], ready: Callable[[], None]) -> dict[str, Any]:
    prepare, compute = FUNCTIONS[function]
    try:
        if function not in prepared:
            prepare()
            if sys.platform == "linux":
                confine()
            prepared.add(function)
        ready()
        return {"value": compute(*args)}
    except Exception as error:  # noqa: BLE001 - errors are data
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def main() -> None:
    limit_resources()
    end_with_parent(int(sys.argv[1]))
    calls, replies = os.fdopen(0, "rb", buffering=0), os.dup(1)
    os.dup2(2, 1)  # whatever a library prints
    prepared: set[str] = set()

    def read(size: int) -> bytes:
        content = b""
        while len(content) < size:
            if not (part := calls.read(size - len(content))):
                sys.exit()
            content += part
        return content

    def reply(content: dict[str, Any]) -> None:
        os.write(replies, json.dumps(content).encode() + b"\n")

    while True:
        function, args = pickle.loads(read(int.from_bytes(read(8), "big")))  # noqa: S301 - from the parent
        reply(computed(function, args, prepared, lambda: reply({})))


if __name__ == "__main__":
    main()
