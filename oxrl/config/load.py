"""YAML to checked `Config`s: stages, overrides, and wrong input answered with its line and the nearest key."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from pydantic import BaseModel, ValidationError

from oxrl.config.schema import Config
from oxrl.names import did_you_mean, nearest_name


class ConfigError(ValueError):
    """Wrong input, said in words: one line per mistake."""


def load_config(path: str | Path | None, overrides: Sequence[str] = ()) -> Config:
    """A YAML file (or nothing), with overrides such as `train.lr=1e-4` laid over it."""
    stages = load_stages(path, overrides)
    if list(stages) != [""]:
        raise ConfigError(f"{path} has the stages {', '.join(stages)}: use load_stages")
    return stages[""]


STAGES: Mapping[str, Mapping[str, Any]] = {
    "sft": {"train": {"alg_name": "sft"}},
    "rl": {"train": {"alg_name": "sgrpo"}},
}
"""Sections that make a run of several stages, and what is different in each unless the file says otherwise."""
REWARD_FILES = ("rewards/compute_score.py", "rewards.py")
"""Where a reward function that is named without its file is looked for, beside the config."""


ELSEWHERE = {
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
"""What other frameworks, and people in a hurry, call our keys."""


class Stage(NamedTuple):
    """A checked config, and who set what: `{("train", "lr"): "line 4", ("train", "alg_name"): "task math"}`."""

    config: Config
    origins: Mapping[tuple[str, str], str]


def load_stages(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Config]:
    """The stages of a file in the order they run; a file without `sft:` or `rl:` has one, called "".

    A stage's section holds sections of its own (`rl: {train: ..., reward: ...}`), laid over those of the whole file.
    """
    return {name: stage.config for name, stage in trace_stages(path, overrides).items()}


def trace_stages(path: str | Path | None, overrides: Sequence[str] = ()) -> dict[str, Stage]:
    """`load_stages`, with where each value comes from."""
    raw, lines = _parse("" if path is None else _read(Path(path)), str(path))
    for override in overrides:
        _lay_over(raw, override)
        lines.pop(tuple(override.partition("=")[0].strip().split(".")), None)
    shared = {section: keys for section, keys in raw.items() if section not in STAGES}
    stages: dict[str, Stage] = {}
    for name in [stage for stage in STAGES if stage in raw] or [""]:
        own = raw.get(name) or {}
        if not isinstance(own, dict):
            raise ConfigError(f"{name} must hold sections such as `train:` and `data:`, not {own!r}")
        own_lines = {place[1:]: line for place, line in lines.items() if place[0] == name}
        inherited = {section: keys for section, keys in shared.items() if (name, section) != ("sft", "reward")}
        whole = _merged(_merged(inherited, STAGES.get(name, {})), own)
        for override in overrides if name else ():
            _override_stage(whole, override, name)
        if path is not None:
            whole = _with_own_rewards(whole, Path(path).parent)
        places = {**lines, **own_lines}
        config = check_config(whole, places)
        stages[name] = Stage(config, _origins(config, whole, places, name))
    return stages


def _override_stage(whole: dict[str, Any], override: str, stage: str) -> None:
    """What is said for all stages wins in each; which algorithm and which reward is a stage's own affair."""
    section, _, rest = override.partition(".")
    if section in STAGES:
        return
    if section == "train" and rest.partition("=")[0].strip() == "alg_name":
        raise ConfigError(f"each stage has its own algorithm: name the stage, as in --set {stage}.{override}")
    if (stage, section) != ("sft", "reward"):
        whole[section] = dict(whole.get(section) or {})
        _lay_over(whole, override)


def _origins(
    config: Config, raw: Mapping[str, Any], lines: Mapping[tuple[str, ...], int], stage: str
) -> dict[tuple[str, str], str]:
    origins: dict[tuple[str, str], str] = {}
    for section, keys in config:
        for key in sorted(keys.model_fields_set):
            place = (section, key)
            if key not in (raw.get(section) or {}):
                origins[place] = f"task {config.run.task}"
            elif place in lines:
                origins[place] = f"line {lines[place]}"
            else:
                by_stage = key in STAGES.get(stage, {}).get(section, {})
                origins[place] = f"stage {stage}" if by_stage else "command line"
    return origins


