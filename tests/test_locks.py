"""`make demo` and `make test` install what the lock files name, and nothing else."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
CONSTRAINTS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())
PINS = {canonicalize_name(name): version for name, version in CONSTRAINTS.items()}


def entries(*files: str) -> dict[str, tuple[str, list[str]]]:
    """Name to version and hashes."""
    found = {}
    for file in files:
        for entry in re.findall(r"^[^#\s].*(?:\n    .*)*", (ROOT / "locks" / f"{file}.txt").read_text(), re.M):
            name, version = re.match(r"(\S+)==(\S+)", entry).groups()
            found[name] = version, re.findall("--hash=sha256:([0-9a-f]{64})", entry)
    return found


LOCKS = sorted(path.stem for path in (ROOT / "locks").glob("*.txt"))


@pytest.mark.parametrize("file", LOCKS)
def test_every_package_has_the_tested_version_and_a_hash(file):
    for name, (version, hashes) in entries(file).items():
        assert version.removesuffix("+cpu") == PINS[name], f"{name}: run `make lock`"
        assert hashes


@pytest.mark.parametrize(
    ("wanted", "steps"),
    [
        (PROJECT["dependencies"], ["torch", "core"]),
        ([each for each in EXTRAS["dev"] if "oxrl" not in each], ["core", "dev", "dev-sources"]),
        ([each for name in ("gym", "math", "plot", "trackio") for each in EXTRAS[name]], ["core", "dev"]),
        (EXTRAS["deepspeed"] + EXTRAS["ray"], ["engines", "engines-sources"]),
    ],
    ids=["core", "dev", "extras", "engines"],
)
def test_the_locks_have_what_the_project_requires(wanted, steps):
    locked = entries(*steps)
    for requirement in map(Requirement, wanted):
        name = canonicalize_name(requirement.name)
        assert name in locked, f"{name}: pin it in constraints.txt and run `make lock`"
        assert locked[name][0] in requirement.specifier


def test_nothing_is_installed_without_a_hash(tmp_path):
    plan = subprocess.run(
        ["make", "--dry-run", f"VENV={tmp_path}", "demo", "test"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.replace("\\\n", "")
    installs = [line for line in plan.splitlines() if "pip" in line.split("#")[0] and " install " in line]
    assert len(installs) > 5
    checked = ("--require-hashes", "--no-index", "--no-deps --no-build-isolation --editable .")
    assert [line for line in installs if not any(way in line for way in checked)] == []
