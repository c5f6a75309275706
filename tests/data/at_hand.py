"""The raw rows at hand for each dataset: five of our own in `raw/`, and real copies where OXRL_TEST_DATA says."""

import gzip
import os
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import pytest

from oxrl.data.prepare import DATASETS

RAW = Path(__file__).parent / "raw"
REAL = {
    "gsm8k": ("train=gsm8k/train.jsonl.gz", "test=gsm8k/test.jsonl.gz"),
    "svamp": ("svamp/test.jsonl.gz",),
    "mbpp": ("mbpp/mbpp.jsonl.gz",),
    "humaneval": ("humaneval/HumanEval.jsonl.gz",),
    "hh_rlhf": ("test=hh-rlhf/harmless-base-test.jsonl.gz",),
    "oasst": ("oasst-en100/en_100_tree.jsonl.gz",),
    "oasst_pairs": ("oasst-en100/en_100_tree.jsonl.gz",),
    "self_instruct": ("self-instruct/seed_tasks.jsonl.gz",),
}


class Case(NamedTuple):
    dataset: str
    files: list[str]
    real: bool = False


def own_rows(name: str) -> list[str]:
    stem = {"math_hard": "math", "ultrafeedback_pairs": "ultrafeedback", "oasst_pairs": "oasst"}.get(name, name)
    if (RAW / f"{stem}.jsonl").exists():
        return [str(RAW / f"{stem}.jsonl")]
    return [f"{split}={RAW / f'{stem}.{split}.jsonl'}" for split in ("train", "test")]


OWN = [Case(name, own_rows(name)) for name in DATASETS]
REAL_CASES = [Case(name, list(files), real=True) for name, files in REAL.items()]
CASES = OWN + REAL_CASES


def case_name(case: Case) -> str:
    return f"{case.dataset}-{'real' if case.real else 'own'}"


def copies_of(case: Case, folder: Path) -> Case:
    """With its first 200 rows in files that lie in `folder`; without real copies the test is skipped."""
    if not case.real:
        return case
    real = os.environ.get("OXRL_TEST_DATA")
    if not real:
        pytest.skip("OXRL_TEST_DATA does not say where real rows are")
    folder.mkdir()
    copies = []
    for file in case.files:
        split, _, name = file.rpartition("=")
        copy = folder / f"{split or 'all'}.jsonl"
        with gzip.open(Path(real) / name, "rt", encoding="utf-8") as lines:
            copy.write_text("".join(islice(lines, 200)), encoding="utf-8")
        copies.append(f"{split}={copy}" if split else str(copy))
    return case._replace(files=copies)
