"""Convert raw rows to the samples of each split, remove overlap between splits, and count what was skipped."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import SPLITS, Dataset
from oxrl.data.prepare.sources import Origin, from_files, from_source
from oxrl.data.prepare.splits import SEED, split_by_prompt, without_overlap
from oxrl.types import Message, Sample


def prepare_samples(
    dataset: Dataset, files: Sequence[str] = (), splits: Sequence[str] = (), instruction: str | None = None
) -> tuple[dict[str, list[Sample]], dict[str, Any]]:
    """Return the samples of each split, and the card that describes them."""
    check_splits(dataset, splits)
    wanted = list(splits) or list(_splits_of(dataset))
    origin = from_files(_assign_splits(dataset, files, splits)) if files else from_source(dataset)
    found, division, skipped = _read(dataset, origin)
    compared = len(found) > 1
    found, overlap = without_overlap(found)
    text = dataset.instruction if instruction is None else instruction
    samples = {name: [_with_instruction(each, text) for each in found[name]] for name in wanted if found.get(name)}
    if not samples:
        raise ValueError(f"{dataset.name}: there are no rows for {' or '.join(wanted)}, only for {', '.join(found)}")
    card = {
        "name": dataset.name,
        "summary": dataset.summary,
        "source": origin.description,
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
            raise ValueError(evaluation_only_message(dataset.name))
        if split not in _splits_of(dataset):
            raise ValueError(f"{dataset.name} has no split {split!r}; it has: {', '.join(_splits_of(dataset))}")


def evaluation_only_message(name: str) -> str:
    return f"{name} is for evaluation only: a model trained on it cannot be evaluated with it"


def _assign_splits(dataset: Dataset, files: Sequence[str], splits: Sequence[str]) -> list[tuple[str | None, Path]]:
    """Return each file with its split; None if its rows are split here."""
    if dataset.generate is not None:
        raise ValueError(f"{dataset.name} is generated and cannot be read from a file; leave --from out")
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
                f"{dataset.name} has the splits {', '.join(dataset.splits)}: name the split of {file}, as in "
                f"--from train={file}"
            )
    if len({split is None for split, _ in named}) > 1:
        raise ValueError("name the split of every file, or of none")
    return named


def _read(dataset: Dataset, origin: Origin) -> tuple[dict[str, list[Sample]], str, list[dict[str, Any]]]:
    """Return the samples by split, how they were split, and the skipped rows by reason."""
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
            f"({rows} times); check that the file is in the raw format of {dataset.name}"
        )
    skipped = [{"reason": reason, "rows": rows, "first": first[reason]} for reason, rows in sorted(reasons.items())]
    unsplit = found.pop(None, None)
    if unsplit is not None:
        division = f"a test split of {dataset.held_out:.0%} of the prompts, drawn with seed {SEED}"
        return split_by_prompt(unsplit, dataset), division, skipped
    by_rule = dataset.split_of is not None and any(part.split is None for part in origin.parts)
    return {str(name): rows for name, rows in found.items()}, "by row" if by_rule else origin.division, skipped


def _with_instruction(sample: Sample, instruction: str) -> Sample:
    """Return the sample with the instruction appended to its last user message."""
    if not instruction:
        return sample
    last = max(index for index, message in enumerate(sample.messages) if message.role == "user")
    content = sample.messages[last].content
    added = f"\n\n{instruction}"
    asked = content + added if isinstance(content, str) else [*content, {"type": "text", "text": added}]
    prompt = Message("user", asked)
    return replace(sample, messages=(*sample.messages[:last], prompt, *sample.messages[last + 1 :]))
