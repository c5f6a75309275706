"""A process group that is ended leaves no shared memory behind."""

import subprocess
import sys
from pathlib import Path

from oxrl.processes import kill_group
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
    """Whether a child of it runs the code that removes shared memory, and not yet its parent's."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return any(b"resource_tracker" in Path(f"/proc/{each}/cmdline").read_bytes() for each in children)
