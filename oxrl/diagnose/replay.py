"""Train recorded steps once more, from the nearest checkpoint, and compare every number with the record."""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.config import Config, ConfigError, check_config
from oxrl.config.registry import find_engine
from oxrl.diagnose.step_difference import Difference, first_difference
from oxrl.run.checkpoint import checkpoints, environment, read_state
from oxrl.run.folder import read_recorded, started_run
from oxrl.run.prepare import resolve
from oxrl.tracking.step_files import read_step, recorded_steps

BATCHES = (
    "the episodes have several turns, and which of them are sampled together depends on time: with rollout.mode "
    "shrinking that changes log-probs by rounding, with rollout.mode fixed it does not"
)


class ReplayedStep(NamedTuple):
    """A step and its first difference; None: bit-equal."""

    step: int
    difference: Difference | None

    def to_json(self) -> dict[str, Any]:
        found = self.difference
        return {"step": self.step, "equal": found is None, "difference": found and found.to_json()}

    def __str__(self) -> str:
        return f"step {self.step}: {self.difference or 'bit-equal'}"


class Replay(NamedTuple):
    """Result of `replay`: steps that were asked for, and the first earlier step that differs."""

    start: str  # the checkpoint, or "the initial model"
    trained: int  # steps that were repeated
    steps: tuple[ReplayedStep, ...]
    earlier: ReplayedStep | None
    environment: Mapping[str, tuple[Any, Any]]  # what differs from that of the record
    note: str = ""  # why a repetition of this run may differ by rounding

    @property
    def equal(self) -> bool:
        return all(each.difference is None for each in self.steps)

    def to_json(self) -> dict[str, Any]:
        return {
            "equal": self.equal,
            "start": self.start,
            "trained": self.trained,
            "steps": [each.to_json() for each in self.steps],
            "earlier": self.earlier and self.earlier.to_json(),
            "environment": {name: list(values) for name, values in self.environment.items()},
            "note": self.note,
        }

    def __str__(self) -> str:
        plural = "" if self.trained == 1 else "s"
        lines = [f"{self.trained} step{plural} trained again from {self.start}"]
        lines += [f"{name} was {then}, is {now}" for name, (then, now) in self.environment.items()]
        if self.earlier is not None or not self.equal:
            lines.append("of two values, the first is the record's")
        if self.earlier is not None:
            lines.append(f"an earlier step differs already: {self.earlier}")
        return "\n".join([*lines, *self._by_range(), *filter(None, [self.note])])

    def _by_range(self) -> Iterator[str]:
        """A line per step that differs, and one for all bit-equal steps between two of them."""
        for differs, group in groupby(self.steps, lambda each: each.difference is not None):
            steps = list(group)
            if differs or len(steps) == 1:
                yield from map(str, steps)
            else:
                yield f"steps {steps[0].step} to {steps[-1].step}: bit-equal ({len(steps)} steps)"


def replay(run: str | Path, steps: Sequence[int] = ()) -> Replay:
    """Train these steps again (default: all that are recorded) in a temporary folder. The run is not changed."""
    folder = started_run(Path(run))
    config = _replayable(check_config(read_recorded(folder / "config.yaml")))
    known = recorded_steps(folder)
    wanted = sorted(set(steps)) or known
    if not wanted:
        raise ConfigError(f"{folder} has no recorded step yet")
    for step in wanted:
        read_step(folder, step)
    start = _checkpoint_before(folder, wanted[0])
    with _quiet(), tempfile.TemporaryDirectory(prefix="oxrl-replay-") as scratch:
        first = _train_again(config, Path(scratch), start, wanted[-1])
        found = {
            step: ReplayedStep(step, first_difference(read_step(folder, step), read_step(scratch, step)))
            for step in known
            if first < step <= wanted[-1]
        }
    earlier = next((each for step, each in found.items() if step < wanted[0] and each.difference), None)
    then = read_step(folder, wanted[-1]).step["environment"]
    changed = {name: (then.get(name), now) for name, now in environment().items() if then.get(name) != now}
    start_name = "the initial model" if start is None else start.name
    note = BATCHES if config.rollout.mode != "fixed" and _depends_on_batches(folder, found.values()) else ""
    return Replay(start_name, wanted[-1] - first, tuple(found[step] for step in wanted), earlier, changed, note)


def _depends_on_batches(folder: Path, steps: Iterable[ReplayedStep]) -> bool:
    """Whether the first difference is in what was sampled, in a step with episodes of several turns."""
    first = next((each for each in steps if each.difference is not None), None)
    if first is None or first.difference is None or first.difference.stage not in ("sampling", "sampler log-prob"):
        return False
    return any(answer.get("turns", 1) > 1 for answer in read_step(folder, first.step).answers)


def _replayable(config: Config) -> Config:
    """The config without trackers and checks, which change no number; refused where a repetition is another run."""
    if config.run.backend not in ("auto", "local"):
        raise ConfigError(f"run.backend is {config.run.backend}: steps of the local backend can be repeated")
    if not find_engine(config.engine).shares_weights:
        raise ConfigError(f"the engine is {config.engine}: steps that the embedded engine sampled can be repeated")
    if config.rollout.lag:
        raise ConfigError(f"rollout.lag is {config.rollout.lag}: steps of a run with lag 0 can be repeated")
    run = config.run.model_copy(update={"trackers": [], "checks": {"all": "off"}})
    return config.model_copy(update={"run": run})


def _checkpoint_before(folder: Path, step: int) -> Path | None:
    earlier = [path for path in checkpoints(folder / "checkpoints") if read_state(path).step < step]
    return earlier[-1] if earlier else None


def _train_again(config: Config, scratch: Path, start: Path | None, last: int) -> int:
    """Return the step that the repetition starts after."""
    from oxrl.run.train import rerun

    spec = resolve(config, scratch, resume_from=start)
    if last > spec.num_steps:
        raise ConfigError(f"the config in the run's folder has {spec.num_steps} steps, but step {last} is recorded")
    rerun(spec, last)
    return 0 if start is None else read_state(start).step


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the messages of a run, which are about the repetition."""
    logger = logging.getLogger("oxrl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
