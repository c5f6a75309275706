"""Prepared datasets as folders: one JSONL file per split, and a card. A folder is written atomically."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from oxrl.data.formats import SPEAKER, RawRow, to_sample
from oxrl.data.prepare.build import check_splits, evaluation_only_message, prepare_samples
from oxrl.data.prepare.recipe import Dataset
from oxrl.data.prepare.sources import local_copy_hint, sha256_of
from oxrl.data.prepare.table import find_dataset
from oxrl.parsing import parse_json, read_json
from oxrl.types import Media, Sample

logger = logging.getLogger(__name__)

CARD = "card.json"
MEDIA = "media"  # folder of images and sounds


def data_dir() -> Path:
    return Path(os.environ.get("OXRL_DATA_DIR") or "data")


def prepare(
    name: str,
    *,
    files: Sequence[str] = (),
    output: str | os.PathLike[str] | None = None,
    splits: Sequence[str] = (),
    instruction: str | None = None,
    size: int = 1000,
    overwrite: bool = False,
) -> Path:
    """Prepare a dataset from the hub, or from local `files` ("FILE" or "SPLIT=FILE"), and return its folder.

    `splits` are those to prepare, by default all; for one file without a split, the split of its rows. `instruction`
    replaces the one that the dataset appends to each question (empty: none); `size` is for tasks of reasoning-gym. The
    folder is written atomically, and the same rows give the same bytes. A folder with other rows of the dataset is a
    ValueError, unless `overwrite` is set.
    """
    dataset = find_dataset(name, size)
    folder = Path(output) if output is not None else _folder_of(dataset)
    _check_replaceable(folder, dataset)
    samples, card = prepare_samples(dataset, files, splits, instruction)
    with _locked(folder):
        _write(folder, dataset, samples, card, overwrite=overwrite)
    return folder


def _folder_of(dataset: Dataset) -> Path:
    return data_dir() / dataset.name.replace(":", "-")


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Allow one process at a time; several ranks of a run may prepare the same dataset."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        yield


def _check_replaceable(folder: Path, dataset: Dataset) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / CARD).is_file() or read_card(folder).get("name") != dataset.name:
        raise ValueError(f"{folder} contains something other than {dataset.name}; choose another folder with --output")


def _write(
    folder: Path,
    dataset: Dataset,
    samples: Mapping[str, Sequence[Sample]],
    card: dict[str, Any],
    *,
    overwrite: bool = False,
) -> None:
    """Write to a temporary folder next to `folder`, then replace it."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        new, old = Path(scratch) / "new", Path(scratch) / "old"
        new.mkdir()
        card["splits"] = {split: _write_split(new / f"{split}.jsonl", each) for split, each in samples.items()}
        (new / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if not overwrite:
            _check_same_rows(folder, card["splits"])
        if folder.exists():
            folder.rename(old)
        new.rename(folder)
    counts = ", ".join(f"{split} {len(each)}" for split, each in samples.items())
    logger.info("%s: %s rows in %s", dataset.name, counts, folder)


def _check_same_rows(folder: Path, splits: Mapping[str, Any]) -> None:
    """Raise ValueError if a split in the folder would be lost or become another one."""
    if not (folder / CARD).is_file():
        return
    for name, entry in read_card(folder)["splits"].items():
        file = folder / str(entry["file"])
        if not file.is_file() or splits.get(name, {}).get("sha256") == sha256_of(file):
            continue
        change = "replaced by other rows" if name in splits else "removed"
        raise ValueError(
            f"{folder} has the splits {', '.join(read_card(folder)['splits'])}, of which {name} ({entry['rows']} rows) "
            f"would be {change}: pass --overwrite to replace the folder, or another --output; give the files of all "
            "splits in one command"
        )


def _write_split(path: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for number, sample in enumerate(samples, 1):
            where = f"{path.name}:{number}"
            stored = replace(sample, id=where, media=tuple(_stored(medium, path.parent) for medium in sample.media))
            line = json.dumps({**_columns(sample), **_media_columns(stored, path.parent)}, ensure_ascii=False)
            read = to_sample(RawRow(where, json.loads(line)), folder=path.parent)
            assert read == stored, f"{where} would be read as {read}, it is {sample}"
            file.write(line + "\n")
    return {"file": path.name, "rows": len(samples), "sha256": sha256_of(path)}


def _stored(medium: Media, folder: Path) -> Media:
    """Write a medium to a file that is named by its content, and return it as this file."""
    content = medium.data if isinstance(medium.data, bytes) else Path(medium.data).read_bytes()
    file = folder / MEDIA / hashlib.sha256(content).hexdigest()[:32]
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(content)
    return Media(medium.kind, str(file.absolute()))


def _media_columns(sample: Sample, folder: Path) -> dict[str, list[str]]:
    """Return paths relative to the folder: `{"images": ["media/0f3c"]}`."""
    columns: dict[str, list[str]] = {}
    for medium in sample.media:
        name = "images" if medium.kind == "image" else "audio"
        columns.setdefault(name, []).append(str(Path(str(medium.data)).relative_to(folder.absolute())))
    return columns


def _columns(sample: Sample) -> dict[str, Any]:
    """Return the columns that `load_samples` converts to this sample; a single user message is plain text."""
    messages = [message.to_dict() for message in sample.messages]
    if sample.messages[-1].role == "assistant":
        return {"messages": messages, **sample.metadata}
    content = messages[0]["content"]
    is_text = len(messages) == 1 and isinstance(content, str) and not SPEAKER.match(content)
    columns: dict[str, Any] = {"prompt": content if is_text else messages}
    if sample.chosen:
        columns["chosen"] = [message.to_dict() for message in sample.chosen]
        columns["rejected"] = [message.to_dict() for message in sample.rejected]
    elif sample.answer is not None:
        columns["answer"] = sample.answer
    return {**columns, **sample.metadata}


def read_card(folder: Path) -> dict[str, Any]:
    return read_json(folder / CARD)


def split_file(name: str, split: str = "train") -> Path:
    """Return the file of a split in `data_dir()`, prepared on first use; a file that was changed is refused."""
    dataset = find_dataset(name)
    check_splits(dataset, [split])
    folder = _folder_of(dataset)
    with _locked(folder):
        if not (folder / CARD).is_file():
            _check_replaceable(folder, dataset)
            logger.info("preparing %s in %s", name, folder)
            _write(folder, dataset, *prepare_samples(dataset))
    entry = read_card(folder)["splits"].get(split)
    if entry is None:
        raise ValueError(f"{folder} was prepared without the split {split!r}; {local_copy_hint(dataset)}")
    path = folder / str(entry["file"])
    if sha256_of(path) != entry["sha256"]:
        raise ValueError(
            f"{path} does not match the hash in its card: prepare it again (oxrl data prepare {name} --overwrite), or "
            "set data.train_files_path to the file"
        )
    return path


def check_trainable(path: str) -> None:
    """Check a file with a card next to it: raise if it is for evaluation only, warn if it is a test split."""
    card_file = Path(path).parent / CARD
    if not Path(path).is_file() or not card_file.is_file():
        return
    card = parse_json(card_file.read_bytes())
    if not isinstance(card, dict) or "splits" not in card:
        return
    if card.get("evaluation_only"):
        raise ValueError(evaluation_only_message(card["name"]))
    if Path(path).name == card["splits"].get("test", {}).get("file"):
        logger.warning("%s is the test split of %s: do not evaluate with it after training on it", path, card["name"])
