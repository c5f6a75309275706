"""A run to MLflow: a database file beside the run folders unless told otherwise, and no server."""

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
from oxrl.tracking.trackers import About, Ending, Tracker

ARTIFACTS = ("config.yaml", "metrics.jsonl", "curves.png", "rollouts.jsonl")
STATUS: Mapping[Ending, str] = {"finished": "FINISHED", "interrupted": "KILLED", "failed": "FAILED"}
LONGEST_PARAMETER = 500  # what every version and store takes


def open_tracker(about: About) -> Tracker:
    mlflow = _imported()
    from mlflow.entities import Metric

    uri = about.uri or os.environ.get("MLFLOW_TRACKING_URI")
    home = about.folder.resolve().parent
    client = mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{home / 'mlflow.db'}")
    if about.id is None:
        id = _new_run(client, about, None if uri else home / "mlflow_artifacts")
    else:
        id = about.id
        client.update_run(id, status="RUNNING")

    def log(step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        client.log_batch(id, metrics=[Metric(_name(key), value, now, step) for key, value in metrics.items()])

    def end(ending: Ending) -> None:
        with suppress(ValueError):  # nothing was measured yet
            save_curves(about.folder, about.folder / "curves.png")
        for file in (about.folder / name for name in ARTIFACTS):
            if file.exists():
                client.log_artifact(id, str(file))
        client.set_terminated(id, STATUS[ending])

    return Tracker(log, end, id)


def log_to_mlflow(step: int, metrics: Mapping[str, float]) -> None:
    """Into the active MLflow run; where there is none, MLflow begins one."""
    if rank() == 0:
        _imported().log_metrics({_name(key): value for key, value in metrics.items()}, step=step)


def _imported() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # read when it is imported
    import mlflow

    for teller in ("mlflow.store.db.utils", "alembic"):
        logging.getLogger(teller).setLevel(logging.WARNING)  # a new database is no news
    return mlflow


def _new_run(client: Any, about: About, artifacts: Path | None) -> str:
    from mlflow.entities import Param

    run = client.create_run(_experiment(client, artifacts), run_name=about.name)
    params = [Param(_name(key), str(value)[:LONGEST_PARAMETER]) for key, value in about.parameters.items()]
    for start in range(0, len(params), 100):  # as many as one call takes
        client.log_batch(run.info.run_id, params=params[start : start + 100])
    return str(run.info.run_id)


def _experiment(client: Any, artifacts: Path | None) -> str:
    from mlflow.exceptions import MlflowException

    name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "oxrl")
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifacts.as_uri() if artifacts else None))
        except MlflowException:  # another run was quicker
            found = client.get_experiment_by_name(name)
            if found is None:
                raise
    return str(found.experiment_id)


def _name(key: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", key)
