"""Log a run to MLflow: by default to a database file next to the run folders, without a server."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from oxrl.tracking.logs import rank
from oxrl.tracking.plot import save_curves
from oxrl.tracking.trackers import Outcome, RunInfo, Tracker

ARTIFACTS = ("config.yaml", "metrics.jsonl", "curves.png", "rollouts.jsonl")
STATUS: Mapping[Outcome, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
MAX_PARAMETER = 500  # characters, accepted by every version and store


def open_tracker(run_info: RunInfo) -> Tracker:
    mlflow = _imported()
    from mlflow.entities import Metric

    uri = run_info.uri or os.environ.get("MLFLOW_TRACKING_URI")
    home = run_info.folder.resolve().parent
    client = mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{home / 'mlflow.db'}")
    if run_info.id is None:
        id = _new_run(client, run_info, None if uri else home / "mlflow_artifacts")
    else:
        id = run_info.id
        client.update_run(id, status="RUNNING")

    def log(step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        client.log_batch(id, metrics=[Metric(_name(key), value, now, step) for key, value in metrics.items()])

    def end(outcome: Outcome) -> None:
        with suppress(ValueError):  # no metrics yet
            save_curves(run_info.folder, run_info.folder / "curves.png")
        for file in (run_info.folder / name for name in ARTIFACTS):
            if file.exists():
                client.log_artifact(id, str(file))
        client.set_terminated(id, STATUS[outcome])

    return Tracker(log, end, id)


def log_to_mlflow(step: int, metrics: Mapping[str, float]) -> None:
    """Log to the active MLflow run; MLflow starts one if there is none."""
    if rank() == 0:
        _imported().log_metrics({_name(key): value for key, value in metrics.items()}, step=step)


def _imported() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read at import
    import mlflow

    for name in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(name).setLevel(logging.WARNING)  # they log the creation of the database
    return mlflow


def _new_run(client: Any, run_info: RunInfo, artifacts: Path | None) -> str:
    from mlflow.entities import Param

    run = client.create_run(_experiment(client, artifacts), run_name=run_info.name)
    params = [Param(_name(key), str(value)[:MAX_PARAMETER]) for key, value in run_info.parameters.items()]
    for start in range(0, len(params), 100):  # the limit of one call
        client.log_batch(run.info.run_id, params=params[start : start + 100])
    return str(run.info.run_id)


def _experiment(client: Any, artifacts: Path | None) -> str:
    from mlflow.exceptions import MlflowException

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "oxrl")
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifacts.as_uri() if artifacts else None))
        except MlflowException:  # another run created it first
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _name(key: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", key)
