"""`oxrl doctor`: whether training can start here, and what to do where it cannot."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from oxrl.cli.base import Json

COLOURS = {"ok": "green", "warning": "yellow", "problem": "red"}


def doctor(
    model: Annotated[str | None, typer.Argument(help="A model to look for: a name, a folder or a hub id.")] = None,
    data: Annotated[str | None, typer.Option(help="Rows to look for: a file, or a name from `oxrl data list`.")] = None,
    json_: Json = False,
) -> None:
    """Look at this machine and say what is wrong, with its fix; exit code 1 if training cannot start.

    oxrl doctor smollm2-135m --data rows.jsonl
    """
    try:
        from oxrl.diagnose.doctor import can_train, findings, gather_facts
    except ModuleNotFoundError as missing:  # what reads versions is itself a package
        typer.echo(f"problem  packages  {missing.name} is not installed\n{'':18} fix: pip install oxrl")
        raise typer.Exit(1) from None
    from oxrl.machine.inventory import as_json

    facts = gather_facts(model, data)
    found = findings(facts)
    if json_:
        told = [finding._asdict() for finding in found]
        shape = {"schema": 1, "can_train": can_train(found), "findings": told}
        typer.echo(json.dumps(shape | {"environment": as_json(facts.environment)}))
    else:
        for finding in found:
            level = typer.style(f"{finding.level:8}", fg=COLOURS[finding.level])
            typer.echo(f"{level} {finding.topic:9} {finding.what}")
            if finding.fix is not None and finding.level != "ok":
                typer.echo(f"{'':18} fix: {finding.fix}")
        typer.echo("training can start" if can_train(found) else "training cannot start")
    raise typer.Exit(0 if can_train(found) else 1)
