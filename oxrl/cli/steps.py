"""`oxrl replay`, `oxrl explain` and `oxrl diff`: commands that read the records of a run's steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.base import Json, exit_on_failure, exit_on_user_error, path

Run = Annotated[Path, typer.Argument(parser=path, help="The folder of a run.")]
Step = Annotated[int, typer.Option("--step", min=1, help="Number of the step.")]


def replay(
    run: Run,
    step: Annotated[
        list[int] | None, typer.Option(min=1, help="The step, or several; default: all that are recorded.")
    ] = None,
    json_: Json = False,
) -> None:
    """Train recorded steps again from the nearest checkpoint, and name the first number that differs from the record.

    For the local backend and the embedded engine at lag 0. Exit code 0: bit-equal; 1: not; 2: no such step.

    oxrl replay runs/first --step 12
    """
    from oxrl.diagnose.replay import replay as train_again

    with exit_on_failure("the replay"):
        found = train_again(run, step or ())
    typer.echo(json.dumps(found.to_json()) if json_ else str(found))
    raise typer.Exit(0 if found.equal else 1)


def explain(
    run: Run,
    step: Step,
    group: Annotated[int | None, typer.Option(help="Show the tokens of an answer of this group (prompt).")] = None,
    answer: Annotated[
        int | None, typer.Option(min=0, help="Which answer of it; default: the one with the largest gradient.")
    ] = None,
    json_: Json = False,
) -> None:
    """Explain what a recorded step taught: token by token, and in words why it taught nothing or little.

    oxrl explain runs/first --step 12

    oxrl explain runs/first --step 12 --group 48 --answer 3
    """
    from oxrl.diagnose.explain import explain as explain_step

    with exit_on_user_error():
        found = explain_step(run, step, group, answer)
    typer.echo(json.dumps(found.to_json()) if json_ else str(found))


def diff(
    run_a: Annotated[Path, typer.Argument(parser=path, help="The folder of a run.")],
    run_b: Annotated[Path, typer.Argument(parser=path, help="The folder of another one.")],
    json_: Json = False,
) -> None:
    """Compare two runs: the config keys that differ, then the first step and field in which they part, and the cause.

    Exit code 0: equal in all steps that both recorded; 1: they part; 2: no such run.

    oxrl diff runs/first runs/second
    """
    from oxrl.diagnose.diff import diff_runs

    with exit_on_user_error():
        found = diff_runs(run_a, run_b)
    typer.echo(json.dumps(found.to_json()) if json_ else str(found))
    raise typer.Exit(1 if found.difference else 0)
