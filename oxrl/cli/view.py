"""`oxrl view`: a page over the folders of runs, in the browser."""

from __future__ import annotations

import os
import sys
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.base import exit_on_user_error, path


def view(
    runs: Annotated[list[Path], typer.Argument(parser=path, help="A run's folder; several are compared.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on loopback; 0 is a free one.")] = 0,
    browser: Annotated[bool, typer.Option(help="Open the page in a browser.")] = True,
    export: Annotated[
        Path | None, typer.Option(parser=path, help="Write the page with its data to this HTML file instead.")
    ] = None,
) -> None:
    """Look at runs in a local page: curves, groups of answers, single tokens. It is live while a run trains.

    oxrl view runs/first

    oxrl view runs/first runs/second

    oxrl view runs/first --export page.html
    """
    with exit_on_user_error():
        from oxrl.view.page import export_page
        from oxrl.view.runs import Runs
        from oxrl.view.server import ViewServer, serve_until_interrupted

        shown = Runs(runs)
        if export is not None:
            written = export_page(shown, export)
            rest = f"; {written.left_out} steps did not fit and are left out" if written.left_out else ""
            typer.echo(f"{export}: {written.bytes / 2**20:.1f} MiB, {written.steps} recorded steps{rest}")
            return
        server = ViewServer(shown, port)
    typer.echo(f"{server.url}\nread-only, for this machine and this address alone; Ctrl-C ends it")
    if browser and _has_screen():
        webbrowser.open(server.url)
    serve_until_interrupted(server)
    typer.echo()


def _has_screen() -> bool:
    """Whether a browser can open a window; without one, some systems start a browser in the terminal."""
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
