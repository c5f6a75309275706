"""Tasks of reasoning-gym (an extra) by name: rows generated from a seed, graded by the task's scorer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from importlib import import_module

from oxrl.data.formats import BadRow
from oxrl.data.prepare.recipe import Dataset, Raw, user_prompt
from oxrl.rewards.gym import reasoning_gym_samples
from oxrl.types import Sample

PREFIX = "gym:"
SEEDS = {"train": 0, "test": 10**9}  # row i of seed s is row 0 of seed s + i: the seeds must be far apart


def gym_dataset(task: str, size: int) -> Dataset:
    """`gym_dataset("leg_counting", 1000)`: 1000 rows for training and a tenth as many for testing."""
    return Dataset(
        name=PREFIX + task,
        summary=f"reasoning-gym's task {task}",
        licence="Apache-2.0",
        convert=convert,
        generate=partial(rows, task, size),
        reward="reasoning_gym_score",
        seen_real_rows=True,
    )


def rows(task: str, size: int, split: str) -> Iterator[Raw]:
    wanted = size if split == "train" else max(1, size // 10)
    for sample in reasoning_gym_samples(task, size=wanted, seed=SEEDS[split]):
        yield {"question": sample.messages[0].content, "answer": sample.answer, **sample.metadata}


def convert(row: Raw) -> list[Sample]:
    task, entry, answer = row["reasoning_gym_task"], row["reasoning_gym_entry"], row["answer"]
    written = json.loads(json.dumps(entry, default=_refuse_value))
    score = import_module("reasoning_gym").get_score_answer_fn(task)
    if answer is not None and score(answer, entry) != score(answer, written):
        raise BadRow("the score changes after the task is written to JSON; create the samples in Python")
    metadata = {"reasoning_gym_task": task, "reasoning_gym_entry": written}
    return [Sample("", user_prompt(str(row["question"])), answer=answer, metadata=metadata)]


def _refuse_value(value: object) -> None:
    raise BadRow(f"it contains a {type(value).__name__}, which JSON cannot represent; create the samples in Python")
