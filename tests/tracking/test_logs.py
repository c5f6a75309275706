"""Who speaks on a screen that several processes share."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG

SAYS = """
import logging
from oxrl.tracking.logs import set_up_logging
set_up_logging()
logging.getLogger("oxrl.loops").info("by the way")
logging.getLogger("oxrl.loops").warning("watch out")
logging.getLogger("somebody").info("not asked")
"""


@pytest.mark.parametrize(
    ("rank", "said"),
    [
        (None, "by the way\nwatch out\n"),
        ("0", "[rank 0] by the way\n[rank 0] watch out\n"),
        ("3", "[rank 3] watch out\n"),
    ],
)
def test_lines_carry_their_rank_and_only_the_first_chats(rank, said):
    variables = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", SAYS],
        capture_output=True,
        text=True,
        timeout=HANG,
        cwd=Path(__file__).parents[2],
        env=variables | ({} if rank is None else {"RANK": rank}),
    )
    assert done.stderr == said
