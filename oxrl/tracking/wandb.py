"""A run to Weights & Biases: online where there is a key for it, else to a file for `wandb sync`.

`WANDB_MODE`, `WANDB_PROJECT`, `WANDB_ENTITY` and `WANDB_BASE_URL` mean what they always do.
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
from oxrl.tracking.trackers import About, Ending, Tracker

logger = logging.getLogger(__name__)

EXIT_CODES: Mapping[Ending, int] = {"finished": 0, "interrupted": 130, "failed": 1}


def open_tracker(about: About) -> Tracker:
    run = _begun(
        name=about.name,
        dir=str(about.folder),
        config=dict(about.parameters),
        id=about.id,
        resume="allow" if about.id is not None and _mode() != "offline" else None,
    )
    if run.offline:
        logger.info("wandb keeps this run in %s: `wandb sync` sends it", Path(run.dir).parent)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        run.log(dict(metrics), step=step, commit=True)

    return Tracker(log, lambda ending: run.finish(exit_code=EXIT_CODES[ending]), str(run.id))


def log_to_wandb(step: int, metrics: Mapping[str, float]) -> None:
    """Into the current W&B run; where there is none, one is begun: offline unless there is a key."""
    if rank() != 0:
        return
    import wandb

    run = wandb.run or _begun(reinit="default", dir=os.environ.get("WANDB_DIR", "."))
    run.log(dict(metrics), step=step, commit=True)


def _begun(**options: Any) -> Any:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    project = os.environ.get("WANDB_PROJECT", "oxrl")
    settings = wandb.Settings(console="off", silent=True)  # what a run says is its own affair
    return wandb.init(**{"project": project, "mode": _mode(), "settings": settings, "reinit": "create_new", **options})


def _mode() -> Any:
    """Without a key, asking for one or for the network would only keep a run waiting."""
    return os.environ.get("WANDB_MODE") or (None if _has_key() else "offline")


def _has_key() -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
