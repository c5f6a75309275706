"""A program of the user's looks into a failure and returns a changed config: the last remedy, under a limit.

It is called as `COMMAND FOLDER`. The folder has `signal.json`, `config.yaml`, `traceback.txt` and `attempts.json`; the
program writes `changed.yaml`, with the same sections. What would change the meaning of the test is refused.
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oxrl.diagnose.verify_model import trial_config
from oxrl.machine.processes import kill_group
from oxrl.names import did_you_mean
from oxrl.onboarding.remedies import Task
from oxrl.parsing import read_yaml

CHANGED, LOG = "changed.yaml", "agent.log"
AGENT_ATTEMPTS = 3
AGENT_SECONDS = 600.0
ALLOWED = frozenset(
    {
        "model.dtype", "model.attn_implementation", "model.gradient_checkpointing", "model.chat_template",
        "train.lr", "train.micro_batch_tokens", "train.clip_grad_norm", "train.adam_epsilon",
        "rollout.max_tokens", "rollout.mode", "rollout.slots", "rollout.temperature",
        "lora.enabled", "lora.r", "lora.alpha", "lora.target_modules",
        "inference_engine.name", "inference_engine.capture", "inference_engine.compile", "inference_engine.cache_gib",
    }
)  # fmt: skip
"""Keys that an agent may change; the model, its data, its reward and whether its code is trusted are the user's."""
ENGINE_NAMES = frozenset({"auto", "embedded", "vllm"})  # not an import path, which would run other code


def ask_agent(
    command: str, folder: Path, task: Task, attempts: Sequence[Mapping[str, Any]], seconds: float
) -> Task | str:
    """Return the task that the agent proposes, or why there is none."""
    (folder / "attempts.json").write_text(json.dumps(list(attempts), indent=1), encoding="utf-8")
    _remove(folder / CHANGED)
    limit, log = min(seconds, AGENT_SECONDS), folder / LOG
    try:
        status = _run([*shlex.split(command), str(folder)], log, limit)
    except OSError as error:
        return f"the agent cannot be started: {error}"
    if status is None:
        return f"the agent did not end within {limit:.0f} s; its output is in {log}"
    if status:
        return f"the agent ended with status {status}; its output is in {log}"
    if not (folder / CHANGED).is_file():
        return f"the agent wrote no {CHANGED}; its output is in {log}"
    try:
        return changed_task(task, read_yaml(folder / CHANGED))
    except ValueError as error:
        return f"{CHANGED} is refused: {error}"


def check_agent(command: str) -> None:
    """Raise a ValueError if there is no such program."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise ValueError(f"--agent {command!r} is not a command: {error}") from None
    if not words or shutil.which(words[0]) is None:
        raise ValueError(f"--agent {command!r} cannot be started: there is no program {' '.join(words[:1])!r}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _run(command: Sequence[str], log: Path, seconds: float) -> int | None:
    """Return the exit status of a program; None if it was ended after so many seconds, with all that it started."""
    with log.open("wb") as output:
        program = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
        try:
            return program.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            kill_group(program.pid)
            program.kill()
            program.wait()


def changed_task(task: Task, sections: Any) -> Task:
    """Return the task with allowed keys of `sections`; others must be as they are."""
    if not isinstance(sections, Mapping):
        raise ValueError("it must have sections, such as model and train")
    settings = {section: dict(keys) for section, keys in task.settings.items()}
    strategy, targets = task.strategy, task.lora_targets
    for section, keys in sections.items():
        if not isinstance(keys, Mapping):
            raise ValueError(f"{section} must be a section")
        for key, value in keys.items():
            if value == _now(task, section, key):
                continue
            name = f"{section}.{key}"
            if name not in ALLOWED:
                hint = did_you_mean(name, ALLOWED, f"; allowed: {', '.join(sorted(ALLOWED))}")
                raise ValueError(f"{name} cannot be changed by an agent{hint}")
            if name == "inference_engine.name" and value not in ENGINE_NAMES:
                raise ValueError(f"{name} is one of {', '.join(sorted(ENGINE_NAMES))}")
            if name == "lora.enabled" and isinstance(value, bool):
                strategy = "lora" if value else "full"
            elif name == "lora.target_modules" and (value == "all-linear" or isinstance(value, list)):
                targets = () if value == "all-linear" else tuple(value)
            else:
                settings.setdefault(section, {})[key] = value
    changed = replace(task, settings=settings, strategy=strategy, lora_targets=targets)
    if changed == task:
        raise ValueError("it changes nothing")
    _check_values(changed)
    return changed


def _check_values(task: Task) -> None:
    """Raise a ValueError, as for a config, instead of spending an attempt."""
    with tempfile.TemporaryDirectory(prefix="oxrl-agent-") as scratch:
        for trial in task.trials:
            trial_config(task.weights, trial, task.strategy, task.lora_targets, Path(scratch), task.settings)


def _now(task: Task, section: str, key: str) -> Any:
    if (section, key) == ("model", "name"):
        return task.weights
    if (section, key) == ("lora", "enabled"):
        return task.strategy == "lora"
    if (section, key) == ("lora", "target_modules"):
        return list(task.lora_targets) or "all-linear"
    return task.value(section, key, None)
