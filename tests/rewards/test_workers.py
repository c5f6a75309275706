"""What cannot be interrupted runs in a process that is killed: the trainer goes on, and nothing is left behind."""

import os
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from oxrl.rewards import grade, reasoning_gym_samples, reward
from oxrl.rewards.allowance import Allowance
from oxrl.rewards.gym import reasoning_gym_score
from oxrl.rewards.workers import WorkerPool
from tests.rewards.rollouts import a_rollout
from tests.waiting import HANG, wait_until, wait_until_async

NEVER = ("(a+)+b", 0, False, "a" * 60)  # a search that takes years
ALWAYS = ("b", 0, False, "abc")
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


@pytest.fixture
def pool():
    pool = WorkerPool(1)
    yield pool
    pool.close()


def pids(pool):
    return [worker.process.pid for worker in pool._workers]


def is_alive(pid):
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


async def test_an_expression_that_takes_years_is_ungraded_and_the_others_are_graded():
    pytest.importorskip("math_verify", reason="the extra oxrl[math] is not installed")
    own, rewards = reward("math_reward_func"), []

    async def grade_others():
        texts = [r"\boxed{x^2+2x+1}", r"\boxed{x^2+2x+2}", r"\boxed{(x+1)(1+x)}"]
        graded = await grade([a_rollout(text, "(x+1)^2") for text in texts], own, time_limit=HANG)
        rewards.extend(rollout.reward for rollout in graded)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(grade_others)
        (stuck,) = await grade([a_rollout(r"\boxed{9^{(999999999)}}", "12")], own, time_limit=0.05)
    assert stuck.reward is None and "no result within 0.05 s" in stuck.error
    assert rewards == [1.0, 0.0, 1.0]


async def test_a_regular_expression_that_takes_years_is_ungraded():
    own = reward("regex_match", pattern="(a+)+b")
    (stuck,) = await grade([a_rollout("a" * 60)], own, time_limit=0.05)
    assert stuck.reward is None and "no result within 0.05 s" in stuck.error
    right, empty = await grade([a_rollout("aab"), a_rollout("")], own, time_limit=HANG)
    assert (right.reward, empty.reward) == (1.0, 0.0)


def test_a_process_is_reused_until_a_call_takes_too_long(pool):
    assert pool.call("found_by_regex", *ALWAYS) is True
    (first,) = pids(pool)
    assert pool.call("found_by_regex", "b", 0, True, "abc") is False
    assert pids(pool) == [first]
    with pytest.raises(TimeoutError, match="no result within 0.01 s"):
        Allowance(0.01).call(pool.call, "found_by_regex", *NEVER)
    assert not is_alive(first) and pids(pool) == []
    assert pool.call("found_by_regex", *ALWAYS) is True
    assert pids(pool) != [first]


def test_an_error_in_the_process_is_raised_here_and_a_dead_process_is_replaced(pool):
    with pytest.raises(RuntimeError, match="unterminated"):
        pool.call("found_by_regex", "(", 0, False, "")
    (pid,) = pids(pool)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(pid), "the process has ended")
    assert pool.call("found_by_regex", *ALWAYS) is True


def test_a_process_that_ends_during_a_call_is_an_error(pool):
    outcome = []

    def call():
        try:
            Allowance(HANG).call(pool.call, "found_by_regex", *NEVER)
        except RuntimeError as error:
            outcome.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    (pid,) = wait_until(lambda: pids(pool), "the process runs")
    os.kill(pid, signal.SIGKILL)
    thread.join()
    assert outcome == ["the process that computes it ended with status -9"]


def test_waiting_for_a_process_takes_nothing_of_a_rewards_time(pool):
    allowance, found = Allowance(HANG), []
    with pool._worker("found_by_regex", Allowance(HANG)):  # the only one
        waiting = threading.Thread(target=lambda: found.append(allowance.call(pool.call, "found_by_regex", *ALWAYS)))
        waiting.start()
        waited = wait_until(lambda: allowance.waited, "the call waits")
        assert not found
    waiting.join()
    assert found == [True] and allowance.waited > waited
    assert allowance.left == pytest.approx(HANG, abs=0.5 * HANG)


