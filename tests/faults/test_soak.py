"""`benchmarks/soak.py` with three faults."""

from __future__ import annotations

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

SOAK = Path(__file__).parents[2] / "benchmarks" / "soak.py"


def soak(*arguments: str) -> str:
    """Return its output."""
    sys.argv = [str(SOAK), *arguments]
    with redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(SOAK), run_name="__main__")
    return out.getvalue()


def test_a_run_with_faults_that_is_resumed_ends_as_one_without(forks):
    faults = ["--every-steps", "3", "--faults", "damage,full,line", "--most-faults", "3"]
    out = forks.run(soak, "--steps", "12", *faults, "--set", "train.checkpoint_every=1")
    assert "12 steps, 3 faults" in out and "| bytes equal to the run without faults | yes |" in out
    assert all(f"| {fault} | 1 |" in out for fault in ("damage", "full", "line"))
    assert "| no process, shared memory or temporary file left | yes |" in out
