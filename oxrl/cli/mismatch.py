"""`oxrl mismatch`: compare the log-probs of a run's engine with those of its trainer."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.base import Json, exit_on_failure, path


def mismatch(
    run: Annotated[Path, typer.Argument(parser=path, help="The folder of a run that samples (grpo, ppo, ...).")],
    answers: Annotated[int, typer.Option(min=1, help="Number of completions to sample and compare.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens per completion.")] = 64,
    recorded: Annotated[
        bool, typer.Option("--recorded", help="Compare the recorded completions of the run instead of new ones.")
    ] = False,
    json_: Json = False,
) -> None:
    """Compare the log-probs of a run's engine with its trainer's, token by token, and report the cause of the gap.

    Exit code 0: within train.max_logprob_gap; 1: above it; 2: no such run.

    oxrl mismatch runs/first

    oxrl mismatch runs/first --recorded --json
    """
    from oxrl.concurrency import run_blocking
    from oxrl.diagnose.logprob_gap import audit_mismatch

    with exit_on_failure("the audit"):
        audit = partial(audit_mismatch, run, answers=answers, max_tokens=max_tokens, recorded=recorded)
        found = run_blocking(audit)
    typer.echo(json.dumps(found.to_json()) if json_ else str(found))
    raise typer.Exit(0 if found.within else 1)
