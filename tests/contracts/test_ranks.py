"""How a step is divided over ranks; ranks that fail or hang; resuming with another number of ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from oxrl.backends.distributed.ranked import divide
from tests.contracts import lost_rank
from tests.forks import has_ended
from tests.waiting import EXPIRES, HANG, wait_until


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[5], [9, 1, 4], [3, 3, 3, 3], list(range(1, 18))])
def test_every_micro_batch_runs_once_and_all_ranks_make_equally_many_passes(sizes, ranks):
    shares = divide(sizes, ranks)
    assert sorted(index for share in shares for index in share.indices) == list(range(len(sizes)))
    assert {len(share.indices) + share.fillers for share in shares} == {-(-len(sizes) // ranks)}


def test_the_largest_micro_batches_go_to_different_ranks():
    loads = [sum((10, 9, 2, 1)[index] for index in share.indices) for share in divide((10, 9, 2, 1), 2)]
    assert sorted(loads) == [11, 11]


@pytest.mark.parametrize(
    ("failing", "named", "end"),
    [
        ((lost_rank.error_of, "all_reduce_or_die"), "no reply from rank 1, which died", -signal.SIGKILL),
        ((lost_rank.error_when_one_died_before,), "rank 1 died", -signal.SIGKILL),
        ((lost_rank.error_when_one_refused,), "rows of another colour", 1),
    ],
    ids=["at work", "idle", "mistaken"],
)
def test_a_rank_that_fails_alone_is_named_immediately_and_no_process_is_left(failing, named, end, start_group):
    """No time limit expires: it is longer than the test may take."""
    group = start_group(2)
    assert named in group.call(*failing)
    assert group.end() == [0, end]


def test_a_rank_that_fails_in_training_is_named_immediately_and_ends_the_backend(tmp_path, start_group):
    first, second = start_group(2).call(lost_rank.errors_of_training, tmp_path)
    assert "rank 1, add_gradients: RuntimeError: planted here" in first
    assert "optim_step cannot run after a failure: rank 1" in second


@pytest.mark.parametrize("warm_up", [False, True])
def test_a_rank_that_runs_out_of_memory_ends_the_run_and_is_recognised(warm_up, tmp_path, start_group):
    """The other ranks wait for it inside a collective, so that the step cannot be repeated."""
    error, recognised = start_group(2).call(lost_rank.error_of_memory, tmp_path, warm_up)
    assert "rank 1, add_gradients: OutOfMemoryError: CUDA out of memory" in error
    assert recognised


def test_a_rank_that_hangs_is_named_when_the_time_limit_expires(start_group):
    error = start_group(3, 3 * EXPIRES).call(lost_rank.error_of, "receive_from_last")
    assert "receive_from_last: " in error and "; no reply from rank 2, which died or hangs" in error


def test_ranks_outlast_a_rank_0_that_is_busy_and_end_after_one_that_hangs(start_group):
    group = start_group(2, 3 * EXPIRES)
    assert group.call(lost_rank.sum_after, 4 * EXPIRES) == [2, 2]
    os.kill(group.pids[0], signal.SIGSTOP)
    wait_until(lambda: has_ended(group.pids[1]), "rank 1 has ended")
    os.kill(group.pids[0], signal.SIGKILL)
    assert group.end() == [-signal.SIGKILL, 1]


def test_a_run_resumes_with_another_number_of_ranks(tmp_path, start_group):
    two = start_group(2)
    two.call(lost_rank.save, tmp_path)
    assert two.end() == [0, 0], "ranks end when rank 0 does"
    start_group(3).call(lost_rank.resume, tmp_path)


SCRIPT = """
import sys
import torch.distributed as dist
from oxrl.backends.distributed.ranks import join_ranks

class Worker:
    def rank(self):
        return dist.get_rank()

ranks = join_ranks(time_limit=float(sys.argv[1]))
if ranks.rank:
    ranks.serve()
else:
    assert ranks.call(ranks.start(Worker), "rank") == [0, 1]
    ranks.stop()
assert not dist.is_initialized(), "PyTorch may abort a process that exits with open groups"
"""


@pytest.mark.engine
def test_ranks_that_torchrun_started_are_used(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        "2",
        script,
        str(HANG),
    ]
    settings = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=settings, capture_output=True, text=True, timeout=HANG)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
