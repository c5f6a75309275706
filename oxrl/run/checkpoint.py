"""Checkpoints: weights, optimizer, random states, data position and step, restored bit for bit.

`checkpoints/step_0040/` is a folder that plain transformers loads, plus `optimizer.safetensors`, `rng.safetensors` and
`training_state.json`, which has a digest of each file and of itself. The folder gets its name only when all is on the
disk, and is loaded only if all digests match (`weights.integrity`).
"""

from __future__ import annotations

import json
import logging
import os
import platform
import random
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anyio
import numpy as np

from oxrl.concurrency import in_thread
from oxrl.data.processor import save_tokenizer
from oxrl.machine.hardware import processor_name
from oxrl.machine.out_of_memory import MemoryAdviceError, ran_out_of_memory
from oxrl.tracking.files import is_full_disk
from oxrl.types import Backend, TrainingState
from oxrl.weights.checkpoint_names import index_weights
from oxrl.weights.integrity import (
    STATE_FILE,
    CorruptCheckpointError,
    apply_umask,
    check_files,
    digests,
    read_sealed,
    seal,
)

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_UNFINISHED = ".unfinished-"
_RANDOM = "rng.safetensors"
_NOT_WEIGHTS = {"optimizer.safetensors", _RANDOM}
_STEP = re.compile(r"step_(\d+)")


class NonFiniteWeightsError(RuntimeError):
    """Weights that are not finite, which are not saved: no run could continue from them."""


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
    with _all_or_nothing(draft, final):
        draft.mkdir(parents=True)
        await backend.save(draft)
        index_weights(draft)
        if tokenizer is not None:
            save_tokenizer(tokenizer, draft)
        save_file(_random_states(), draft / _RANDOM)
        with anyio.CancelScope(shield=True):  # a thread cannot be cancelled; other tasks run meanwhile
            await in_thread(partial(_seal_and_publish, state, draft, final))
    _prune(root, keep_last, keep)
    return final


def _seal_and_publish(state: TrainingState, draft: Path, final: Path) -> None:
    if (name := _non_finite_weight(draft)) is not None:
        raise NonFiniteWeightsError(
            f"after step {state.step} the weight {name} is not finite, so no checkpoint was written; "
            f"{_what_is_left(final.parent)}. A lower train.lr is the usual remedy, or model.dtype bfloat16 instead of "
            "float16"
        )
    record = {**state._asdict(), "files": digests(draft)}
    apply_umask(draft)
    sealed = {**record, "seal": seal(record), "environment": environment()}
    (draft / STATE_FILE).write_text(json.dumps(sealed, indent=1), encoding="utf-8")
    _publish(draft, final)


async def load_checkpoint(path: str | Path, backend: Backend) -> TrainingState:
    """Restore `backend` and the random states; the caller restores its data from the cursor."""
    from safetensors.torch import load_file

    path = Path(path)
    check_files(path)
    _check_content(path)
    state, then = _read_record(path)
    _warn_of_differences(then)
    try:
        await backend.load(path)
        _restore_random_states(load_file(path / _RANDOM))
    except (KeyError, TypeError) as error:
        raise CorruptCheckpointError(f"{path} is not what was written: {type(error).__name__} {error}") from error
    return state


def _check_content(path: Path) -> None:
    """Raise if the files are not safetensors; digests do not show who wrote them."""
    from safetensors import SafetensorError, safe_open

    if not (path / _RANDOM).is_file():
        raise CorruptCheckpointError(f"{path / _RANDOM} is missing from the checkpoint")
    files = sorted(path.glob("*.safetensors"))
    if (pickled := sorted(path.glob("*.bin"))) and not {file.name for file in files} - _NOT_WEIGHTS:
        raise CorruptCheckpointError(
            f"{pickled[0]} has pickled weights, which can run code when they are loaded and are refused: a checkpoint "
            "has safetensors"
        )
    for file in files:
        try:
            with safe_open(file, framework="np"):
                pass
        except SafetensorError as error:
            raise CorruptCheckpointError(f"{file} is damaged: it is not safetensors ({error})") from None


def read_state(path: str | Path) -> TrainingState:
    """The training state of a checkpoint, without its weights."""
    return _read_record(Path(path))[0]


def _read_record(path: Path) -> tuple[TrainingState, dict[str, Any]]:
    sealed = read_sealed(path)
    return TrainingState(**{name: sealed[name] for name in TrainingState._fields}), sealed["environment"]


