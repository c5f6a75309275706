"""`oxrl doctor`: check whether training can start on this machine, with a fix for each problem."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from oxrl.cli import completion
from oxrl.cli.base import Json
from oxrl.machine.packages import install_command

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="A model to check: a name, a folder or a hub id.", autocompletion=completion.models),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="A dataset to check: a file, or a name from `oxrl data list`.")
    ] = None,
    json_: Json = False,
) -> None:
    """Check this machine and print problems with their fixes; exit code 1 if training cannot start.

    oxrl doctor

    oxrl doctor smollm2-135m --data rows.jsonl
    """
    try:
        from oxrl.diagnose.doctor import can_train, findings, gather_facts
    except ModuleNotFoundError as missing:  # the checks themselves need packages
        typer.echo(f"problem  packages  {missing.name} is not installed\n{'':18} fix: {install_command()}")
        raise typer.Exit(1) from None
    from oxrl.machine.inventory import as_json

    facts = gather_facts(model, data)
    found = findings(facts)
    if json_:
        report = {"schema": 1, "can_train": can_train(found), "findings": [finding._asdict() for finding in found]}
        typer.echo(json.dumps(report | {"environment": as_json(facts.environment)}))
    else:
        for finding in found:
            level = typer.style(f"{finding.level:8}", fg=COLOURS[finding.level])
            typer.echo(f"{level} {finding.topic:9} {finding.what}")
            if finding.fix is not None and finding.level != "ok":
                typer.echo(f"{'':18} fix: {finding.fix}")
        typer.echo("training can start" if can_train(found) else "training cannot start")
    raise typer.Exit(0 if can_train(found) else 1)
