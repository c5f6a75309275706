"""A sandboxed program gets what it needs to run, and nothing else: files, network, processes, memory, time, output."""

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from oxrl.rewards import sandbox
from oxrl.rewards.sandbox import Isolation, Limits, SandboxError, available, require_isolation
from oxrl.rewards.sandbox.isolation import _warn_unsandboxed
from oxrl.rewards.sandbox.process import interpreter, readable_paths
from tests.rewards.sandbox import programs
from tests.rewards.sandbox.children import children
from tests.rewards.sandbox.programs import refused
from tests.waiting import EXPIRES, HANG, wait_until

PATIENT = Limits(seconds=HANG)
BY_CPU = Limits(seconds=HANG, cpu_seconds=1)
BY_CLOCK = Limits(seconds=2 * EXPIRES)  # the start of an interpreter takes a small part of it
SLEEPS = "import signal\nsignal.pause()"


def run_program(source, isolation, limits=PATIENT):
    return programs.run_program(source, isolation, limits)


def test_a_program_writes_to_both_outputs_and_its_stdin_is_empty(isolation):
    source = "import sys\nprint(sys.stdin.read() + 'ab')\nprint('careful', file=sys.stderr)\nsys.exit(3)"
    outcome = run_program(source, isolation)
    assert (outcome.ended, outcome.code, outcome.stdout, outcome.stderr) == ("exit", 3, "ab\n", "careful\n")


def test_the_standard_library_is_available_and_exceptions_are_reported(isolation):
    imports = "import collections, decimal, hashlib, heapq, itertools, math, re, statistics, typing"
    source = f"{imports}\nopen('/dev/null', 'w')\nraise KeyError('x')"
    outcome = run_program(source, isolation)
    assert outcome.code == 1 and "KeyError: 'x'" in outcome.stderr


