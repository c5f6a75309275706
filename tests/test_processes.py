"""A process group that is ended leaves no shared memory behind."""

import subprocess
import sys
import time
from pathlib import Path

from oxrl.processes import kill_group

CHILD = """
import time
from multiprocessing.shared_memory import SharedMemory
memory = SharedMemory(create=True, size=1 << 12)
time.sleep(2)  # until whoever removes it has begun
print(memory.name, flush=True)
time.sleep(600)
"""


def test_whoever_removes_shared_memory_outlives_the_others_of_a_group():
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, start_new_session=True)
    memory = Path("/dev/shm") / child.stdout.readline().decode().strip()
    assert memory.exists()
    kill_group(child.pid)
    child.wait()
    deadline = time.monotonic() + 20
    while memory.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
