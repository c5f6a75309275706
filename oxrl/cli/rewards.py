"""`oxrl rewards ...`: list reward functions, and test them against reward hacking."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from oxrl.cli import completion
from oxrl.cli.base import Json, RewardParameter, exit_on_user_error

app = typer.Typer(no_args_is_help=True, help="List and test reward functions.")


@app.command("list")
def rewards_list(json_: Json = False) -> None:
    """List the reward functions with their descriptions and parameters.

    oxrl rewards list
    """
    from oxrl.rewards import describe_rewards

    cards = describe_rewards()
    if json_:
        rewards = {
            card.name: {"explanation": card.explanation, "reads": card.reads, "parameters": _as_text(card.parameters)}
            for card in cards.values()
        }
        typer.echo(json.dumps(rewards))
        return
    for card in cards.values():
        typer.echo(f"{card.name:20} {card.explanation.splitlines()[0]}")
        if card.parameters:
            typer.echo(f"{'':20} " + ", ".join(f"{each} {value}" for each, value in _as_text(card.parameters).items()))


@app.command("test")
def rewards_test(
    name: Annotated[
        str,
        typer.Argument(help="A name from `oxrl rewards list`, or FILE.py:FUNCTION.", autocompletion=completion.rewards),
    ],
    data: Annotated[str, typer.Option(help="Rows with a reference answer: JSONL, Parquet, CSV or a hub id.")],
    limit: Annotated[int, typer.Option(min=1, help="Only the first rows.")] = 200,
    param: RewardParameter = None,
    pays_for: Annotated[
        str | None,
        typer.Option(help="answer, form or opinion; default inferred from the fields that the reward reads."),
    ] = None,
    threshold: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="Maximum mean reward of adversarial completions, as a fraction of the full reward."
        ),
    ] = 0.05,
    workers: Annotated[int, typer.Option(min=1, help="Completions graded concurrently, for judges.")] = 1,
    json_: Json = False,
) -> None:
    """Test a reward on rows: correct, wrong and adversarial completions. Exit code 1 if it can be gamed.

    oxrl rewards test number_match --data prompts.jsonl

    oxrl rewards test my_rewards.py:my_reward --data prompts.jsonl --limit 50
    """
    with exit_on_user_error():
        from oxrl.run.reward import try_named_reward

        report = try_named_reward(
            name, data, param or [], limit=limit, pays_for=pays_for, threshold=threshold, workers=workers
        )
    typer.echo(json.dumps(report.to_dict()) if json_ else str(report))
    if report.problems:
        raise typer.Exit(1)


def _as_text(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: "(needed)" if default is ... else default for name, default in parameters.items()}