def _non_finite_weight(folder: Path) -> str | None:
    """The name of a weight in these files that is not finite; optimizer and random states are not looked at."""
    import torch
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        if file.name in _NOT_WEIGHTS:
            continue
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                # A sum needs no second tensor, and in float64 it cannot overflow by itself.
                if not opened.get_tensor(name).sum(dtype=torch.float64).isfinite():
                    return str(name)
    return None


def _root(error: BaseException) -> BaseException:
    """The first cause; a rank's error arrives as the cause of another one."""
    return error if error.__cause__ is None else _root(error.__cause__)


@contextmanager
def _all_or_nothing(draft: Path, final: Path) -> Iterator[None]:
    """Remove a draft that could not be written completely, to free its space; earlier checkpoints stay."""
    from safetensors import SafetensorError

    try:
        yield
    except BaseException as error:
        shutil.rmtree(draft, ignore_errors=True)
        root = _root(error)
        if ran_out_of_memory(root):
            raise MemoryAdviceError(
                f"memory ran out while the checkpoint {final} was written: {error}; {_what_is_left(final.parent)}. "
                "Weights and optimizer state are copied in host memory, one file after the other, whatever "
                "train.micro_batch_tokens is. End other programs or raise the memory limit of this one, then use "
                "--resume; a run with lora.enabled: true writes the adapter only"
            ) from error
        if not isinstance(root, OSError | SafetensorError):
            raise
        if isinstance(root, OSError) and root.errno is None:  # of a library that is imported to write, not of a disk
            left = _what_is_left(final.parent)
            raise RuntimeError(f"the checkpoint {final} could not be written: {error}; {left}") from error
        raise _make_room(f"the checkpoint {final}", error, final.parent) from error


@contextmanager
def advice_on_full_disk(folder: Path) -> Iterator[None]:
    """If there is no room for another file of the run in `folder`, raise what to do."""
    try:
        yield
    except OSError as error:
        if not is_full_disk(error):
            raise
        raise _make_room(error.filename or f"a file in {folder}", error, folder / "checkpoints") from error


def _make_room(what: str, error: BaseException, root: Path) -> RuntimeError:
    return RuntimeError(
        f"{what} could not be written: {error}; {_what_is_left(root)}. Free disk space, then resume the run"
    )


def _what_is_left(root: Path) -> str:
    before = latest_checkpoint(root)
    return "there is no earlier checkpoint" if before is None else f"{before.name} is intact"


def checkpoints(root: str | Path) -> list[Path]:
    """The finished checkpoints in `root`, oldest first."""
    found = [(int(m[1]), path) for path in Path(root).glob("step_*") if (m := _STEP.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest_checkpoint(root: str | Path) -> Path | None:
    """The finished checkpoint with the highest step; None if there is none."""
    return next(reversed(checkpoints(root)), None)


def intact_checkpoint(root: str | Path) -> Path | None:
    """The newest finished checkpoint that can be resumed; None if there is none at all.

    Newer damaged ones are renamed with a warning. If all are damaged, it raises and changes nothing.
    """
    damaged: dict[Path, str] = {}
    for path in reversed(checkpoints(root)):
        try:
            check_files(path)
            _check_content(path)
        except CorruptCheckpointError as error:
            damaged[path] = str(error)
            continue
        for other, why in damaged.items():
            moved = Path(root) / f"damaged-{other.name}"
            shutil.rmtree(moved, ignore_errors=True)
            other.rename(moved)
            logger.warning("%s; it was moved to %s, and %s is used instead", why, moved, path.name)
        return path
    if damaged:
        newest = next(iter(damaged.values()))
        raise CorruptCheckpointError(
            f"{newest}, and so is every earlier one: restore one from a backup, or start a new run"
        )
    return None


def best_checkpoint(root: str | Path) -> Path | None:
    """The checkpoint with the best evaluation, as the newest one records it; without evaluations, the newest."""
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
        logger.warning("resuming in another environment, so not bit for bit: %s", "; ".join(changed))


def _publish(draft: Path, final: Path) -> None:
    """Rename the draft once its content is on the disk."""
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
    """Rename old checkpoints before deleting them, so that a kill in between leaves no partial one."""
    for path in checkpoints(root)[: -max(1, keep_last)]:
        if path.name != f"step_{keep or 0:04d}":
            path.rename(root / f"{_UNFINISHED}removed-{path.name}")
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
