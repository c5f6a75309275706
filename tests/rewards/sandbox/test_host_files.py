"""A program changes nothing of the machine's files, also on kernels whose Landlock does not check every change."""

import os
import tempfile
from pathlib import Path

import pytest

from oxrl.rewards.sandbox import Isolation, process, syscalls
from oxrl.rewards.sandbox.isolation import probe_isolation
from tests.rewards.sandbox.programs import refused


@pytest.fixture
def victim():
    """A file that its owner may change, in a folder that is not hidden behind a program's own /tmp."""
    with tempfile.NamedTemporaryFile(dir="/var/tmp") as file:
        path = Path(file.name)
        path.write_text("precious")
        os.utime(path, (1, 1))
        yield path


@pytest.fixture(params=[2, 6])
def landlock(request, monkeypatch):
    """Use this version of Landlock: 2 (kernels 5.19 to 6.1) does not check truncation."""
    limit_landlock(request.param, monkeypatch)


def limit_landlock(version, monkeypatch):
    source = process.module_source
    bootstrap = source("bootstrap").replace("_NEWEST_LANDLOCK = 6", f"_NEWEST_LANDLOCK = {version}")
    monkeypatch.setattr(process, "module_source", lambda name: bootstrap if name == "bootstrap" else source(name))


def test_no_file_is_emptied_or_dated(isolation, landlock, victim, monkeypatch):
    readable = process.readable_paths()
    monkeypatch.setattr(process, "readable_paths", lambda: [*readable, str(victim)])
    refused(
        f"""os.truncate({str(victim)!r}, 0)
os.open({str(victim)!r}, os.O_TRUNC)
os.open({str(victim)!r}, os.O_TRUNC | 3)
open({str(victim)!r}, "w")
os.utime({str(victim)!r}, (2, 2))
os.utime(os.open({str(victim)!r}, os.O_RDONLY), (2, 2))
os.utime(os.__file__)
os.truncate(os.__file__, os.stat(os.__file__).st_size)""",
        isolation,
    )
    assert victim.read_text() == "precious" and victim.stat().st_mtime == 1
    assert probe_isolation(isolation) is None


def test_missing_isolation_is_noticed():
    problem = probe_isolation(Isolation("none", {}))
    assert "not isolated: truncates_a_file" in problem and "not isolated: changes_times" in problem


@pytest.mark.parametrize("call", [syscalls._Call(76, 45), syscalls._Call(280, 88)], ids=["truncate", "utimensat"])
def test_isolation_that_lets_a_program_change_files_is_not_used(call, monkeypatch):
    monkeypatch.setitem(syscalls.ALLOWED, "allowed by mistake", call)
    limit_landlock(2, monkeypatch)
    assert "not isolated" in probe_isolation(Isolation("landlock", {}))
