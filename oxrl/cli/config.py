"""`oxrl config ...`: print, validate and compare config files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oxrl.cli.base import Json, exit_on_user_error, path

if TYPE_CHECKING:
    from oxrl.config import Config

app = typer.Typer(no_args_is_help=True, help="Inspect a config before training.")

File = Annotated[Path, typer.Argument(parser=path, help="YAML file.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="Any config key: --set train.weight_decay=0.1")]


@app.command("show")
def config_show(file: File, set_: Set = None, json_: Json = False) -> None:
    """Print the resolved config with the origin of each value.

    oxrl config show config.yaml --set train.lr=1e-4
    """
    with exit_on_user_error():
        from oxrl.config import trace_stages
        from oxrl.config.reference import as_lines

        stages = trace_stages(file, set_ or [])
        notes = {name: _notes(stage.config) for name, stage in stages.items()}
    if json_:
        dumped = {name: stage.config.model_dump(mode="json") for name, stage in stages.items()}
        typer.echo(json.dumps(dumped.get("", dumped)))
        return
    for name, stage in stages.items():
        lines = "\n".join(as_lines(stage.config, stage.origins)).splitlines()
        lines += ["", *(f"# {each}" for each in notes[name])]
        typer.echo("\n".join([f"{name}:", *(f"  {line}" if line else "" for line in lines)] if name else lines).strip())


def _notes(config: Config) -> list[str]:
    """Return the default reward, keys without effect, and contradictions."""
    from oxrl.config.checks import contradictions, remarks
    from oxrl.run.reward import default_reward, lacks_reward

    reward = []
    if lacks_reward(config):
        found = default_reward(config)
        reward = [f"reward: {', '.join(found)}" if found else "reward: inferred from the rows when they are read"]
    return [*reward, *remarks(config), *(f"error: {each}" for each in contradictions(config))]


@app.command("validate")
def config_validate(file: File, set_: Set = None, json_: Json = False) -> None:
    """Validate a file without reading data or models; exit code 2 and all errors if it is invalid.

    oxrl config validate config.yaml
    """
    mistakes, notes = _validate(file, set_ or [])
    if json_:
        typer.echo(json.dumps({"valid": not mistakes, "mistakes": mistakes, "remarks": notes}))
    else:
        for mistake in mistakes:
            typer.secho(f"error: {mistake}", fg="red", err=True)
        for note in notes:
            typer.secho(f"note: {note}", fg="yellow", err=True)
        if not mistakes:
            typer.echo(f"{file} is valid")
    if mistakes:
        raise typer.Exit(2)


def _validate(file: Path, overrides: list[str]) -> tuple[list[str], list[str]]:
    """Return errors and remarks."""
    from oxrl.config import load_stages
    from oxrl.config.checks import contradictions, remarks
    from oxrl.run.prepare import config_problems

    try:
        stages = load_stages(file, overrides).items()
        prefixed = [(f"{name}: " if name else "", config) for name, config in stages]
        errors = [
            f"{prefix}{each}"
            for prefix, config in prefixed
            for each in (*contradictions(config), *config_problems(config))
        ]
        return errors, [f"{prefix}{each}" for prefix, config in prefixed for each in remarks(config)]
    except ValueError as error:
        return str(error).splitlines(), []


@app.command("diff")
def config_diff(
    one: Annotated[Path, typer.Argument(parser=path, help="YAML file.")],
    other: Annotated[Path, typer.Argument(parser=path, help="YAML file.")],
    json_: Json = False,
) -> None:
    """Print the keys that differ between two files, including defaults.

    oxrl config diff a.yaml b.yaml
    """
    with exit_on_user_error():
        left, right = (_flat(file) for file in (one, other))
    keys = [key for key in {**left, **right} if left.get(key) != right.get(key)]
    if json_:
        typer.echo(json.dumps({key: [left.get(key), right.get(key)] for key in keys}))
        return
    for key in keys:
        typer.echo(f"{key}: {json.dumps(left.get(key))} -> {json.dumps(right.get(key))}")


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
    """Print the JSON schema of a config file, for editors.

    oxrl config schema > schema.json
    """
    from oxrl.config.reference import json_schema

    typer.echo(json.dumps(json_schema(), indent=1))
