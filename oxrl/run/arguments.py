"""Arguments of `Trainer` to sections of a config: functions become import paths, rows a file."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from oxrl.config import Config, nearest_key
from oxrl.data.prepare import DATASETS, data_dir
from oxrl.names import LIVE, import_path_of, is_available, live_name, without_digest
from oxrl.rewards.grade import Reward
from oxrl.run.folder import texts_in

logger = logging.getLogger(__name__)

NAMES = {
    "task": "run.task",
    "algorithm": "train.alg_name",
    "data": "data.train_files_path",
    "val": "data.val_files_path",
    "reward": "reward.reward_func",
    "steps": "train.train_steps_per_epoch",
    "epochs": "train.total_number_of_epochs",
    "batch_size": "train.train_batch_size_per_gpu",
    "engine": "inference_engine.name",
    "env": "rollout.env",
    "tools": "rollout.tools",
    "filter": "rollout.filter",
    "tracker": "run.trackers",
}
"""Arguments of `Trainer.train`, which are those of `oxrl train`, and their keys; keys have their own names, too."""

Sections: TypeAlias = dict[str, dict[str, Any]]
Rows: TypeAlias = str | Path | Iterable[Mapping[str, Any]] | Any
"""A file, a name, rows as dicts, a `datasets.Dataset`, or a data frame of pandas or polars."""
RewardLike: TypeAlias = str | Reward | Callable[..., Any]
RewardsLike: TypeAlias = RewardLike | Sequence[RewardLike] | Mapping[RewardLike, float] | Mapping[str, float]


ELSEWHERE = {
    "train_dataset": "data",
    "eval_dataset": "val",
    "reward_funcs": "reward",
    "output_dir": "output",
    "report_to": "trackers",
    "max_prompt_length": "max_seq_len",
}
"""Arguments of TRL's trainers and configs, besides those that the config knows -> ours, for suggestions."""


def sections_of(keywords: Mapping[str, Any]) -> Sections:
    """`sections_of({"lr": 1e-4, "lora": True}) == {"train": {"lr": 1e-4}, "lora": {"enabled": True}}`."""
    sections: Sections = {}
    for name, value in keywords.items():
        for section, key, given in _placed(name, value):
            sections.setdefault(section, {})[key] = given
    if "tools" in sections.get("rollout", {}):
        sections["rollout"].setdefault("env", "tools")
    return sections


def log_names(keywords: Mapping[str, Any]) -> None:
    """Which key an argument sets, where it is called otherwise."""
    renamed = [f"{name} is {NAMES[name]}" for name in keywords if not NAMES.get(name, name).endswith(name)]
    if renamed:
        logger.info("in the config, %s", ", ".join(renamed))


def check_available(recorded: Mapping[str, Any], given: Sections) -> None:
    """Functions that a run was started with and that cannot be imported have to be passed again to resume it."""
    arguments = {key: name for name, key in NAMES.items()}
    for section, keys in recorded.items():
        for key, value in keys.items():
            argument = arguments.get(f"{section}.{key}", key)
            if key in given.get(section, {}):
                continue
            if missing := [path for path in texts_in(value) if not is_available(path)]:
                where = without_digest(missing[0]).removeprefix(f"{LIVE}:").rpartition(".")[0]
                raise ValueError(
                    f"this run was started with {argument}={live_name(missing[0])}, defined in {where}, which this "
                    f"process does not have: pass {argument}= again, or put the function into a file and pass "
                    f"'FILE.py:{live_name(missing[0])}'"
                )


def _placed(name: str, value: Any) -> list[tuple[str, str, Any]]:
    """Section, key and value of one keyword."""
    schema = {section: set(field.annotation.model_fields) for section, field in _schema().items()}
    # `reward` and `data` are also mappings to weights, and of names to rows.
    if name in schema and isinstance(value, Mapping) and (name not in NAMES or set(value) <= schema[name]):
        return [_plain(name, key, each) for key, each in value.items()]
    if name == "lora" and isinstance(value, bool):
        return [("lora", "enabled", value)]
    if name in NAMES:
        section, _, key = NAMES[name].partition(".")
        return [_plain(section, key, value)]
    if name in schema:
        raise ValueError(f"{name} is a section of the config: give it as {name}={{...}}, not {value!r}")
    homes = [section for section, keys in schema.items() if name in keys]
    if len(homes) != 1:
        raise ValueError(_which(name, homes, {key for keys in schema.values() for key in keys}))
    return [_plain(homes[0], name, value)]


def _schema() -> dict[str, Any]:
    """The sections that list their keys; open ones are passed as a whole."""
    return {name: field for name, field in Config.model_fields.items() if hasattr(field.annotation, "model_fields")}


