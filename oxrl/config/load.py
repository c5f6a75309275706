"""YAML to validated `Config`s: stages, overrides, and errors that name the line and the nearest key."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from oxrl.config.schema import Config
from oxrl.data.fill import TEMPLATED
from oxrl.machine.secrets import without_secrets
from oxrl.names import did_you_mean, nearest_name
from oxrl.parsing import Lines, ParseError, parse_yaml, parse_yaml_with_lines, read_yaml_text


class ConfigError(ValueError):
    """Invalid input: one line per error."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """Return the config of a YAML file (or of none), with overrides such as `train.lr=1e-4` applied."""
    stages = load_stages(path, overrides)
    if list(stages) != [""]:
        raise ConfigError(f"{path} has the stages {', '.join(stages)}: use load_stages")
    return stages[""]


STAGES: Mapping[str, Mapping[str, Any]] = {
    "sft": {"train": {"alg_name": "sft"}},
    "rl": {"train": {"alg_name": "sgrpo"}},
}
"""Sections that define the stages of a run -> the defaults of each stage."""
EXAMPLES = Path(__file__).parent / "examples"
"""Complete configs that come with the package."""
REWARD_FILES = ("rewards/compute_score.py", "rewards.py")
"""Files next to the config that are searched for a reward function given by its bare name."""

KEY_ALIASES = {
    "learning_rate": "lr",
    "batch_size": "train_batch_size_per_gpu",
    "per_device_train_batch_size": "train_batch_size_per_gpu",
    "epochs": "total_number_of_epochs",
    "num_epochs": "total_number_of_epochs",
    "num_train_epochs": "total_number_of_epochs",
    "steps": "train_steps_per_epoch",
    "max_steps": "train_steps_per_epoch",
    "algorithm": "alg_name",
    "max_grad_norm": "clip_grad_norm",
    "warmup_ratio": "warmup_steps_ratio",
    "max_length": "max_seq_len",
    "num_generations": "n_samples",
    "max_new_tokens": "max_tokens",
    "max_completion_length": "max_tokens",
    "rank": "r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "torch_dtype": "dtype",
    "name_or_path": "name",
    "path": "name",
    "save_steps": "checkpoint_every",
    "eval_steps": "eval_every",
    "logging_steps": "log_every",
}
"""Common names of keys in other frameworks -> the key here, for suggestions in error messages."""


class Stage(NamedTuple):
    """A validated config and the origin of its keys: `{("train", "lr"): "line 4", ("run", "task"): "command line"}`."""

    config: Config
    origins: Mapping[tuple[str, str], str]


def load_stages(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Config]:
    """Return the stages of a file in the order they run; a file without `sft:` or `rl:` has one, named "".

    A stage holds config sections (`rl: {train: ..., reward: ...}`) that override those at the top level.
    """
    return {name: stage.config for name, stage in trace_stages(path, overrides).items()}


def trace_stages(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Stage]:
    """Return the same stages as `load_stages`, with the origin of each value."""
    raw, lines = _parse("" if path is None else _read(Path(path)), str(path))
    for override in overrides:
        _apply_override(raw, override)
        lines.pop(tuple(override.partition("=")[0].strip().split(".")), None)
    shared = {section: keys for section, keys in raw.items() if section not in STAGES}
    stages: dict[str, Stage] = {}
    for name in [stage for stage in STAGES if stage in raw] or [""]:
        own = raw.get(name) or {}
        if not isinstance(own, dict):
            raise ConfigError(f"{name} must hold sections such as `train:` and `data:`, not {own!r}")
        own_lines = {key_path[1:]: line for key_path, line in lines.items() if key_path[0] == name}
        inherited = {section: keys for section, keys in shared.items() if (name, section) != ("sft", "reward")}
        merged = _merged(_merged(inherited, STAGES.get(name, {})), own)
        for override in overrides if name else ():
            _override_stage(merged, override, name)
        if path is not None:
            merged = _with_local_rewards(merged, Path(path).parent)
        stage_lines = {**lines, **own_lines}
        config = check_config(merged, stage_lines)
        stages[name] = Stage(config, _origins(config, merged, stage_lines, name))
    return stages


def _override_stage(raw: dict[str, Any], override: str, stage: str) -> None:
    """Apply an override of a shared key to a stage; algorithm and reward are set per stage."""
    section, _, rest = override.partition(".")
    if section in STAGES:
        return
    if section == "train" and rest.partition("=")[0].strip() == "alg_name":
        raise ConfigError(f"train.alg_name is set per stage: name the stage, as in --set {stage}.{override}")
    if (stage, section) != ("sft", "reward"):
        raw[section] = dict(raw.get(section) or {})
        _apply_override(raw, override)


def _origins(
    config: Config, raw: Mapping[str, Any], lines: Mapping[tuple[str, ...], int], stage: str
) -> dict[tuple[str, str], str]:
    origins: dict[tuple[str, str], str] = {}
    for section, keys in config:
        filled = {key for key, field in type(keys).model_fields.items() if getattr(keys, key) != field.default}
        for key in sorted(keys.model_fields_set | filled):
            key_path = (section, key)
            if key not in (raw.get(section) or {}):
                origins[key_path] = f"task {config.run.task}"
            elif key_path in lines:
                origins[key_path] = f"line {lines[key_path]}"
            else:
                by_stage = key in STAGES.get(stage, {}).get(section, {})
                origins[key_path] = f"stage {stage}" if by_stage else "command line"
    return origins


def _with_local_rewards(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Resolve bare reward names that are not built in to functions in `REWARD_FILES` next to the config."""
    section = raw.get("reward")
    named = section.get("reward_func") if isinstance(section, dict) else None
    if isinstance(named, str):
        found: Any = _locate_reward(named, folder)
    elif isinstance(named, dict):
        found = {_locate_reward(str(each), folder): weight for each, weight in named.items()}
    else:
        return raw
    return {**raw, "reward": {**raw["reward"], "reward_func": found}}


