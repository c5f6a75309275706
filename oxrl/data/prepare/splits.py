"""Splits without common prompts. A prompt is all messages before the reply, regardless of case and whitespace."""

from __future__ import annotations

import hashlib
import unicodedata
from collections.abc import Mapping, Sequence

from oxrl.data.media import identity
from oxrl.data.prepare.recipe import SPLITS, Dataset
from oxrl.types import Sample

SEED = 0


def prompt_key(sample: Sample) -> str:
    """Return a key that is equal for equal prompts: case, whitespace and system messages are ignored, media are not."""
    replied = sample.messages and sample.messages[-1].role == "assistant"
    prompt = sample.messages[:-1] if replied else sample.messages
    text = "\n".join(f"{message.role}: {message.content}" for message in prompt if message.role != "system")
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return " ".join([plain, *(str(identity(medium)) for medium in sample.media)])


def split_by_prompt(samples: Sequence[Sample], dataset: Dataset) -> dict[str, list[Sample]]:
    """Assign a share `held_out` of the groups to the test split; the choice depends only on the seed and their content.

    Each split gets at least one group.
    """
    group = dataset.group or prompt_key
    groups = {group(sample) for sample in samples}
    shuffled = sorted(groups, key=lambda each: hashlib.sha256(f"{SEED}:{each}".encode()).digest())
    num_held_out = min(max(1, round(dataset.held_out * len(shuffled))), len(shuffled) - 1)
    held_out = set(shuffled[:num_held_out])
    return {
        "train": [sample for sample in samples if group(sample) not in held_out],
        "test": [sample for sample in samples if group(sample) in held_out],
    }


def without_overlap(splits: Mapping[str, Sequence[Sample]]) -> tuple[dict[str, list[Sample]], dict[str, int]]:
    """Remove the prompts that also occur in a later split of `SPLITS`; return the splits and the removed counts."""
    kept: dict[str, list[Sample]] = {}
    removed: dict[str, int] = {}
    seen: set[str] = set()
    for name in reversed([name for name in SPLITS if name in splits]):
        keys = [prompt_key(sample) for sample in splits[name]]
        kept[name] = [sample for sample, key in zip(splits[name], keys, strict=True) if key not in seen]
        removed[name] = len(keys) - len(kept[name])
        seen.update(keys)
    counts = {name: count for name, count in removed.items() if count}
    return {name: kept[name] for name in SPLITS if name in kept}, counts
