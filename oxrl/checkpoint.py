"""A run's state to a folder and back, to the bit: weights, optimizer, random states, data position, step.

`checkpoints/step_0040/` is a folder that plain transformers loads; beside the weights lie `optimizer.safetensors`,
`rng.safetensors` and `training_state.json`. It appears under its name only when every byte is on the disk.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import random
import re
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from oxrl.hardware import processor_name
from oxrl.types import Backend, TrainingState

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_UNFINISHED = ".unfinished-"
_STEP = re.compile(r"step_(\d+)")


async def save_checkpoint(
    root: str | Path,
    backend: Backend,
    state: TrainingState,
    *,
    tokenizer: Any = None,
    keep_last: int = 2,
    keep: int | None = None,
) -> Path:
    """Write `root/step_NNNN` atomically, then remove all but the last `keep_last` and step `keep` (the best one)."""
    from safetensors.torch import save_file

    root = Path(root)
    final = root / f"step_{state.step:04d}"
    draft = root / f"{_UNFINISHED}{final.name}"
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir(parents=True)
    await backend.save(draft)
    if tokenizer is not None:
        tokenizer.save_pretrained(draft)
    save_file(_random_states(), draft / "rng.safetensors")
    record = {**state._asdict(), "environment": environment()}
    (draft / "training_state.json").write_text(json.dumps(record, indent=1), encoding="utf-8")
    _publish(draft, final)
    _prune(root, keep_last, keep)
    return final


async def load_checkpoint(path: str | Path, backend: Backend) -> TrainingState:
    """Put `backend` and the random states back to where they were; the caller restores its data from the cursor."""
    from safetensors.torch import load_file

    path = Path(path)
    state, then = _read_record(path)
    _warn_of_differences(then)
    await backend.load(path)
    _restore_random_states(load_file(path / "rng.safetensors"))
    return state


def read_state(path: str | Path) -> TrainingState:
    """What a checkpoint says of itself, without its weights."""
    return _read_record(Path(path))[0]


def _read_record(path: Path) -> tuple[TrainingState, dict[str, Any]]:
    file = path / "training_state.json"
    if not file.exists():
        raise ValueError(f"{path} is not a checkpoint: it has no training_state.json")
    record = json.loads(file.read_text(encoding="utf-8"))
    environment = record.pop("environment")
    return TrainingState(**record), environment


def checkpoints(root: str | Path) -> list[Path]:
    """The finished checkpoints in `root`, oldest first."""
    found = [(int(m[1]), path) for path in Path(root).glob("step_*") if (m := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest_checkpoint(root: str | Path) -> Path | None:
    """The finished checkpoint with the highest step; None if there is none."""
    return next(reversed(checkpoints(root)), None)


def best_checkpoint(root: str | Path) -> Path | None:
    """The checkpoint with the best evaluation, as the newest one remembers it; without evaluations, the newest."""
    newest = latest_checkpoint(root)
    if newest is None:
        return None
    best = Path(root) / f"step_{read_state(newest).cursor.get('best_step') or 0:04d}"
    return best if best.exists() else newest


def environment() -> dict[str, Any]:
    """What must be equal for two runs to be equal to the bit."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else processor_name()
    versions = {name: version(name) for name in ("torch", "transformers", "peft", "numpy")}
    return {"python": platform.python_version(), "device": device, "threads": torch.get_num_threads(), **versions}


def _warn_of_differences(then: Mapping[str, Any]) -> None:
    now = environment()
    changed = [f"{name} was {then.get(name)}, is {now[name]}" for name in now if then.get(name) != now[name]]
    if changed:
        logger.warning("resuming elsewhere, so not bit for bit: %s", "; ".join(changed))


def _publish(draft: Path, final: Path) -> None:
    """Give the folder its name once its content has reached the disk."""
    for file in [*draft.rglob("*"), draft]:
        _flush(file)
    if final.exists():  # an older run's checkpoint of the same step
        shutil.rmtree(final)
    draft.rename(final)
    _flush(final.parent)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _prune(root: Path, keep_last: int, keep: int | None) -> None:
    """Old checkpoints lose their name before their content, so that a kill in between leaves no half of one."""
    for path in checkpoints(root)[: -max(1, keep_last)]:
        if path.name != f"step_{keep or 0:04d}":
            doomed = root / f"{_UNFINISHED}removed-{path.name}"
            path.rename(doomed)
    for leftover in root.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(leftover)


def _random_states() -> dict[str, Tensor]:
    import torch

    _, python, gauss = random.getstate()
    numpy_state: Any = np.random.get_state(legacy=False)
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor(python, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy_key": torch.from_numpy(numpy_state["state"]["key"].astype(np.int64)),
        "numpy_rest": torch.tensor(
            [numpy_state["state"]["pos"], numpy_state["has_gauss"], numpy_state["gauss"]], dtype=torch.float64
        ),
    }
    return states | {f"cuda:{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}


def _restore_random_states(states: Mapping[str, Tensor]) -> None:
    import torch

    torch.set_rng_state(states["torch"])
    gauss = states["python_gauss"].tolist()
    random.setstate((3, tuple(states["python"].tolist()), gauss[0] if gauss else None))
    position, has_gauss, normal = states["numpy_rest"].tolist()
    key = states["numpy_key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, int(position), int(has_gauss), normal))
    cuda = [states[name] for name in sorted(states) if name.startswith("cuda:")]
    if cuda and torch.cuda.device_count() == len(cuda):
        torch.cuda.set_rng_state_all(cuda)