def _with_own_rewards(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A reward that is named without its file, and that no table knows, is looked for beside the config."""
    section = raw.get("reward")
    named = section.get("reward_func") if isinstance(section, dict) else None
    if isinstance(named, str):
        found: Any = _place_of_reward(named, folder)
    elif isinstance(named, dict):
        found = {_place_of_reward(str(each), folder): weight for each, weight in named.items()}
    else:
        return raw
    return {**raw, "reward": {**raw["reward"], "reward_func": found}}


def _place_of_reward(name: str, folder: Path) -> str:
    if ":" in name:
        return name
    definition = re.compile(rf"^(async )?def {re.escape(name)}\(", re.MULTILINE)
    for file in (folder / each for each in REWARD_FILES):
        if file.is_file() and definition.search(file.read_text(encoding="utf-8")):
            from oxrl.rewards.table import BUILDERS, REWARDS

            return name if name in (*REWARDS, *BUILDERS) else f"{file}:{name}"
    return name


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Section by section, `above` wins."""
    merged = dict(below)
    for section, keys in above.items():
        both = isinstance(keys, dict) and isinstance(merged.get(section), dict)
        merged[section] = {**merged[section], **keys} if both else keys
    return merged


def check_config(raw: Mapping[str, Any], lines: Mapping[tuple[str, ...], int] | None = None) -> Config:
    """A mapping of sections as a `Config`; all its mistakes at once, with their lines where `lines` knows them."""
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_in_words(mistake, lines or {}) for mistake in error.errors())) from None


def _read(path: Path) -> str:
    if not path.is_file():
        near = did_you_mean(path.name, (other.name for other in path.parent.glob("*.y*ml")))
        raise ConfigError(f"there is no config file {path}{near}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None


class _Loader(yaml.SafeLoader):
    """YAML 1.1 reads `1e-5` as text; people mean a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def _parse(text: str, where: str) -> tuple[dict[str, Any], dict[tuple[str, ...], int]]:
    try:
        node = yaml.compose(text, _Loader)
        if repeated := list(_repeated(node)):
            raise ConfigError("\n".join(repeated))
        raw = yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not valid YAML: {error}") from None
    if raw is None:
        return {}, {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{where} must hold sections such as `model:` and `data:`, not {type(raw).__name__}")
    return raw, dict(_lines(node))


def _lines(node: yaml.Node | None, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            place = (*above, str(key.value))
            yield place, key.start_mark.line + 1
            yield from _lines(value, place)


def _repeated(node: yaml.Node | None, above: tuple[str, ...] = ()) -> Iterator[str]:
    """YAML would quietly take the last one."""
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _repeated(value, (*above, str(index)))
    if not isinstance(node, yaml.MappingNode):
        return
    first: dict[str, int] = {}
    for key, value in node.value:
        line, place = key.start_mark.line + 1, (*above, str(key.value))
        if str(key.value) in first:
            yield f"line {line}: {'.'.join(place)} is there twice, first on line {first[place[-1]]}: keep one of them"
        first.setdefault(str(key.value), line)
        yield from _repeated(value, place)


def _lay_over(raw: dict[str, Any], override: str) -> None:
    place, equals, value = override.partition("=")
    *sections, key = place.strip().split(".")
    if not equals or not sections:
        raise ConfigError(f"an override looks like train.lr=1e-4, not {override!r}")
    for section in sections:
        if raw.get(section) is None:
            raw[section] = {}
        raw = raw[section]
        if not isinstance(raw, dict):
            raise ConfigError(f"{section} must be a section with keys, such as {key}, not {raw!r}")
    try:
        raw[key] = yaml.load(value, _Loader)  # noqa: S506 - a SafeLoader
    except yaml.YAMLError:
        raise ConfigError(f"{override!r}: what stands behind = is not valid YAML") from None


def _in_words(mistake: Any, lines: Mapping[tuple[str, ...], int]) -> str:
    place = tuple(str(part) for part in mistake["loc"])
    line = next((lines[place[:end]] for end in range(len(place), 0, -1) if place[:end] in lines), None)
    where = f"line {line}: " if line is not None else ""
    name = ".".join(place)
    if mistake["type"] == "extra_forbidden":
        near = nearest_key(place[-1], _keys_at(place[:-1]))
        hint = f"did you mean {near}?" if near else f"allowed: {', '.join(_keys_at(place[:-1]))}"
        return f"{where}{name} is not a key; {hint}"
    if mistake["type"] == "missing":
        return f"{where}{name} is missing"
    message = mistake["msg"].removeprefix("Value error, ")
    if mistake["type"] == "value_error":  # our own words, which say what was wrong
        return f"{where}{name}: {message}" if place else f"{where}{message}"
    return f"{where}{name}: {message}, got {mistake['input']!r}" if place else f"{where}{message}"


def nearest_key(name: str, keys: Sequence[str]) -> str | None:
    """Return the key that other frameworks call `name`, or the one with the nearest spelling; None if none is near."""
    alias = ELSEWHERE.get(name)
    return alias if alias in keys else nearest_name(name, keys)


def _keys_at(place: tuple[str, ...]) -> list[str]:
    section: Any = Config
    for part in place:
        field = section.model_fields.get(part)
        if field is None or not (isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)):
            return []
        section = field.annotation
    return list(section.model_fields)
