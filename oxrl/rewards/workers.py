"""Computations that Python cannot interrupt, in warm processes that can be killed.

sympy and regular expressions may run for years inside of one call into C, which holds the interpreter: no other thread
of the process runs meanwhile. On a model's text such calls are made by `worker.py`, in a process without the
environment variables and open files of this one; it is killed when the time of the reward is over. It can open no
sockets and start nothing, and reads files of packages only, where the kernel has seccomp and Landlock. Processes start
when first needed, are reused, and end with this one, however that ends.
"""

from __future__ import annotations

import atexit
import json
import os
import pickle
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from oxrl.rewards.allowance import Allowance, current_allowance

_MAX_WORKERS = min(16, max(2, os.cpu_count() or 1))
_MAX_CALLS = 1_000  # of one process: the caches of the parsers grow
_START_SECONDS = 120.0  # to import a library on a busy machine
_MAX_WAIT = 86_400.0  # poll takes no infinity


class _Worker:
    """A process that computes one function."""

    def __init__(self, function: str) -> None:
        self.function, self.busy = function, False
        path = os.pathsep.join(str(Path(entry).absolute()) for entry in sys.path if entry)
        self.calls = 0
        self._unread = b""
        ends, kept = os.pipe()  # nothing is written to it: the kernel closes it when this process ends
        self._kept = os.fdopen(kept, "wb")
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-s", "-S", "-B", str(Path(__file__).with_name("worker.py")), str(ends)],
            pass_fds=(ends,),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PYTHONPATH": path, "PYTHONHASHSEED": "0"},  # the iteration order of sets is always the same
            cwd="/",
            start_new_session=True,  # Ctrl-C is for this process
        )
        os.close(ends)

    def send(self, args: tuple[Any, ...]) -> dict[str, Any]:
        """Send a call; the reply comes when the process has imported what it needs."""
        assert self.process.stdin is not None, "stdin is a pipe"
        self.calls += 1
        request = pickle.dumps((self.function, args))
        try:
            self.process.stdin.write(len(request).to_bytes(8, "big") + request)
            self.process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        return self.reply(_START_SECONDS)

    def reply(self, seconds: float) -> dict[str, Any]:
        """The next reply; TimeoutError if there is none in time, EOFError if the process has ended."""
        assert self.process.stdout is not None, "stdout is a pipe"
        deadline = time.monotonic() + min(seconds, _MAX_WAIT)
        descriptor, poll = self.process.stdout.fileno(), select.poll()
        poll.register(descriptor, select.POLLIN)
        while b"\n" not in self._unread:
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise TimeoutError
            part = os.read(descriptor, 1 << 16)
            if not part:
                raise EOFError
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        reply: dict[str, Any] = json.loads(line)
        return reply

    def kill(self) -> int:
        """Its exit status."""
        self.process.kill()
        self.close_pipes()
        return self.process.wait()

    def close_pipes(self) -> None:
        for stream in (self.process.stdin, self.process.stdout, self._kept):
            assert stream is not None, "all are pipes"
            with suppress(BrokenPipeError):  # a request that was not sent
                stream.close()


class WorkerPool:
    """At most `size` processes; the time that a call waits for one is not taken from its reward."""

    def __init__(self, size: int = _MAX_WORKERS) -> None:
        self.size = size
        self.forget()

    def forget(self) -> None:
        """Leave the processes to the process that forked this one."""
        for worker in getattr(self, "_workers", ()):
            worker.close_pipes()
        self._slots, self._lock = threading.BoundedSemaphore(self.size), threading.Lock()
        self._workers: set[_Worker] = set()

    def call(self, function: str, *args: Any) -> Any:
        """The value of a function of `worker.py`; a TimeoutError when the time of the reward is over."""
        allowance = current_allowance()
        with self._worker(function, allowance) as worker:
            try:
                with allowance.stopped():
                    reply = worker.send(args)
                if "error" not in reply:
                    reply = worker.reply(allowance.left)
            except TimeoutError:
                raise TimeoutError(f"no result within {allowance.seconds:g} s") from None
            except EOFError:
                raise RuntimeError(f"the process that computes it ended with status {worker.kill()}") from None
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply["value"]

    @contextmanager
    def _worker(self, function: str, allowance: Allowance) -> Iterator[_Worker]:
        """A process for one call; it is killed if the call fails, and kept for the next one otherwise."""
        with allowance.stopped():
            self._slots.acquire()
        try:
            worker = self._take(function)
            keep = False
            try:
                yield worker
                keep = worker.calls < _MAX_CALLS
            finally:
                with self._lock:
                    worker.busy = not keep
                    self._workers -= set() if keep else {worker}
                if not keep:
                    worker.kill()
        finally:
            self._slots.release()

    def _take(self, function: str) -> _Worker:
        with self._lock:
            self._workers = {each for each in self._workers if each.busy or each.process.poll() is None}
            idle = (each for each in self._workers if each.function == function and not each.busy)
            worker = next(idle, None) or _Worker(function)
            worker.busy = True
            self._workers.add(worker)
            return worker

    def close(self) -> None:
        with self._lock:
            for worker in self._workers:
                worker.kill()
            self._workers = set()


WORKERS = WorkerPool()
atexit.register(WORKERS.close)
os.register_at_fork(after_in_child=WORKERS.forget)
