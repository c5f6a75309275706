"""`oxrl models ...`: the model catalogue, and verification that a model can be trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from oxrl.cli import completion, onboarding
from oxrl.cli.base import Json, exit_on_user_error, path

app = typer.Typer(no_args_is_help=True, help="The model catalogue and its verification records.")
app.command("scout")(onboarding.scout)
app.command("onboard")(onboarding.onboard)


@app.command("list")
def models_list(json_: Json = False) -> None:
    """List models: size, architecture, tasks, tuning, and by whom, when and with which versions one was verified.

    oxrl models list
    """
    with exit_on_user_error():
        from oxrl.models.catalog import Entry, catalog
        from oxrl.onboarding.records import local_models

        here = {name: record for name, record in local_models().items() if record.get("entry")}
        own = [Entry(**record["entry"])._replace(name=name) for name, record in here.items()]
        cards = {entry.name: _card(entry) for entry in [*catalog().values(), *own]}
    if json_:
        typer.echo(json.dumps(cards))
        return
    header = ("name", "size", "architecture", "tasks", "tuning", "status", "verified")
    rows = [
        (e.name, e.size, e.architecture, ", ".join(e.tasks), e.strategy, card["status"], card["verified"] or "")
        for e, card in zip([*catalog().values(), *own], cards.values(), strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for number, row in enumerate((header, *rows)):
        line = "  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip()
        typer.secho(line, bold=number == 0)
    typer.echo("tuning: full weights or LoRA, by default; config-ready: not verified here; not yet: cannot be trained")
    typer.echo(
        "verified long ago: with another major version of torch or transformers; `oxrl models onboard` repeats it"
    )


ModelName = Annotated[
    str,
    typer.Argument(
        metavar="NAME", help="A name from `oxrl models list`, or its hub id.", autocompletion=completion.models
    ),
]


@app.command("show")
def models_show(name: ModelName, json_: Json = False) -> None:
    """Print the catalogue entry of a model and its verification record.

    oxrl models show qwen3-0.6b
    """
    with exit_on_user_error():
        from oxrl.models.catalog import find_entry, record_of

        entry = find_entry(name)
        card = {**_card(entry), "record": record_of(entry.name, local=True)}
    if json_:
        typer.echo(json.dumps(card))
        return
    for key, value in card.items():
        if value is not None:
            text = ", ".join(value) if isinstance(value, list) else value
            typer.echo(f"{key:16} {json.dumps(text, indent=1) if isinstance(text, dict) else text}")


def _card(entry: Any) -> dict[str, Any]:
    from oxrl.onboarding.records import current_status

    derived = {each: getattr(entry, each) for each in ("source", "strategy", "reason")}
    status, verification = current_status(entry)
    fields = {key: list(value) if isinstance(value, tuple) else value for key, value in entry._asdict().items()}
    return {**fields, **derived, "status": status, "verified": None if verification is None else str(verification)}


@app.command("config")
def models_config(name: ModelName) -> None:
    """Print a config to start from.

    oxrl models config qwen3-0.6b > config.yaml
    """
    with exit_on_user_error():
        from oxrl.config import check_config
        from oxrl.config.tasks import example_config
        from oxrl.models.catalog import as_yaml, find_entry

        entry = find_entry(name)
        config = example_config(entry)
        check_config(config)
    if entry.not_yet is not None:
        typer.secho(f"{entry.name} cannot be trained yet: {entry.not_yet}", fg="yellow", err=True)
    typer.echo(as_yaml(config), nl=False)


@app.command("verify")
def models_verify(
    name: ModelName,
    model: Annotated[str | None, typer.Option(help="A local copy of the model; default: load it by name.")] = None,
    output: Annotated[
        Path | None, typer.Option(parser=path, help="Output file of the record; default NAME.json.")
    ] = None,
) -> None:
    """Train the model for two steps each of SFT, DPO and GRPO, check the results, and write a record.

    oxrl models verify qwen3-0.6b --output qwen3-0.6b.json
    """
    with exit_on_user_error():
        from oxrl.diagnose.verify_model import verify_entry, write_record
        from oxrl.models.catalog import find_entry

        entry = find_entry(name)
        if entry.not_yet is not None:
            raise ValueError(f"{entry.name} cannot be verified yet: {entry.not_yet}")
        path = output or Path(f"{entry.name}.json")
        record = verify_entry(entry, model)
        write_record(record, path)
    for problem in record["problems"]:
        typer.secho(problem, fg="red", err=True)
    typer.echo(f"{entry.name}: {'verified' if not record['problems'] else 'problems found'}; {path}")
    if record["problems"]:
        raise typer.Exit(1)


@app.command("fetch")
def models_fetch(name: ModelName, json_: Json = False) -> None:
    """Download a model for use without network, and print its folder.

    oxrl models fetch qwen3-0.6b
    """
    with exit_on_user_error():
        from oxrl.run.export import fetch_model

        folder = fetch_model(name)
    typer.echo(json.dumps({"folder": str(folder)}) if json_ else str(folder))
