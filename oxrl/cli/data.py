"""`oxrl data ...`: inspect data before training, and prepare registered datasets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli import completion
from oxrl.cli.base import Json, exit_on_user_error, path

app = typer.Typer(no_args_is_help=True, help="Inspect and prepare data.")


@app.command("show")
def data_show(
    file: Annotated[str, typer.Argument(help="Dataset: JSONL, Parquet, CSV or a hub id.")],
    model: Annotated[
        str,
        typer.Option(help="Model whose tokenizer and chat template are used.", autocompletion=completion.models),
    ] = "smollm2-135m",
    algorithm: Annotated[
        str,
        typer.Option(help="Algorithm that the rows are rendered for.", autocompletion=completion.algorithms),
    ] = "sft",
    rows: Annotated[int, typer.Option(min=0, help="Number of rows to print in full.")] = 3,
    max_len: Annotated[int | None, typer.Option(min=2, help="Maximum row length in tokens.")] = 2048,
    column: Annotated[
        list[str] | None, typer.Option(help="Column mapping EXPECTED=ACTUAL, such as response=answer.")
    ] = None,
    prompt: Annotated[
        str | None, typer.Option(help='The prompt from other columns, as data.prompt: "{Body} {Question}".')
    ] = None,
    response: Annotated[str | None, typer.Option(help="The response from another column, as data.response.")] = None,
    answer: Annotated[str | None, typer.Option(help="The reference answer, as data.answer: Answer.")] = None,
    chosen: Annotated[str | None, typer.Option(help="The better response, as data.chosen.")] = None,
    rejected: Annotated[str | None, typer.Option(help="The worse response, as data.rejected.")] = None,
    system: Annotated[str | None, typer.Option(help="A system message for every row, as data.system.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print statistics as JSON.")] = False,
) -> None:
    """Print the rows as training would see them: trained tokens in colour, lengths, problems.

    oxrl data show rows.jsonl

    oxrl data show pairs.jsonl --algorithm dpo --column chosen=better --column rejected=worse

    oxrl data show svamp.jsonl --algorithm grpo --prompt "{Body} {Question}" --answer Answer
    """
    given = {"prompt": prompt, "response": response, "answer": answer, "chosen": chosen, "rejected": rejected}
    template = {name: text for name, text in {**given, "system": system}.items() if text is not None}
    with exit_on_user_error():
        from oxrl.diagnose.data import inspect_data, print_report
        from oxrl.run.folder import resolve_weights

        pairs = [each.partition("=") for each in column or []]
        if invalid := [left for left, equals, right in pairs if not (left and equals and right)]:
            raise ValueError(f"--column looks like response=answer, not {invalid[0]!r}")
        columns = {left: right for left, _, right in pairs}
        report = inspect_data(file, resolve_weights(model), algorithm, max_len, columns, template)
    if json_:
        typer.echo(json.dumps(report.statistics()))
    else:
        print_report(report, rows)


@app.command("prepare")
def data_prepare(
    name: Annotated[
        str,
        typer.Argument(help="A name from `oxrl data list`, or gym:TASK.", autocompletion=completion.datasets),
    ],
    from_: Annotated[
        list[str] | None,
        typer.Option("--from", help="A local copy in the raw format: FILE or SPLIT=FILE; repeatable."),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(parser=path, help="Output folder; default $OXRL_DATA_DIR/NAME.")
    ] = None,
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; with --from FILE, the split of the file.")
    ] = None,
    instruction: Annotated[
        str | None, typer.Option(help="Text after each question, instead of the dataset's default; may be empty.")
    ] = None,
    size: Annotated[int, typer.Option(min=1, help="Number of training rows of a gym:TASK.")] = 1000,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace a prepared dataset whose splits or rows are others.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the dataset card as JSON.")] = False,
) -> None:
    """Download a dataset, or read a local copy, and convert it to files for training.

    oxrl data prepare gsm8k

    oxrl data prepare gsm8k --from train=train.jsonl --from test=test.jsonl

    oxrl data prepare gym:leg_counting --size 500
    """
    with exit_on_user_error():
        from oxrl.data.prepare import prepare, read_card

        folder = prepare(
            name,
            files=from_ or (),
            output=output,
            splits=split or (),
            instruction=instruction,
            size=size,
            overwrite=overwrite,
        )
        card = read_card(folder)
    if json_:
        typer.echo(json.dumps({"folder": str(folder), **card}))
        return
    for each, entry in card["splits"].items():
        typer.echo(f"{each:11} {entry['rows']:7} rows  {folder / entry['file']}")
    for skipped in card["skipped"]:
        typer.echo(f"skipped {skipped['rows']}: {skipped['reason']} (first {skipped['first']})")
    typer.echo(f"licence {card['licence']}; conversion verified: {card['verified']}; reward {card['reward'] or 'none'}")


@app.command("list")
def data_list(json_: Json = False) -> None:
    """List the datasets that can be used by name.

    oxrl data list
    """
    from oxrl.data.prepare import DATASETS

    if json_:
        datasets = {
            each.name: {
                "summary": each.summary, "licence": each.licence, "hub": each.hub, "reward": each.reward,
                "evaluation_only": each.evaluation_only, "seen_real_rows": each.seen_real_rows,
            }
            for each in DATASETS.values()
        }  # fmt: skip
        typer.echo(json.dumps(datasets))
        return
    for each in DATASETS.values():
        notes = [each.licence, *(["evaluation only"] if each.evaluation_only else []), each.reward or ""]
        typer.echo(f"{each.name:20} {each.summary} ({', '.join(filter(None, notes))})")
    typer.echo(f"{'gym:TASK':20} any task of reasoning-gym, generated (reasoning_gym_score)")
