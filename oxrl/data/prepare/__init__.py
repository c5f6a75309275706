"""Datasets by name: raw rows become JSONL of our own columns, split so that train and test share nothing, with a card.

`prepare` does it; `split_file` does it on first use. A file that is already in one of the known formats (prompt and
response, preferences, ...) needs none of this: `load_samples` reads it as it is.
"""

from oxrl.data.prepare.build import check_splits, prepare_samples
from oxrl.data.prepare.recipe import Dataset
from oxrl.data.prepare.store import check_trainable, data_dir, prepare, read_card, split_file
from oxrl.data.prepare.table import DATASETS, find_dataset

__all__ = [
    "DATASETS", "Dataset", "check_splits", "check_trainable", "data_dir", "find_dataset", "prepare",
    "prepare_samples", "read_card", "split_file",
]  # fmt: skip
