"""`oxrl rewards ...`: what answers can be paid for, and whether a reward can be gamed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from oxrl.cli.base import Json, exit_on_user_error

app = typer.Typer(no_args_is_help=True, help="What answers can be paid for.")


@app.command("list")
def rewards_list(json_: Json = False) -> None:
    """List the reward functions: what each pays for, what it reads of a row, its parameters."""
    from oxrl.rewards import describe_rewards

    cards = describe_rewards()
    if json_:
        told = {
            card.name: {"explanation": card.explanation, "reads": card.reads, "parameters": _written(card.parameters)}
            for card in cards.values()
        }
        typer.echo(json.dumps(told))
        return
    for card in cards.values():
        typer.echo(f"{card.name:20} {card.explanation.splitlines()[0]}")
        if card.parameters:
            typer.echo(f"{'':20} " + ", ".join(f"{each} {value}" for each, value in _written(card.parameters).items()))


@app.command("test")
def rewards_test(
    name: Annotated[str, typer.Argument(help="A name from `oxrl rewards list`, or FILE.py:FUNCTION.")],
    data: Annotated[str, typer.Option(help="Rows with an answer: JSONL, Parquet, CSV or a hub id.")],
    limit: Annotated[int, typer.Option(min=1, help="Only the first rows.")] = 200,
    param: Annotated[list[str] | None, typer.Option(help="A parameter of the reward: --param strict=true")] = None,
    pays_for: Annotated[
        str | None, typer.Option(help="answer, form or opinion; default told from what the reward reads.")
    ] = None,
    threshold: Annotated[
        float, typer.Option(min=0, max=1, help="Share of the full reward that a cheat may earn on average.")
    ] = 0.05,
    workers: Annotated[int, typer.Option(min=1, help="Answers graded at a time, for judges.")] = 1,
    json_: Json = False,
) -> None:
    """Try a reward on real rows: right answers, wrong ones, cheats. Exit code 1 if it can be gamed."""
    with exit_on_user_error():
        from oxrl.run.reward import try_named_reward

        report = try_named_reward(
            name, data, param or [], limit=limit, pays_for=pays_for, threshold=threshold, workers=workers
        )
    typer.echo(json.dumps(report.to_dict()) if json_ else str(report))
    if report.problems:
        raise typer.Exit(1)


def _written(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "(needed)" if default is ... else default for name, default in parameters.items()}
