"""Task presets: algorithm, dataset, reward and settings, from `[tasks.*]` of the model catalogue.

`task_config` returns the preset as config sections, `fill_task` merges it under a config. Whether dataset, reward and
algorithm exist is checked where they are used.
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
    reward: str | None = None  # None: the algorithm uses none
    rollout: Mapping[str, Any] = {}
    data: Mapping[str, Any] = {}  # keys of `data` other than the dataset


@cache
def tasks() -> Mapping[str, Task]:
    """Return all tasks by name."""
    return {name: Task(name, **fields) for name, fields in _read()["tasks"].items()}


def find_task(name: str) -> Task:
    plain = name.lower().replace("_", "-")
    plain = ALIASES.get(plain, plain)
    if plain in tasks():
        return tasks()[plain]
    if plain in _read()["not_yet"]:
        raise ValueError(f"the task {name} is not supported yet: {_read()['not_yet'][plain]}")
    hint = did_you_mean(plain, tasks(), ".")
    raise ValueError(f"no task is called {name!r}{hint} Available: {', '.join(tasks())}")


def task_config(name: str, *, lora: bool = False) -> dict[str, Any]:
    """Return the config sections of a task, without the model: `task_config("math")["data"]["dataset"] == "gsm8k"`."""
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
    """Return an initial config for the first task of a model."""
    task = entry.tasks[0]
    full = entry.strategy == "full"
    sections = task_config(task, lora=not full) if entry.not_yet is None else _placeholder_config(task)
    config: dict[str, Any] = {
        "model": {"name": entry.source, **({"gradient_checkpointing": True} if entry.billions > 1 else {})},
        "run": {"experiment_id": f"{entry.name}-{task}"},
        **sections,
    }
    if not full:
        config["lora"] = {"enabled": True, "target_modules": list(entry.lora_targets)}
    return config


def _placeholder_config(task: str) -> dict[str, Any]:
    """Return the sections for a model that cannot be trained yet."""
    return {"train": {"alg_name": "sft"}, "data": {"train_files_path": f"{task}.jsonl"}}


def fill_task(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return a raw config with unset keys taken from the task.

    A dataset or files in the config replace the task's dataset. The reward is left unset: the dataset's reward takes
    precedence over the task's and is resolved later. The task's learning rate and rollout lengths are dropped if one of
    the two algorithms samples and the other does not.
    """
    written = {section: keys for section, keys in config.items() if isinstance(keys, Mapping)}
    train, data = written.get("train", {}), written.get("data", {})
    preset = task_config(name, lora=written.get("lora", {}).get("enabled") is True)
    preset.pop("reward", None)
    if data.get("dataset") is not None or data.get("train_files_path") is not None:
        del preset["data"]["dataset"]
    if "alg_name" in train and _samples(train["alg_name"]) != _samples(preset["train"]["alg_name"]):
        del preset["train"]["lr"]
        preset.pop("rollout", None)
    filled = dict(config)
    for section, keys in preset.items():
        if config.get(section) is None or section in written:  # a value that is not a section is reported by validation
            filled[section] = {**keys, **written.get(section, {})}
    return filled


def _samples(name: object) -> bool:
    from oxrl.algorithms import algorithm

    try:
        return algorithm(str(name)).online is not None
    except ValueError:  # reported when the config is validated
        return False


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads((Path(__file__).parents[1] / "models" / "catalog.toml").read_text(encoding="utf-8"))
