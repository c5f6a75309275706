"""A program of the user's looks into a failure and returns a changed config: the last remedy, under a limit.

It is called as `COMMAND FOLDER`. The folder has `signal.json`, `config.yaml`, `traceback.txt` and `attempts.json`; the
program writes `changed.yaml`, with the same sections. What would change the meaning of the test is refused.
"""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oxrl.onboarding.remedies import Task
from oxrl.parsing import read_yaml

CHANGED = "changed.yaml"
AGENT_ATTEMPTS = 3
AGENT_SECONDS = 600.0
ALLOWED: Mapping[str, frozenset[str]] = {
    "model": frozenset({"dtype", "attn_implementation", "gradient_checkpointing", "chat_template"}),
    "train": frozenset({"lr", "micro_batch_tokens", "clip_grad_norm", "adam_epsilon"}),
    "rollout": frozenset({"max_tokens", "mode", "slots", "temperature"}),
    "lora": frozenset({"enabled", "r", "alpha", "target_modules"}),
    "inference_engine": frozenset({"name", "capture", "compile", "cache_gib"}),
}
"""Keys that an agent may change; the model, its data, its reward and whether its code is trusted are the user's."""
ENGINE_NAMES = frozenset({"auto", "embedded", "vllm"})  # not an import path, which would run other code


def ask_agent(
    command: str, folder: Path, task: Task, attempts: Sequence[Mapping[str, Any]], seconds: float
) -> Task | str:
    """Return the task that the agent proposes, or why there is none."""
    (folder / "attempts.json").write_text(json.dumps(list(attempts), indent=1), encoding="utf-8")
    (folder / CHANGED).unlink(missing_ok=True)
    try:
        limit = min(seconds, AGENT_SECONDS)
        done = subprocess.run([*shlex.split(command), str(folder)], timeout=limit, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return f"the agent did not end within {limit:.0f} s"
    except OSError as error:
        raise ValueError(f"--agent {command!r} cannot be started: {error}") from None
    if done.returncode:
        return f"the agent ended with status {done.returncode}"
    if not (folder / CHANGED).is_file():
        return f"the agent wrote no {CHANGED}"
    try:
        return changed_task(task, read_yaml(folder / CHANGED))
    except ValueError as error:
        return f"{CHANGED} is refused: {error}"


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
            if key not in ALLOWED.get(section, ()):
                raise ValueError(f"{section}.{key} cannot be changed by an agent; allowed: {_allowed()}")
            if (section, key) == ("inference_engine", "name") and value not in ENGINE_NAMES:
                raise ValueError(f"inference_engine.name is one of {', '.join(sorted(ENGINE_NAMES))}")
            if (section, key) == ("lora", "enabled"):
                strategy = "lora" if value else "full"
            elif (section, key) == ("lora", "target_modules"):
                targets = () if value == "all-linear" else tuple(value)
            else:
                settings.setdefault(section, {})[key] = value
    changed = replace(task, settings=settings, strategy=strategy, lora_targets=targets)
    if changed == task:
        raise ValueError("it changes nothing")
    return changed


def _now(task: Task, section: str, key: str) -> Any:
    if (section, key) == ("model", "name"):
        return task.weights
    if (section, key) == ("lora", "enabled"):
        return task.strategy == "lora"
    if (section, key) == ("lora", "target_modules"):
        return list(task.lora_targets) or "all-linear"
    return task.value(section, key, None)


def _allowed() -> str:
    return ", ".join(f"{section}.{key}" for section, keys in ALLOWED.items() for key in sorted(keys))
