"""Shared by all commands: error handling with exit codes, and common options."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli import completion
from oxrl.machine.secrets import without_secrets
from oxrl.parsing import parse_yaml

WRONG_PATH = {
    errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOENT, errno.ENOTDIR,
    errno.EPERM, errno.EROFS,
}  # fmt: skip


def path(text: str) -> Path:
    """A path given on the command line; an empty one, often an unset shell variable, would be the current folder."""
    if not text:
        raise typer.BadParameter("it is empty")
    return Path(text)


def rewards(text: str | None) -> str | dict[str, float] | None:
    """The value of --reward: a name, or `{NAME: WEIGHT, ...}`, of which a list is short for weights of 1."""
    if text is None or text.lstrip()[:1] not in ("{", "["):
        return text
    try:
        given = parse_yaml(text)
        members = {str(each): 1.0 for each in given} if isinstance(given, list) else given
        return {name: float(weight) for name, weight in members.items()}
    except (ValueError, TypeError):
        raise typer.BadParameter(
            f"several rewards look like {{number_match: 1.0, tag_format: 0.2}}, not {text}"
        ) from None


@contextmanager
def exit_on_user_error() -> Iterator[None]:
    """Print a ValueError, or an OSError of a wrong path, as a message without traceback, and exit with code 2."""
    try:
        yield
    except ValueError as error:
        message = str(error)
    except OSError as error:
        if error.errno not in WRONG_PATH:
            raise
        message = f"{str(error.filename)[:200]}: {error.strerror}; check the path, or choose another one"
    else:
        return
    for line in without_secrets(message).splitlines():
        typer.secho(f"error: {line}", fg="red", err=True)
    raise typer.Exit(2)


@contextmanager
def exit_on_failure(what: str, resume_hint: Callable[[], str] = str) -> Iterator[None]:
    """Print one message and exit: code 1 for a failure, 2 for invalid input, 130 for an interrupt."""
    try:
        with exit_on_user_error():
            yield
    except KeyboardInterrupt:
        typer.secho(f"\ninterrupted{resume_hint()}", fg="yellow", err=True)
        raise typer.Exit(130) from None
    except typer.Exit:  # a RuntimeError as well, but already reported
        raise
    except SystemExit as exit_:  # by a custom loss, filter or environment
        typer.secho(f"{what} failed: a function that it called exits, with {exit_.code!r}", fg="red", err=True)
        raise typer.Exit(1) from exit_
    except RuntimeError as failure:
        typer.secho(f"{what} failed: {without_secrets(str(failure))}", fg="red", err=True)
        raise typer.Exit(1) from failure


Seed = Annotated[int, typer.Option(help="Random seed of the sampling.")]
ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A run's folder, a hub id, a name from `oxrl models list`, a local folder or a .gguf file.",
        autocompletion=completion.models,
    ),
]
RewardParameter = Annotated[list[str] | None, typer.Option(help="Parameter of the reward: --param strict=true")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Sampling = Annotated[float, typer.Option(min=0, help="Sampling temperature; 0 is greedy.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Maximum new tokens per completion.")]


def _renamed(value: int | None) -> int | None:
    if value is not None:
        typer.secho("--max-new-tokens is now --max-tokens", fg="yellow", err=True)
    return value


FormerMaxTokens = Annotated[int | None, typer.Option("--max-new-tokens", min=1, hidden=True, callback=_renamed)]
