"""`oxrl algorithms`: list the algorithms, or describe one."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from oxrl.cli import completion
from oxrl.cli.base import Json, exit_on_user_error


def algorithms(
    name: Annotated[
        str | None,
        typer.Argument(
            help="The algorithm to describe, or a custom loss: FILE.py:FUNCTION.", autocompletion=completion.algorithms
        ),
    ] = None,
    json_: Json = False,
) -> None:
    """List the algorithms, or describe one: formula, parameters, requirements, an example.

    oxrl algorithms

    oxrl algorithms dpo
    """
    with exit_on_user_error():
        from oxrl.algorithms.describe import FAMILIES, explain, families

        if name is not None:
            card = explain(name)
            typer.echo(json.dumps(card._asdict()) if json_ else str(card))
            return
        by_family = families()
        if json_:
            rows = [(name, family, summary) for family, names in by_family.items() for name, summary in names.items()]
            typer.echo(json.dumps({name: {"family": family, "summary": summary} for name, family, summary in rows}))
            return
        for family, names in by_family.items():
            typer.secho(f"\n{family}: {FAMILIES[family]}", bold=True)
            typer.echo("\n".join(f"  {each:14} {summary}" for each, summary in names.items()))
        typer.echo(
            "\nto start with: sft (good responses), dpo (pairs), kto (labels), sgrpo (rewards); `oxrl algorithms NAME` "
            "describes one"
        )
