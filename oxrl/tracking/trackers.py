"""Log the metrics of a run to MLflow, TensorBoard, W&B and trackio, besides `metrics.jsonl`.

A tracker is a function of (step, metrics) and a function that ends it. A failing tracker never stops a running run: the
first failure is logged as a warning. Telemetry of these packages is off unless the user's environment enables it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from oxrl.machine.packages import require
from oxrl.parsing import read_json
from oxrl.tracking.files import write_atomically
from oxrl.tracking.logs import rank
from oxrl.tracking.metrics import Sink, all_of, read_metrics

logger = logging.getLogger(__name__)

Outcome: TypeAlias = Literal["finished", "interrupted", "failed"]
TRACKERS = ("mlflow", "tensorboard", "wandb", "trackio")
"""Each is the name of a package, of the extra that installs it, and of a module here with `open_tracker(RunInfo)`."""
STATE_FILE = "trackers.json"
MAX_FAILURES = 3  # in a row, before a tracker is disabled


class RunInfo(NamedTuple):
    """What a tracker needs to open a run; `id` is the tracker's run id if the run is resumed."""

    folder: Path
    parameters: Mapping[str, Any]  # {"train.lr": 1e-5, ...}
    uri: str | None = None
    id: str | None = None

    @property
    def name(self) -> str:
        return "/".join(self.folder.resolve().parts[-2:])


class Tracker(NamedTuple):
    """An open tracker: its sink, the function that ends it, and its run id."""

    log: Sink
    end: Callable[[Outcome], None]
    id: str


def check_trackers(names: Sequence[str]) -> None:
    """Raise a ValueError if a package is missing; imports none of them."""
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"unknown tracker {name!r}; allowed: {', '.join(TRACKERS)}")
        require(name)


@contextmanager
def tracked(names: Sequence[str], folder: Path, config: Mapping[str, Any], *, uri: str | None = None) -> Iterator[Sink]:
    """Open the trackers and yield a sink that feeds all of them; on ranks other than 0 it feeds none.

    A resumed run continues the same run of the tracker, and steps that were logged before are not logged again.
    """
    chosen = tuple(dict.fromkeys(names)) if rank() == 0 else ()
    state_file = folder / STATE_FILE
    known = read_json(state_file) if state_file.exists() else {}
    if chosen:
        folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        sinks = []
        for name in chosen:
            before = known.get(name, {"id": None, "seen": -1})
            seen = max(before["seen"], _last_step(folder)) if name in known else -1
            tracker = _opened(name, RunInfo(folder, flattened(config), uri, before["id"]))
            known[name] = {"id": tracker.id, "seen": seen}
            sinks.append(stack.enter_context(_ended(_SafeTracker(name, tracker, seen))))
        if chosen:
            write_atomically(state_file, json.dumps(known))
        yield all_of(*sinks)


def _opened(name: str, run_info: RunInfo) -> Tracker:
    check_trackers([name])
    try:
        tracker: Tracker = import_module(f"oxrl.tracking.{name}").open_tracker(run_info)
    except Exception as error:
        raise ValueError(f"{name} cannot be opened ({error}): fix this, or remove it from run.trackers") from error
    return tracker


def _last_step(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    rows = read_metrics(file) if file.exists() else []
    return int(rows[-1]["step"]) if rows else -1  # an evaluation before the first step is step 0


class _SafeTracker:
    """A tracker whose first failure is logged, and whose failures are never raised."""

    def __init__(self, name: str, tracker: Tracker, seen: int) -> None:
        self.name, self.tracker, self.seen = name, tracker, seen
        self.failures, self.warned = 0, False

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        if step > self.seen and self.failures < MAX_FAILURES:
            self._try(lambda: self.tracker.log(step, metrics))

    def end(self, outcome: Outcome) -> None:
        self._try(lambda: self.tracker.end(outcome))

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # noqa: BLE001 - no error of a tracker may stop the run
            self.failures += 1
            if not self.warned:
                logger.warning("%s failed and may miss steps: %s; metrics.jsonl has all of them", self.name, error)
            self.warned = True
        else:
            self.failures = 0


@contextmanager
def _ended(tracker: _SafeTracker) -> Iterator[Sink]:
    """End the tracker with the outcome of the block."""
    outcome: Outcome = "failed"
    try:
        yield tracker
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "interrupted"
        raise
    finally:
        tracker.end(outcome)


def flattened(config: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """`flattened({"train": {"lr": 1e-5}}) == {"train.lr": 1e-5}`; an empty section is kept."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flattened(value, f"{above}{key}.")
        else:
            flat[f"{above}{key}"] = value
    return flat
