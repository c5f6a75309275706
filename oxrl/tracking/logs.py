"""Logging of several processes to one screen: lines carry the rank, and ranks other than 0 log warnings only."""

from __future__ import annotations

import logging
import os
import sys

from oxrl.machine.secrets import without_secrets


def rank() -> int:
    """Return the rank of this process, as torchrun sets it; 0 if there is only one."""
    value = os.environ.get("RANK", "")
    return int(value) if value.isdecimal() else 0


class _Formatter(logging.Formatter):
    """Logs no secret, also where a library's error holds one."""

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def set_up_logging() -> None:
    """Configure logging for an application such as the command line; library code never calls this."""
    prefix = f"[rank {rank()}] " if "RANK" in os.environ else ""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter(f"{prefix}%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    logging.getLogger("oxrl").setLevel(logging.INFO if rank() == 0 else logging.WARNING)
