"""`oxrl config ...`: what a config file says once everything is filled in, and whether it can be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oxrl.cli.base import Json, exit_on_user_error

if TYPE_CHECKING:
    from oxrl.config import Config

app = typer.Typer(no_args_is_help=True, help="Look at a config before training with it.")

File = Annotated[Path, typer.Argument(help="YAML file.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any config key: --set train.weight_decay=0.1")]


@app.command("show")
def config_show(file: File, set_: Set = None, json_: Json = False) -> None:
    """Print everything that a run would use, and where it comes from: oxrl config show config.yaml"""
    with exit_on_user_error():
        from oxrl.config import trace_stages
        from oxrl.config.reference import as_lines

        stages = trace_stages(file, set_ or [])
        told = {name: _told(stage.config) for name, stage in stages.items()}
    if json_:
        dumped = {name: stage.config.model_dump(mode="json") for name, stage in stages.items()}
        typer.echo(json.dumps(dumped.get("", dumped)))
        return
    for name, stage in stages.items():
        lines = "\n".join(as_lines(stage.config, stage.origins)).splitlines()
        lines += ["", *(f"# {each}" for each in told[name])]
        typer.echo("\n".join([f"{name}:", *(f"  {line}" if line else "" for line in lines)] if name else lines).strip())


def _told(config: Config) -> list[str]:
    """What is settled later, and what has no effect."""
    from oxrl.config.checks import contradictions, remarks
    from oxrl.run.reward import default_reward, lacks_reward

    settled = []
    if lacks_reward(config):
        found = default_reward(config)
        settled = [f"reward: {', '.join(found)}" if found else "reward: told from the rows when they are read"]
    return [*settled, *remarks(config), *(f"error: {each}" for each in contradictions(config))]


@app.command("validate")
def config_validate(file: File, set_: Set = None, json_: Json = False) -> None:
    """Check a file without reading data or models; exit code 2 and all mistakes if it is wrong."""
    mistakes, told = _mistakes(file, set_ or [])
    if json_:
        typer.echo(json.dumps({"valid": not mistakes, "mistakes": mistakes, "remarks": told}))
    else:
        for mistake in mistakes:
            typer.secho(f"error: {mistake}", fg="red", err=True)
        for remark in told:
            typer.secho(f"note: {remark}", fg="yellow", err=True)
        if not mistakes:
            typer.echo(f"{file} is valid")
    if mistakes:
        raise typer.Exit(2)


def _mistakes(file: Path, overrides: list[str]) -> tuple[list[str], list[str]]:
    from oxrl.config import load_stages
    from oxrl.config.checks import contradictions, remarks
    from oxrl.run.prepare import config_problems

    try:
        stages = load_stages(file, overrides).items()
        marked = [(f"{name}: " if name else "", config) for name, config in stages]
        mistakes = [
            f"{mark}{each}" for mark, config in marked for each in (*contradictions(config), *config_problems(config))
        ]
        return mistakes, [f"{mark}{each}" for mark, config in marked for each in remarks(config)]
    except ValueError as mistake:
        return str(mistake).splitlines(), []


@app.command("diff")
def config_diff(
    one: Annotated[Path, typer.Argument(help="YAML file.")],
    other: Annotated[Path, typer.Argument(help="YAML file.")],
    json_: Json = False,
) -> None:
    """Print the keys that two files set differently, defaults filled in: oxrl config diff a.yaml b.yaml"""
    with exit_on_user_error():
        left, right = (_flat(file) for file in (one, other))
    places = [place for place in {**left, **right} if left.get(place) != right.get(place)]
    if json_:
        typer.echo(json.dumps({place: [left.get(place), right.get(place)] for place in places}))
        return
    for place in places:
        typer.echo(f"{place}: {json.dumps(left.get(place))} -> {json.dumps(right.get(place))}")


def _flat(file: Path) -> dict[str, Any]:
    from oxrl.config import load_stages

    return {
        ".".join(filter(None, (stage, section, key))): value
        for stage, config in load_stages(file).items()
        for section, keys in config.model_dump(mode="json").items()
        for key, value in keys.items()
    }


@app.command("schema")
def config_schema() -> None:
    """Print the JSON schema, for editors that complete and check YAML."""
    from oxrl.config.reference import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))
