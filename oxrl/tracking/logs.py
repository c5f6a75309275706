"""Logging of several processes to one screen: lines carry the rank, and ranks other than 0 log warnings only."""

from __future__ import annotations

import logging
import os
import sys


def rank() -> int:
    """Return the rank of this process, as torchrun sets it; 0 if there is only one."""
    value = os.environ.get("RANK", "")
    return int(value) if value.isdecimal() else 0


def set_up_logging() -> None:
    """Configure logging for an application such as the command line; library code never calls this."""
    prefix = f"[rank {rank()}] " if "RANK" in os.environ else ""
    logging.basicConfig(level=logging.WARNING, format=f"{prefix}%(message)s", stream=sys.stderr)
    logging.getLogger("oxrl").setLevel(logging.INFO if rank() == 0 else logging.WARNING)
