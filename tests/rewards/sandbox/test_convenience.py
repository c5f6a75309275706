"""Threads, asyncio, numpy and pickle work in a sandboxed program, and give it no way out."""

from pathlib import Path

import pytest

from oxrl.rewards.sandbox import Limits
from oxrl.rewards.sandbox.process import packages_of_programs
from tests.rewards.sandbox.programs import refused, run_program
from tests.waiting import HANG

PATIENT = Limits(seconds=HANG)


def test_every_thread_is_isolated(isolation):
    source = """import os, socket, subprocess, threading
def attempt(action):
    try: print(action.__name__, action())
    except OSError: pass
def reads(): return open("/etc/passwd").read(1)
def writes(): return open("/var/tmp/oxrl-was-here", "w")
def forks(): return os.fork()
def starts(): return subprocess.run(["/bin/true"])
def connects(): return socket.socket()
def signals(): return os.kill(os.getppid(), 0)
def raises_limits(): return os.setpriority(os.PRIO_PROCESS, 0, -1)
for action in (reads, writes, forks, starts, connects, signals, raises_limits):
    thread = threading.Thread(target=attempt, args=(action,))
    thread.start()
    thread.join()
print("end")"""
    assert run_program(source, isolation, PATIENT).stdout == "end\n"


def test_a_pair_of_sockets_reaches_nothing_else(isolation):
    source = """import socket
one, other = socket.socketpair()
one.send(b"x")
print(other.recv(1))"""
    assert run_program(source, isolation, PATIENT).stdout == "b'x'\n"
    pair = "pair = socket.socketpair()[0]; "
    refused(
        f"""socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
socket.socketpair(30, socket.SOCK_STREAM)
{pair}pair.send(b"x", socket.MSG_OOB)
{pair}pair.recv(1, socket.MSG_DONTWAIT | socket.MSG_OOB)
{pair}pair.sendto(b"x", b"\\0oxrl")
{pair}pair.bind(b"\\0oxrl")
{pair}pair.listen()
{pair}pair.connect(b"\\0oxrl")
{pair}pair.sendmsg([b"x"])
{pair}pair.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)""",
        isolation,
    )


@pytest.mark.skipif("numpy" not in packages_of_programs(), reason="numpy is not installed, or below /tmp")
def test_numpy_reaches_no_file(isolation, tmp_path):
    secret = tmp_path / "secret.npy"
    secret.write_bytes(b"42")
    refused(
        f"""import numpy; numpy.load({str(secret)!r}, allow_pickle=True)
import numpy; numpy.fromfile({str(secret)!r})
import numpy; numpy.memmap({str(secret)!r})
import numpy; numpy.save({str(secret)!r}, [1])""",
        isolation,
    )
    assert secret.read_bytes() == b"42"


def test_asyncio_and_pickle_reach_no_file_or_process(isolation):
    refused(
        """import asyncio; asyncio.run(asyncio.create_subprocess_exec("/bin/true"))
import asyncio; asyncio.run(asyncio.open_connection("127.0.0.1", 1))
import pickle; pickle.loads(b"cbuiltins\\nopen\\n(S'/etc/passwd'\\ntR.")
import multiprocessing; multiprocessing.Process(target=print).start()""",
        isolation,
    )
    assert not Path("/var/tmp/oxrl-was-here").exists()
