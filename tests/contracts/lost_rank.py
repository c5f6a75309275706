"""What rank 0 of a separate group runs in `test_ranks`, most often with a rank that fails."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path

import anyio
import pytest
import torch
import torch.distributed as dist

from oxrl.algorithms import algorithm
from oxrl.backends.distributed import ranks as module
from oxrl.backends.distributed.fsdp import FSDPTrainingBackend
from oxrl.backends.distributed.ranks import RankError
from oxrl.backends.local import create_pytorch_backend
from oxrl.loops.memory_warmup import warm_up_memory
from oxrl.loops.step import train_step
from oxrl.machine.out_of_memory import ran_out_of_memory
from tests.contracts import together
from tests.contracts.test_backend import load_tiny, some_items, train
from tests.contracts.test_over_ranks import CLOSE, RATES, items_of
from tests.forks import has_ended
from tests.waiting import EXPIRES, wait_until

SCHEDULE = {**RATES, "lr_scheduler": "cosine", "num_steps": 4}


class CollectiveWorker:
    """A worker whose calls need all ranks, as those over a sharded model do."""

    def all_reduce(self) -> float:
        total = torch.ones(4)
        dist.all_reduce(total)
        return float(total[0])

    def all_reduce_or_die(self) -> float:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return self.all_reduce()

    def all_reduce_or_raise(self) -> float:
        if dist.get_rank() == 1:
            raise ValueError("rows of another colour")
        return self.all_reduce()

    def receive_from_last(self) -> None:
        """The last rank hangs; ranks that wait for it in a collective time out with rank 0, or a little later."""
        last = dist.get_world_size() - 1
        if dist.get_rank() == last:
            while True:
                signal.pause()
        if dist.get_rank() == 0:
            dist.recv(torch.zeros(1), src=last)

    def process(self) -> int:
        return os.getpid()


def started() -> int:
    target: int = together.ranks().start(CollectiveWorker)
    assert together.ranks().call(target, "all_reduce") == [together.ranks().world] * together.ranks().world
    return target


def error_of(call: str) -> str:
    with pytest.raises((RankError, ValueError)) as caught:
        together.ranks().call(started(), call)
    return str(caught.value)


def sum_after(seconds: float) -> list[float]:
    """Of a call after so many seconds without one."""
    target = started()
    time.sleep(seconds)
    return list(together.ranks().call(target, "all_reduce"))


def error_when_one_died_before() -> str:
    target = started()
    lost = together.ranks().call(target, "process")[1]
    os.kill(lost, signal.SIGKILL)
    wait_until(partial(has_ended, lost), "rank 1 has ended, and its sockets are closed")
    with pytest.raises(RankError) as caught:
        together.ranks().call(target, "all_reduce")
    return str(caught.value)


def error_when_one_refused() -> str:
    module.COMMON_ERROR_SECONDS = EXPIRES  # rank 0 hangs in a collective
    return error_of("all_reduce_or_raise")


FAILS_ON_ONE_RANK = """
import torch.distributed as dist
from oxrl.algorithms.preference import Pairs

def planted(pairs: Pairs):
    if dist.get_rank() == 1:
        raise RuntimeError("planted here")
    return pairs.chosen * 0
"""


def errors_of_training(folder: Path) -> list[str]:
    """Of the step in which one rank fails, and of what comes after it."""
    file = folder / "planted.py"
    file.write_text(FAILS_ON_ONE_RANK)
    backend = FSDPTrainingBackend(together.ranks(), load_tiny, others={"ref": load_tiny})
    step = partial(train_step, backend, algorithm(f"{file}:planted"), items_of("dpo"), 90)
    errors = []
    for call in (partial(anyio.run, step), backend.optim_step):
        with pytest.raises(RankError) as caught:
            call()
        errors.append(str(caught.value))
    return errors


RUNS_OUT_OF_MEMORY = """
import torch
import torch.distributed as dist
from oxrl.algorithms.preference import Pairs

def planted(pairs: Pairs):
    if dist.get_rank() == 1:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    return pairs.chosen * 0
"""


def error_of_memory(folder: Path, warm_up: bool) -> tuple[str, bool]:
    """Of a step or a memory warm-up in which one rank runs out of memory, and whether it is recognised as that."""
    file = folder / "planted.py"
    file.write_text(RUNS_OUT_OF_MEMORY)
    backend = FSDPTrainingBackend(together.ranks(), load_tiny, others={"ref": load_tiny})
    run = warm_up_memory if warm_up else train_step
    with pytest.raises(RankError) as caught:
        anyio.run(run, backend, algorithm(f"{file}:planted"), items_of("dpo"), 90)
    return str(caught.value), ran_out_of_memory(caught.value)


async def _save(folder: Path) -> None:
    backend = FSDPTrainingBackend(together.ranks(), load_tiny, **SCHEDULE)
    await train(backend, some_items(), 3, steps=2)
    await backend.save(folder)


async def _resume(folder: Path) -> None:
    through = create_pytorch_backend(load_tiny(), **SCHEDULE)
    expected, weights = await train(through, some_items(), 3, steps=4)
    resumed = FSDPTrainingBackend(together.ranks(), load_tiny, **SCHEDULE)
    await resumed.load(folder)
    found, others = await train(resumed, some_items(), 3, steps=2)
    assert found == pytest.approx(expected[2:], abs=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, **CLOSE)


def save(folder: Path) -> None:
    anyio.run(_save, folder)


def resume(folder: Path) -> None:
    anyio.run(_resume, folder)
