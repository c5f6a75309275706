"""`oxrl plot`: the metrics of a run as curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.base import exit_on_user_error, path


def plot(
    run: Annotated[Path, typer.Argument(parser=path, help="A run's folder.")],
    output: Annotated[Path | None, typer.Option(parser=path, help="PNG file; default RUN/curves.png.")] = None,
    metric: Annotated[list[str] | None, typer.Option(help="A metric to plot; repeatable; default a selection.")] = None,
) -> None:
    """Plot the metrics of a run in the terminal and to a PNG file.

    oxrl plot runs/first

    oxrl plot runs/first --metric reward --metric entropy --output curves.png
    """
    with exit_on_user_error():
        from oxrl.run.folder import last_stage
        from oxrl.tracking.plot import plot_run

        plot_run(last_stage(run), output or run / "curves.png", metric or [])
