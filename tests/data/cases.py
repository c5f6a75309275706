"""Raw rows of each dataset: five in `raw/`, in the format of the real ones, for every test run.

If the environment variable OXRL_TEST_DATA names a folder with copies of the real rows, the same tests run on the first
200 rows of each file too. The rows in `raw/` cover every line of code that the real rows cover.
"""

import gzip
import os
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from oxrl.data.prepare import DATASETS

RAW = Path(__file__).parent / "raw"
FOLDER = os.environ.get("OXRL_TEST_DATA")
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
REAL_CASES = [Case(name, list(files), real=True) for name, files in REAL.items()] if FOLDER else []
CASES = OWN + REAL_CASES


def case_name(case: Case) -> str:
    return f"{case.dataset}-{'real' if case.real else 'own'}"


def copies_of(case: Case, folder: Path) -> Case:
    """Return the case with the first 200 rows of each real file copied to `folder`; other cases unchanged."""
    if not case.real:
        return case
    assert FOLDER is not None
    folder.mkdir()
    copies = []
    for file in case.files:
        split, _, name = file.rpartition("=")
        copy = folder / f"{split or 'all'}.jsonl"
        with gzip.open(Path(FOLDER) / name, "rt", encoding="utf-8") as lines:
            copy.write_text("".join(islice(lines, 200)), encoding="utf-8")
        copies.append(f"{split}={copy}" if split else str(copy))
    return case._replace(files=copies)
