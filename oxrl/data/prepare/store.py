"""Prepared datasets as folders: JSONL of our own columns per split, and a card. They appear whole or not at all."""

from __future__ import annotations

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
from oxrl.data.prepare.build import check_splits, only_for_evaluation, prepare_samples
from oxrl.data.prepare.recipe import Dataset
from oxrl.data.prepare.sources import local_copy, sha256_of
from oxrl.data.prepare.table import find_dataset
from oxrl.types import Sample

logger = logging.getLogger(__name__)

CARD = "card.json"


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
) -> Path:
    """Prepare a dataset from the hub, or from local `files` ("FILE" or "SPLIT=FILE"), and return its folder.

    `splits` are those to prepare, by default all; with one undivided file, the one that it is. `instruction` stands
    behind each question instead of the dataset's own (an empty one: nothing does); `size` is for reasoning-gym's tasks.
    The folder appears whole or not at all, and the same rows make the same bytes.
    """
    dataset = find_dataset(name, size)
    folder = Path(output) if output is not None else _folder_of(dataset)
    _check_replaceable(folder, dataset)
    samples, card = prepare_samples(dataset, files, splits, instruction)
    with _alone(folder):
        _write(folder, dataset, samples, card)
    return folder


def _folder_of(dataset: Dataset) -> Path:
    return data_dir() / dataset.name.replace(":", "-")


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """One process at a time; several ranks of a run may want the same dataset."""
    from filelock import FileLock

    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        yield


def _check_replaceable(folder: Path, dataset: Dataset) -> None:
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if not (folder / CARD).is_file() or read_card(folder).get("name") != dataset.name:
        raise ValueError(f"{folder} holds something else than {dataset.name}: choose another folder with --output")


def _write(folder: Path, dataset: Dataset, samples: Mapping[str, Sequence[Sample]], card: dict[str, Any]) -> None:
    """Into a folder beside the final one, which then takes its place."""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as scratch:
        fresh, old = Path(scratch) / "new", Path(scratch) / "old"
        fresh.mkdir()
        card["splits"] = {split: _write_split(fresh / f"{split}.jsonl", each) for split, each in samples.items()}
        (fresh / CARD).write_text(json.dumps(card, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        if folder.exists():
            folder.rename(old)
        fresh.rename(folder)
    told = ", ".join(f"{split} {len(each)}" for split, each in samples.items())
    logger.info("%s: %s rows in %s", dataset.name, told, folder)


def _write_split(path: Path, samples: Sequence[Sample]) -> dict[str, Any]:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for number, sample in enumerate(samples, 1):
            where = f"{path.name}:{number}"
            line = json.dumps(_columns(sample), ensure_ascii=False)
            read = to_sample(RawRow(where, json.loads(line)))
            assert read == replace(sample, id=where), f"{where} would be read as {read}, it is {sample}"
            file.write(line + "\n")
    return {"file": path.name, "rows": len(samples), "sha256": sha256_of(path)}


def _columns(sample: Sample) -> dict[str, Any]:
    """The columns that `load_samples` reads as this sample; a lone question is plain text."""
    said = [message.to_dict() for message in sample.messages]
    if sample.messages[-1].role == "assistant":
        return {"messages": said, **sample.metadata}
    lone = len(said) == 1 and isinstance(said[0]["content"], str) and not SPEAKER.match(said[0]["content"])
    columns: dict[str, Any] = {"prompt": said[0]["content"] if lone else said}
    if sample.chosen:
        columns["chosen"] = [message.to_dict() for message in sample.chosen]
        columns["rejected"] = [message.to_dict() for message in sample.rejected]
    elif sample.answer is not None:
        columns["answer"] = sample.answer
    return {**columns, **sample.metadata}


def read_card(folder: Path) -> dict[str, Any]:
    card: dict[str, Any] = json.loads((folder / CARD).read_text(encoding="utf-8"))
    return card


def split_file(name: str, split: str = "train") -> Path:
    """The file of a split below `data_dir()`, prepared now if it was not before; one that was changed is refused."""
    dataset = find_dataset(name)
    check_splits(dataset, [split])
    folder = _folder_of(dataset)
    with _alone(folder):
        if not (folder / CARD).is_file():
            _check_replaceable(folder, dataset)
            logger.info("preparing %s in %s", name, folder)
            _write(folder, dataset, *prepare_samples(dataset))
    entry = read_card(folder)["splits"].get(split)
    if entry is None:
        raise ValueError(f"{folder} was prepared without the split {split!r}; {local_copy(dataset)}")
    path = folder / str(entry["file"])
    if sha256_of(path) != entry["sha256"]:
        raise ValueError(
            f"{path} is not what its card says it is: prepare it again (oxrl data prepare {name}), or name the file in "
            "data.train_files_path"
        )
    return path


def check_trainable(path: str) -> None:
    """A file that lies beside a card of ours: one for evaluation only is refused, a test split is warned about."""
    card = Path(path).parent / CARD
    if not Path(path).is_file() or not card.is_file():
        return
    told = json.loads(card.read_text(encoding="utf-8"))
    if not isinstance(told, dict) or "splits" not in told:
        return
    if told.get("evaluation_only"):
        raise ValueError(only_for_evaluation(told["name"]))
    if Path(path).name == told["splits"].get("test", {}).get("file"):
        logger.warning("%s is the test split of %s: measuring with it will say nothing afterwards", path, told["name"])
