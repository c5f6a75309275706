"""The requests that the page makes, as a table: path -> function of the runs. The server and the export both use it."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import parse_qs, unquote

from oxrl.names import did_you_mean
from oxrl.parsing import ParseError, read_yaml
from oxrl.tracking.catalogue import EVALUATED, METRICS
from oxrl.tracking.health import find_warnings
from oxrl.tracking.metrics import read_metrics
from oxrl.view.files import new_lines, open_inside
from oxrl.view.steps import Json, Steps, dumped

MOST_RUNS = 6  # that differ in colour, dashes and marks
_RUN_FILES = ("config.yaml", "metrics.jsonl", "record", "rollouts.jsonl", ".lock")
_LINES = {"metrics": "metrics.jsonl", "checks": "checks.jsonl"}
_STAGES = "stages.yaml"


class Response(NamedTuple):
    body: bytes
    kind: str = "application/json"
    headers: Mapping[str, str] = {}


class Run(NamedTuple):
    """One run of the page: `Run("grpo-1", Path("runs/grpo-1"), Steps(...))`."""

    name: str
    folder: Path
    steps: Steps


class NotFoundError(ValueError):
    """There is nothing at the path of a request."""


class Runs:
    """`Runs([Path("runs/a")]).respond("run/0/step/12")`; every path that the page asks for begins at `overview`."""

    def __init__(self, folders: Sequence[Path]) -> None:
        stages = [stage for folder in folders for stage in _stages_of(folder)]
        if len(stages) > MOST_RUNS:
            raise ValueError(f"a page can show {MOST_RUNS} runs, not {len(stages)}: name fewer")
        names = _short_names(stages)
        self.runs = [Run(name, folder, Steps(folder)) for name, folder in zip(names, stages, strict=True)]

    def respond(self, path: str, query: str = "") -> Response:
        """The response to a request; `NotFoundError` if there is none."""
        if path == "overview":
            return Response(dumped(self.overview()))
        for pattern, respond in _TABLE:
            if found := pattern.fullmatch(path):
                return respond(self._run(found["run"]), found.groupdict(), query)
        raise NotFoundError(f"there is no {path}")

    def overview(self) -> Json:
        """The names of the runs, and the table of metrics in the order in which they are shown."""
        known = [metric._asdict() for metric in METRICS]
        known += [{"name": name, "meaning": meaning, "headline": True} for name, meaning in EVALUATED.items()]
        return {"runs": [{"name": run.name, "folder": str(run.folder)} for run in self.runs], "metrics": known}

    def _run(self, number: str) -> Run:
        if int(number) >= len(self.runs):
            raise NotFoundError(f"there is no run {number}")
        return self.runs[int(number)]


Respond: TypeAlias = Callable[[Run, Mapping[str, str], str], Response]


def _lines(run: Run, names: Mapping[str, str], query: str) -> Response:
    """What a file has gained since the byte `from`, if it is the same file."""
    given = parse_qs(query)
    start = int(given["from"][0]) if given.get("from", [""])[0].isdecimal() else 0
    lines = new_lines(run.folder, _LINES[names["file"]], start, given.get("file", [""])[0])
    facts = {"X-Start": lines.start, "X-End": lines.end, "X-File": lines.file, "X-More": int(lines.more)}
    return Response(lines.body, "text/plain", {name: str(value) for name, value in facts.items()})


def _steps(run: Run, _: Mapping[str, str], __: str) -> Response:
    return Response(dumped(run.steps.numbers()))


def _step(run: Run, names: Mapping[str, str], _: str) -> Response:
    return Response(dumped(run.steps.step(int(names["step"]))))


def _answer(run: Run, names: Mapping[str, str], _: str) -> Response:
    return Response(dumped(run.steps.answer(int(names["step"]), unquote(names["group"]), unquote(names["index"]))))


def _prompt(run: Run, names: Mapping[str, str], _: str) -> Response:
    return Response(dumped(run.steps.prompt(unquote(names["sample"]))))


def _config(run: Run, _: Mapping[str, str], __: str) -> Response:
    """The config as flat keys, whose values are texts: `{"train.lr": "1e-05"}`."""
    return Response(dumped(flat_config(run.folder)))


def _warnings(run: Run, _: Mapping[str, str], __: str) -> Response:
    """What the curves themselves show to be wrong, in the form of the guard's findings."""
    try:
        with open_inside(run.folder, "metrics.jsonl"):
            found = find_warnings(read_metrics(run.folder / "metrics.jsonl"))
    except OSError:
        found = []
    fields = ("step", "check", "message", "remedy")
    return Response(dumped([{**dict(zip(fields, each, strict=True)), "state": "warned"} for each in found]))


_NAME = r"[^/]{1,2000}"
_TABLE: tuple[tuple[re.Pattern[str], Respond], ...] = tuple(
    (re.compile(rf"run/(?P<run>\d{{1,3}})/{path}"), respond)
    for path, respond in {
        rf"lines/(?P<file>{'|'.join(_LINES)})": _lines,
        "steps": _steps,
        r"step/(?P<step>\d{1,12})": _step,
        rf"answer/(?P<step>\d{{1,12}})/(?P<group>{_NAME})/(?P<index>{_NAME})": _answer,
        rf"prompt/(?P<sample>{_NAME})": _prompt,
        "config": _config,
        "warnings": _warnings,
    }.items()
)


def flat_config(folder: Path) -> dict[str, str]:
    """`{"train.lr": "1e-05"}`; empty if the run has no readable config."""
    try:
        with open_inside(folder, "config.yaml"):
            raw = read_yaml(folder / "config.yaml")
    except (OSError, ParseError):
        return {}
    return dict(_flat(raw, ())) if isinstance(raw, dict) else {}


def _flat(value: Any, above: tuple[str, ...]) -> list[tuple[str, str]]:
    if isinstance(value, dict) and value:
        return [pair for key, inner in value.items() for pair in _flat(inner, (*above, str(key)))]
    return [(".".join(above), dumped(value).decode())]


def _stages_of(folder: Path) -> list[Path]:
    """The folder of a run, or those of its stages; a ValueError if it has no run."""
    if not folder.is_dir():
        hint = did_you_mean(folder.name, (other.name for other in folder.parent.glob("*/")))
        raise ValueError(f"there is no run folder {folder}{hint}")
    if (folder / _STAGES).exists():
        stages = [each for each in sorted(folder.iterdir()) if each.is_dir() and _has_run(each)]
        stages.sort(key=lambda each: (each / "config.yaml").stat().st_mtime if (each / "config.yaml").exists() else 0)
        return stages or [folder]
    if not _has_run(folder):
        raise ValueError(f"{folder} is not a run folder: it has none of {', '.join(_RUN_FILES[:-1])}")
    return [folder]


def _has_run(folder: Path) -> bool:
    return any((folder / name).exists() for name in _RUN_FILES)


def _short_names(folders: Sequence[Path]) -> list[str]:
    """The last parts of the paths, as many as make them differ; a stage has the name of its run before its own."""
    parts = [folder.resolve().parts for folder in folders]
    for length in range(1, max(map(len, parts), default=1) + 1):
        if len({each[-length:] for each in parts}) == len(parts):
            least = [2 if (folder.parent / _STAGES).exists() else 1 for folder in folders]
            return ["/".join(each[-max(length, own) :]) for each, own in zip(parts, least, strict=True)]
    raise ValueError("a run is named twice: name each once")
