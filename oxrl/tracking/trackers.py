"""The numbers of a run to MLflow, TensorBoard, W&B and trackio, one file each; `metrics.jsonl` is there in any case.

A tracker is a function of (step, metrics) and an end. It cannot stop a run that has begun: its failure is said once.
What these packages would tell their makers stays untold unless the user's environment says otherwise.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from oxrl.tracking.logs import rank
from oxrl.tracking.metrics import Sink, all_of, read_metrics

logger = logging.getLogger(__name__)

Ending: TypeAlias = Literal["finished", "interrupted", "failed"]
TRACKERS = ("mlflow", "tensorboard", "wandb", "trackio")
"""Each is the name of a package, of the extra that brings it, and of a file here that has `open_tracker(About)`."""
REMEMBERED = "trackers.json"
PATIENCE = 3  # failures in a row before a tracker is left alone


class About(NamedTuple):
    """What a tracker is told of a run; `id` is its own name for the run if it has seen it before."""

    folder: Path
    parameters: Mapping[str, Any]  # {"train.lr": 1e-5, ...}
    uri: str | None = None
    id: str | None = None

    @property
    def name(self) -> str:
        return "/".join(self.folder.resolve().parts[-2:])


class Tracker(NamedTuple):
    """An open one: where numbers go, how it ends, and what it calls the run."""

    log: Sink
    end: Callable[[Ending], None]
    id: str


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ValueError if a package is missing; imports none of them."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"unknown tracker {name!r}; allowed: {', '.join(TRACKERS)}")
        if find_spec(name) is None:
            raise ValueError(f'the tracker {name} is not installed: pip install "oxrl[{name}]"')


@contextmanager
def tracked(names: Sequence[str], folder: Path, config: Mapping[str, Any], *, uri: str | None = None) -> Iterator[Sink]:
    """A sink that feeds all of them, for as long as the run lasts; on ranks other than 0 it feeds none.

    A run that was there before goes on as the same run, and a step that was sent before is not sent again.
    """
    chosen = tuple(dict.fromkeys(names)) if rank() == 0 else ()
    memory = folder / REMEMBERED
    known = json.loads(memory.read_text(encoding="utf-8")) if memory.exists() else {}
    if chosen:
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        sinks = []
        for name in chosen:
            before = known.get(name, {"id": None, "seen": 0})
            seen = max(before["seen"], _last_step(folder)) if name in known else 0
            tracker = _opened(name, About(folder, flattened(config), uri, before["id"]))
            known[name] = {"id": tracker.id, "seen": seen}
            sinks.append(stack.enter_context(_until_it_ends(_Patient(name, tracker, seen))))
        if chosen:
            memory.write_text(json.dumps(known), encoding="utf-8")
        yield all_of(*sinks)


def _opened(name: str, about: About) -> Tracker:
    check_trackers([name])
    try:
        tracker: Tracker = import_module(f"oxrl.tracking.trackers.{name}").open_tracker(about)
    except Exception as error:
        raise ValueError(f"{name} cannot be opened ({error}): correct it, or leave it out of run.trackers") from error
    return tracker


def _last_step(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    rows = read_metrics(file) if file.exists() else []
    return int(rows[-1]["step"]) if rows else 0


class _Patient:
    """A tracker whose failures are said once and hurt nobody."""

    def __init__(self, name: str, tracker: Tracker, seen: int) -> None:
        self.name, self.tracker, self.seen = name, tracker, seen
        self.failures, self.told = 0, False

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self.seen and self.failures < PATIENCE:
            self._try(lambda: self.tracker.log(step, metrics))

    def end(self, ending: Ending) -> None:
        self._try(lambda: self.tracker.end(ending))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever a tracker raises, the run goes on
            self.failures += 1
            if not self.told:
                logger.warning("%s failed and may miss steps: %s; all of them are in metrics.jsonl", self.name, error)
            self.told = True
        else:
            self.failures = 0


@contextmanager
def _until_it_ends(tracker: _Patient) -> Iterator[Sink]:
    ending: Ending = "failed"
    try:
        yield tracker
        ending = "finished"
    except KeyboardInterrupt:
        ending = "interrupted"
        raise
    finally:
        tracker.end(ending)


def flattened(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`flattened({"train": {"lr": 1e-5}}) == {"train.lr": 1e-5}`; an empty section stays as it is."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat
