"""Rows into splits that share no prompt. What a prompt is: all that is said before the reply, however it is spaced."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence

from oxrl.data.prepare.recipe import SPLITS, Dataset
from oxrl.types import Sample

SEED = 0


def prompt_key(sample: Sample) -> str:
    """Two samples with the same key ask the same: case, spacing and the system's words do not count."""
    replied = sample.messages and sample.messages[-1].role == "assistant"
    prompt = sample.messages[:-1] if replied else sample.messages
    said = "\n".join(f"{message.role}: {message.content}" for message in prompt if message.role != "system")
    return " ".join(unicodedata.normalize("NFKC", said).casefold().split())


def divided(samples: Sequence[Sample], dataset: Dataset) -> dict[str, list[Sample]]:
    """A share `held_out` of the groups becomes the test split: which ones depends on the seed and their content alone.

    At least one group is held out, and at least one is left to train on.
    """
    group = dataset.group or prompt_key
    groups = {group(sample) for sample in samples}
    by_lot = sorted(groups, key=lambda each: hashlib.sha256(f"{SEED}:{each}".encode()).digest())
    wanted = min(max(1, round(dataset.held_out * len(by_lot))), len(by_lot) - 1)
    held_out = set(by_lot[:wanted])
    return {
        "train": [sample for sample in samples if group(sample) not in held_out],
        "test": [sample for sample in samples if group(sample) in held_out],
    }


def without_overlap(splits: Mapping[str, Sequence[Sample]]) -> tuple[dict[str, list[Sample]], dict[str, int]]:
    """The splits without what a later one of `SPLITS` asks too, and how many samples each lost so."""
    kept: dict[str, list[Sample]] = {}
    lost: dict[str, int] = {}
    taken: set[str] = set()
    for name in reversed([name for name in SPLITS if name in splits]):
        keys = [prompt_key(sample) for sample in splits[name]]
        kept[name] = [sample for sample, key in zip(splits[name], keys, strict=True) if key not in taken]
        lost[name] = len(keys) - len(kept[name])
        taken.update(keys)
    return {name: kept[name] for name in SPLITS if name in kept}, {name: count for name, count in lost.items() if count}
