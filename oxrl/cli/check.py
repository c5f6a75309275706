"""`oxrl check`: the states of the checks of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oxrl.cli.base import Json, exit_on_user_error, path

if TYPE_CHECKING:
    from oxrl.guard.findings import Finding

_COLOURS = {"passed": "green", "warned": "yellow", "failed": "red", "skipped": None}


def check(
    run: Annotated[Path, typer.Argument(parser=path, help="The folder of a run that has ended, trains or was killed.")],
    json_: Json = False,
) -> None:
    """Print the state of every check of a run, a line per check.

    Exit code 0: no check failed; 1: one did, and stopped the run; 2: there is no such run, or it has no checks yet.

    oxrl check runs/first

    oxrl check runs/first --json
    """
    from oxrl.guard.findings import FILE, states_of
    from oxrl.run.folder import started_run

    with exit_on_user_error():
        folder = run if (run / FILE).is_file() else started_run(run)  # a loop in Python writes no config
        if not (folder / FILE).exists():
            raise ValueError(
                f"{folder} has no {FILE}: the run has not reached its first step, or a version without checks wrote it"
            )
        states = states_of(folder)
    if json_:
        typer.echo(json.dumps({"folder": str(folder), "checks": [each._asdict() for each in states]}))
    else:
        for state in states:
            typer.secho(_line(state), fg=_COLOURS[state.state])
    raise typer.Exit(int(any(state.state == "failed" for state in states)))


def _line(state: Finding) -> str:
    where = f"step {state.step}: " if state.step else ""
    remedy = f"; {state.remedy}" if state.is_fault else ""
    return f"{state.state:7}  {state.check:18}  {where}{state.message}{remedy}"
