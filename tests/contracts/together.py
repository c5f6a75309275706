"""Groups of ranks for tests: each test that is marked `engine("ranks")` runs in rank 0 of one group of two.

Its reports come back, so it has its name and its durations in the run that started it (`conftest`). A test that needs
a separate group starts one (`start_group`) and calls functions in its rank 0. Ranks are `forks`: a group starts in
less than a second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol

from oxrl.machine.processes import RENDEZVOUS_FILE, free_ports
from tests import forks
from tests.scheduling import SHARED
from tests.waiting import HANG

MARK = "ranks"
_SHARED: list[forks.Forked] = []  # two ranks that run one test after the other


# In the process of the test run


def settings(home: Path, ranks: int) -> dict[str, str]:
    """As `oxrl.run.launch` gives them to its ranks."""
    return {
        RENDEZVOUS_FILE: str(home / "rendezvous"),
        "WORLD_SIZE": str(ranks),
        "GLOO_SOCKET_IFNAME": "lo",
        "MASTER_ADDR": "127.0.0.1",  # required by DeepSpeed, and not used
        "MASTER_PORT": str(free_ports(1)[0]),
        "TORCH_EXTENSIONS_DIR": str(home / "extensions"),
    }


def start(config: pytest.Config, ranks: int, time_limit: float = HANG, files: Sequence[str] = ()) -> forks.Forked:
    """Start ranks; they are connected when this returns."""
    factory: pytest.TempPathFactory = config._tmp_path_factory  # type: ignore[attr-defined]
    home = factory.mktemp("ranks")
    mains = [(lead, (time_limit, home, files)), *((serve, (rank, time_limit)) for rank in range(1, ranks))]
    group = forks.server(config).start(mains, **settings(home, ranks))
    try:
        group.answer()
    except BaseException:
        group.kill()
        raise
    return group


@contextmanager
def group(config: pytest.Config, ranks: int, time_limit: float = HANG) -> Iterator[forks.Forked]:
    """A separate group; ranks that are left at the end are killed."""
    started = start(config, ranks, time_limit)
    try:
        yield started
    finally:
        if started.pids:
            started.kill()


def in_ranks(item: pytest.Item) -> bool:
    return any(MARK in mark.args for mark in item.iter_markers("engine"))


def reports_of(item: pytest.Item) -> list[pytest.TestReport]:
    """Run it in rank 0 of the shared group; the next test after a failure gets a new group."""
    files = {str(each.path) for each in item.session.items if in_ranks(each)}
    if not _SHARED:
        _SHARED.append(start(item.config, 2, files=sorted(files)))
        SHARED.callback(end_shared_group)
    group = _SHARED.pop()
    try:
        found = group.call(run_item, item.nodeid.removesuffix(f"@{MARK}"))
    except BaseException:
        group.kill()
        raise
    reports = [item.config.hook.pytest_report_from_serializable(config=item.config, data=data) for data in found]
    for report in reports:
        report.nodeid = item.nodeid
    if any(report.failed for report in reports):
        group.kill()
    else:
        _SHARED.append(group)
    return reports


def end_shared_group() -> None:
    while _SHARED:
        _SHARED.pop().end()


# In the ranks

RANKS: list[Any] = []  # of this process, once it has joined


def ranks() -> Any:
    if not RANKS:
        pytest.skip("needs several ranks: mark it engine('ranks')")
    return RANKS[0]


def join(rank: int, time_limit: float) -> Any:
    from oxrl.backends.distributed.ranks import join_ranks

    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    return join_ranks(time_limit=time_limit)


def serve(rank: int, time_limit: float) -> None:
    join(rank, time_limit).serve()


def lead(connection: Connection, time_limit: float, home: Path, files: Sequence[str]) -> None:
    RANKS.append(join(0, time_limit))
    if files:
        options = ["-p", "no:cacheprovider", f"--basetemp={home / 'tmp'}"]
        pytest.main([*files, *options], plugins=[RunsRequestedTests(connection)])
    else:
        connection.send((None, ""))
        forks.answer_calls(connection)
    RANKS[0].stop()


SESSION: list[pytest.Session] = []  # of rank 0 of the shared group


class RunsRequestedTests:
    """Runs tests on request instead of all that were collected."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        SESSION.append(session)
        self.connection.send((None, ""))
        forks.answer_calls(self.connection)
        return True


def run_item(nodeid: str) -> list[dict[str, Any]]:
    (item,) = [each for each in SESSION[0].items if each.nodeid == nodeid]
    hook = item.config.hook
    reports = runtestprotocol(item, nextitem=None, log=False)
    return [hook.pytest_report_to_serializable(config=item.config, report=report) for report in reports]