def _which(name: str, homes: Sequence[str], keys: set[str]) -> str:
    if homes:
        return f"{name} is a key of {' and '.join(homes)}: name the section, as in {homes[0]}={{{name!r}: ...}}"
    from oxrl.algorithms.table import ALGORITHMS  # imports torch

    if any(name in recipe.schema() for recipe in ALGORITHMS.values()):
        return f"{name} is a parameter of algorithms: pass it as alg_params={{{name!r}: ...}}"
    near = ELSEWHERE.get(name) or nearest_key(name, [*keys, *NAMES])
    near = next((argument for argument, key in NAMES.items() if key.partition(".")[2] == near), near)
    hint = f"; did you mean {near}?" if near else "; docs/configuration.md"
    return f"{name} is neither an argument nor a key of the config{hint}"


def by_argument(message: str, given: Mapping[str, Any]) -> str:
    """An error of the config, with the argument that a key was set by."""
    for name, key in NAMES.items():
        if name in given and not key.endswith(f".{name}"):
            message = message.replace(f"{key}:", f"{name} ({key}):")
    return message


def _plain(section: str, key: str, value: Any) -> tuple[str, str, Any]:
    """As a config can hold it: functions by import path, rows as a file, prepared datasets by their key."""
    if key in ("train_files_path", "val_files_path"):
        if key == "train_files_path" and isinstance(value, str) and value in DATASETS and not Path(value).exists():
            return section, "dataset", value
        if isinstance(value, dict) and not hasattr(value, "column_names"):  # several, by name
            return section, key, {name: _data_path(each) for name, each in value.items()}
        return section, key, _data_path(value)
    if key == "reward_func":
        return section, key, _reward_value(value)
    if key == "trackers" and isinstance(value, str):
        return section, key, [value]
    if isinstance(value, Path):
        return section, key, str(value)
    if isinstance(value, list | tuple) and any(callable(each) for each in value):
        return section, key, [_named(each) for each in value]
    return section, key, _named(value)


def _named(given: Any) -> Any:
    """A function or a `Reward` by its import path; anything else as it is."""
    return import_path_of(given) if callable(given) or isinstance(given, Reward) else given


def _reward_value(given: Any) -> Any:
    """One reward, a list of rewards with the weight 1, or a mapping to weights."""
    if isinstance(given, str) or callable(given) or isinstance(given, Reward):
        return _named(given)
    if isinstance(given, list | tuple):
        given = dict.fromkeys(given, 1.0)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"reward is a name, a function, a list of them or a mapping to weights, not {type(given).__name__}"
        )
    for each, weight in given.items():
        if not (isinstance(each, str | Reward) or callable(each)):
            raise ValueError(f"reward: {each!r} is neither the name of a reward nor a function")
        if isinstance(weight, bool) or not isinstance(weight, int | float):
            raise ValueError(f"reward: a weight is a number, not {weight!r}")
    paths = [_named(each) for each in given]
    names = [live_name(path) or path.rpartition(":")[2] for path in paths]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"reward: two functions are called {twice[0]}; define each with `def` and a name of its own")
    return dict(zip(paths, map(float, given.values()), strict=True))


def _data_path(given: Any) -> str:
    return str(given) if isinstance(given, str | Path) else str(_file_of(_rows(given)).absolute())


def _rows(given: Any) -> list[Mapping[str, Any]]:
    """A list of rows, a `datasets.Dataset`, or a data frame of pandas or polars; missing values are None."""
    if hasattr(given, "iterrows"):
        rows = given.astype(object).where(given.notna(), None).to_dict("records")
    elif hasattr(given, "to_dicts"):
        rows = given.to_dicts()
    elif isinstance(given, Mapping):
        splits = f", as in data=dataset[{next(iter(given))!r}]" if hasattr(given, "column_names") and given else ""
        raise ValueError(
            f"data has several splits or columns ({', '.join(map(str, given))}): pass the rows of one{splits}"
        )
    else:
        rows = list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"data is a file, a dataset's name or a list of rows (dicts), not {type(given).__name__}")
    return list(rows)


def _json_value(value: Any) -> Any:
    """Arrays and numbers of numpy and others, and dates."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(f"a value is a {type(value).__name__}, {value!r:.60}")


def _file_of(rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows given in Python to a file named by their digest, so that the run can be repeated."""
    lines = []
    for number, row in enumerate(rows):
        try:
            lines.append(json.dumps(row, ensure_ascii=False, default=_json_value) + "\n")
        except (TypeError, ValueError) as error:
            raise ValueError(f"row {number} of the data cannot be written as JSON: {error}") from error
    text = "".join(lines)
    file = data_dir() / "given" / f"rows-{hashlib.sha256(text.encode()).hexdigest()[:16]}.jsonl"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file
