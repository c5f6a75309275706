"""The soak of `benchmarks/soak.py`, for two faults: what runs for half an hour there must run at all."""

import subprocess
import sys
from pathlib import Path

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def test_a_run_that_is_struck_and_resumed_ends_as_one_that_is_left_alone():
    given = ["--steps", "14", "--every", "1", "--faults", "damage,term", "--most-faults", "2"]
    done = subprocess.run(
        [sys.executable, str(SOAK), *given, "--set", "train.checkpoint_every=1"],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "14 steps, 2 faults" in done.stdout and "| bytes equal to the run without faults | yes |" in done.stdout
    assert "| damage | 1 |" in done.stdout and "| term | 1 |" in done.stdout
