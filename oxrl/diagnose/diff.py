"""Two runs side by side: the keys in which their configs differ, and the first step and field in which they part."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.diagnose.step_difference import KIND, Difference, first_difference, first_digest
from oxrl.run.folder import changes, read_recorded, started_run
from oxrl.tracking.step_files import read_index, read_step, recorded_steps

CAUSES = {
    KIND: "algorithm: compare train.alg_name, and whether the rows have responses",
    "weights before the step": "weights: the runs start from other weights, or the step before changed them otherwise",
    "data": "data order: other rows, or the same rows in another order",
    "prompt": "data order: rows of the same numbers have other prompts: the same rows in another order, other rows, or "
    "another chat template",
    "version": "version: the answers were sampled with weights of another version; compare rollout.lag and "
    "partial_rollouts",
    "sampling": "sampling: the same prompts and weights gave other tokens; compare the sampling settings and engines",
    "sampler log-prob": "sampling: the same tokens with other probabilities; compare engines and precision",
    "reward": "reward: the same answers were graded differently",
    "reference log-prob": "weights: another reference model",
    "advantage": "advantage: the same rewards became other advantages; compare the algorithm and its parameters",
    "log-prob": "weights: the same tokens have other probabilities in training; compare precision, layout and threads",
    "ratio": "clipping: compare the clip range",
    "loss": "loss: compare the algorithm, its parameters and the learning rate",
    "gradient": "loss: compare the algorithm and its parameters",
    "weights": "weights: the same gradient gave another update; compare the optimizer's settings",
}
_SEEDED = ("data", "prompt", "sampling", "weights before the step")


class RunDiff(NamedTuple):
    """Result of `diff_runs`: `step` and `difference` are None where no step differs."""

    config: Mapping[str, tuple[Any, Any]]
    environment: Mapping[str, tuple[Any, Any]]
    compared: int
    step: int | None
    difference: Difference | None
    cause: str

    def to_json(self) -> dict[str, Any]:
        found = self.difference and self.difference.to_json()
        pairs = {name: {key: list(both) for key, both in getattr(self, name).items()} for name in _PAIRS}
        return {**self._asdict(), **pairs, "difference": found}

    def __str__(self) -> str:
        both = {**self.config, **self.environment}
        lines = [f"{key}: {old!r} and {new!r}" for key, (old, new) in both.items()]
        if self.difference is None:
            return "\n".join([*lines, f"equal to the bit in the {self.compared} steps that both recorded"])
        return "\n".join([*lines, f"they part at step {self.step}, {self.difference}", f"likely cause: {self.cause}"])


_PAIRS = ("config", "environment")


def diff_runs(first: str | Path, second: str | Path) -> RunDiff:
    """Compare the configs and the records of two runs."""
    folders = [started_run(Path(run)) for run in (first, second)]
    configs = [read_recorded(folder / "config.yaml") for folder in folders]
    config = changes(configs[0], configs[1]) | {
        key: (new, old) for key, (old, new) in changes(configs[1], configs[0]).items()
    }
    lines = [{line["step"]: line for line in read_index(folder)} for folder in folders]
    common = sorted(lines[0].keys() & lines[1].keys())
    if not common:
        raise ValueError(f"{first} and {second} have no recorded step in common")
    environment = _environments(folders)
    for step in common:
        if found := _difference(folders, [each[step] for each in lines], step):
            return RunDiff(config, environment, len(common), step, found, _cause(found, config))
    return RunDiff(config, environment, len(common), None, None, "")


def _difference(folders: list[Path], lines: list[Mapping[str, Any]], step: int) -> Difference | None:
    """Token by token where both still have the step, else by its line in the index."""
    if not all((folder / "record" / f"step_{step:06d}.jsonl").exists() for folder in folders):
        return first_digest(*lines)
    return first_difference(*(read_step(folder, step) for folder in folders))


def _environments(folders: list[Path]) -> dict[str, tuple[Any, Any]]:
    latest = [read_step(folder, steps[-1]) for folder in folders if (steps := recorded_steps(folder))]
    if len(latest) < len(folders):
        return {}
    old, new = (record.step["environment"] for record in latest)
    return {name: (old.get(name), new.get(name)) for name in sorted({*old, *new}) if old.get(name) != new.get(name)}


def _cause(found: Difference, config: Mapping[str, Any]) -> str:
    if found.stage in _SEEDED and "run.seed" in config:
        return f"seed: run.seed is {config['run.seed'][0]} and {config['run.seed'][1]}"
    if found.stage == "loss" and found.where == "lr":
        return "learning rate: compare train.lr, lr_scheduler, warmup_steps_ratio and the number of steps"
    return CAUSES.get(found.stage, "none is known for this field")
