"""How tests are distributed over the workers of `pytest -n 3`: file by file, and all users of one engine to one worker.

An engine is thus started once in a run, and ends with the last test that uses it. Long units come first, so that the
workers end together. With `OXRL_TEST_ORDER=7` units and the tests in them come in a random order instead, the same for
the same number.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest
from xdist.scheduler import LoadScopeScheduling

GROUPS = {  # fixture or mark of an engine: the unit that shares it
    "vllm_url": "vllm-server",
    "vllm_in_process": "vllm-and-ray",
    "vllm_images": "vllm-images",
    "vllm_sounds": "vllm-sounds",
    "vllm_images_url": "vllm-images-server",
    "ray_images": "vllm-and-ray",
    "ray_here": "vllm-and-ray",
    "ray_ranks": "vllm-and-ray",
    "ray_replicas": "vllm-and-ray",
    "ranks": "ranks",
}
FIRST = (  # what takes longest; everything else follows in the order of the file names
    "vllm-and-ray",
    "ranks",
    "vllm-server",
    "tests/faults/test_engines.py",
    "tests/run/test_launch.py",
    "tests/contracts/test_pairs.py",
    "tests/contracts/test_ranks.py",
)
MARKS = {  # fixture: the mark of the tests that use it
    "complete_run": "trains",
    "forks": "trains",
    "start_group": "engine",
    "drivers": "engine",
    "smollm2": "engine",  # the real model of 135 M parameters
    "installed": "engine",  # a wheel that was built and installed
}
SHARED = ExitStack()  # the engines that the tests of the current unit share


def engines_of(item: pytest.Item) -> list[str]:
    """The engine fixtures of a test: among its arguments, or named by a mark, `pytest.mark.engine("vllm_url")`."""
    marked = [name for mark in item.iter_markers("engine") for name in mark.args]
    return [name for name in (*getattr(item, "fixturenames", ()), *marked) if name in GROUPS]


def ordered(units: Sequence[str], seed: str | None) -> list[str]:
    if seed is not None:
        return random.Random(seed).sample(units, len(units))
    return sorted(units, key=lambda unit: FIRST.index(unit) if unit in FIRST else len(FIRST))


def unit_of(item: pytest.Item) -> str:
    """What goes to one worker as a whole: the users of an engine, else a file."""
    groups = {GROUPS[name] for name in engines_of(item)}
    if len(groups) > 1:
        raise pytest.UsageError(f"{item.nodeid} uses engines of two workers: {', '.join(sorted(groups))}")
    return groups.pop() if groups else item.nodeid.split("::")[0]


def end_engines_after(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """If it is the last test of its unit: an idle engine takes memory and CPU time from the other worker."""
    if nextitem is None or unit_of(nextitem) != unit_of(item):
        SHARED.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    units = {item.nodeid: unit_of(item) for item in items}
    for item in items:
        if units[item.nodeid] in GROUPS.values():
            item.add_marker(pytest.mark.engine)
        for name in MARKS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(MARKS[name])
    seed = os.environ.get("OXRL_TEST_ORDER")
    if seed is not None:
        random.Random(seed).shuffle(items)
    position = {name: index for index, name in enumerate(ordered(list(dict.fromkeys(units.values())), seed))}
    items.sort(key=lambda item: position[units[item.nodeid]])
    if hasattr(config, "workerinput"):
        written = _units_file().with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(units))
        written.rename(_units_file())


def _units_file() -> Path:
    """The file that maps tests to units: the scheduler knows only their names. All workers write the same content."""
    return Path(tempfile.gettempdir()) / "units.json"


class UnitScheduling(LoadScopeScheduling):
    def schedule(self) -> None:
        self.units: dict[str, str] = json.loads(_units_file().read_text())
        super().schedule()

    def _split_scope(self, nodeid: str) -> str:
        return self.units[nodeid]


@pytest.hookimpl(optionalhook=True)  # also without xdist: pytest -p no:xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> UnitScheduling:
    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`
    return UnitScheduling(config, log)  # type: ignore[arg-type]
