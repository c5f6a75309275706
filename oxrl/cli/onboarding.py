"""`oxrl models scout` and `oxrl models onboard`: a new model from its name to a verified record."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from oxrl.cli import completion
from oxrl.cli.base import Json, exit_on_user_error

if TYPE_CHECKING:
    from oxrl.onboarding.findings import Scouting

COLOURS = {"blocked": "red", "repair": "yellow", "note": "cyan", "ok": None}

ScoutedName = Annotated[
    str,
    typer.Argument(
        metavar="NAME_OR_PATH",
        help="A name from `oxrl models list`, a hub id, a local folder or a .gguf file.",
        autocompletion=completion.models,
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="Run Python code from the model repository, after your review.")
]


def scout(
    name: ScoutedName,
    json_: Json = False,
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a hub model.")] = None,
    trust_remote_code: Trust = False,
) -> None:
    """Read a model's small files and report what it is, who knows it, and what has to be repaired.

    oxrl models scout Qwen/Qwen3-0.6B
    """
    with exit_on_user_error():
        from oxrl.onboarding.scout import scout as scout_model

        report = scout_model(name, revision=revision, trust_remote_code=trust_remote_code)
    if json_:
        typer.echo(json.dumps(report.as_dict()))
    else:
        _print(report)
    if report.status == "blocked":
        raise typer.Exit(1)


def _print(report: Scouting) -> None:
    typer.secho(f"{report.name}: {report.status}", bold=True)
    for key, value in report.facts.items():
        if value not in (None, [], {}):
            typer.echo(f"  {key:18} {', '.join(map(str, value)) if isinstance(value, list) else value}")
    for finding in report.findings:
        typer.secho(f"{finding.level:8} {finding.name:18} {finding.message}", fg=COLOURS[finding.level])
    if report.entry is not None and report.config is not None:
        from oxrl.models.catalog import Entry, as_yaml
        from oxrl.onboarding.scout import entry_as_toml

        typer.echo(f"\nproposed catalogue entry:\n{entry_as_toml(Entry(**report.entry))}")
        typer.echo(f"config to start from:\n{as_yaml(report.config)}", nl=False)
    if report.repairs:
        typer.echo(f"to repair: {', '.join(report.repairs)}; `oxrl models scout {report.name} --fix` writes a copy")
