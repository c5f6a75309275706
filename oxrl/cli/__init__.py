"""The command line. Exit codes: 0 success, 1 a failed run, 2 invalid input, 130 interrupted.

One file per command or group of commands; `COMMANDS` and `GROUPS` list them.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Annotated

import typer

import oxrl
from oxrl.cli import (
    algorithms,
    check,
    config,
    data,
    doctor,
    env,
    export,
    generate,
    mismatch,
    models,
    plan,
    plot,
    report,
    rewards,
    steps,
    train,
    view,
)
from oxrl.cli.eval import evaluate
from oxrl.machine.hardware import set_up_process
from oxrl.run.launch import leave
from oxrl.tracking.files import is_full_disk
from oxrl.tracking.logs import make_optional, set_up_logging

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
    algorithms.algorithms,
    plot.plot,
    check.check,
    view.view,
    export.merge,
    export.export,
    doctor.doctor,
    report.report,
    mismatch.mismatch,
    steps.replay,
    steps.explain,
    steps.diff,
)
GROUPS = {"config": config.app, "data": data.app, "env": env.app, "rewards": rewards.app, "models": models.app}
for command in COMMANDS:
    app.command()(command)
app.command("eval")(evaluate)
for name, group in GROUPS.items():
    app.add_typer(group, name=name)


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(oxrl.__version__)
        raise typer.Exit


@app.callback()
def oxrl_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Post-train language models: supervised, preference and reinforcement learning."""


def main_with_config_file(about: str) -> None:
    """Run `--config-file X ...` as `oxrl train X ...`, for `main_rl.py` and `main_sl.py`."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--config-file", required=True, help="YAML file; other flags are passed to `oxrl train`")
    known, other = parser.parse_known_args()
    sys.argv[1:] = ["train", known.config_file, *other]
    main()


def main() -> None:
    """Run the command line; the entry point of `oxrl`."""
    if sys.flags.optimize > 1:
        typer.echo(
            "error: PYTHONOPTIMIZE=2 (python -OO) removes docstrings that transformers needs: unset it", err=True
        )
        sys.exit(2)
    set_up_process()
    make_optional("stderr")
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # no progress bars in log files
    set_up_logging()
    try:
        app()
    except SystemExit as exit_:
        leave(exit_.code if isinstance(exit_.code, int) else 0)
        raise
    except OSError as error:
        if not is_full_disk(error):
            raise
        make_optional("stdout")  # it may be what is full, and would fail again at exit
        typer.secho(f"error: {error}: free disk space, then run the command again", fg="red", err=True)
        sys.exit(1)
