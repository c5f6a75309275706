"""How a step is divided over ranks; and one launch of two ranks for all that needs them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oxrl.backends.ranked import divide
from oxrl.processes import MEETING
from tests.contracts import lost_rank
from tests.engines import need

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("sizes", [[5], [9, 1, 4], [3, 3, 3, 3], list(range(1, 18))])
def test_every_micro_batch_is_run_once_and_all_ranks_make_as_many_passes(sizes, ranks):
    shares = divide(sizes, ranks)
    assert sorted(place for share in shares for place in share.places) == list(range(len(sizes)))
    assert {len(share.places) + share.fillers for share in shares} == {-(-len(sizes) // ranks)}


def test_the_largest_are_spread_over_the_ranks():
    loads = [sum((10, 9, 2, 1)[place] for place in share.places) for share in divide((10, 9, 2, 1), 2)]
    assert sorted(loads) == [11, 11]


def launch(ranks: int, *arguments: str, **settings: str) -> None:
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    done = subprocess.run(
        [sys.executable, *command, "-m", "tests.contracts.together", *arguments],
        cwd=HERE.parents[1],
        env={**os.environ, "OMP_NUM_THREADS": "1", **settings},
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


CONTRACT = [str(HERE / name) for name in ("test_backend.py", "weights_over_ranks.py", "over_two_ranks.py")]


def test_the_contract_holds_over_two_ranks_and_three_go_on_from_there(tmp_path):
    handed_on = {"OXRL_TEST_HANDED_ON": str(tmp_path)}
    launch(2, *CONTRACT, "-k", "(fsdp or over_two_ranks or weights_over_ranks) and not zero", **handed_on)
    launch(3, str(HERE / "over_three_ranks.py"), OXRL_TEST_TIME_LIMIT="15", **handed_on)


def test_the_contract_holds_with_deepspeed_which_compiles_nothing(tmp_path):
    need("deepspeed")
    launch(
        2,
        str(HERE / "over_deepspeed.py"),
        *CONTRACT,
        *("-k", "over_deepspeed or zero"),
        TORCH_EXTENSIONS_DIR=str(tmp_path),
    )
    assert not list(tmp_path.rglob("*.ninja")), "a build takes minutes"


@pytest.mark.parametrize(
    ("when", "named", "end"),
    [
        ("at_work", "no word from rank 1, which died", -signal.SIGKILL),
        ("idle", "rank 1 died", -signal.SIGKILL),
        ("mistaken", "rows of another colour", 1),
    ],
)
def test_a_rank_that_fails_alone_is_named_and_nobody_stays_behind(when, named, end, tmp_path):
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2", MEETING: str(tmp_path / "meeting")}
    command = [sys.executable, "-m", "tests.contracts.lost_rank", when, str(tmp_path / "report")]
    processes = [
        subprocess.Popen(command, cwd=HERE.parents[1], env={**settings, "RANK": str(rank), "LOCAL_RANK": "0"})
        for rank in range(2)
    ]
    try:
        codes = [process.wait(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, end]
    seconds, said = (tmp_path / "report").read_text().split("\n", 1)
    assert named in said
    assert float(seconds) < lost_rank.TIME_LIMIT
