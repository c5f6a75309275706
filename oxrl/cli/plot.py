"""`oxrl plot`: the metrics of one or several runs as curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.base import exit_on_user_error, path


def plot(
    runs: Annotated[list[Path], typer.Argument(parser=path, help="A run's folder; several are plotted together.")],
    output: Annotated[
        Path | None, typer.Option(parser=path, help="PNG file; default curves.png in the first run's folder.")
    ] = None,
    metric: Annotated[list[str] | None, typer.Option(help="A metric to plot; repeatable; default a selection.")] = None,
) -> None:
    """Plot the metrics of one or several runs in the terminal and to a PNG file.

    oxrl plot runs/first

    oxrl plot runs/first runs/second --metric eval_loss

    oxrl plot runs/first --metric reward --metric entropy --output curves.png
    """
    with exit_on_user_error():
        from oxrl.run.folder import last_stage
        from oxrl.tracking.plot import plot_runs

        plot_runs([last_stage(run) for run in runs], output or runs[0] / "curves.png", metric or [])
