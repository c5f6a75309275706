"""Going on with what two ranks saved, on three; and a rank that hangs, which ends them. Runs inside `together`."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest
import torch

from oxrl.algorithms import algorithm
from oxrl.backends.fsdp import FSDPTrainingBackend
from oxrl.backends.local import create_pytorch_backend
from oxrl.backends.ranks import RankError
from oxrl.loops.step import train_step
from oxrl.models.load import load_model
from tests.contracts import together
from tests.contracts.over_two_ranks import CLOSE, TINY, items_of
from tests.contracts.test_backend import some_items, train

pytestmark = pytest.mark.anyio
SCHEDULE = {"lr": 1e-3, "lr_scheduler": "cosine", "num_steps": 6}


@pytest.fixture
def anyio_backend():
    return "asyncio"


async def test_a_run_goes_on_with_another_number_of_ranks():
    through = create_pytorch_backend(load_model("tiny"), **SCHEDULE)
    expected, weights = await train(through, some_items(), 3, steps=6)
    resumed = FSDPTrainingBackend(together.ranks(), TINY, **SCHEDULE)
    await resumed.load(Path(os.environ["OXRL_TEST_HANDED_ON"]))
    found, others = await train(resumed, some_items(), 3, steps=4)
    assert found == pytest.approx(expected[2:], abs=1e-5)
    for name, tensor in weights.items():
        torch.testing.assert_close(others[name], tensor, **CLOSE)
    resumed.close()


HANGS_ON_ONE_RANK = """
import time
import torch.distributed as dist
from oxrl.algorithms.preference import Pairs

def planted(pairs: Pairs):
    if dist.get_rank() == 2:
        time.sleep(25)  # longer than the time limit, and then it goes home by itself
    return pairs.chosen * 0
"""


async def test_z_a_rank_that_hangs_is_named_within_the_time_limit(tmp_path):
    file = tmp_path / "planted.py"
    file.write_text(HANGS_ON_ONE_RANK)
    backend = FSDPTrainingBackend(together.ranks(), partial(load_model, "tiny"), others={"ref": TINY})
    started = time.monotonic()
    with pytest.raises(RankError, match="add_gradients: .* no word from rank 2, which died or hangs"):
        await train_step(backend, algorithm(f"{file}:planted"), items_of("dpo"), 60)
    assert time.monotonic() - started < together.TIME_LIMIT + 10