def _locate_reward(name: str, folder: Path) -> str:
    if ":" in name:
        return name
    definition = re.compile(rf"^(async )?def {re.escape(name)}\(", re.MULTILINE)
    for file in (folder / each for each in REWARD_FILES):
        if file.is_file() and definition.search(file.read_text(encoding="utf-8")):
            from oxrl.rewards.table import BUILDERS, REWARDS

            return name if name in (*REWARDS, *BUILDERS) else f"{file}:{name}"
    return name


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge section by section; `above` takes precedence."""
    merged = dict(below)
    for section, keys in above.items():
        both = isinstance(keys, dict) and isinstance(merged.get(section), dict)
        merged[section] = {**merged[section], **keys} if both else keys
    return merged


def check_config(raw: Mapping[str, Any], lines: Mapping[tuple[str, ...], int] | None = None) -> Config:
    """Validate a mapping of sections; the error lists all mistakes, with line numbers where `lines` has them."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_format_error(each, lines or {}) for each in error.errors())) from None


def _read(path: Path) -> str:
    try:
        if path.is_dir():
            raise ConfigError(f"{path} is a folder: pass the YAML file in it, such as {path / 'config.yaml'}")
        if not path.is_file():
            near = did_you_mean(path.name, (other.name for other in path.parent.glob("*.y*ml")))
            packaged = EXAMPLES / path.name
            there = f"; the file of that name is {packaged}" if packaged.is_file() else near
            raise ConfigError(f"there is no config file {path}{there}")
        return read_yaml_text(path)
    except ParseError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"the config {str(path)[:200]} cannot be read: {error.strerror}") from None


def _parse(text: str, where: str) -> tuple[dict[str, Any], Lines]:
    try:
        raw, lines = parse_yaml_with_lines(text, where)
    except ParseError as error:
        raise ConfigError(str(error)) from None
    if raw is None:
        return {}, {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must hold sections such as `model:` and `data:`, not {type(raw).__name__}")
    return raw, lines


def _apply_override(raw: dict[str, Any], override: str) -> None:
    key_path, equals, value = override.partition("=")
    *sections, key = key_path.strip().split(".")
    if not equals or not sections:
        raise ConfigError(f"an override looks like train.lr=1e-4, not {without_secrets(override)!r}")
    for section in sections:
        if raw.get(section) is None:
            raw[section] = {}
        raw = raw[section]
        if not isinstance(raw, dict):
            raise ConfigError(f"{section} must be a section with keys, such as {key}, not {raw!r}")
    if sections[-1] == "data" and key in TEMPLATED and value.lstrip().startswith("{"):
        raw[key] = value.strip()  # a row template, which YAML would read as a mapping
        return
    try:
        raw[key] = parse_yaml(value, f"the value of {key_path.strip()}")
    except ParseError as error:
        raise ConfigError(str(error).splitlines()[0]) from None  # the other lines quote the value


def _format_error(error: Any, lines: Mapping[tuple[str, ...], int]) -> str:
    key_path = tuple(str(part) for part in error["loc"])
    line = next((lines[key_path[:end]] for end in range(len(key_path), 0, -1) if key_path[:end] in lines), None)
    where = f"line {line}: " if line is not None else ""
    name = ".".join(key_path)
    if error["type"] == "extra_forbidden":
        return f"{where}{name} is not a key; {_hint_of_key(key_path)}"
    if error["type"] == "missing":
        return f"{where}{name} is missing"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":  # raised by a validator of the schema; it already names the value
        return f"{where}{name}: {message}" if key_path else f"{where}{message}"
    return f"{where}{name}: {message}, got {error['input']!r:.200}" if key_path else f"{where}{message}"


def _hint_of_key(key_path: tuple[str, ...]) -> str:
    """The same key in the section that has it, else the nearest key, else all keys."""
    *above, name = key_path
    if elsewhere := [f"{section}.{name}" for section in Config.model_fields if name in _keys_at((section,))]:
        return f"did you mean {' or '.join(elsewhere)}?"
    known = _keys_at(tuple(above))
    near = nearest_key(name, known)
    return f"did you mean {near}?" if near else f"allowed: {', '.join(known)}"


def nearest_key(name: str, keys: Sequence[str]) -> str | None:
    """Return the intended key, by its name in other frameworks or by spelling; None if none is close."""
    alias = KEY_ALIASES.get(name)
    return alias if alias in keys else nearest_name(name, keys)


def _keys_at(key_path: tuple[str, ...]) -> list[str]:
    section: Any = Config
    for part in key_path:
        field = section.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        section = field.annotation
    return list(section.model_fields)
