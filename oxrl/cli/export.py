"""`oxrl merge` and `oxrl export`: a run to a folder for others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli.base import Json, exit_on_user_error

Source = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or any model.")]
Output = Annotated[Path, typer.Option(help="The new folder.")]
Dtype = Annotated[str, typer.Option(help="auto (as stored), float32, bfloat16 or float16.")]


def merge(run: Source, output: Output, dtype: Dtype = "auto", json_: Json = False) -> None:
    """Merge a LoRA adapter into its base: oxrl merge runs/lora --output merged"""
    with exit_on_user_error():
        from oxrl.run.export import merge_run

        folder = merge_run(run, output, dtype=dtype)
    _tell(folder, None, json_)


def export(
    run: Source,
    output: Output,
    adapter: Annotated[bool, typer.Option("--adapter", help="Leave a LoRA adapter an adapter.")] = False,
    dtype: Dtype = "auto",
    push: Annotated[str | None, typer.Option(metavar="OWNER/NAME", help="Upload it too; needs HF_TOKEN.")] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: for all to see.")] = False,
    json_: Json = False,
) -> None:
    """Write a run's best weights, its tokenizer and a card: oxrl export runs/rl --output model"""
    with exit_on_user_error():
        from oxrl.run.export import export_model, push_model

        folder = export_model(run, output, adapter=adapter, dtype=dtype)
        address = None if push is None else push_model(folder, push, private=not public)
    _tell(folder, address, json_)


def _tell(folder: Path, address: str | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "pushed_to": address}))
        return
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    typer.echo(f"{folder}: {size / 2**20:,.0f} MiB")
    if address is not None:
        typer.echo(f"pushed to {address}")
    typer.echo(f"talk to it: oxrl chat {folder}")
