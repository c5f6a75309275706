"""What all commands share: mistakes answered in words, and the options that mean the same everywhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """What the user got wrong is answered in words, with exit code 2 and no traceback."""
    try:
        yield
    except ValueError as mistake:
        for line in str(mistake).splitlines():
            typer.secho(f"error: {line}", fg="red", err=True)
        raise typer.Exit(2) from None


@contextmanager
def exit_on_failure(what: str, how_to_go_on: Callable[[], str] = str) -> Iterator[None]:
    """What failed on the way is one message and exit code 1, an interrupt 130, a mistake 2."""
    try:
        with exit_on_user_error():
            yield
    except KeyboardInterrupt:
        typer.secho(f"\ninterrupted{how_to_go_on()}", fg="yellow", err=True)
        raise typer.Exit(130) from None
    except typer.Exit:  # a RuntimeError too, but already told
        raise
    except RuntimeError as failure:
        typer.secho(f"{what} failed: {failure}", fg="red", err=True)
        raise typer.Exit(1) from failure


Json = Annotated[bool, typer.Option("--json", help="As JSON.")]
Sampling = Annotated[float, typer.Option(min=0, help="0 always takes the likeliest token.")]
