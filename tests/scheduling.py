"""How tests are distributed over the workers of `pytest -n 2`: file by file, and all users of one engine to one worker.

An engine is thus started once in a run. Long units come first, so that the workers end together. With
`OXRL_TEST_ORDER=7` units and the tests in them come in a random order instead, the same for the same number.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest
from xdist.scheduler import LoadScopeScheduling

GROUPS = {  # fixture or mark of an engine: the unit that shares it
    "vllm_url": "vllm-server",
    "vllm_in_process": "vllm-and-ray",
    "ray_here": "vllm-and-ray",
    "ray_ranks": "vllm-and-ray",
    "ray_replicas": "vllm-and-ray",
    "ranks": "ranks",
}
FIRST = (  # what takes longest; everything else follows in the order of the file names
    "vllm-server",
    "vllm-and-ray",
    "ranks",
    "tests/contracts/test_ranks.py",
    "tests/test_launch.py",
)


def engines_of(item: pytest.Item) -> list[str]:
    """The engine fixtures of a test: among its arguments, or named by a mark, `pytest.mark.engine("vllm_url")`."""
    marked = [name for mark in item.iter_markers("engine") for name in mark.args]
    return [name for name in (*getattr(item, "fixturenames", ()), *marked) if name in GROUPS]


def unit_of(nodeid: str) -> str:
    """What goes to one worker as a whole: the group behind the `@`, else the file."""
    name, _, group = nodeid.rpartition("@")
    return group if name and "]" not in group and "/" not in group else nodeid.split("::")[0]


def ordered(units: Sequence[str], seed: str | None) -> list[str]:
    if seed is not None:
        return random.Random(seed).sample(units, len(units))
    return sorted(units, key=lambda unit: FIRST.index(unit) if unit in FIRST else len(FIRST))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    unit: dict[pytest.Item, str] = {}
    for item in items:
        groups = {GROUPS[name] for name in engines_of(item)}
        if len(groups) > 1:
            raise pytest.UsageError(f"{item.nodeid} uses engines of two workers: {', '.join(sorted(groups))}")
        for group in groups:
            item.add_marker(pytest.mark.engine)
            item.add_marker(pytest.mark.xdist_group(group))
        unit[item] = next(iter(groups), item.nodeid.split("::")[0])
    seed = os.environ.get("OXRL_TEST_ORDER")
    if seed is not None:
        random.Random(seed).shuffle(items)
    position = {name: index for index, name in enumerate(ordered(list(dict.fromkeys(unit.values())), seed))}
    items.sort(key=lambda item: position[unit[item]])


class UnitScheduling(LoadScopeScheduling):
    def _split_scope(self, nodeid: str) -> str:
        return unit_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> UnitScheduling:
    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`
    return UnitScheduling(config, log)  # type: ignore[arg-type]
