"""The states of a run's checks as lines of `checks.jsonl`: written when a state changes, read by `oxrl check`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

from oxrl.guard.table import CHECKS
from oxrl.tracking.metrics import drop_lines_after, read_metrics

State: TypeAlias = Literal["passed", "warned", "failed", "skipped"]
FILE = "checks.jsonl"


class Finding(NamedTuple):
    """`Finding(3, "mask", "failed", "row a:1: the mask is shifted ...", "look at ...")`: a state from a step on."""

    step: int
    check: str
    state: State
    message: str
    remedy: str = ""

    @property
    def is_fault(self) -> bool:
        return self.state in ("warned", "failed")

    def __str__(self) -> str:
        return f"step {self.step}: {self.check}: {self.message}{f'; {self.remedy}' if self.remedy else ''}"


class FindingsFile:
    """Appends findings to the folder of a run; lines after `keep_until` are dropped, as a resumed run repeats them."""

    def __init__(self, folder: Path, *, keep_until: int = -1) -> None:
        self.path = folder / FILE
        if self.path.exists():
            drop_lines_after(self.path, keep_until)

    def __call__(self, finding: Finding) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finding._asdict()) + "\n")


def read_findings(folder: Path) -> list[Finding]:
    """All findings of a run in order; an incomplete last line of a killed run, or of another version, is left out."""
    path = folder / FILE
    rows = read_metrics(path) if path.exists() else []
    return [finding for row in rows if (finding := _finding(row)) is not None]


def _finding(row: Mapping[str, Any]) -> Finding | None:
    if row.get("check") not in CHECKS or row.get("state") not in get_args(State):
        return None
    return Finding(row["step"], row["check"], row["state"], str(row.get("message", "")), str(row.get("remedy", "")))


def states_of(folder: Path) -> list[Finding]:
    """The state of every check of the run in a folder, in the order of the table: what a fault was stays."""
    latest: dict[str, Finding] = {}
    for finding in read_findings(folder):
        before = latest.get(finding.check)
        if before is None or finding.is_fault or not before.is_fault:
            latest[finding.check] = finding
    return [latest.get(name, Finding(0, name, "skipped", "not reached yet")) for name in CHECKS]
