"""Run folders: their path, whether a run can start or resume there, and the files beside the checkpoints."""

from __future__ import annotations

import glob
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from oxrl.config import STAGES, Config, ConfigError, check_config, load_stages
from oxrl.data.buffer import DataBuffer
from oxrl.models.catalog import catalogued
from oxrl.names import did_you_mean, source_file, without_digest
from oxrl.parsing import ParseError, read_json, read_yaml
from oxrl.rollouts.buffer import Group
from oxrl.rollouts.mcp_tools import PREFIX
from oxrl.rollouts.record import digest_of
from oxrl.run.checkpoint import best_checkpoint, intact_checkpoint, latest_checkpoint
from oxrl.tracking.files import write_atomically
from oxrl.tracking.metrics import drop_lines_after
from oxrl.types import Rollout, Turn

logger = logging.getLogger(__name__)


STARTED = (".lock", "config.yaml", "stages.yaml", "metrics.jsonl")  # files of which a run writes one at its start


class RunExistsError(ConfigError):
    """The folder that was given for a new run has one."""

    def __init__(self, folder: Path) -> None:
        super().__init__(f"{folder} already has a run: pass resume=True to continue it, or another output")
        self.folder = folder


def run_folder(config: Config, output: str | Path | None) -> Path:
    """`output`, or the folder that the config names."""
    if output == "":
        raise ConfigError("the output folder is empty: name one, or leave it out")
    root = config.run.checkpoint_dir or os.environ.get("OXRL_CHECKPOINT_DIR") or "checkpoints"
    folder = Path(output) if output is not None else Path(root) / config.run.experiment_id
    return folder.absolute()  # a reward may change the working directory


def choose_folder(config: Config, output: str | Path | None, *, resume: bool) -> Path:
    """`output`; without it NAME, NAME-2, NAME-3, ...: the next one for a new run, the last run of NAME for a resume.

    A folder of another experiment, such as one that is called NAME-2, is not resumed.
    """
    first = run_folder(config, output)
    if output is not None:
        return first
    started = dict(sorted((number, folder) for number, folder in _numbered(first) if has_run(folder)))
    if resume:
        own = [folder for folder in started.values() if _is_run_of(config.run.experiment_id, folder)]
        chosen = own[-1] if own else first
    else:
        last = max(started, default=0)
        chosen = first.with_name(f"{first.name}-{last + 1}") if last else first
    if resume and chosen != first:
        logger.info("resuming the latest run: %s", chosen)
    return chosen


