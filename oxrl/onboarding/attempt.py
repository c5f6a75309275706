"""One attempt to verify a model, in this process or in a child with a time limit, and its failure as a record.

A child can be ended, and its end by the system is a failure like any other. `python -m oxrl.onboarding.attempt FOLDER`
is that child.
"""

from __future__ import annotations

import hashlib
import json
import platform
import re
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import yaml

from oxrl.diagnose.verify_model import verify_model
from oxrl.machine.inventory import installed
from oxrl.machine.out_of_memory import free_memory_of
from oxrl.machine.processes import end_with_parent, kill_group
from oxrl.machine.secrets import without_secrets
from oxrl.onboarding.remedies import Task, failure_kind, kind_of_text
from oxrl.parsing import read_json
from oxrl.run.failure import REPORTED_PACKAGES, SCHEMA, SIGNAL, fingerprint, where_in_oxrl

TASK, OUTCOME, OUTPUT = "task.json", "outcome.json", "output.log"
LAST_LINES = 30


class Outcome(NamedTuple):
    """`Outcome(record, None)` of an attempt that worked, else `Outcome(None, {"kind": "engine", ...})`."""

    record: dict[str, Any] | None
    signal: dict[str, Any] | None


Attempt: TypeAlias = Callable[[Task, Path, float], Outcome]
"""(task, folder for its failure, seconds) -> outcome."""


def attempt_here(task: Task, folder: Path, seconds: float) -> Outcome:  # noqa: ARG001 - it cannot be ended
    """Verify in this process, without a time limit."""
    try:
        record = verify_model(
            task.weights, task.strategy, task.lora_targets, trials=task.trials, settings=task.settings,
            stop_at_failure=True,
        )  # fmt: skip
    except (Exception, SystemExit) as error:  # noqa: BLE001 - a model may fail in any way; that is the result
        failed = signal_of(error)
        _write_failure(folder, task, failed, "".join(traceback.format_exception(error)))
        free_memory_of(error)
        return Outcome(None, failed)
    if not record["problems"]:
        return Outcome(record, None)
    message = record["problems"][0]
    return failed_outcome(folder, task, kind_of_text(message) or "wrong_result", message, "\n".join(record["problems"]))


def attempt_in_child(task: Task, folder: Path, seconds: float) -> Outcome:
    """Verify in a child process, which is ended after so many seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / TASK).write_text(json.dumps(task.as_dict()), encoding="utf-8")
    (folder / OUTCOME).unlink(missing_ok=True)
    with (folder / OUTPUT).open("wb") as log:
        command = [sys.executable, "-m", "oxrl.onboarding.attempt", str(folder)]
        # Its standard input is a pipe, which closes when this process ends for any reason: then the child ends too.
        child = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True, stdin=subprocess.PIPE)
        try:
            status = child.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(child)
    if status is None:
        return failed_outcome(folder, task, "time_out", f"it did not end within {seconds:.0f} s", _log(folder))
    if (folder / OUTCOME).is_file():
        return Outcome(**read_json(folder / OUTCOME))
    if status == -signal.SIGKILL:
        message = "the system killed it (SIGKILL), as it does if memory runs out"
        return failed_outcome(folder, task, "out_of_memory", message, _log(folder))
    return failed_outcome(folder, task, "exception", f"it ended with status {status}", _log(folder))


def _log(folder: Path) -> str:
    return "\n".join((folder / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])


def _end(child: subprocess.Popen[bytes]) -> None:
    """Kill the child if it runs, and what it left behind, engines included."""
    kill_group(child.pid)
    child.kill()
    child.wait()
    if child.stdin is not None:
        child.stdin.close()


def failed_outcome(folder: Path, task: Task, kind: str, message: str, trace: str = "") -> Outcome:
    """Return an outcome for a failure without an exception, and write it down."""
    digest = hashlib.sha256(f"{kind}\n{re.sub(r'[0-9.]+', '', message)}".encode()).hexdigest()[:16]
    failed = {"kind": kind, "exception": "", "message": message, "fingerprint": digest}
    _write_failure(folder, task, failed, trace)
    return Outcome(None, failed)


def signal_of(error: BaseException) -> dict[str, Any]:
    """Return kind, message and fingerprint of a failure, without secrets."""
    where = where_in_oxrl(error)
    return {
        "kind": failure_kind(error),
        "exception": f"{type(error).__module__}.{type(error).__qualname__}",
        "message": without_secrets(str(error)),
        "where": None if where is None else where._asdict(),
        "fingerprint": fingerprint(error) if isinstance(error, Exception) else "",
    }


def _write_failure(folder: Path, task: Task, failed: dict[str, Any], trace: str) -> None:
    """Write what a person or an agent needs to look into the failure."""
    folder.mkdir(parents=True, exist_ok=True)
    packages = installed(REPORTED_PACKAGES)
    full = {  # as of a failed run, so that `oxrl report` reads it
        "schema": SCHEMA,
        "step": None,
        "algorithm": ", ".join(task.trials),
        "model": task.weights,
        "where": None,
        "versions": {"python": platform.python_version(), **{name: each.version for name, each in packages.items()}},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **failed,
    }
    (folder / SIGNAL).write_text(json.dumps(full, indent=1) + "\n", encoding="utf-8")
    (folder / "config.yaml").write_text(yaml.safe_dump(_sections(task), sort_keys=False), encoding="utf-8")
    (folder / "traceback.txt").write_text(without_secrets(trace), encoding="utf-8")


def _sections(task: Task) -> dict[str, Any]:
    """Return the task as the sections of a config that matter here."""
    sections = {section: dict(keys) for section, keys in task.settings.items()}
    sections["model"] = {"name": task.weights, **sections.get("model", {})}
    lora = {"enabled": task.strategy == "lora", "target_modules": list(task.lora_targets) or "all-linear"}
    sections["lora"] = {**lora, **sections.get("lora", {})}
    return sections


def main(folder: Path) -> None:
    """Make the attempt that a folder describes, and write its outcome there."""
    task = Task.from_dict(read_json(folder / TASK))
    outcome = attempt_here(task, folder, 0.0)
    draft = folder / f".{OUTCOME}"
    draft.write_text(json.dumps(outcome._asdict()), encoding="utf-8")
    draft.rename(folder / OUTCOME)


if __name__ == "__main__":
    from oxrl.machine.hardware import set_up_process

    end_with_parent()
    set_up_process()
    main(Path(sys.argv[1]))
