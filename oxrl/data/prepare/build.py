"""Raw rows into the samples of each split: converted, divided, without overlap, and counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import SPLITS, Dataset
from oxrl.data.prepare.sources import Origin, from_files, from_its_source
from oxrl.data.prepare.splits import SEED, divided, without_overlap
from oxrl.types import Message, Sample


def prepare_samples(
    dataset: Dataset, files: Sequence[str] = (), splits: Sequence[str] = (), instruction: str | None = None
) -> tuple[dict[str, list[Sample]], dict[str, Any]]:
    """The samples of each split, and what the card says about them."""
    check_splits(dataset, splits)
    wanted = list(splits) or list(_splits_of(dataset))
    origin = from_files(_named(dataset, files, splits)) if files else from_its_source(dataset)
    found, division, skipped = _read(dataset, origin)
    compared = len(found) > 1
    found, overlap = without_overlap(found)
    text = dataset.instruction if instruction is None else instruction
    samples = {name: [_instructed(each, text) for each in found[name]] for name in wanted if found.get(name)}
    if not samples:
        raise ValueError(f"{dataset.name}: there are no rows for {' or '.join(wanted)}, only for {', '.join(found)}")
    card = {
        "name": dataset.name,
        "summary": dataset.summary,
        "source": origin.told,
        "licence": dataset.licence,
        "verified": "on real rows" if dataset.seen_real_rows else "schema only",
        "evaluation_only": dataset.evaluation_only,
        "reward": dataset.reward,
        "instruction": text,
        "division": division,
        "overlap_removed": overlap if compared else "not known: only one split was read",
        "skipped": skipped,
    }
    return samples, card


def _splits_of(dataset: Dataset) -> list[str]:
    derived = {"train", "test"} if dataset.held_out else set()
    return [name for name in SPLITS if name in dataset.splits or name in derived]


def check_splits(dataset: Dataset, splits: Iterable[str]) -> None:
    for split in splits:
        if split == "train" and dataset.evaluation_only:
            raise ValueError(only_for_evaluation(dataset.name))
        if split not in _splits_of(dataset):
            raise ValueError(f"{dataset.name} has no split {split!r}; it has: {', '.join(_splits_of(dataset))}")


def only_for_evaluation(name: str) -> str:
    return f"{name} is for evaluation only: what was trained on it says nothing when measured with it"


def _named(dataset: Dataset, files: Sequence[str], splits: Sequence[str]) -> list[tuple[str | None, Path]]:
    """Each file with its split; None where its rows are divided here."""
    if dataset.made is not None:
        raise ValueError(f"{dataset.name} is made on the spot: there is no file to read it from")
    named: list[tuple[str | None, Path]] = []
    for file in files:
        split, equals, path = file.partition("=")
        if equals and split in SPLITS:
            check_splits(dataset, [split])
            named.append((split, Path(path)))
        elif len(splits) == 1 and dataset.split_of is None:
            named.append((splits[0], Path(file)))
        elif dataset.evaluation_only:
            named.append(("test", Path(file)))
        elif dataset.split_of is not None or dataset.held_out:
            named.append((None, Path(file)))
        else:
            raise ValueError(
                f"{dataset.name} comes in the splits {', '.join(dataset.splits)}: say which one {file} is, as in "
                f"--from train={file}"
            )
    if len({split is None for split, _ in named}) > 1:
        raise ValueError("name the split of every file, or of none")
    return named


def _read(dataset: Dataset, origin: Origin) -> tuple[dict[str, list[Sample]], str, list[dict[str, Any]]]:
    """Samples by split, how they were divided, and what was left out and why."""
    found: dict[str | None, list[Sample]] = {}
    reasons: Counter[str] = Counter()
    first: dict[str, str] = {}
    for part in origin.parts:
        for row in part.rows:
            try:
                if row.error:
                    raise BadRow(row.error)
                samples = dataset.convert(row.columns)
                split = dataset.split_of(row.columns) if part.split is None and dataset.split_of else part.split
            except BadRow as bad:
                reasons[bad.reason] += 1
                first.setdefault(bad.reason, row.where)
                continue
            found.setdefault(split, []).extend(samples)
    if not found:
        reason, rows = reasons.most_common(1)[0]
        raise ValueError(
            f"none of the {reasons.total()} rows can be used as {dataset.name}; the first, {first[reason]}: {reason} "
            f"({rows} times). Is this its raw format?"
        )
    skipped = [{"reason": reason, "rows": rows, "first": first[reason]} for reason, rows in sorted(reasons.items())]
    undivided = found.pop(None, None)
    if undivided is not None:
        words = f"a test split of {dataset.held_out:.0%} of the prompts, drawn with seed {SEED}"
        return divided(undivided, dataset), words, skipped
    by_rule = dataset.split_of is not None and any(part.split is None for part in origin.parts)
    return {str(name): rows for name, rows in found.items()}, "by row" if by_rule else origin.division, skipped


def _instructed(sample: Sample, instruction: str) -> Sample:
    """The instruction goes behind what the user said last."""
    if not instruction:
        return sample
    place = max(index for index, message in enumerate(sample.messages) if message.role == "user")
    asked = Message("user", f"{sample.messages[place].content}\n\n{instruction}")
    return replace(sample, messages=(*sample.messages[:place], asked, *sample.messages[place + 1 :]))
