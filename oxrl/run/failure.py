"""A run that fails leaves `failure/` in its folder: all that a person or a program needs to look into it.

The files and the shape of `signal.json` are described in BUG_REPORTING.md. What a user got wrong is no failure: our
own ValueErrors say it in words. Whatever goes wrong in here, the failure itself comes through.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import shutil
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple, TypeAlias

import yaml

from oxrl.loops.memory_warmup import ran_out_of_memory
from oxrl.machine.inventory import Environment, as_json, gather_environment
from oxrl.types import Batch, Item, Row

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["non_finite", "out_of_memory", "guard", "exception"]
SCHEMA = 1
FOLDER, SIGNAL = "failure", "signal.json"
PACKAGE = Path(__file__).parents[1]
METRICS_KEPT = 50
TELLING_PACKAGES = ("oxrl", "torch", "transformers", "peft", "vllm", "sglang", "ray", "deepspeed", "flash-attn")


class Where(NamedTuple):
    """`Where("oxrl/loops/step.py", 46, "update")`: the innermost place in oxRL."""

    file: str
    line: int
    function: str


@contextmanager
def failures_recorded(folder: Path, config: Mapping[str, Any]) -> Iterator[None]:
    """What fails in here is written down in `folder/failure` and goes on; what an earlier try left there moves aside.

    So `failure/` is there if and only if the last try failed.
    """
    _set_aside(folder / FOLDER)
    try:
        yield
    except Exception as error:
        if not is_mistake(error):
            record_failure(folder, config, error)
        raise


def _set_aside(place: Path) -> None:
    if place.exists():
        before = place.with_name("failure.before")
        shutil.rmtree(before, ignore_errors=True)
        place.rename(before)


def is_mistake(error: Exception) -> bool:
    """Whether it is the user's: a ValueError that oxRL raised itself, in words."""
    return isinstance(error, ValueError) and _raised_here(error)


def kind_of(error: Exception) -> Kind:
    names = {each.__name__ for each in type(error).__mro__}
    if "NonFiniteError" in names:
        return "non_finite"
    if ran_out_of_memory(_origin(error)):
        return "out_of_memory"
    return "guard" if isinstance(error, RuntimeError) and _raised_here(error) else "exception"


def record_failure(folder: Path, config: Mapping[str, Any], error: Exception) -> None:
    """Write down what is known, file by file; one that cannot be written is said and left out."""
    place = folder / FOLDER
    environments: list[Environment] = []

    def environment() -> str:
        environments.append(gather_environment())
        return json.dumps(as_json(environments[0]), indent=1)

    def signal() -> str:
        return json.dumps(signal_of(error, config, environments[0] if environments else None, place), indent=1)

    files: dict[str, Callable[[], str]] = {
        "traceback.txt": lambda: "".join(traceback.format_exception(error)),
        "config.yaml": lambda: yaml.safe_dump(dict(config), sort_keys=False),
        "metrics.jsonl": lambda: _tail(folder / "metrics.jsonl", METRICS_KEPT),
        "batch.jsonl": lambda: "".join(json.dumps(row) + "\n" for row in suspects(error)),
        "environment.json": environment,
        SIGNAL: signal,  # the last: where it is, all is
    }
    for name, text in files.items():
        try:
            place.mkdir(parents=True, exist_ok=True)
            if content := text():
                (place / name).write_text(content, encoding="utf-8")
        except Exception as problem:  # noqa: BLE001 - the failure itself must come through
            logger.warning("%s of the failure cannot be written: %s", name, problem)
    if (place / SIGNAL).exists():
        logger.error("what is known of this failure is in %s; `oxrl report %s` makes a bug report of it", place, folder)


def signal_of(
    error: Exception, config: Mapping[str, Any], environment: Environment | None, place: Path
) -> dict[str, Any]:
    """The shape that programs may rely on; it changes only together with `schema`."""
    where = where_in_oxrl(error)
    packages = environment.packages if environment is not None else {}
    versions = {name: packages[name].version for name in TELLING_PACKAGES if name in packages}
    return {
        "schema": SCHEMA,
        "kind": kind_of(error),
        "exception": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": str(error),
        "step": _step(error),
        "algorithm": config["train"]["alg_name"],
        "model": config["model"]["name"],
        "where": None if where is None else where._asdict(),
        "fingerprint": fingerprint(error),
        "versions": {"python": ".".join(map(str, sys.version_info[:3])), **versions},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": sorted(file.name for file in place.iterdir() if file.name != SIGNAL),
    }


