"""Tests that are marked `engine("ranks")` run in rank 0 of a group of ranks, and report as if they ran here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial

import pytest

from tests import forks
from tests.contracts import together
from tests.scheduling import end_engines_after


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if not together.in_ranks(item):
        return None
    hook = item.ihook
    hook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    call = pytest.CallInfo.from_call(
        partial(together.reports_of, item), when="setup", reraise=(KeyboardInterrupt, pytest.exit.Exception)
    )
    if call.excinfo is None:
        reports = call.result
        reports[0].duration = call.duration - sum(each.duration for each in reports[1:])  # with the start of the group
    else:
        reports = [hook.pytest_runtest_makereport(item=item, call=call)]
    for report in reports:
        hook.pytest_runtest_logreport(report=report)
    hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    item.session._setupstate.teardown_exact(nextitem)  # what an earlier test, which ran here, shares with this one only
    end_engines_after(item, nextitem)
    return True


@pytest.fixture
def start_group(pytestconfig: pytest.Config) -> Iterator[Callable[..., forks.Forked]]:
    """`start_group(2)`: a separate group of ranks for a test; those still running at its end are killed."""
    with ExitStack() as started:
        yield lambda *arguments, **named: started.enter_context(together.group(pytestconfig, *arguments, **named))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "engine(name): the engine that a test runs on; with 'ranks' it runs in rank 0")
