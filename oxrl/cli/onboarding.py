"""`oxrl models scout` and `oxrl models onboard`: a new model from its name to a verified record."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from oxrl.cli import completion
from oxrl.cli.base import Json, exit_on_failure, exit_on_user_error, path

if TYPE_CHECKING:
    from oxrl.onboarding.findings import Scouting

COLOURS = {"blocked": "red", "repair": "yellow", "note": "cyan", "ok": None}

STATUS_COLOURS = {"verified": "green", "verified with changes": "green", "not verified": "red", "unfinished": "yellow"}

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
    fix: Annotated[bool, typer.Option("--fix", help="Make the repairs in a copy of the small files.")] = False,
    repair: Annotated[
        list[str] | None, typer.Option(help="With --fix: this repair only; also one that a note names.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(parser=path, help="With --fix: the folder of the copy; default beside the model.")
    ] = None,
) -> None:
    """Read a model's small files and report what it is, who knows it, and what has to be repaired.

    oxrl models scout Qwen/Qwen3-0.6B

    oxrl models scout ./my-model --fix
    """
    with exit_on_user_error():
        from oxrl.onboarding.repair import repair as repair_model
        from oxrl.onboarding.scout import scout as scout_model

        if not fix and (repair or output):
            raise ValueError("--repair and --output belong to --fix")
        report = scout_model(name, revision=revision, trust_remote_code=trust_remote_code)
        fixed = None
        if fix:
            fixed = repair_model(report, only=repair or (), output=output, trust_remote_code=trust_remote_code)
            report = fixed.report
    if json_:
        changes = [change._asdict() for change in fixed.changes] if fixed else []
        typer.echo(json.dumps({**report.as_dict(), "changes": changes, "failed": fixed.failed if fixed else []}))
    else:
        _print(report)
        for change in fixed.changes if fixed else ():
            typer.secho(f"repaired {change.repair:18} {change.message}", fg="green")
        for failure in fixed.failed if fixed else ():
            typer.secho(f"not repaired: {failure}", fg="red", err=True)
        if fixed and fixed.changes:
            typer.echo(f"written to {fixed.name}; the weights there are links")
    if report.status == "blocked":
        raise typer.Exit(1)


def onboard(
    names: Annotated[
        list[str], typer.Argument(metavar="NAME...", help="Models as for scout.", autocompletion=completion.models)
    ],
    budget: Annotated[float, typer.Option(min=0.1, help="Minutes for all models together.")] = 60.0,
    limit: Annotated[float, typer.Option(min=0.1, help="Minutes for one attempt.")] = 30.0,
    memory: Annotated[
        float | None, typer.Option(min=0.01, help="GiB that a run may need; default: what this machine has free.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option(help="Engine that samples; default embedded.", autocompletion=completion.engines)
    ] = None,
    agent: Annotated[
        str | None,
        typer.Option(metavar="COMMAND", help="A program that gets the failure folder and writes changed.yaml there."),
    ] = None,
    by: Annotated[str | None, typer.Option(help="Who verifies, for the record.")] = None,
    output: Annotated[
        Path | None, typer.Option(parser=path, help="Folder of the records; default the package's or the cache.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option(parser=path, help="Folder of attempts and failures; default in the cache.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also models that are done, from the first attempt.")] = False,
    trust_remote_code: Trust = False,
    json_: Json = False,
) -> None:
    """Scout, repair, plan and verify models; a failure goes to the remedies, one at a time. It can be resumed.

    oxrl models onboard Qwen/Qwen3-0.6B ./my-model --budget 90
    """
    with exit_on_failure("onboarding", lambda: "; the same command continues"):
        from oxrl.onboarding.pipeline import Options, default_work
        from oxrl.onboarding.pipeline import onboard as onboard_models

        options = Options(
            work or default_work(), output, budget, limit, memory, engine, agent, by, again=again,
            trust_remote_code=trust_remote_code,
        )  # fmt: skip
        results = onboard_models(names, options)
    if json_:
        typer.echo(json.dumps([result.as_dict() for result in results]))
    else:
        for result in results:
            colour = STATUS_COLOURS[result.status]
            typer.secho(f"{result.name}: {result.status} ({result.attempts} attempts)", fg=colour)
            details = [*result.changes, result.why, f"record: {result.record}" if result.record else ""]
            for detail in filter(None, details):
                typer.echo(f"  {detail}")
    if not all(result.status.startswith("verified") for result in results):
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
    if report.repairs and not report.blockers:
        command = shlex.join(["oxrl", "models", "scout", report.name, "--fix"])
        typer.echo(f"to repair: {', '.join(report.repairs)}; `{command}` writes a copy")
