"""A test run leaves nothing behind, however it ends; long tests come first."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.leftovers import VARIABLE
from tests.scheduling import ordered
from tests.waiting import HANG, wait_until

RUN = """
import json, os, subprocess, sys, tempfile
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from tests import leftovers

watch = leftovers.Watch(grace=0.0)
child = '''
import os, signal, sys
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=4096)
resource_tracker.unregister(memory._name, "shared_memory")  # a leak that nothing else cleans up
print(memory.name, flush=True)
signal.pause()
'''
left = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True, start_new_session=True)
memory = left.stdout.readline().strip()
facts = {"child": left.pid, "memory": f"/dev/shm/{memory}", "folder": tempfile.mkdtemp()}
print(json.dumps(facts), flush=True)
if sys.stdin.readline():
    print(json.dumps(watch.end()), flush=True)
"""


@pytest.fixture
def run():
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "TMPDIR")}
    process = subprocess.Popen(
        [sys.executable, "-c", RUN], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    )
    yield process, json.loads(process.stdout.readline())
    process.kill()
    process.communicate(timeout=HANG)


def alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.engine
def test_what_is_left_at_the_end_of_a_run_is_named_and_removed(run):
    process, facts = run
    process.stdin.write("end\n")
    process.stdin.flush()
    left = json.loads(process.stdout.readline())
    assert any(line.startswith(f"process {facts['child']}: ") for line in left)
    assert f"shared memory {facts['memory']}" in left
    assert not alive(facts["child"]) and not Path(facts["memory"]).exists() and not Path(facts["folder"]).exists()


@pytest.mark.engine
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_that_is_interrupted_leaves_nothing(run, sign):
    process, facts = run
    process.send_signal(sign)
    process.wait(HANG)
    wait_until(lambda: not alive(facts["child"]), "the end of what the run started")
    wait_until(lambda: not Path(facts["memory"]).exists(), "the end of its shared memory")
    wait_until(lambda: not Path(facts["folder"]).parent.exists(), "the end of its temporary files")


INTERRUPTED = """
from pathlib import Path
from tests.scheduling import SHARED

def test_that_is_interrupted():
    SHARED.callback(Path(__file__).with_name("ended").touch)
    raise KeyboardInterrupt

def test_that_would_use_the_same_engine():
    pass
"""


@pytest.mark.engine
def test_engines_end_with_a_run_that_is_interrupted(tmp_path):
    (tmp_path / "conftest.py").write_text("from tests.conftest import *")
    (tmp_path / "test_interrupted.py").write_text(INTERRUPTED)
    environment = {name: value for name, value in os.environ.items() if name not in (VARIABLE, "TMPDIR")}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == pytest.ExitCode.INTERRUPTED, done.stdout + done.stderr
    assert (tmp_path / "ended").exists()


def test_long_units_come_first_and_a_seed_gives_another_order():
    units = ["tests/a.py", "ranks", "tests/b.py", "vllm-server"]
    assert ordered(units, None) == ["ranks", "vllm-server", "tests/a.py", "tests/b.py"]
    assert ordered(units, "1") == ordered(units, "1") and sorted(ordered(units, "1")) == sorted(units)
    assert len({tuple(ordered(units, str(seed))) for seed in range(9)}) > 3
