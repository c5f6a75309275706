"""Log lines of several processes on one screen: each says whose it is, and all but the first keep to warnings."""

from __future__ import annotations

import logging
import os
import sys


def rank() -> int:
    """Which of the processes of a run this is, as torchrun says it; 0 where there is one."""
    said = os.environ.get("RANK", "")
    return int(said) if said.isdecimal() else 0


def set_up_logging() -> None:
    """For whoever owns the process, such as the command line; a library leaves logging to its user."""
    whose = f"[rank {rank()}] " if "RANK" in os.environ else ""
    logging.basicConfig(level=logging.WARNING, format=f"{whose}%(message)s", stream=sys.stderr)
    logging.getLogger("oxrl").setLevel(logging.INFO if rank() == 0 else logging.WARNING)
