"""The attempts of one model's onboarding, on disk: an interrupted one goes on, a finished one is not repeated.

They count only for the same files of the model and the same versions of oxRL, torch and transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from oxrl.onboarding.records import source_digest
from oxrl.parsing import read_json

FILE = "attempts.json"


@dataclass(slots=True)
class State:
    """`State(folder, "tiny")`: no attempts yet; `State.load` continues with those in the folder."""

    folder: Path
    name: str
    conditions: Mapping[str, Any] = field(default_factory=dict)
    attempts: list[dict[str, Any]] = field(default_factory=list)
    result: dict[str, Any] | None = None

    @classmethod
    def load(cls, folder: Path, name: str, conditions: Mapping[str, Any]) -> State:
        """Return the attempts in the folder, or none if they were of other files, versions or conditions."""
        if not (folder / FILE).is_file():
            return cls(folder, name, conditions)
        try:
            saved, made_with = read_json(folder / FILE), _made_with(name)
        except ValueError:  # the model is not there any more; the scout says so
            return cls(folder, name, conditions)
        if saved["name"] != name or saved["made_with"] != {**made_with, **conditions}:
            return cls(folder, name, conditions)
        return cls(folder, name, conditions, saved["attempts"], saved["result"])

    def add(self, attempt: Mapping[str, Any]) -> None:
        self.attempts.append(dict(attempt))
        self._write()

    def finish(self, result: Mapping[str, Any]) -> None:
        self.result = dict(result)
        self._write()

    def _write(self) -> None:
        content = {
            "name": self.name,
            "made_with": {**_made_with(self.name), **self.conditions},
            "attempts": self.attempts,
            "result": self.result,
        }
        draft = self.folder / f".{FILE}"
        draft.write_text(json.dumps(content, indent=1), encoding="utf-8")
        draft.rename(self.folder / FILE)


def _made_with(name: str) -> dict[str, str]:
    versions = {package: version(package) for package in ("oxrl", "torch", "transformers")}
    return {"digest": source_digest(name), **versions}
