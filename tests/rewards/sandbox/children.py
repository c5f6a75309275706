"""Processes that this one has started and not yet buried: an engine that serves a whole run of tests may be one."""

import threading
from pathlib import Path


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text().split())
