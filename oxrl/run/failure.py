"""The record of a failed run: `failure/` in its folder, with all that is needed to analyse it.

The files and the fields of `signal.json` are described in BUG_REPORTING.md. A user's mistake (a ValueError raised by
oxRL itself) is not recorded. An error while recording never hides the failure itself.
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

from oxrl.machine.inventory import Environment, as_json, gather_environment
from oxrl.machine.out_of_memory import ran_out_of_memory
from oxrl.machine.secrets import without_secrets
from oxrl.types import Batch, Item, Row

logger = logging.getLogger(__name__)

Kind: TypeAlias = Literal["non_finite", "out_of_memory", "guard", "exception"]
SCHEMA = 1
FOLDER, SIGNAL = "failure", "signal.json"
PACKAGE = Path(__file__).parents[1]
METRICS_KEPT = 50
REPORTED_PACKAGES = ("oxrl", "torch", "transformers", "peft", "vllm", "sglang", "ray", "deepspeed", "flash-attn")


class Where(NamedTuple):
    """`Where("oxrl/loops/step.py", 46, "update")`: the innermost frame in oxRL."""

    file: str
    line: int
    function: str


@contextmanager
def failures_recorded(folder: Path, config: Mapping[str, Any]) -> Iterator[None]:
    """Record an exception in `folder/failure` and raise it again; an earlier record is moved to `failure.before`.

    So `failure/` exists if and only if the last attempt failed.
    """
    _move_earlier(folder / FOLDER)
    try:
        yield
    except Exception as error:
        if not is_user_error(error):
            record_failure(folder, config, error)
        raise


def _move_earlier(record: Path) -> None:
    if record.exists():
        before = record.with_name("failure.before")
        shutil.rmtree(before, ignore_errors=True)
        record.rename(before)


def is_user_error(error: Exception) -> bool:
    """Whether the input was wrong: a ValueError that oxRL raised itself."""
    return isinstance(error, ValueError) and _raised_here(error)


def kind_of(error: Exception) -> Kind:
    names = {each.__name__ for each in type(error).__mro__}
    if names & {"NonFiniteError", "NonFiniteWeightsError"}:
        return "non_finite"
    if ran_out_of_memory(_origin(error)):
        return "out_of_memory"
    return "guard" if isinstance(error, RuntimeError) and _raised_here(error) else "exception"


def record_failure(folder: Path, config: Mapping[str, Any], error: Exception) -> None:
    """Write the record file by file; one that cannot be written is logged and left out."""
    record = folder / FOLDER
    environments: list[Environment] = []

    def environment() -> str:
        environments.append(gather_environment())
        return json.dumps(as_json(environments[0]), indent=1)

    def signal() -> str:
        return json.dumps(signal_of(error, config, environments[0] if environments else None, record), indent=1)

    files: dict[str, Callable[[], str]] = {
        "traceback.txt": lambda: without_secrets("".join(traceback.format_exception(error))),
        "config.yaml": lambda: yaml.safe_dump(dict(config), sort_keys=False),
        "metrics.jsonl": lambda: _tail(folder / "metrics.jsonl", METRICS_KEPT),
        "batch.jsonl": lambda: "".join(json.dumps(row) + "\n" for row in suspects(error)),
        "environment.json": environment,
        SIGNAL: signal,  # last: its presence marks a complete record
    }
    for name, text in files.items():
        try:
            record.mkdir(parents=True, exist_ok=True)
            if content := text():
                (record / name).write_text(content, encoding="utf-8")
        except Exception as problem:  # noqa: BLE001 - it must not hide the failure itself
            logger.warning("%s of the failure record cannot be written: %s", name, problem)
    if (record / SIGNAL).exists():
        logger.error("this failure is recorded in %s; `oxrl report %s` makes a bug report of it", record, folder)


def signal_of(
    error: Exception, config: Mapping[str, Any], environment: Environment | None, record: Path
) -> dict[str, Any]:
    """The content of `signal.json`, which programs may rely on; it changes only together with `schema`."""
    where = where_in_oxrl(error)
    packages = environment.packages if environment is not None else {}
    versions = {name: packages[name].version for name in REPORTED_PACKAGES if name in packages}
    return {
        "schema": SCHEMA,
        "kind": kind_of(error),
        "exception": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": without_secrets(str(error)),
        "step": _context(error).get("step"),
        "algorithm": config["train"]["alg_name"],
        "model": config["model"]["name"],
        "where": None if where is None else where._asdict(),
        "fingerprint": fingerprint(error),
        "versions": {"python": ".".join(map(str, sys.version_info[:3])), **versions},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "files": sorted(file.name for file in record.iterdir() if file.name != SIGNAL),
    }


def fingerprint(error: Exception) -> str:
    """Equal for equal failures: by kind, location and the words of the message, without its numbers and names."""
    where = where_in_oxrl(error)
    location = "" if where is None else f"{where.file}:{where.function}"
    words = re.sub(r"\(.*?\)|'[^']*'|\"[^\"]*\"", " ", str(error).partition("\n")[0]).split()
    plain = [word for word in words if re.fullmatch(r"[A-Za-z_-]+[.,:;!]?", word)][:12]
    return hashlib.sha256("\n".join([kind_of(error), type(error).__name__, location, *plain]).encode()).hexdigest()[:16]


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
    """Frames with their line numbers, the innermost first."""
    return list(traceback.walk_tb(_origin(error).__traceback__))[::-1]


def _origin(error: BaseException) -> BaseException:
    """The original error where `advice_on_memory` has replaced it."""
    cause = error.__cause__
    return cause if cause is not None and ran_out_of_memory(cause) else error


def _context(error: BaseException) -> dict[str, Any]:
    """What the loop was processing (`oxrl.loops.step.annotate`)."""
    return getattr(_origin(error), "oxrl_context", {})


def suspects(error: BaseException) -> list[dict[str, Any]]:
    """The rows that were being processed, as plain numbers: those that the error names, else all of the step."""
    context = _context(error)
    batches: list[Batch] = getattr(error, "batches", context.get("batches", []))
    if batches:
        return [row for batch in batches for row in _rows_of_batch(batch)]
    items: list[Item] = context.get("items", [])
    return [_plain_row(row) for item in items for row in item]


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
    """JSON has no NaN and no infinity, so they are written as text."""
    return [float(value) if -float("inf") < float(value) < float("inf") else str(float(value)) for value in values]


def _tail(file: Path, lines: int) -> str:
    return "".join(file.read_text(encoding="utf-8").splitlines(keepends=True)[-lines:]) if file.exists() else ""
