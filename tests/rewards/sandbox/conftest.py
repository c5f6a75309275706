"""Each kind of isolation that works here, one after the other."""

import functools
import shutil
import sys

import pytest

from oxrl.rewards.sandbox import Isolation
from oxrl.rewards.sandbox.isolation import probe_isolation


@pytest.fixture(params=["bubblewrap", "namespaces", "landlock"])
def isolation(request):
    if sys.platform != "linux":
        pytest.skip("programs are isolated on Linux only")
    isolation = Isolation(request.param, {}, shutil.which("bwrap") if request.param == "bubblewrap" else None)
    if problem := problem_with(isolation.kind, isolation.bwrap):
        pytest.skip(f"{isolation.kind}: {problem}")
    return isolation


@functools.cache
def problem_with(kind, bwrap):
    if kind == "bubblewrap" and bwrap is None:
        return "bwrap is not installed"
    return probe_isolation(Isolation(kind, {}, bwrap))
