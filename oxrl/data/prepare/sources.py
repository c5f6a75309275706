"""Sources of raw rows: local copies, the hub through `datasets`, or a task that generates them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.data.formats import RawRow
from oxrl.data.prepare.recipe import Dataset
from oxrl.data.sources import read_rows, undecoded
from oxrl.machine.hub import offline_if_unreachable


class Part(NamedTuple):
    """Rows of one split, or rows without a split (`split` is None)."""

    split: str | None
    rows: Iterator[RawRow]


class Origin(NamedTuple):
    """`Origin([Part("train", rows)], {"hub": "openai/gsm8k:main", ...})`: rows, and their source for the card."""

    parts: list[Part]
    description: dict[str, Any]
    division: str = "as published"


def from_files(files: Sequence[tuple[str | None, Path]]) -> Origin:
    parts = [Part(split, read_rows(path)) for split, path in files]
    return Origin(parts, {"files": [{"name": path.name, "sha256": sha256_of(path)} for _, path in files]})


def sha256_of(path: Path) -> str:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def from_source(dataset: Dataset) -> Origin:
    """Load all splits, even if only some are needed: overlap can only be removed if all are known."""
    if dataset.generate is not None:
        parts = [Part(split, _numbered(f"{dataset.name}:{split}", dataset.generate(split))) for split in dataset.splits]
        return Origin(parts, {"made by": dataset.summary}, "each split from a seed of its own")
    if dataset.hub is None:
        raise ValueError(f"{dataset.name} is not on the hub; {local_copy_hint(dataset)}")
    parts, revision = _from_hub(dataset, dataset.hub)
    if dataset.held_out and "test" not in dataset.splits:
        parts = [part._replace(split=None) for part in parts]
    return Origin(parts, {"hub": dataset.hub, "splits": list(dataset.splits.values()), "revision": revision})


def local_copy_hint(dataset: Dataset) -> str:
    location = f" ({dataset.elsewhere})" if dataset.elsewhere else ""
    one_file = dataset.evaluation_only or dataset.held_out or dataset.split_of
    example = "FILE" if one_file else "train=FILE --from test=FILE"
    return f"pass a local copy in the raw format{location}: oxrl data prepare {dataset.name} --from {example}"


def _numbered(name: str, rows: Any) -> Iterator[RawRow]:
    return (RawRow(f"{name}:{number}", row) for number, row in enumerate(rows, 1))


def _from_hub(dataset: Dataset, hub: str) -> tuple[list[Part], str]:
    """Download and load all rows, so that errors are raised here."""
    import datasets

    name, _, subset = hub.partition(":")
    try:
        with offline_if_unreachable():
            if all(each.endswith(".jsonl.gz") for each in dataset.splits.values()):
                return _files_from_hub(name, dataset.splits)
            builder = datasets.load_dataset_builder(name, subset or None)
            builder.download_and_prepare()
        loaded = {
            ours: (theirs, undecoded(builder.as_dataset(split=theirs))) for ours, theirs in dataset.splits.items()
        }
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"{name} could not be loaded from the hub ({reason}); {local_copy_hint(dataset)}") from None
    parts = [Part(ours, _numbered(f"{hub}:{theirs}", rows)) for ours, (theirs, rows) in loaded.items()]
    return parts, str(builder.hash)


def _files_from_hub(name: str, splits: Mapping[str, str]) -> tuple[list[Part], str]:
    """Download files that `datasets` cannot load as a table; the folder of a download is named after its commit."""
    from huggingface_hub import hf_hub_download

    paths = {ours: Path(hf_hub_download(name, theirs, repo_type="dataset")) for ours, theirs in splits.items()}
    return [Part(ours, read_rows(path)) for ours, path in paths.items()], next(iter(paths.values())).parent.name