def create_folder(config: Config, folder: Path) -> None:
    """Create the folder of a run or of its stage, and log it if an earlier run has the folder of this name."""
    first = run_folder(config, None)
    numbered = re.compile(re.escape(first.name) + r"-\d+")
    homes = [each for each in (folder, folder.parent) if each.parent == first.parent and numbered.fullmatch(each.name)]
    new = [home for home in homes if not home.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    if new and has_run(first):
        logger.info("%s has a run; the new one is in: %s", first, new[0])


def _numbered(first: Path) -> Iterator[tuple[int, Path]]:
    """The folders that are called NAME or NAME-2 and so on, with their numbers."""
    yield 1, first
    for folder in first.parent.glob(f"{glob.escape(first.name)}-*"):
        digits = folder.name.removeprefix(f"{first.name}-")
        if re.fullmatch(r"[2-9]|[1-9][0-9]{1,8}", digits):
            yield int(digits), folder


def has_run(folder: Path) -> bool:
    """Whether a run was started in a folder."""
    return any((folder / name).exists() for name in STARTED)


def _is_run_of(experiment: str, folder: Path) -> bool:
    """Whether the run that is recorded in a folder has this `run.experiment_id`; one that is damaged may have it."""
    try:
        return any(config.run.experiment_id == experiment for config in recorded_stages(folder).values())
    except ConfigError:
        return True


def starting_point(folder: Path, resume: bool) -> Path | None:
    newest = intact_checkpoint(folder / "checkpoints") if resume else None
    if resume and newest is None:
        if not (folder / "config.yaml").exists():
            raise ConfigError(f"there is nothing to resume in {folder}: it has no run")
        logger.warning("%s has no checkpoint yet: starting over", folder)
    if not resume and (folder / "metrics.jsonl").exists():
        raise RunExistsError(folder)
    return newest


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be created or written; it is created when the run starts."""
    try:
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        folder.stat()  # a name may be too long
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(f"the run folder {folder} cannot be created: {error.strerror}") from error
    if not existing.is_dir():
        raise ConfigError(f"the run folder {folder} cannot be created: {existing} is a file")
    if not os.access(existing, os.W_OK | os.X_OK):
        what = "is not writable" if existing == folder else f"cannot be created: {existing} is not writable"
        raise ConfigError(f"the run folder {folder} {what}")


def check_resumable(config: Config, path: Path) -> None:
    """Refuse a resume with keys that change the shape of the weights or the optimizer state."""
    if not path.exists():
        return
    before = read_recorded(path)
    now = config.model_dump(mode="json")
    for section, key in (("model", "name"), ("lora", "enabled"), ("lora", "r"), ("train", "alg_name")):
        if key not in before.get(section, {}):
            raise _damaged(path)
        was, wanted = before[section][key], now[section][key]
        same = was == wanted or (key == "name" and _same_model(str(was), wanted))
        if not same and (key != "alg_name" or without_digest(str(was)) != without_digest(wanted)):
            raise ConfigError(
                f"this run has {section}.{key} {was!r} and cannot be resumed with {wanted!r}: "
                "start a new run from its checkpoint instead"
            )


def _same_model(one: str, other: str) -> bool:
    """Whether both are the same folder (`runs/a`, `/home/me/runs/a`) or model (`qwen3-0.6b`, `Qwen/Qwen3-0.6B`)."""
    if Path(other).is_dir():
        return Path(one).resolve() == Path(other).resolve()
    first, second = (entry.source if (entry := catalogued(name)) else name for name in (one, other))
    return first == second


def _damaged(file: Path) -> ConfigError:
    return ConfigError(
        f"{file} is damaged: remove it, then resume the run in {file.parent} with the config or arguments that it was "
        "started with"
    )


def record_config(config: Config, path: Path, *, resuming: bool) -> None:
    """Write the config that a resume is compared with; log every change."""
    now = with_absolute_paths(config.model_dump(mode="json"))
    if resuming and path.exists():
        before = with_absolute_paths(read_recorded(path))
        for key, (old, value) in changes(before, now).items():
            logger.warning("resuming with another %s: %r instead of %r%s", key, value, old, _why_changed(old, value))
        with suppress(ConfigError):  # written by a version with other keys
            if (rows := check_config(before).batch_size) != config.batch_size:
                logger.warning("resuming with %d rows in a step instead of %d", config.batch_size, rows)
    write_atomically(path, yaml.safe_dump(now, sort_keys=False))


def with_absolute_paths(value: Any) -> Any:
    """The same sections with absolute paths of data and of Python files, so that a run can be resumed from anywhere."""
    if isinstance(value, dict):
        return {_absolute_file(key): with_absolute_paths(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_absolute_paths(each) for each in value]
    return _absolute_file(value) if isinstance(value, str) else value


def _absolute_file(text: str) -> str:
    """`rows.jsonl`, `rewards.py:short`, `gym:room.py:Room` and the words of `mcp:python server.py` with absolute paths.

    Other texts, and those of files that do not exist, are returned as they are.
    """
    if text.startswith(PREFIX):
        words = re.split(r"(\s+)", text.removeprefix(PREFIX))
        return PREFIX + "".join(map(_absolute_file, words))
    found = _FILE.fullmatch(text)
    if found is None or not Path(found["file"]).is_file():
        return text
    return f"{found['scheme'] or ''}{Path(found['file']).absolute()}{found['name'] or ''}"


_FILE = re.compile(
    r"(?P<scheme>(?:gym|verifiers):)?(?P<file>.+\.(?:py(?=:|$)|(?:jsonl|json|csv|tsv|parquet)$))(?P<name>:[\w-]+)?"
)


def _python_file(text: str) -> Path | None:
    """The file of `rewards.py:short`, `verifiers:my_env.py`, or of a module that is imported."""
    found = _FILE.fullmatch(text)
    if found is not None and found["scheme"]:
        return Path(found["file"]) if Path(found["file"]).is_file() else None
    return source_file(text)


def _why_changed(old: Any, new: Any) -> str:
    """For a function with the same name and another digest, which is hard to see in a long path."""
    before, now = (sorted(map(without_digest, texts_in(each))) for each in (old, new))
    return " (the source of the function has changed)" if now and before == now else ""


def record_inputs(config: Config, held_out: Sequence[Any], path: Path, *, resuming: bool) -> None:
    """Write digests of what a run reads besides its config and training rows; log every change since the last start."""
    files = {name: file for name in texts_in(config.model_dump(mode="json")) if (file := _python_file(name))}
    now = {name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in sorted(files.items())}
    now["held-out rows"] = str(DataBuffer(held_out).state()["fingerprint"]) if held_out else ""
    if resuming and path.exists():
        before: dict[str, str] = {}
        with suppress(ValueError):  # a damaged file cannot be compared
            before = read_json(path)
        for name in sorted(before.keys() & now.keys()):
            if before[name] != now[name]:
                logger.warning(
                    "resuming with other content of %s: metrics before and after may not be comparable", name
                )
    write_atomically(path, json.dumps(now, indent=1))


def texts_in(value: Any) -> Iterator[str]:
    """All texts in a dumped config, keys too: several rewards are `{NAME: weight}`."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for part in value:
            yield from texts_in(part)
        if isinstance(value, dict):
            yield from texts_in(list(value.values()))


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """`{"train.lr": (1e-5, 1e-4)}`: keys of two dumped configs that differ, with the old and the new value."""
    return {
        f"{section}.{key}": (old, value)
        for section, keys in now.items()
        for key, value in keys.items()
        if (old := before.get(section, {}).get(key)) != value
    }


def record_stages(stages: Mapping[str, Config], home: Path) -> None:
    """Write the configs of all stages, so that a run interrupted in its first stage can be resumed."""
    home.mkdir(parents=True, exist_ok=True)
    dumped = {name: config.model_dump(mode="json") for name, config in stages.items()}
    write_atomically(home / "stages.yaml", yaml.safe_dump(dumped, sort_keys=False))


def recorded_stages(home: Path, overrides: Sequence[str] = ()) -> dict[str, Config]:
    """The stages of the run in this folder, with overrides; a run without stages has one, named ""."""
    file = next((home / name for name in ("stages.yaml", "config.yaml") if (home / name).exists()), None)
    if file is None:
        return {}
    read_recorded(file)
    return load_stages(file, overrides)


def read_recorded(file: Path) -> dict[str, Any]:
    """The content of `config.yaml` or `stages.yaml`, as a run wrote it."""
    try:
        recorded = read_yaml(file)
    except FileNotFoundError:
        raise ConfigError(f"{file} does not exist: the run in {file.parent} has not started to train") from None
    except ParseError:
        recorded = None
    if not isinstance(recorded, dict) or not all(isinstance(section, dict) for section in recorded.values()):
        raise _damaged(file)
    return recorded


def template_kwargs_of(name: str) -> dict[str, Any]:
    """The variables of the chat template that a run was trained with; {} for other models."""
    return dict(_config_of(name).get("data", {}).get("template_kwargs") or {})


def actions_of(name: str) -> Any:
    """The actions as tokens of the rows or of the environment that a run was trained with; None for other models."""
    config = _config_of(name)
    found = config.get("data", {}).get("actions")
    return found or (config.get("rollout", {}).get("env_args") or {}).get("actions")


def _config_of(name: str) -> Mapping[str, Any]:
    """The recorded config of a run, which may be given by one of its checkpoints; {} for other models."""
    home = Path(name)
    file = last_stage(home.parents[1] if home.parent.name == "checkpoints" else home) / "config.yaml"
    return read_recorded(file) if file.is_file() else {}


def resolve_weights(name: str) -> str:
    """The best checkpoint of a run folder; any other name as it is."""
    if not name:
        raise ConfigError("the name of the model is empty")
    home = Path(name)
    if not home.is_dir():
        return name
    best = best_checkpoint(last_stage(home) / "checkpoints")
    if best is None and any((home / file).exists() for file in ("config.yaml", "stages.yaml")):
        raise ConfigError(f"the run in {home} has no checkpoint yet")
    return str(best) if best is not None else name


def last_stage(home: Path) -> Path:
    """The folder of the last stage that has a checkpoint; the run folder itself for a run without stages."""
    reached = [home / name for name in STAGES if latest_checkpoint(home / name / "checkpoints") is not None]
    return reached[-1] if (home / "stages.yaml").exists() and reached else home


def current_stage(home: Path) -> Path:
    """The folder of the last stage that was started; the run folder itself for a run without stages."""
    started = [home / name for name in STAGES if has_run(home / name)]
    return started[-1] if (home / "stages.yaml").exists() and started else home


def started_run(home: Path) -> Path:
    """`current_stage` of a folder that has a run; a ValueError if it has none."""
    folder = current_stage(home)
    if not has_run(folder):
        hint = "" if home.exists() else did_you_mean(home.name, (other.name for other in home.parent.glob("*/")))
        raise ConfigError(f"there is no run in {home}: pass the folder that `oxrl train` wrote{hint}")
    return folder


class RolloutLog:
    """One line per step in `path`: a digest of all rollouts, and some of them in full.

    On a resumed run, lines of steps that will be repeated are dropped.
    """

    def __init__(self, path: Path, samples: int, *, keep_until: int) -> None:
        self.path, self.samples = path, samples
        if path.exists():
            drop_lines_after(path, keep_until)

    def __call__(self, step: int, groups: Sequence[Group]) -> None:
        rollouts = [rollout for group in groups for rollout in group]
        record = {
            "step": step,
            "digest": digest_of(rollouts),
            "samples": [_rollout_record(rollout) for rollout in rollouts[: self.samples]],
        }
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")


def _rollout_record(rollout: Rollout) -> dict[str, Any]:
    return {
        "id": rollout.id,
        "prompt": rollout.prompt,
        "response": rollout.response,
        "answer": rollout.sample.answer,
        "reward": rollout.reward,
        "status": rollout.status.value,
        "greedy": rollout.greedy,
        "version": rollout.version,
        "turns": [_turn_record(turn) for turn in rollout.turns],
    }


def _turn_record(turn: Turn) -> dict[str, Any]:
    """Tokens with the sampler's log-probs, which `oxrl mismatch` compares with the trainer's."""
    generation = turn.generation
    return {
        "prompt_ids": list(turn.prompt_ids),
        "token_ids": list(generation.token_ids),
        "logprobs": list(generation.logprobs),
        "versions": list(generation.token_versions),
    }
