"""`oxrl plan`: steps, memory and time of a run. Exit codes: 0 it fits, 1 it does not, 2 invalid input."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from oxrl.cli.base import Json, exit_on_user_error, path

if TYPE_CHECKING:
    from oxrl.config import Config


def plan(
    config: Annotated[Path, typer.Argument(parser=path, help="YAML file.")],
    output: Annotated[Path | None, typer.Option(parser=path, help="The folder of the run.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any config key: --set train.micro_batch_tokens=512")
    ] = None,
    gpu_memory: Annotated[
        float | None,
        typer.Option(min=1, help="GiB per GPU: plan for the GPUs of the config instead of this machine."),
    ] = None,
    json_: Json = False,
) -> None:
    """Print the plan of a run: steps, memory, time, and whether it fits. No weights are loaded.

    oxrl plan config.yaml

    oxrl plan config.yaml --set model.gradient_checkpointing=true --json

    oxrl plan config.yaml --set run.training_gpus=8 --gpu-memory 80
    """
    with exit_on_user_error():
        from oxrl.config import load_stages

        show_plans(load_stages(config, set_ or []), output, json_, gpu_memory)


def show_plans(
    stages: Mapping[str, Config], output: Path | None, as_json: bool, gpu_memory: float | None = None
) -> NoReturn:
    """Print the plan of each stage and exit, with code 1 if one does not fit."""
    from oxrl.diagnose.plan import plan_run
    from oxrl.diagnose.plan_text import describe

    plans = {
        name: plan_run(config, output / name if output and name else output, gpu_memory)
        for name, config in stages.items()
    }
    if as_json:
        by_stage: dict[str, Any] = {name: plan.as_dict() for name, plan in plans.items()}
        typer.echo(json.dumps(by_stage.get("", by_stage)))
    for name, plan in plans.items() if not as_json else ():
        if name:
            typer.secho(f"stage {name}", bold=True)
        for heading, text in describe(plan).items():
            first, *rest = text.splitlines()
            typer.echo(f"{heading:10} {first}")
            for line in rest:
                typer.echo(f"{'':10} {line}")
    raise typer.Exit(0 if all(plan.fits for plan in plans.values()) else 1)
