"""Log a run to Weights & Biases: online if an API key is found, else to a file for `wandb sync`.

`WANDB_MODE`, `WANDB_PROJECT`, `WANDB_ENTITY` and `WANDB_BASE_URL` have their usual meaning.
"""

from __future__ import annotations

import logging
import netrc
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from oxrl.tracking.logs import rank
from oxrl.tracking.trackers import Outcome, RunInfo, Tracker

logger = logging.getLogger(__name__)

EXIT_CODES: Mapping[Outcome, int] = {"finished": 0, "interrupted": 130, "failed": 1}


def open_tracker(run_info: RunInfo) -> Tracker:
    run = _start_run(
        name=run_info.name,
        dir=str(run_info.folder),
        config=dict(run_info.parameters),
        id=run_info.id,
        resume="allow" if run_info.id is not None and _mode() != "offline" else None,
    )
    if run.offline:
        logger.info("wandb is offline and logs to %s: upload it with `wandb sync`", Path(run.dir).parent)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step, commit=True)

    return Tracker(log, lambda outcome: run.finish(exit_code=EXIT_CODES[outcome]), str(run.id))


def log_to_wandb(step: int, metrics: Mapping[str, float]) -> None:
    """Log to the current W&B run; starts one if there is none, offline unless an API key is found."""
    if rank() != 0:
        return
    import wandb

    run = wandb.run or _start_run(reinit="default", dir=os.environ.get("WANDB_DIR", "."))
    run.log(dict(metrics), step=step, commit=True)


def _start_run(**options: Any) -> Any:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    project = os.environ.get("WANDB_PROJECT", "oxrl")
    settings = wandb.Settings(console="off", silent=True)  # do not capture or print console output
    return wandb.init(**{"project": project, "mode": _mode(), "settings": settings, "reinit": "create_new", **options})


def _mode() -> Any:
    """Return `WANDB_MODE`, or offline without an API key, since wandb would wait for a prompt or the network."""
    return os.environ.get("WANDB_MODE") or (None if _has_key() else "offline")


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
