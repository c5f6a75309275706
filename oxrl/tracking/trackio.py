"""Log a run to trackio: to a database below `TRACKIO_DIR`, or to the Space in `TRACKIO_SPACE_ID`."""

from __future__ import annotations

import io
import logging
import uuid
from contextlib import redirect_stdout

from oxrl.tracking.trackers import Outcome, RunInfo, Tracker

logger = logging.getLogger(__name__)

PROJECT = "oxrl"


def open_tracker(run_info: RunInfo) -> Tracker:
    with redirect_stdout(io.StringIO()):  # trackio prints to stdout, which is reserved for results
        import trackio

        name = run_info.id or f"{run_info.name}-{uuid.uuid4().hex[:6]}"
        run = trackio.init(
            project=PROJECT,
            name=name,
            resume="never" if run_info.id is None else "allow",
            config=dict(run_info.parameters),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
    logger.info("logging to trackio as run %s: view it with `trackio show --project %s`", name, PROJECT)

    def end(outcome: Outcome) -> None:  # noqa: ARG001 - same signature for all trackers
        with redirect_stdout(io.StringIO()):
            trackio.finish()

    return Tracker(lambda step, metrics: run.log(dict(metrics), step=step), end, name)