def fingerprint(error: Exception) -> str:
    """Equal for equal failures: by kind, place and the words of the message, without its numbers and names."""
    where = where_in_oxrl(error)
    place = "" if where is None else f"{where.file}:{where.function}"
    words = re.sub(r"\(.*?\)|'[^']*'|\"[^\"]*\"", " ", str(error).partition("\n")[0]).split()
    plain = [word for word in words if re.fullmatch(r"[A-Za-z_-]+[.,:;!]?", word)][:12]
    return hashlib.sha256("\n".join([kind_of(error), type(error).__name__, place, *plain]).encode()).hexdigest()[:16]


def where_in_oxrl(error: BaseException) -> Where | None:
    """The innermost frame of oxRL's own code."""
    for frame, line in _frames(error):
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(PACKAGE):
            return Where(file.relative_to(PACKAGE.parent).as_posix(), line, frame.f_code.co_name)
    return None


def _raised_here(error: BaseException) -> bool:
    innermost = next(iter(_frames(error)), None)
    return innermost is not None and Path(innermost[0].f_code.co_filename).is_relative_to(PACKAGE)


def _frames(error: BaseException) -> list[tuple[FrameType, int]]:
    """With their lines, the innermost first."""
    return list(traceback.walk_tb(_origin(error).__traceback__))[::-1]


def _origin(error: BaseException) -> BaseException:
    """What ran out of memory, behind the advice that was made of it."""
    cause = error.__cause__
    return cause if cause is not None and ran_out_of_memory(cause) else error


def _step(error: BaseException) -> int | None:
    """The step that was under way, as the loop counts it."""
    for frame, _ in _frames(error):
        step = frame.f_locals.get("step")
        if isinstance(step, int) and frame.f_globals.get("__name__", "").startswith("oxrl.loops."):
            return step
    return None


def suspects(error: BaseException) -> list[dict[str, Any]]:
    """The rows that were at work, as plain numbers: those that the error names, else the innermost in a frame."""
    batches: list[Batch] = getattr(error, "batches", [])
    items: list[Item] = []
    for frame, _ in _frames(error):
        if batches or items:
            break
        held = list(frame.f_locals.values())
        batches = [value for value in held if _is_batch(value)][:1] or next(filter(_are_batches, held), [])
        items = next(filter(_are_items, held), [])
    if batches:
        return [row for batch in batches for row in _rows_of_batch(batch)]
    return [_plain_row(row) for item in items for row in item]


def _is_batch(value: Any) -> bool:
    """On the CPU: memory of a GPU that failed cannot be read any more."""
    return isinstance(value, Batch) and value.tokens.device.type == "cpu"


def _are_batches(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_is_batch, value))


def _are_items(value: Any) -> bool:
    first = value[0] if isinstance(value, list) and value else None
    return isinstance(first, tuple) and bool(first) and isinstance(first[0], Row)


def _rows_of_batch(batch: Batch) -> list[dict[str, Any]]:
    rows = []
    for index, (start, end) in enumerate(pairwise(batch.borders)):
        rows.append(
            {
                "id": batch.ids[index],
                "tokens": batch.tokens[start:end].tolist(),
                "mask": batch.mask[start:end].int().tolist(),
                "streams": {name: _numbers(stream[start:end]) for name, stream in batch.streams.items()},
                "scalars": {name: _numbers(values)[index] for name, values in batch.scalars.items()},
            }
        )
    return rows


def _plain_row(row: Row) -> dict[str, Any]:
    return {
        "id": row.id,
        "tokens": row.tokens.tolist(),
        "mask": row.mask.astype(int).tolist(),
        "streams": {name: _numbers(stream) for name, stream in row.streams.items()},
        "scalars": {name: _numbers([value])[0] for name, value in row.scalars.items()},
    }


def _numbers(values: Any) -> list[float | str]:
    """JSON has no NaN and no infinity, and here they are what is looked for: they are written as text."""
    return [float(value) if -float("inf") < float(value) < float("inf") else str(float(value)) for value in values]


def _tail(file: Path, lines: int) -> str:
    return "".join(file.read_text(encoding="utf-8").splitlines(keepends=True)[-lines:]) if file.exists() else ""
