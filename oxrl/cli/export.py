"""`oxrl merge` and `oxrl export`: write the model of a run as a standalone folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from oxrl.cli import completion
from oxrl.cli.base import Json, exit_on_failure, path

Source = Annotated[str, typer.Argument(metavar="RUN", help="A run's folder, or any model.")]
Output = Annotated[Path, typer.Option(parser=path, help="Output folder; it must be new or empty.")]
Dtype = Annotated[
    str,
    typer.Option(
        help="Type of the written weights: auto (as stored), float32, bfloat16 or float16.",
        autocompletion=completion.dtypes,
    ),
]


def merge(run: Source, output: Output, dtype: Dtype = "auto", json_: Json = False) -> None:
    """Write a LoRA run as a plain model: the adapter is merged into its base. `export`, for adapters only.

    oxrl merge runs/lora --output merged
    """
    with exit_on_failure("the export"):
        from oxrl.run.export import merge_run

        folder = merge_run(run, output, dtype=dtype)
    _print_result(folder, None, json_)


def export(
    run: Source,
    output: Output,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the LoRA adapter alone, without merging it.")
    ] = False,
    dtype: Dtype = "auto",
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Also upload to the hub; needs HF_TOKEN.")
    ] = None,
    public: Annotated[
        bool, typer.Option("--public", help="With --push: make the repository public; default private.")
    ] = False,
    json_: Json = False,
) -> None:
    """Write the model of any run for transformers, vLLM and others: best weights, tokenizer, model card.

    A LoRA adapter is merged into its base, as by `oxrl merge`, or kept with --adapter.

    oxrl export runs/rl --output model

    oxrl export runs/lora --output adapter --adapter

    oxrl export runs/rl --output model --push OWNER/NAME
    """
    with exit_on_failure("the export"):
        from oxrl.run.export import export_model, push_model

        folder = export_model(run, output, adapter=adapter, dtype=dtype)
        url = None if push is None else push_model(folder, push, private=not public)
    _print_result(folder, url, json_)


def _print_result(folder: Path, url: str | None, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"folder": str(folder), "pushed_to": url}))
        return
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    typer.echo(f"{folder}: {size / 2**20:,.0f} MiB")
    if url is not None:
        typer.echo(f"pushed to {url}")
    typer.echo(f"to chat: oxrl chat {folder}")
