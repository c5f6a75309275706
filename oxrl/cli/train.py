"""`oxrl train`: flags override a YAML file; trains the run and reports its result."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oxrl.cli import completion
from oxrl.cli.base import exit_on_failure, exit_on_user_error, path, rewards
from oxrl.cli.plan import show_plans
from oxrl.run.launch import restarted
from oxrl.tracking.logs import make_optional

if TYPE_CHECKING:
    from oxrl.config import Config
    from oxrl.run.spec import RunSpec
    from oxrl.run.train import RunResult


Model = Annotated[
    str | None,
    typer.Option(
        help="Hub id, name from `oxrl models list`, local folder or .gguf file.", autocompletion=completion.models
    ),
]


def train(
    config: Annotated[Path | None, typer.Argument(parser=path, help="YAML file; flags override it.")] = None,
    model: Model = None,
    task: Annotated[
        str | None,
        typer.Option(
            help="math, math-hard, code, reasoning, instruct or chat: algorithm, data and reward in one.",
            autocompletion=completion.tasks,
        ),
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="A name from `oxrl algorithms` (default sgrpo), or a custom loss: FILE.py:FUNCTION.",
            autocompletion=completion.algorithms,
        ),
    ] = None,
    data: Annotated[
        str | None, typer.Option(help="Training rows: JSONL, Parquet, CSV, or a hub id; see `oxrl data show`.")
    ] = None,
    val: Annotated[str | None, typer.Option(help="Held-out rows for evaluation.")] = None,
    reward: Annotated[
        str | None,
        typer.Option(
            help="A name from `oxrl rewards list` or FILE.py:FUNCTION; several: {NAME: WEIGHT, ...}.",
            autocompletion=completion.rewards,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(parser=path, help="Run folder; default: a new one, checkpoints/EXPERIMENT_ID with a number."),
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[
        int | None, typer.Option(help="Optimizer steps per epoch, instead of one pass over the data.")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="Rows per optimizer step on each training device.")] = None,
    lr: Annotated[float | None, typer.Option(help="Peak learning rate.")] = None,
    lora: Annotated[bool, typer.Option("--lora", help="Train a LoRA adapter instead of all weights.")] = False,
    seed: Annotated[int | None, typer.Option(help="Fixes data order, dropout and new weights.")] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="Training backend: auto, local, fsdp, deepspeed, ray, or FILE.py:RECORD.",
            autocompletion=completion.backends,
        ),
    ] = None,
    engine: Annotated[
        str | None,
        typer.Option(
            help="Inference engine: embedded, vllm, http, or FILE.py:RECORD.", autocompletion=completion.engines
        ),
    ] = None,
    tracker: Annotated[
        list[str] | None,
        typer.Option(
            help="Also log metrics to mlflow, tensorboard, wandb or trackio; repeatable.",
            autocompletion=completion.trackers,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any config key, repeatable: --set train.weight_decay=0.1")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Resume the run in --output; without it, the latest of this experiment.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only print what would happen, as `oxrl plan` does.")
    ] = False,
    json_: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Train a model.

    oxrl train config.yaml

    oxrl train --model smollm2-135m --algorithm sft --data rows.jsonl --output runs/first

    oxrl train --model smollm2-135m --algorithm grpo --data prompts.jsonl --reward number_match --output runs/rl

    oxrl train --model smollm2-135m --task math --lora --tracker tensorboard

    oxrl train --output runs/first --resume
    """
    flags = {
        "model.name": model,
        "run.task": task,
        "train.alg_name": algorithm,
        "data.train_files_path": data,
        "data.val_files_path": val,
        "reward.reward_func": rewards(reward),
        "train.total_number_of_epochs": epochs,
        "train.train_steps_per_epoch": steps,
        "train.train_batch_size_per_gpu": batch_size,
        "train.lr": lr,
        "lora.enabled": True if lora else None,
        "run.seed": seed,
        "run.backend": backend,
        "inference_engine.name": engine,
        "run.trackers": tracker or None,
    }
    make_optional("stdout")  # the result of a run is its folder
    overrides = [f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None]
    with exit_on_user_error():
        stages = _stages(config, output, resume, [*overrides, *(set_ or [])])
        if dry_run:
            show_plans(stages, output, json_)
        resume = resume or restarted(stages, output)
        _start_ranks(stages, output, resume)
        from oxrl.run.train import train_spec  # imports torch: wrong input was reported before

        for spec in _prepared(stages, output, resume):
            typer.echo(f"to watch: oxrl view {spec.folder}", err=True)
            with exit_on_failure("the run", partial(_how_to_resume, spec.folder)):
                result = train_spec(spec)
            _report(result, spec.config, as_json=json_)


