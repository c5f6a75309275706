"""Blocking functions inside a running event loop: they finish, and signals interrupt them as they do outside of one."""

import asyncio
import signal
import sys
import threading
from contextvars import ContextVar

import anyio
import pytest
import trio

import oxrl
from oxrl.concurrency import run_blocking, run_until_interrupted, task_group
from oxrl.rewards.primitives import compute_batch_rewards
from oxrl.testing import fake_rollout
from tests.rows import sums, write_jsonl
from tests.waiting import wait_until, wait_until_async

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "trio"])
SETTING = ContextVar("setting", default="unset")


def to_main_thread(number):
    signal.pthread_kill(threading.main_thread().ident, number)


@LOOPS
def test_an_async_function_runs_to_its_end_inside_a_running_event_loop(loop):
    async def work(value):
        await anyio.sleep(0)
        return value, SETTING.get(), threading.current_thread() is threading.main_thread()

    async def notebook():
        SETTING.set("of the caller")
        return run_blocking(work, 3)

    assert anyio.run(notebook, backend=loop) == (3, "of the caller", False)
    assert run_blocking(work, 4) == (4, "unset", True)


def test_an_async_function_runs_in_a_callback_of_an_event_loop():
    async def work():
        return 3

    async def main():
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: done.set_result(run_blocking(work)))
        return await done

    assert asyncio.run(main()) == 3


@LOOPS
def test_an_error_is_raised_in_the_caller(loop):
    async def fail():
        raise LookupError("of the function")

    async def notebook():
        run_blocking(fail)

    with pytest.raises(LookupError, match="of the function"):
        anyio.run(notebook, backend=loop)


@LOOPS
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_inside_a_running_event_loop_cancels_outside_of_shields_and_then_interrupts(loop, number):
    seen, cancelled = [], anyio.Event()

    async def other(*, task_status):
        try:
            task_status.started()
            await anyio.sleep_forever()
        finally:
            seen.append("cancelled")
            cancelled.set()

    async def work():
        async with task_group() as tasks:
            await tasks.start(other)
            with anyio.CancelScope(shield=True):
                to_main_thread(number)
                await cancelled.wait()
                seen.append("the shielded part is complete")
            await anyio.sleep_forever()

    async def notebook():
        before = signal.getsignal(number)
        try:
            run_until_interrupted(work)
        finally:
            assert signal.getsignal(number) is before

    with pytest.raises(KeyboardInterrupt):
        anyio.run(notebook, backend=loop)
    assert seen == ["cancelled", "the shielded part is complete"]


def test_a_signal_that_does_not_wake_the_waiting_main_thread_interrupts_too():
    def waits():
        return sys._current_frames()[threading.main_thread().ident].f_code.co_filename == threading.__file__

    async def work():
        await wait_until_async(waits, "the main thread waits")
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)  # like one that comes just before the wait blocks
        await anyio.sleep_forever()

    async def notebook():
        run_until_interrupted(work)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(notebook())


def test_a_second_interrupt_does_not_wait_for_a_function_that_ignores_the_first():
    release, interrupted_once = threading.Event(), threading.Event()

    async def stubborn():
        to_main_thread(signal.SIGINT)
        try:
            await anyio.sleep_forever()
        finally:
            interrupted_once.set()
            release.wait()

    def interrupt_again():
        interrupted_once.wait()
        to_main_thread(signal.SIGINT)

    async def notebook():
        run_blocking(stubborn)

    threading.Thread(target=interrupt_again, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(notebook())
    release.set()


@LOOPS
def test_rewards_are_computed_inside_a_running_event_loop(loop):
    async def notebook():
        return compute_batch_rewards([fake_rollout("4")], lambda rollout: float(rollout.response == "4"))

    assert anyio.run(notebook, backend=loop) == [1.0]


def sft_config(tmp_path, **train):
    data = write_jsonl(tmp_path / "rows.jsonl", sums(8))
    return oxrl.Config(model={"name": "tiny"}, train={"alg_name": "sft", **train}, data={"train_files_path": str(data)})


@pytest.mark.trains
def test_a_run_is_called_awaited_and_run_by_trio_and_asyncio(tmp_path):
    config = sft_config(tmp_path, train_steps_per_epoch=2, total_number_of_epochs=1)

    async def notebook():
        called = oxrl.train_run(config, tmp_path / "called")
        return called, await called

    first = trio.run(oxrl.run_sft, config, tmp_path)
    called, awaited = asyncio.run(notebook())
    assert first.folder == tmp_path / "sft" and first.history[-1]["loss"] == called.history[-1]["loss"]
    assert awaited is called and asyncio.run(called) is called and isinstance(called, oxrl.RunResult)


@pytest.mark.trains
@pytest.mark.parametrize("run", [asyncio.run, trio.run])
def test_an_interrupt_in_a_notebook_saves_the_run(tmp_path, run):
    config = sft_config(tmp_path, total_number_of_epochs=1_000_000)
    out = tmp_path / "out"

    async def notebook():
        oxrl.train_run(config, out)

    def interrupt():
        wait_until(lambda: (out / "metrics.jsonl").exists(), "it trains")
        to_main_thread(signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(KeyboardInterrupt):
        run(notebook() if run is asyncio.run else notebook)
    done = len((out / "metrics.jsonl").read_text().splitlines())
    assert oxrl.latest_checkpoint(out / "checkpoints").name == f"step_{done:04d}", "the last step is saved"
