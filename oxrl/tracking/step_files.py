"""The folder `record/` of a run: one file per step, written as a whole, and an index with one line per step.

Files hold JSON only, so that a reader needs neither the trainer nor torch. Old steps are removed; their lines in the
index stay. docs/records.md describes the format.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from oxrl.parsing import parse_json
from oxrl.tracking.metrics import drop_lines_after, read_metrics

FOLDER, INDEX = "record", "index.jsonl"
_NAME = re.compile(r"step_(\d+)\.jsonl")


class StepRecord(NamedTuple):
    """`read_step("runs/rl", 12)`: the first line of a step's file, and its answers (or rows) in order."""

    step: dict[str, Any]
    answers: list[dict[str, Any]]


class StepFiles:
    """Writes the record of a run in `folder`, of which the last `keep` steps stay. A resumed run drops later steps."""

    def __init__(self, folder: Path, *, keep: int, keep_until: int) -> None:
        self.folder, self.keep = folder / FOLDER, keep
        self.folder.mkdir(parents=True, exist_ok=True)
        for draft in self.folder.glob(".*.draft"):
            draft.unlink()
        for step, file in _files(self.folder):
            if not keep_until - keep < step <= keep_until:
                file.unlink()
        if (self.folder / INDEX).exists():
            drop_lines_after(self.folder / INDEX, keep_until)

    def write(self, header: Mapping[str, Any], answers: Iterable[str], summary: Mapping[str, Any]) -> None:
        """Write the file of a step under its name once it is complete, and append a line to the index."""
        step = int(header["step"])
        file = self.folder / f"step_{step:06d}.jsonl"
        draft = self.folder / f".{file.name}.draft"
        content = "\n".join([json_text(header), *answers, ""])
        draft.write_text(content, encoding="utf-8")
        draft.replace(file)
        line = {"step": step, "file": file.name, "bytes": len(content), **summary}
        with (self.folder / INDEX).open("a", encoding="utf-8") as index:
            index.write(json_text(line) + "\n")
        (self.folder / f"step_{step - self.keep:06d}.jsonl").unlink(missing_ok=True)


def record_folder(run: str | Path) -> Path:
    """The folder with the record of a run; a ValueError if there is none."""
    folder = Path(run) / FOLDER
    if not Path(run).is_dir():
        raise ValueError(f"there is no folder {run}: pass the folder that `oxrl train` wrote")
    if not folder.is_dir():
        raise ValueError(f"{run} has no record: it is written by `oxrl train` unless rollout.record is off")
    return folder


def recorded_steps(run: str | Path) -> list[int]:
    """The steps whose files exist, in order."""
    return [step for step, _ in _files(record_folder(run))]


def read_index(run: str | Path) -> list[dict[str, Any]]:
    """One line per step of the run, also of steps whose file was removed; an incomplete last line is left out."""
    index = record_folder(run) / INDEX
    return read_metrics(index) if index.exists() else []


def read_step(run: str | Path, step: int) -> StepRecord:
    """The record of one step; a ValueError names what is missing or damaged."""
    folder = record_folder(run)
    file = folder / f"step_{step:06d}.jsonl"
    if not file.is_file():
        raise ValueError(f"{run} has no record of step {step}; {_available([each for each, _ in _files(folder)])}")
    return parse_step(file.read_bytes(), str(file))


def parse_step(content: bytes, name: str) -> StepRecord:
    """The record in the bytes of a file; `name` is for messages."""
    lines = [_parsed(line, f"{name}, line {number}") for number, line in enumerate(content.splitlines(), 1)]
    if not lines or lines[0].get("kind") != "step":
        raise ValueError(f'{name} is not the record of a step: its first line has no kind "step"')
    return StepRecord(lines[0], lines[1:])


def _available(steps: Sequence[int]) -> str:
    return f"it has {len(steps)} steps from {steps[0]} to {steps[-1]}" if steps else "it has none"


def _parsed(line: bytes, name: str) -> dict[str, Any]:
    try:
        value = parse_json(line)
    except ValueError as error:
        raise ValueError(f"{name} is damaged: {error}") from None
    if not isinstance(value, dict) or not isinstance(value.get("kind"), str):
        raise ValueError(f"{name} is damaged: it must be an object with a kind")
    return value


def _files(folder: Path) -> Iterator[tuple[int, Path]]:
    found = ((match, file) for file in folder.glob("step_*.jsonl") if (match := _NAME.fullmatch(file.name)))
    yield from sorted((int(match[1]), file) for match, file in found)


def json_text(value: Any) -> str:
    """Compact JSON; numbers that are not finite are null, and what JSON has no form for is its text."""
    try:
        return json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value


def json_numbers(values: np.ndarray[Any, Any], known: np.ndarray[Any, Any]) -> str:
    """`[null,-0.12,3]`: the shortest text of each number that reads back as the same float32; null where not known."""
    shown = known & np.isfinite(values)
    texts = np.full(len(values), "null", dtype=object)
    known_values = values[shown]
    if len(known_values) and (known_values == known_values[0]).all():  # an advantage, a version
        texts[shown] = str(known_values[0])
    else:
        texts[shown] = known_values.astype("U").tolist()
    return f"[{','.join(texts.tolist())}]"