async def test_a_reward_is_cancelled_only_when_it_does_not_wait():
    allowance = Allowance(0.01)
    async with anyio.create_task_group() as tasks:
        with anyio.CancelScope() as scope, allowance.stopped():
            tasks.start_soon(allowance.cancel_at_end, scope)
            await anyio.sleep(0.1)  # longer than it may take
            assert not scope.cancel_called
        await wait_until_async(lambda: scope.cancel_called, "its time is over")


def test_a_process_has_neither_the_environment_nor_the_files_of_the_trainer(pool, monkeypatch):
    monkeypatch.setenv("SECRET_KEY", "123")
    with socket.socket() as own:
        own.set_inheritable(True)
        assert pool.call("found_by_regex", *ALWAYS) is True
        (pid,) = pids(pool)
        names = {each.partition(b"=")[0] for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if each}
        files = [str(each.readlink()) for each in Path(f"/proc/{pid}/fd").iterdir()]
    assert names == {b"PYTHONPATH", b"PYTHONHASHSEED"}
    assert all(file.startswith("pipe:") or file == "/dev/null" for file in files), files


def test_an_answer_that_a_scorer_evaluates_as_python_reaches_nothing(tmp_path):
    pytest.importorskip("reasoning_gym", reason="the extra oxrl[gym] is not installed")
    (sample,) = reasoning_gym_samples("spiral_matrix", size=1)
    secret = tmp_path / "secret"
    secret.write_text("1")
    actions = (f"os.system('touch {tmp_path}/new')", f"os.remove('{secret}')", f"os.truncate('{secret}', 0)")
    for action in (*actions, f"os.open('{tmp_path}/new', os.O_CREAT)"):
        answer = f"[os := __import__('os'), {action}]"
        assert reasoning_gym_score(replace(a_rollout(answer), sample=sample)) < 0.1
    assert [file.name for file in tmp_path.iterdir()] == ["secret"] and secret.read_text() == "1"
    assert reasoning_gym_score(replace(a_rollout(sample.answer), sample=sample)) == 1.0


@pytest.mark.parametrize("busy", [False, True])
def test_processes_end_with_the_trainer_however_it_ends(busy):
    script = (
        "import threading\n"
        "from oxrl.rewards.allowance import Allowance\n"
        "from oxrl.rewards.workers import WORKERS\n"
        "WORKERS.call('found_by_regex', 'b', 0, False, 'abc')\n"
        f"call = (Allowance({HANG}).call, (WORKERS.call, *{('found_by_regex', *NEVER)!r}))\n"
        f"{busy} and threading.Thread(target=call[0], args=call[1], daemon=True).start()\n"
        "print(*[worker.process.pid for worker in WORKERS._workers], flush=True)\n"
        "threading.Event().wait()\n"
    )
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        (pid,) = map(int, trainer.stdout.readline().split())
        if busy:
            wait_until(lambda: cpu_time(pid) > 20, "the process computes", trainer)
    finally:
        trainer.kill()
        trainer.communicate()
    wait_until(lambda: not is_alive(pid), "the process has ended")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_calls_raise_no_signals(pool):
    """The signal of what was written may come after it was read, and would end the process in the middle of a call."""
    assert pool.call("found_by_regex", *ALWAYS) is True
    (pid,) = pids(pool)
    (flags,) = (line for line in Path(f"/proc/{pid}/fdinfo/0").read_text().splitlines() if line.startswith("flags"))
    assert not int(flags.split()[1], 8) & os.O_ASYNC


def cpu_time(pid):
    """In ticks of a hundredth of a second."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11])


def test_a_forked_process_starts_processes_of_its_own(pool):
    assert pool.call("found_by_regex", *ALWAYS) is True
    before = pids(pool)
    child = os.fork()
    if child == 0:
        pool.forget()
        os._exit(0 if pids(pool) == [] and pool.call("found_by_regex", *ALWAYS) is True else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert pool.call("found_by_regex", *ALWAYS) is True
    assert pids(pool) == before