def test_no_file_of_the_machine_can_be_read(isolation, tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("42")
    refused(
        f"""open("/etc/passwd")
open("/proc/self/environ")
open("/proc/1/cmdline")
open({str(secret)!r})
open({str(Path(sandbox.__file__).with_name("judge.py"))!r})""",
        isolation,
    )


def test_a_walk_from_the_root_or_home_finds_only_files_of_python(isolation):
    """bubblewrap shows empty folders on the path to the interpreter; without it they cannot be listed at all."""
    own = (*readable_paths(), interpreter(), "/dev")
    source = f"""import os
for top in ("/", {str(Path.home())!r}):
    for folder, folders, files in os.walk(top):
        folders[:] = [each for each in folders if not os.path.join(folder, each).startswith({own!r})]
        for file in files:
            path = os.path.join(folder, file)
            if not path.startswith({own!r}): print(path)"""
    outcome = run_program(source, isolation)
    assert (outcome.stdout, outcome.code) == ("", 0), outcome.stderr


def test_packages_of_a_virtual_environment_are_not_readable(isolation):
    if sys.prefix == sys.base_prefix:
        pytest.skip("this interpreter is not in a virtual environment")
    packages = sysconfig.get_paths()["purelib"]
    refused(f"open({pytest.__file__!r})", isolation)
    listing = f"import os\ntry: print('pytest' in os.listdir({packages!r}))\nexcept OSError: print('refused')"
    assert run_program(listing, isolation).stdout in ("refused\n", "False\n"), "bubblewrap shows the folder of numpy"


def test_nothing_can_be_written_outside_the_scratch_folder(isolation, tmp_path):
    victim = tmp_path / "victim.txt"
    victim.write_text("precious")
    refused(
        f"""open({str(victim)!r}, "w")
open({str(tmp_path / "new.txt")!r}, "w")
os.unlink({str(victim)!r})
os.truncate({str(victim)!r}, 0)
os.rename({str(victim)!r}, "/tmp/mine")
os.mkdir({str(tmp_path / "folder")!r})
os.chmod({str(victim)!r}, 0)
os.symlink("/etc", "/tmp/link")
open("/var/tmp/oxrl-was-here", "w")
open("/new.txt", "w")
open("/dev/new.txt", "w")
open("/dev/shm/new.txt", "w")
open({str(Path.home() / "new.txt")!r}, "w")
os.mkdir("/folder")""",
        isolation,
    )
    assert victim.read_text() == "precious" and [each.name for each in tmp_path.iterdir()] == ["victim.txt"]


def test_the_scratch_folder_is_deleted_with_the_program(isolation):
    if isolation.kind == "landlock":
        pytest.skip("without namespaces there is no scratch folder")
    source = "open('mine.txt', 'w').write('x'); print(open('/tmp/mine.txt').read())"
    assert run_program(source, isolation).stdout == "x\n"
    assert not Path("/tmp/mine.txt").exists()
    assert "FileNotFoundError" in run_program("open('mine.txt')", isolation).stderr


def test_scratch_cannot_be_filled_beyond_its_size(isolation):
    if isolation.kind == "landlock":
        pytest.skip("without namespaces there is no scratch folder")
    source = "written = 0\ntry:\n  for i in range(99):\n    written += open(str(i), 'wb', 0).write(bytes(1 << 20))\n"
    outcome = run_program(source + "except OSError: print(written >> 20)", isolation)
    assert outcome.stdout.strip() == "16"


def test_the_environment_is_empty(isolation, monkeypatch):
    monkeypatch.setenv("OXRL_SECRET", "token")
    source = "import os, ctypes\nctypes.CDLL(None).getenv.restype = ctypes.c_char_p\nprint(dict(os.environ))"
    assert run_program(source, isolation).stdout == "{}\n"


def test_no_connection_reaches_a_listener_on_this_machine(isolation):
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        refused(f"socket.create_connection(('127.0.0.1', {port}))\nsocket.socket(socket.AF_UNIX)", isolation)
        with pytest.raises(BlockingIOError):
            server.accept()


def test_no_process_is_started_nor_a_thread_beyond_those_that_wait_for_the_program(isolation):
    refused("os.fork()\nos.forkpty()\nsubprocess.run(['/bin/true'])\nos.execv('/bin/true', ['true'])", isolation)
    source = """import ctypes, os, threading
libc, of_thread = ctypes.CDLL(None, use_errno=True), 0x3D0F00
number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
print(libc.syscall(number, of_thread, ctypes.create_string_buffer(4096), 0, 0, 0), libc.syscall(435, 0, 0))
everyone = threading.Barrier(17)
threads = [threading.Thread(target=everyone.wait) for _ in range(16)]
for thread in threads: thread.start()
everyone.wait()
for thread in threads: thread.join()
late = threading.Event()
for _ in range(100): threading.Thread(target=lambda: late.is_set()).start()
print("end")"""
    assert run_program(source, isolation).stdout == "-1 -1\nend\n"


def test_no_process_is_signalled_in_any_way(isolation):
    received = []
    before = {each: signal.signal(each, lambda number, _: received.append(number)) for each in (10, 12, 29)}
    try:
        mine = os.getpid()
        refused(f"os.kill(os.getppid(), 9)\nos.kill({mine}, 10)\nos.killpg(0, 12)\nos.kill(-1, 12)", isolation)
        owner = f"""import fcntl, os
r, w = os.pipe()
for command, value in ((8, {mine}), (10, 12), (4, os.O_ASYNC)):
    try: fcntl.fcntl(r, command, value)
    except OSError: print("refused")
os.write(w, b"x")"""
        outcome = run_program(owner, isolation)
        assert outcome.stdout.startswith("refused\nrefused\n") and outcome.code == 0
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert received == []


def test_other_processes_cannot_be_inspected(isolation):
    source = """import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(libc.ptrace(16, 1, 0, 0), libc.unshare(0x10000000), libc.mount(0, b"/tmp", b"tmpfs", 0, 0), end=" ")
print(libc.prctl(1, 0, 0, 0, 0), libc.syscall(435, 0, 0), libc.setuid(0), libc.shmget(0, 4096, 0o1600), end=" ")"""
    assert run_program(source, isolation).stdout == "-1 " * 7


def test_limits_cannot_be_raised(isolation):
    source = """import resource
for kind in (resource.RLIMIT_AS, resource.RLIMIT_CPU, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE):
    try: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)); print("raised")
    except (ValueError, OSError): pass
try: resource.prlimit(1, resource.RLIMIT_CPU)
except OSError: print("end")"""
    assert run_program(source, isolation).stdout == "end\n"


def test_too_much_memory_is_a_memory_error(isolation):
    outcome = run_program("x = bytearray(4 << 30)", isolation)
    assert outcome.code == 1 and "MemoryError" in outcome.stderr


def test_an_endless_loop_ends_at_its_cpu_limit(isolation):
    source = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: pass"
    outcome = run_program(source, isolation, BY_CPU)
    assert outcome.ended == "time"


@pytest.mark.parametrize("closes", [False, True])
def test_a_sleeping_program_ends_at_the_wall_clock_limit_even_with_closed_outputs(isolation, closes):
    source = f"import os\nos.close(1); os.close(2)\n{SLEEPS}" if closes else SLEEPS
    assert run_program(source, isolation, BY_CLOCK).ended == "time"


def test_endless_output_is_truncated_and_ends_the_program(isolation):
    outcome = run_program("while True: print('x' * 1000)", isolation)
    assert outcome.ended == "output" and len(outcome.stdout) == PATIENT.output


def test_a_crash_is_a_signal_and_a_recursion_an_exception(isolation):
    crash = run_program("import ctypes; ctypes.string_at(0)", isolation)
    assert (crash.ended, crash.code) == ("signal", 11)
    assert "RecursionError" in run_program("def f(): f()\nf()", isolation).stderr


def test_nothing_is_left_behind(isolation):
    before, others = open_files(), children()
    for source in ("print(1)", "1 / 0", "while True: print(1)", "while True: pass"):
        run_program(source, isolation, BY_CPU)
    assert open_files() == before
    assert children() <= others


def test_no_zombie_is_left_for_init_to_reap(isolation):
    """In many containers the first process never reaps, and zombies pile up until no process can be started."""
    libc, adopt_orphans = ctypes.CDLL(None), 36
    tests, others = sandbox.Tests(("assert f() == 1",), remote={"f": "f"}), children()
    libc.prctl(adopt_orphans, 1, 0, 0, 0)
    try:
        for limits, end in (
            (BY_CPU, "while True: pass"),
            (BY_CLOCK, "import signal; signal.pause()"),
            (PATIENT, "import os; os._exit(0)"),
        ):
            if limits is not BY_CLOCK:
                run_program(end, isolation, limits)
            sandbox.run_tests([f"def f(): {end}"], tests, isolation, limits)
        assert children() <= others
    finally:
        libc.prctl(adopt_orphans, 0, 0, 0, 0)


def open_files():
    return {each.name for each in Path("/proc/self/fd").iterdir()}


def test_a_program_dies_with_the_process_that_started_it(isolation):
    starter = (
        "from oxrl.rewards.sandbox import Isolation, Limits\n"
        "from tests.rewards.sandbox.programs import run_program\n"
        f"isolation = Isolation({isolation.kind!r}, {{}}, {isolation.bwrap!r})\n"
        f"run_program({SLEEPS!r}, isolation, Limits(seconds={HANG}))"
    )
    parent = subprocess.Popen([sys.executable, "-c", starter], start_new_session=True)
    try:
        found = wait_until(
            lambda: [each for each in descendants(parent.pid) if is_filtered(each)], "the program runs", parent
        )
    finally:
        parent.kill()
        parent.communicate()
    wait_until(lambda: not is_filtered(found[0]), "the program has ended")


def descendants(process):
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{process}/task/{process}/children").read_text().split():
            yield child
            yield from descendants(child)


def is_filtered(process):
    """Whether a live process has a seccomp filter: the untrusted program, and not the process that started it."""
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text()
        return "Seccomp:\t2" in status and "State:\tZ" not in status
    return False


def test_programs_run_concurrently():
    with ThreadPoolExecutor(8) as pool:
        outcomes = list(pool.map(lambda n: run_program(f"print({n} ** 2)", available()).stdout, range(16)))
    assert outcomes == [f"{n**2}\n" for n in range(16)]


def test_the_isolation_of_this_machine_is_found_by_probing():
    isolation = available()
    assert isolation.kind != "none", isolation.missing
    assert isolation.kind == "bubblewrap" or "bubblewrap" in isolation.missing
    assert isolation.explanation and require_isolation() is isolation


def test_without_isolation_programs_are_refused_unless_that_is_allowed(caplog):
    nothing = Isolation("none", {"landlock": "Operation not permitted"})
    with pytest.raises(ValueError, match=r"landlock: Operation not permitted.*reward.allow_unsandboxed"):
        require_isolation(found=nothing)
    _warn_unsandboxed.cache_clear()
    isolation = require_isolation(allow_unsandboxed=True, found=nothing)
    require_isolation(allow_unsandboxed=True, found=nothing)
    assert caplog.text.count("programs that the model writes run without isolation") == 1
    assert run_program("print(1)", isolation).stdout == "1\n"
    assert run_program("while True: pass", isolation, BY_CPU).ended == "time"


def test_an_ordinary_user_is_isolated_too():
    system = Path("/usr/bin/python3")
    if os.geteuid() != 0 or not system.exists():
        pytest.skip("needs root, to switch the user, and an interpreter that every user can run")
    package = Path(sandbox.__file__).parents[1]
    code = f"""import os, sys, types
assert sys.version_info >= (3, 11) and os.access({str(package / "sandbox" / "__init__.py")!r}, os.R_OK)
sys.path.insert(0, {str(package.parents[1])!r})
rewards = sys.modules["oxrl.rewards"] = types.ModuleType("oxrl.rewards")  # without its dependencies
rewards.__path__ = [{str(package)!r}]
from oxrl.rewards.sandbox import Limits, Tests, available, run_tests
tests = Tests(("assert f() == 42",), remote={{"f": "f"}})
print(available().kind, run_tests(["def f(): return 42"], tests, available(), Limits(seconds={HANG})).passed)"""
    command = [system, "-B", "-c", code]
    done = subprocess.run(command, user=65534, group=65534, extra_groups=[], cwd="/", capture_output=True, text=True)
    if "AssertionError" in done.stderr:
        pytest.skip("that interpreter is too old, or cannot read this folder")
    assert done.returncode == 0, done.stderr
    kind, passed = done.stdout.split()
    assert kind in ("bubblewrap", "namespaces", "landlock") and passed == "1"


def test_a_sandbox_that_cannot_be_set_up_is_an_error_and_not_an_outcome():
    isolation = Isolation("bubblewrap", {}, "/bin/false")
    with pytest.raises(SandboxError, match="could not be set up"):
        run_program("print('ran')", isolation)
