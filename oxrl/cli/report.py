"""`oxrl report`: print a bug report of a failed run, or file it on GitHub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.base import Json, exit_on_user_error, path


def report(
    run: Annotated[Path, typer.Argument(parser=path, help="The folder of a failed run, or a model's record.")],
    send: Annotated[
        str | None, typer.Option(metavar="OWNER/REPO", help="File the report as an issue; needs GITHUB_TOKEN.")
    ] = None,
    json_: Json = False,
) -> None:
    """Print a bug report of a failed run, or the text that publishes a model's record; with --send, file it on GitHub.

    Secrets are removed, and an issue that has the same fingerprint is not filed again.

    oxrl report runs/first

    oxrl report my-model.json

    oxrl report runs/first --send OWNER/REPO
    """
    from oxrl.diagnose.bug_report import SendError, report_of
    from oxrl.diagnose.bug_report import send as send_report

    with exit_on_user_error():
        if run.is_file():
            from oxrl.onboarding.publish import report_of_record

            written = report_of_record(run)
        else:
            written = report_of(run)
        if not json_:
            typer.echo(f"# {written.title}\n\n{written.body}", nl=False)
        try:
            sent = None if send is None else send_report(written, send, run)
        except SendError as failure:
            typer.secho(f"error: {failure}", fg="red", err=True)
            raise typer.Exit(1) from None
    if json_:
        typer.echo(json.dumps(written._asdict() | {"sent": sent and sent._asdict()}))
    elif sent is not None:
        typer.echo(f"{'already reported' if sent.known else 'filed'}: {sent.url}", err=True)
