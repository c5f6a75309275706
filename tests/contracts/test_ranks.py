"""How a step is divided over ranks; and one launch of two ranks for all that needs them."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from oxrl.backends.ranks import check_world, divide, join_ranks
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


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize(("when", "named"), [("at_work", "no word from rank 1, which died"), ("idle", "rank 1 died")])
def test_a_rank_that_is_killed_is_named_and_nobody_stays_behind(when, named, tmp_path):
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
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
    assert codes == [0, -signal.SIGKILL]
    seconds, said = (tmp_path / "report").read_text().split("\n", 1)
    assert named in said
    assert float(seconds) < lost_rank.TIME_LIMIT


def test_another_number_of_ranks_than_was_asked_for_is_refused_before_anybody_waits(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="asks for 2 training processes, and 3 were started"):
        join_ranks(expected=2)
    check_world(3, 3)
