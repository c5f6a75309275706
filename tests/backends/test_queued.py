"""Queued calls: submitted immediately, executed in order, and none after a failure."""

import threading

import anyio
import pytest

from oxrl.algorithms import algorithm
from oxrl.backends.distributed.queued import NotRunError, QueuedBackend
from oxrl.backends.local import create_pytorch_backend
from oxrl.loops.memory_warmup import warm_up_memory
from oxrl.types import ImmediateTrainFuture, Row, Weights
from tests.waiting import EXPIRES, HANG, wait_until_async

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request):
    return request.param


class Slow:
    """A backend whose steps block until `go` is set, and whose reference cannot be updated."""

    layout = "packed"

    def __init__(self):
        self.done = []
        self.go = threading.Event()
        self.waits = threading.Event()

    def optim_step(self):
        self.waits.set()
        assert self.go.wait(HANG)
        self.done.append("step")
        return ImmediateTrainFuture({"grad_norm": 1.0})

    def get_weights(self):
        self.done.append("weights")
        return ImmediateTrainFuture(Weights(self, self.done.count("step")))

    def update_reference(self, decay):
        assert self.go.wait(HANG)
        raise ValueError(f"there is no reference to keep {decay} of")

    def close(self):
        self.done.append("close")


@pytest.fixture
def slow():
    backend = Slow()
    yield backend
    backend.go.set()


async def test_calls_are_submitted_before_the_last_one_finished_and_done_in_order(slow):
    queued = QueuedBackend(slow)
    step, weights = queued.optim_step(), queued.get_weights()
    assert slow.done == [], "both were submitted, and none has finished"
    slow.go.set()
    assert (await weights).version == 1, "it waited for the step"
    assert await step == {"grad_norm": 1.0}
    queued.close()
    assert slow.done == ["step", "weights", "close"]


async def test_the_event_loop_runs_while_a_call_is_awaited(slow):
    queued, finished = QueuedBackend(slow), []

    async def step():
        finished.append(await queued.optim_step())

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step)
        await wait_until_async(slow.waits.is_set, "the step runs")
        assert not finished
        slow.go.set()
    assert finished


async def test_nothing_runs_after_a_failure_until_it_has_been_raised(slow):
    queued = QueuedBackend(slow)
    bad, step, weights = queued.update_reference(0.5), queued.optim_step(), queued.get_weights()
    slow.go.set()
    with pytest.raises(NotRunError, match=r"get_weights did not run, because update_reference .* no reference"):
        await weights
    fine = queued.get_weights()
    with pytest.raises(NotRunError, match="optim_step did not run"):
        await step
    with pytest.raises(ValueError, match=r"keep 0\.5"):
        await bad
    assert (await fine).version == 0
    assert slow.done == ["weights"]


async def test_a_failure_that_was_never_awaited_is_logged_on_close(slow, caplog):
    queued = QueuedBackend(slow)
    queued.update_reference(0.5)
    slow.go.set()
    queued.close()
    assert "update_reference failed, and its result was never awaited" in caplog.text
    with pytest.raises(ValueError, match="optim_step was called after the backend was closed"):
        queued.optim_step()


async def test_a_call_that_takes_too_long_is_named_and_so_is_what_waits_behind_it(slow):
    queued = QueuedBackend(slow, time_limit=EXPIRES)
    step, weights = queued.optim_step(), queued.get_weights()
    with pytest.raises(
        TimeoutError, match=rf"optim_step did not finish within {EXPIRES:g} s, and get_weights is queued behind"
    ):
        await weights
    with pytest.raises(TimeoutError, match=rf"optim_step did not finish within {EXPIRES:g} s$"):
        await step
    slow.go.set()
    await wait_until_async(lambda: slow.done == ["step", "weights"], "a limit ends the wait, not the call")


async def test_a_cancelled_wait_leaves_the_call_running(slow):
    queued, scope = QueuedBackend(slow), anyio.CancelScope()

    async def step():
        with scope:
            await queued.optim_step()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(step)
        await wait_until_async(slow.waits.is_set, "the step runs")
        scope.cancel()
    assert scope.cancelled_caught and slow.done == []
    slow.go.set()
    assert (await queued.get_weights()).version == 1


async def test_memory_warm_up_and_attributes_are_passed_through(tiny_model):
    queued = QueuedBackend(create_pytorch_backend(tiny_model))
    assert queued.model is tiny_model and queued.module.model is tiny_model and queued.version == 0
    queued.set_temperature(0.5)
    assert queued.module.temperature == 0.5
    rows = [(Row("a", [1, 2, 3], [False, True, True]),)]
    assert await warm_up_memory(queued, algorithm("sft"), rows, 100) == rows
    assert all(parameter.grad is None for parameter in tiny_model.parameters())
    queued.close()
