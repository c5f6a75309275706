"""`oxrl algorithms` and `oxrl plot`: what there is, and what became of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.base import Json, exit_on_user_error


def algorithms(
    name: Annotated[str | None, typer.Argument(help="Which one to explain.")] = None,
    json_: Json = False,
) -> None:
    """List the algorithms, or explain one: formula, parameters, what it needs, an example."""
    with exit_on_user_error():
        from oxrl.algorithms.describe import FAMILIES, explain, families

        if name is None:
            told = families()
            if json_:
                each = [(name, family, summary) for family, names in told.items() for name, summary in names.items()]
                typer.echo(json.dumps({name: {"family": family, "summary": said} for name, family, said in each}))
                return
            for family, names in told.items():
                typer.secho(f"\n{family}: {FAMILIES[family]}", bold=True)
                typer.echo("\n".join(f"  {each:14} {summary}" for each, summary in names.items()))
        else:
            card = explain(name)
            typer.echo(json.dumps(card._asdict()) if json_ else str(card))


def plot(
    run: Annotated[Path, typer.Argument(help="A run's folder.")],
    output: Annotated[Path | None, typer.Option(help="PNG file; default RUN/curves.png.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="Which curves; default the telling ones.")] = None,
) -> None:
    """Draw a run's curves in the terminal and to a PNG."""
    with exit_on_user_error():
        from oxrl.run.folder import last_stage
        from oxrl.tracking.plot import plot_run

        plot_run(last_stage(run), output or run / "curves.png", metric or [])
