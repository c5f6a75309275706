"""`oxrl data ...`: look at data before training on it, and fetch what is known by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.base import Json, exit_on_user_error

app = typer.Typer(no_args_is_help=True, help="Look at data before training on it.")


@app.command("show")
def data_show(
    file: Annotated[str, typer.Argument(help="Rows: JSONL, Parquet, CSV or a hub id.")],
    model: Annotated[str, typer.Option(help="Whose tokenizer and chat template.")] = "smollm2-135m",
    algorithm: Annotated[str, typer.Option(help="For whose rows.")] = "sft",
    rows: Annotated[int, typer.Option(min=0, help="How many to print in full.")] = 3,
    max_len: Annotated[int | None, typer.Option(min=2, help="Longest row that training would keep.")] = 2048,
    column: Annotated[list[str] | None, typer.Option(help="ours=theirs, such as response=answer.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Statistics as JSON.")] = False,
) -> None:
    """Print what would be trained on: trained tokens in colour, lengths, problems."""
    with exit_on_user_error():
        from oxrl.diagnose.data import inspect_data, print_report
        from oxrl.run.folder import resolve_weights

        pairs = [each.partition("=") for each in column or []]
        if wrong := [left for left, equals, right in pairs if not (left and equals and right)]:
            raise ValueError(f"--column looks like response=answer, not {wrong[0]!r}")
        columns = {left: right for left, _, right in pairs}
        report = inspect_data(file, resolve_weights(model), algorithm, max_len, columns)
    if json_:
        typer.echo(json.dumps(report.statistics()))
    else:
        print_report(report, rows)


@app.command("prepare")
def data_prepare(
    name: Annotated[str, typer.Argument(help="A name from `oxrl data list`, or gym:TASK.")],
    from_: Annotated[
        list[str] | None,
        typer.Option("--from", help="A local copy in the raw format: FILE or SPLIT=FILE; can be given several times."),
    ] = None,
    output: Annotated[Path | None, typer.Option(help="The dataset's folder; default $OXRL_DATA_DIR/NAME.")] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; with --from FILE, the split that the file is.")
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="Stands behind each question, instead of the dataset's own; may be empty.")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="Training rows of a gym:TASK.")] = 1000,
    json_: Annotated[bool, typer.Option("--json", help="The card as JSON.")] = False,
) -> None:
    """Fetch a dataset and write it as files that train reads: oxrl data prepare gsm8k"""
    with exit_on_user_error():
        from oxrl.data.prepare import prepare, read_card

        folder = prepare(name, files=from_ or (), output=output, splits=split or (), instruction=instruction, size=size)
        card = read_card(folder)
    if json_:
        typer.echo(json.dumps({"folder": str(folder), **card}))
        return
    for each, entry in card["splits"].items():
        typer.echo(f"{each:11} {entry['rows']:7} rows  {folder / entry['file']}")
    for left_out in card["skipped"]:
        typer.echo(f"left out {left_out['rows']}: {left_out['reason']} (first {left_out['first']})")
    typer.echo(f"licence {card['licence']}; conversion verified: {card['verified']}; reward {card['reward'] or 'none'}")


@app.command("list")
def data_list(json_: Json = False) -> None:
    """List the datasets that are known by name."""
    from oxrl.data.prepare import DATASETS

    if json_:
        told = {
            each.name: {
                "summary": each.summary, "licence": each.licence, "hub": each.hub, "reward": each.reward,
                "evaluation_only": each.evaluation_only, "seen_real_rows": each.seen_real_rows,
            }
            for each in DATASETS.values()
        }  # fmt: skip
        typer.echo(json.dumps(told))
        return
    for each in DATASETS.values():
        notes = [each.licence, *(["evaluation only"] if each.evaluation_only else []), each.reward or ""]
        typer.echo(f"{each.name:20} {each.summary} ({', '.join(filter(None, notes))})")
    typer.echo(f"{'gym:TASK':20} any task of reasoning-gym, made on the spot (reasoning_gym_score)")
