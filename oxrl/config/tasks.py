"""What a run for a task begins with: algorithm, dataset, reward and settings, from `[tasks.*]` of the catalogue.

Data, not code: `task_config` gives the sections of a config, `fill_task` lays what a config says over them. Whether
dataset, reward and algorithm exist is checked by whoever reads them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.models.catalog import Entry
from oxrl.names import did_you_mean

ALIASES = {"coding": "code"}


class Task(NamedTuple):
    """`Task("math", "grade-school word problems", "sgrpo", "gsm8k", "gsm8k_reward_func", {"max_tokens": 512})`."""

    name: str
    about: str
    algorithm: str
    dataset: str
    reward: str | None = None  # None: the algorithm asks for none
    rollout: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}  # besides the dataset


@cache
def tasks() -> Mapping[str, Task]:
    """Every task that there is, by its name."""
    return {name: Task(name, **fields) for name, fields in _read()["tasks"].items()}


def find_task(name: str) -> Task:
    plain = name.lower().replace("_", "-")
    plain = ALIASES.get(plain, plain)
    if plain in tasks():
        return tasks()[plain]
    if plain in _read()["not_yet"]:
        raise ValueError(f"the task {name} is not there yet: {_read()['not_yet'][plain]}")
    hint = did_you_mean(plain, tasks(), ".")
    raise ValueError(f"no task is called {name!r}{hint} There are: {', '.join(tasks())}")


def task_config(name: str, *, lora: bool = False) -> dict[str, Any]:
    """`task_config("math")["data"] == {"dataset": "gsm8k"}`: the sections of a config, but for the model."""
    task = find_task(name)
    rates = _read()["learning_rates"][task.algorithm]
    sections: dict[str, Any] = {
        "train": {"alg_name": task.algorithm, "lr": rates["lora" if lora else "full"]},
        "data": {"dataset": task.dataset, **task.data},
    }
    if task.reward is not None:
        sections |= {"reward": {"reward_func": task.reward}, "rollout": dict(task.rollout)}
    return sections


def example_config(entry: Entry) -> dict[str, Any]:
    """A config to begin with, for the model's first task."""
    task = entry.tasks[0]
    full = entry.strategy == "full"
    sections = task_config(task, lora=not full) if entry.not_yet is None else _once_it_can(task)
    config: dict[str, Any] = {
        "model": {"name": entry.source, **({"gradient_checkpointing": True} if entry.billions > 1 else {})},
        "run": {"experiment_id": f"{entry.name}-{task}"},
        **sections,
    }
    if not full:
        config["lora"] = {"enabled": True, "target_modules": list(entry.lora_targets)}
    return config


def _once_it_can(task: str) -> dict[str, Any]:
    """What the config of a model that cannot be trained yet will look like."""
    return {"train": {"alg_name": "sft"}, "data": {"train_files_path": f"{task}.jsonl"}}


def fill_task(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A config as it was written, with what it does not say taken from the task.

    Rows of one's own take the place of the task's dataset. The reward is left open: a dataset's own comes before the
    task's, and which rows there are is known later. An algorithm of another kind has other rates and needs no lengths.
    """
    written = {section: keys for section, keys in config.items() if isinstance(keys, Mapping)}
    train, data = written.get("train", {}), written.get("data", {})
    given = task_config(name, lora=written.get("lora", {}).get("enabled") is True)
    given.pop("reward", None)
    if data.get("dataset") is not None or data.get("train_files_path") is not None:
        del given["data"]["dataset"]
    if "alg_name" in train and _samples(train["alg_name"]) != _samples(given["train"]["alg_name"]):
        del given["train"]["lr"]
        given.pop("rollout", None)
    filled = dict(config)
    for section, keys in given.items():
        if config.get(section) is None or section in written:  # what is no section at all is told later
            filled[section] = {**keys, **written.get(section, {})}
    return filled


def _samples(name: object) -> bool:
    from oxrl.algorithms import algorithm

    try:
        return algorithm(str(name)).online is not None
    except ValueError:  # told when the config is checked
        return False


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parents[1] / "models" / "catalog.toml").read_text(encoding="utf-8"))
