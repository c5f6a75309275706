"""How a step is divided over ranks; and one launch of two ranks for all that needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from oxrl.backends.ranks import divide

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
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]


def test_the_contract_holds_over_two_ranks_and_three_go_on_from_there(tmp_path):
    files = [str(HERE / "test_backend.py"), str(HERE / "over_two_ranks.py")]
    built = tmp_path / "built"
    handed_on = {"OXRL_TEST_HANDED_ON": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(built)}
    launch(2, *files, "-k", "fsdp or zero or over_two_ranks", **handed_on)
    assert not list(built.rglob("*.ninja")), "DeepSpeed has compiled something, which takes minutes"
    launch(3, str(HERE / "over_three_ranks.py"), OXRL_TEST_TIME_LIMIT="15", **handed_on)
