"""What all commands share: mistakes answered in words, and the options that mean the same everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer


@contextmanager
def mistakes_end_here() -> Iterator[None]:
    """What the user got wrong is answered in words, with exit code 2 and no traceback."""
    try:
        yield
    except ValueError as mistake:
        for line in str(mistake).splitlines():
            typer.secho(f"error: {line}", fg="red", err=True)
        raise typer.Exit(2) from None


Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Sampling = Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")]
