"""Run one command as several ranks, watch them, and restart a run that lost one.

Rank 0 runs the loop and the others serve it (`backends.distributed.ranks`), so rank 0's exit code is that of the run.
When a rank is killed or hangs, all are ended and the command runs again as with `--resume`, up to `max_restarts` times.
Ranks end with the process that started them, however it ended. Ranks that `torchrun` starts work the same way.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NamedTuple, NoReturn

from oxrl.machine.processes import LOOPBACK_INTERFACE, RENDEZVOUS_FILE, end_with_parent, free_ports

if TYPE_CHECKING:
    from oxrl.backends.distributed.ranks import Ranks
    from oxrl.config import Config

logger = logging.getLogger(__name__)

STARTED_BY_US = "OXRL_RANK_OF"
RESTARTED = "OXRL_RESTARTED"
END_SECONDS = 20.0  # that ranks have to end after the first of them did
POLL_SECONDS = 0.1
ORDERLY = (0, 2, 130)  # exit codes: finished, wrong input, interrupted


class Ended(NamedTuple):
    """How the ranks of one attempt ended: rank 0's exit code, and the ranks that were lost (killed, or hanging)."""

    code: int
    lost: tuple[str, ...]


OXRL = (sys.executable, "-m", "oxrl")


def run_ranks(arguments: Sequence[str], ranks: int, *, max_restarts: int, program: Sequence[str] = OXRL) -> int:
    """`run_ranks(["train", "config.yaml"], 2, max_restarts=3)`: the exit code of `oxrl train config.yaml`."""
    command = [*program, *arguments]
    ended = _attempt(command, ranks)
    for restart in range(1, max_restarts + 1):
        if not ended.lost:
            break
        logger.warning(
            "%s: resuming from the last checkpoint (restart %d of %d)", "; ".join(ended.lost), restart, max_restarts
        )
        ended = _attempt(command, ranks, **{RESTARTED: str(restart)})
    if ended.lost:
        logger.error("%s: giving up after %d restarts; the run can be resumed", "; ".join(ended.lost), max_restarts)
        return 1
    return ended.code


def restarted(stages: Mapping[str, Config], output: str | Path | None) -> bool:
    """Whether this process resumes a run that lost a rank after it had started."""
    if RESTARTED not in os.environ:
        return False
    from oxrl.run.folder import run_folder

    home = run_folder(next(iter(stages.values())), output)
    return any((home / name).exists() for name in ("config.yaml", "stages.yaml"))


def _attempt(command: Sequence[str], ranks: int, **more: str) -> Ended:
    with tempfile.TemporaryDirectory(prefix="oxrl-ranks-") as home:
        return _run(command, ranks, Path(home) / "rendezvous", more)


def _run(command: Sequence[str], ranks: int, rendezvous: Path, more: Mapping[str, str]) -> Ended:
    settings = {
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        # The rendezvous is a file and traffic stays on loopback: not reachable from outside.
        RENDEZVOUS_FILE: str(rendezvous),
        "GLOO_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        "NCCL_SOCKET_IFNAME": LOOPBACK_INTERFACE,
        # DeepSpeed requires them, and then uses the existing process group.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_ports(1)[0]),
        STARTED_BY_US: str(os.getpid()),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // ranks)),
        **more,
    }
    processes: list[subprocess.Popen[bytes]] = []
    try:
        with _signals_forwarded_to_first(processes) as received:
            for rank in range(ranks):
                environment = {**os.environ, **settings, "RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(
                    subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, start_new_session=True)
                )
            if received:  # perhaps before rank 0 existed; no rank has anything to save yet
                return Ended(128 + received[0], ())
            return _watch(processes, received)
    except KeyboardInterrupt:
        return Ended(130, ())
    finally:
        for process in processes:
            _end(process)


def _watch(processes: Sequence[subprocess.Popen[bytes]], received: Sequence[int]) -> Ended:
    """Wait until rank 0 has ended, or another rank was killed or has given up waiting for it.

    After a signal a run is not restarted: rank 0 may die of the signal before it can handle it.
    """
    first, others = processes[0], processes[1:]
    while first.poll() is None and all(other.poll() in (None, *ORDERLY) for other in others):
        time.sleep(POLL_SECONDS)
    deadline = time.monotonic() + (0 if received and _killed(first) else END_SECONDS)
    while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    if received:
        handled = first.returncode is not None and first.returncode >= 0
        return Ended(first.returncode if handled else 128 + received[0], ())
    lost = []
    if first.returncode not in ORDERLY:
        lost = [f"rank {rank} {how}" for rank, process in enumerate(processes) if (how := _loss(process))]
    return Ended(1 if first.returncode is None else first.returncode, tuple(lost))


def _killed(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is not None and process.returncode < 0


def _loss(process: subprocess.Popen[bytes]) -> str:
    if process.poll() is None:
        return f"hangs: it did not end within {END_SECONDS:g} s of the others"
    return f"was ended by {signal.Signals(-process.returncode).name}" if process.returncode < 0 else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin is not None:
        process.stdin.close()


@contextmanager
def _signals_forwarded_to_first(processes: Sequence[subprocess.Popen[bytes]]) -> Iterator[Sequence[int]]:
    """Forward SIGINT and SIGTERM to rank 0, which saves and ends the other ranks; a second signal kills them all.

    Yields the signals received so far. `processes` may be filled later.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():  # only the main thread can set handlers
        yield received
        return

    def forward(number: int, _: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)
        if processes:
            processes[0].send_signal(number)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


_JOINED: list[Ranks] = []


def join(*, time_limit: float) -> Ranks:
    """Join the other ranks, once per process. All but rank 0 serve here until the run is over, and exit."""
    from oxrl.backends.distributed.ranks import RankError, join_ranks

    if _JOINED:
        return _JOINED[0]
    if STARTED_BY_US in os.environ:
        end_with_parent(str(Path(os.environ[RENDEZVOUS_FILE]).parent))
    ranks = join_ranks(time_limit=time_limit)
    _JOINED.append(ranks)
    if ranks.rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 handles it
        try:
            ranks.serve()
        except RankError as lost:  # a rank that ended has its own message, one that hangs has none
            logger.log(logging.WARNING if "timed out" in str(lost).lower() else logging.DEBUG, "%s", lost)
            _leave(1)
        _leave(0)
    atexit.register(ranks.stop)
    return ranks


def join_others(*, time_limit: float = 600.0) -> None:
    """If this process is a rank that torchrun or `run_ranks` started, join the others; all but rank 0 exit in here."""
    if "RANK" in os.environ:
        join(time_limit=time_limit)


def leave(code: int) -> None:
    """Stop the other ranks at the end of rank 0, and exit: a process group without a member cannot shut down."""
    if _JOINED:
        _JOINED[0].stop()
        _leave(code)


def _leave(code: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
