"""The command line: words to function calls, mistakes to one message. Exit codes: 2 wrong input, 1 a failed run.

One file per family of commands; `app` below is the table of them.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Annotated

import typer

import oxrl
from oxrl.cli import config, data, doctor, export, generate, look, mismatch, models, plan, report, rewards, train
from oxrl.cli.eval import evaluate
from oxrl.machine.hardware import set_up_process
from oxrl.run.launch import leave
from oxrl.tracking.logs import set_up_logging

app = typer.Typer(
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
)
COMMANDS = (
    train.train,
    plan.plan,
    generate.chat,
    generate.generate,
    look.algorithms,
    look.plot,
    export.merge,
    export.export,
    doctor.doctor,
    report.report,
    mismatch.mismatch,
)
FAMILIES = {"config": config.app, "data": data.app, "rewards": rewards.app, "models": models.app}
for command in COMMANDS:
    app.command()(command)
app.command("eval")(evaluate)
for name, family in FAMILIES.items():
    app.add_typer(family, name=name)


def _tell_version(wanted: bool) -> None:
    if wanted:
        typer.echo(oxrl.__version__)
        raise typer.Exit


@app.callback()
def oxrl_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_tell_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Post-train language models: supervised, preference and reinforcement learning."""


def main_with_config_file(about: str) -> None:
    """`--config-file X ...` as `oxrl train X ...`: the doors at the root of the repository."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--config-file", required=True, help="YAML file; further flags are those of `oxrl train`")
    known, further = parser.parse_known_args()
    sys.argv[1:] = ["train", known.config_file, *further]
    main()


def main() -> None:
    set_up_process()
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # a log file is no place for bars
    set_up_logging()
    try:
        app()
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 0)
        raise
