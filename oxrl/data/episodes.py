"""Folders of recorded episodes to rows: what was seen at a step, the instruction, and the actions that followed.

A folder has JSONL or Parquet files of steps or of whole episodes, or the layout of a LeRobot dataset, which is read
without its package. Each step becomes one row of the format `actions`. Pictures are not decoded here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from oxrl.data.fill import numbers_text
from oxrl.data.formats import RawRow
from oxrl.names import did_you_mean
from oxrl.parsing import parse_json

COLUMNS = ("instruction", "images", "action", "actions", "state", "episode")
"""What a step, or with `actions` an episode, may have; `data.columns` maps these names to those of the files."""

_IMAGES = ("images", "image")
_INSTRUCTIONS = ("instruction", "task", "prompt")
_FRAMES = "to train from it, save its frames as pictures: record it without videos, or write one row per step"

Row: TypeAlias = Mapping[str, Any]


class _Layout(NamedTuple):
    """Where each of `COLUMNS` is in the files of a folder, and what its `task_index` means."""

    files: Sequence[Path]
    columns: Mapping[str, Sequence[str]]  # the first that a row has is used; all of them for pictures
    tasks: Mapping[int, str] = {}


def is_recording(folder: Path, readers: Mapping[str, Any], columns: Mapping[str, str] | None = None) -> bool:
    """Whether a folder has a LeRobot dataset, or files whose first row has an action."""
    if (folder / "meta" / "info.json").is_file():
        return True
    first = next((row for file in _files(folder, readers)[:1] for row in _reader(file, readers)(file)), None)
    mapped = columns or {}
    return first is not None and any(mapped.get(name, name) in first.columns for name in ("action", "actions"))


def read_episodes(
    folder: Path, readers: Mapping[str, Any], chunk: int, columns: Mapping[str, str] | None = None
) -> Iterator[RawRow]:
    """One row per step, with the `chunk` actions from there on; the last action of an episode is repeated.

    `readers` are functions of a path by the ending of its name. A row that cannot be read is a ValueError: without it
    the actions of the steps before it would be others.
    """
    layout = _lerobot(folder) if (folder / "meta" / "info.json").is_file() else _plain(folder, readers)
    layout = layout._replace(columns={**layout.columns, **_mapped(columns or {})})
    steps = (step for file in layout.files for row in _rows(file, readers) for step in _steps(row, layout))
    for _, episode in groupby(steps, key=lambda step: step.episode):
        yield from _rows_of(list(episode), chunk)


class _Step(NamedTuple):
    where: str
    episode: Any
    action: Any
    shown: dict[str, Any]


def _plain(folder: Path, readers: Mapping[str, Any]) -> _Layout:
    return _Layout(
        _files(folder, readers),
        {"instruction": _INSTRUCTIONS, "images": _IMAGES, "episode": ("episode", "episode_index")},
    )


def _files(folder: Path, readers: Mapping[str, Any]) -> list[Path]:
    return sorted(file for file in folder.iterdir() if file.name.lower().endswith(tuple(readers)) and file.is_file())


def _reader(file: Path, readers: Mapping[str, Any]) -> Any:
    return next(reader for ending, reader in readers.items() if file.name.lower().endswith(ending))


def _mapped(columns: Mapping[str, str]) -> dict[str, Sequence[str]]:
    given = {"images" if name == "image" else name: theirs for name, theirs in columns.items()}
    if unknown := [name for name in given if name not in COLUMNS]:
        raise ValueError(
            f"columns: {unknown[0]!r} is no column of recorded episodes{did_you_mean(unknown[0], COLUMNS) or ';'} "
            f"names: {', '.join(COLUMNS)}"
        )
    return {name: (theirs,) for name, theirs in given.items()}


def _rows(file: Path, readers: Mapping[str, Any]) -> Iterator[RawRow]:
    for row in _reader(file, readers)(file):
        if row.error:
            raise ValueError(f"{row.where}: {row.error}; an episode is read as a whole, so it cannot be left out")
        yield row


def _steps(row: RawRow, layout: _Layout) -> Iterator[_Step]:
    """One step, or those of an episode: a row with `actions`."""
    found = {name: _column(row.columns, layout, name) for name in COLUMNS}
    whole = found.pop("actions")
    instruction = found["instruction"] or layout.tasks.get(row.columns.get("task_index", -1))
    if not isinstance(instruction, str) or not instruction.strip():
        raise ValueError(f"{row.where}: {_missing(row, 'instruction')}")
    if whole is None:
        if found["action"] is None:
            raise ValueError(f"{row.where}: {_missing(row, 'action')}, or actions, those of a whole episode")
        episode = row.where.rpartition(":")[0] if found["episode"] is None else found["episode"]
        yield _Step(row.where, episode, found["action"], _shown(instruction, found))
        return
    lists = {name: found[name] for name in ("images", "state") if found[name] is not None}
    if wrong := [name for name, value in lists.items() if not isinstance(value, list) or len(value) != len(whole)]:
        raise ValueError(f"{row.where}: it has {len(whole)} actions, and {wrong[0]} needs a list with one for each")
    for number, action in enumerate(whole):
        at = {name: value[number] for name, value in lists.items()}
        yield _Step(f"{row.where}:{number}", row.where, action, _shown(instruction, at))


def _column(row: Row, layout: _Layout, name: str) -> Any:
    theirs = layout.columns.get(name, (name,))
    if name == "images":  # of all cameras
        pictures = [each for column in theirs for each in _as_list(row.get(column))]
        return pictures or None
    return next((row[column] for column in theirs if row.get(column) is not None), None)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [] if value is None else [value]


def _missing(row: RawRow, name: str) -> str:
    return f"it has {', '.join(row.columns) or 'no columns'}, and no {name}: map it with columns, {name}=THEIRS"


def _shown(instruction: str, found: Row) -> dict[str, Any]:
    state, images = found.get("state"), found.get("images")
    shown: dict[str, Any] = {"instruction": instruction}
    if state is not None:
        shown["state"] = numbers_text(state)
    if images is not None:
        shown["images"] = _as_list(images)
    return shown


def _rows_of(episode: Sequence[_Step], chunk: int) -> Iterator[RawRow]:
    actions = [step.action for step in episode]
    for number, step in enumerate(episode):
        following = actions[number : number + chunk]
        following += [actions[-1]] * (chunk - len(following))
        yield RawRow(step.where, {**step.shown, "actions": following, "step": number})


def _lerobot(folder: Path) -> _Layout:
    """Versions 2 and 3: the features in `meta/info.json`, the instructions in `meta/tasks`, the steps in `data`."""
    info = parse_json((folder / "meta" / "info.json").read_bytes())
    kinds = {name: about.get("dtype") for name, about in info.get("features", {}).items()}
    pictures = [name for name, kind in kinds.items() if kind == "image"]
    if not pictures and (video := next((name for name, kind in kinds.items() if kind == "video"), None)):
        raise ValueError(f"{video} of {folder} is a video, which is not read: {_FRAMES}")
    files = sorted((folder / "data").rglob("*.parquet"))
    if not files:
        raise ValueError(f"{folder} has a meta/info.json, and no Parquet file in data: download the whole dataset")
    columns = {"images": pictures, "state": ("observation.state",), "episode": ("episode_index",)}
    return _Layout(files, columns, _tasks(folder / "meta"))


def _tasks(meta: Path) -> dict[int, str]:
    if (lines := meta / "tasks.jsonl").is_file():
        each = map(parse_json, lines.read_bytes().splitlines())
        return {int(row["task_index"]): str(row["task"]) for row in each}
    if (table := meta / "tasks.parquet").is_file():
        from pyarrow import parquet  # type: ignore[import-untyped]

        rows = parquet.read_table(table).to_pylist()  # the instruction is the index of a data frame
        return {int(row["task_index"]): str(row.get("task", row.get("__index_level_0__"))) for row in rows}
    return {}


def write_episodes(file: Path, steps: Iterable[Row]) -> int:
    """Write steps as Parquet, pictures as bytes; returns their number."""
    import pyarrow
    from pyarrow import parquet

    rows = list(steps)
    parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return len(rows)
