"""A process group that is ended leaves no shared memory behind; ports for servers stay free until they listen."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from oxrl.machine.processes import free_ports, kill_group
from tests.waiting import wait_until

CHILD = """
import sys
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1 << 12)
print(memory.name, flush=True)
sys.stdin.read()
"""


def test_the_process_that_removes_shared_memory_outlives_the_others_of_its_group():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    child = subprocess.Popen([sys.executable, "-c", CHILD], **pipes, start_new_session=True)
    memory = Path("/dev/shm") / child.stdout.readline().decode().strip()
    assert memory.exists()
    wait_until(lambda: trackers_of(child.pid), "the process that removes it runs", child)
    kill_group(child.pid)
    child.communicate()
    wait_until(lambda: not memory.exists(), "the shared memory was removed")


def trackers_of(pid: int) -> bool:
    """Return whether a child of it already runs the resource tracker."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(b"resource_tracker" in Path(f"/proc/{each}/cmdline").read_bytes() for each in children)


def test_ports_for_servers_are_distinct_and_below_the_default_ephemeral_range():
    ports = free_ports(500)
    assert len(set(ports)) == 500
    assert max(ports) < 32_768


def test_a_port_that_is_in_use_is_not_free(monkeypatch):
    (taken,) = free_ports(1)
    monkeypatch.setattr("oxrl.machine.processes.SERVER_PORTS", [taken])
    assert free_ports(1) == [taken]
    with socket.socket() as server:
        server.bind(("127.0.0.1", taken))
        server.listen()
        with pytest.raises(OSError, match="fewer than 1 ports are free"):
            free_ports(1)
