"""Logging of several ranks to one screen."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import HANG

PROGRAM = """
import logging
from oxrl.tracking.logs import set_up_logging
set_up_logging()
logging.getLogger("oxrl.loops").info("an info")
logging.getLogger("oxrl.loops").warning("a warning")
logging.getLogger("another").info("not shown")
"""


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (None, "an info\na warning\n"),
        ("0", "[rank 0] an info\n[rank 0] a warning\n"),
        ("3", "[rank 3] a warning\n"),
    ],
)
def test_lines_carry_the_rank_and_only_rank_0_logs_info(rank, expected):
    variables = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=HANG,
        cwd=Path(__file__).parents[2],
        env=variables | ({} if rank is None else {"RANK": rank}),
    )
    assert done.stderr == expected