def _prepared(stages: Mapping[str, Config], output: Path | None, resume: bool) -> Iterator[RunSpec]:
    from oxrl.run.folder import RunExistsError
    from oxrl.run.prepare import prepare_stages

    try:
        yield from prepare_stages(stages, output, resume=resume)
    except RunExistsError as error:
        raise ValueError(
            f"{error.folder} already has a run: pass --resume to continue it, or another --output"
        ) from None


def _start_ranks(stages: Mapping[str, Config], output: Path | None, resume: bool) -> None:
    """Launch the ranks of a run with several processes and exit with their code; in a rank, join the others."""
    from oxrl.run.folder import choose_folder
    from oxrl.run.launch import join_others, run_ranks
    from oxrl.run.placement import check_installed, placed, ranks_to_start

    where = [placed(config) for config in stages.values()]
    counts = {ranks_to_start(config) for config in where}
    if len(counts) > 1:
        raise ValueError(f"all stages of a run need the same run.backend and run.training_gpus, not {counts}")
    if ranks := counts.pop():
        for config in where:
            check_installed(config)
        # Without --output a rank that is restarted would choose another folder than before.
        folder = choose_folder(where[0], output, resume=resume)
        arguments = [*sys.argv[1:], *(["--output", str(folder)] if output is None else [])]
        raise typer.Exit(run_ranks(arguments, ranks, max_restarts=where[0].run.max_restarts))
    join_others(time_limit=where[0].run.rank_time_limit)


def _stages(path: Path | None, output: Path | None, resume: bool, overrides: list[str]) -> dict[str, Config]:
    from oxrl.config import load_stages

    named = any(each.startswith("model.name=") for each in overrides)
    if not resume and path is None and not named and output is not None:
        from oxrl.run.folder import has_run

        if has_run(output):
            raise ValueError(
                f"{output} has a run. To resume it: oxrl train --output {output} --resume (with --steps or --epochs to "
                "train for longer). For a new run: oxrl train CONFIG, or --model and --data, with another --output"
            )
    if path is not None or (output is None and named) or not resume:
        return load_stages(path, overrides)
    if output is None:
        raise ValueError("--output names the run to resume; or repeat the config or flags of the run")
    from oxrl.run.folder import recorded_stages

    if not (stages := recorded_stages(output, overrides)):
        raise ValueError(f"there is nothing to resume in {output}")
    return stages


def _first_and_last(rows: Sequence[Mapping[str, Any]], most: int = 8) -> Iterator[str]:
    """The main metrics of a run, each at its first and its last step."""
    from oxrl.tracking.catalogue import results
    from oxrl.tracking.metrics import short_number

    seen: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:  # not finite
                seen.setdefault(name, []).append((row["step"], value))
    ends = [(name, *seen[name][0], *seen[name][-1]) for name in results(seen)[:most]]
    lines = [
        (name, f"{start}", short_number(first), f"{end}", short_number(last)) for name, start, first, end, last in ends
    ]
    table = [("", "step", "first", "step", "last"), *lines]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for name, *cells in table:
        yield f"{name:{widths[0]}}" + "".join(f"  {cell:>{size}}" for cell, size in zip(cells, widths[1:], strict=True))


def _how_to_resume(folder: Path) -> str:
    started = (folder / "config.yaml").exists()
    return f"; resume with: oxrl train --output {folder} --resume" if started else " before its first step"


def _report(result: RunResult, config: Config, *, as_json: bool) -> None:
    from oxrl.guard.findings import states_of
    from oxrl.tracking.health import HealthWarning
    from oxrl.tracking.metrics import read_metrics

    last = result.history[-1] if result.history else {}
    logged = read_metrics(result.folder / "metrics.jsonl")
    faults = sorted(each for each in states_of(result.folder) if each.is_fault)
    warnings = [HealthWarning(each.step, each.check, each.message, each.remedy) for each in faults]
    if as_json:
        found = {"folder": str(result.folder), "checkpoint": str(result.checkpoint), "last": last}
        typer.echo(json.dumps({**found, "warnings": [each._asdict() for each in warnings]}))
        return
    for line in _first_and_last(logged) if last else ["nothing was left to do"]:
        typer.echo(line)
    for warning in warnings:
        typer.secho(f"warning: {warning}", fg="yellow")
    typer.echo(f"model: {result.checkpoint}{' (see the warnings)' if warnings else ''}")
    if config.train.alg_name != "rm":  # a reward model generates no text
        typer.echo(f"to chat: oxrl chat {result.folder}")
