"""Whether the files of a checkpoint are what was written: `training_state.json` has a digest of each, and of itself."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from oxrl.parsing import read_json
from oxrl.types import TrainingState

STATE_FILE = "training_state.json"
_ONLY_FOR_RESUME = ("optimizer.safetensors", "rng.safetensors", "reference.safetensors", "shards/")


def apply_umask(folder: Path) -> None:
    """Give all files of a folder the permissions of a new file; safetensors writes its own for the owner alone."""
    probe = folder / ".permissions"  # `os.umask` would have to set it to read it, for all threads
    probe.touch()
    permissions = probe.stat().st_mode
    probe.unlink()
    for file in folder.rglob("*"):
        if file.is_file() and not file.is_symlink():
            file.chmod(file.stat().st_mode | permissions)


class CorruptCheckpointError(ValueError):
    """A checkpoint whose files have changed since they were written; the message begins with the file."""


def check_files(path: str | Path, chosen: Callable[[str], bool] = bool) -> None:
    """Raise at the first file of a checkpoint that has changed since it was written; of all, or of `chosen` names."""
    path = Path(path)
    files = {name: digest for name, digest in read_sealed(path).get("files", {}).items() if chosen(name)}
    if missing := sorted(name for name in files if not (path / name).is_file()):
        raise CorruptCheckpointError(f"{path / missing[0]} is missing from the checkpoint")
    now = digests(path, files)
    for name, digest in files.items():
        if now[name] != digest:
            raise CorruptCheckpointError(f"{path / name} is damaged: it is not what was written")


def check_model_files(folder: Path, *, weights: bool) -> None:
    """Raise if a file that a model is loaded from has changed: its weights, or all others.

    Only checkpoints have digests. What only a resume reads is left out.
    """

    def is_read(name: str) -> bool:
        return name.endswith(".safetensors") == weights and not name.startswith(_ONLY_FOR_RESUME)

    state = folder / STATE_FILE
    if not state.is_file() or b'"seal"' not in state.read_bytes():  # other programs write files of this name, too
        return
    try:
        check_files(folder, is_read)
    except CorruptCheckpointError as error:
        raise CorruptCheckpointError(
            f"{error}; use another checkpoint, or, if it was changed on purpose, a copy of the folder without "
            f"{STATE_FILE}"
        ) from None


def read_sealed(path: Path) -> dict[str, Any]:
    file = path / STATE_FILE
    if not file.exists():
        raise ValueError(f"{path} is not a checkpoint: it has no {STATE_FILE}")
    try:
        sealed = read_json(file)
        record = {name: sealed[name] for name in (*TrainingState._fields, "files") if name in sealed}
        unsealed = not {"seal", "files"} & sealed.keys()  # by an older version of oxRL
        intact = _is_state(sealed) and (unsealed or sealed.get("seal") == seal(record))
    except (ValueError, TypeError, AttributeError):
        intact = False
    if not intact:
        raise CorruptCheckpointError(f"{file} is damaged: it is not what was written")
    return sealed


def _is_state(sealed: Mapping[str, Any]) -> bool:
    """Whether the fields have their types: a seal has no key, so anyone can write one."""
    numbers = [sealed.get(name) for name in ("step", "version", "seed")]
    parts = [sealed.get("cursor"), sealed.get("environment"), sealed.get("files", {})]
    if not all(isinstance(part, dict) for part in parts) or any(type(each) is not int for each in numbers):
        return False
    counts = (sealed["step"], sealed["version"], sealed["cursor"].get("best_step") or 0)
    return all(type(count) is int and count >= 0 for count in counts)


def seal(record: Mapping[str, Any]) -> str:
    as_read = json.loads(json.dumps(record))  # JSON turns numeric keys into strings
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def digests(folder: Path, names: Iterable[str] | None = None) -> dict[str, str]:
    """Digests of the files by name, in threads: hashing releases the GIL."""
    if names is None:
        names = [str(file.relative_to(folder)) for file in sorted(folder.rglob("*")) if file.is_file()]

    def digest(name: str) -> str:
        with (folder / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(4) as threads:
        return dict(zip(names, threads.map(digest, names), strict=True))
