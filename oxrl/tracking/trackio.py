"""A run to trackio: a database of its own below `TRACKIO_DIR`, or the Space in `TRACKIO_SPACE_ID`."""

from __future__ import annotations

import io
import logging
import uuid
from contextlib import redirect_stdout

from oxrl.tracking.trackers import About, Ending, Tracker

logger = logging.getLogger(__name__)

PROJECT = "oxrl"


def open_tracker(about: About) -> Tracker:
    with redirect_stdout(io.StringIO()):  # it tells of itself where results belong
        import trackio

        name = about.id or f"{about.name}-{uuid.uuid4().hex[:6]}"
        run = trackio.init(
            project=PROJECT,
            name=name,
            resume="never" if about.id is None else "allow",
            config=dict(about.parameters),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )
    logger.info("trackio calls this run %s: `trackio show --project %s` shows it", name, PROJECT)

    def end(ending: Ending) -> None:  # noqa: ARG001 - one signature for all
        with redirect_stdout(io.StringIO()):
            trackio.finish()

    return Tracker(lambda step, metrics: run.log(dict(metrics), step=step), end, name)
