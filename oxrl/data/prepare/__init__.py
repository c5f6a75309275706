"""Datasets by name: raw rows converted to JSONL, with splits that do not overlap, and a card that describes them.

`prepare` does this explicitly, `split_file` on first use. A file that is already in a known format (prompt and
response, preferences, ...) needs no preparation: `load_samples` reads it.
"""

from oxrl.data.prepare.build import check_splits, prepare_samples
from oxrl.data.prepare.recipe import Dataset
from oxrl.data.prepare.store import check_trainable, data_dir, prepare, read_card, split_file
from oxrl.data.prepare.table import DATASETS, find_dataset

__all__ = [
    "DATASETS", "Dataset", "check_splits", "check_trainable", "data_dir", "find_dataset", "prepare",
    "prepare_samples", "read_card", "split_file",
]  # fmt: skip
