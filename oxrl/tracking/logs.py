"""Logging of several processes to one screen: lines carry the rank, and ranks other than 0 log warnings only.

A screen is optional: what cannot be written to it is dropped where the caller wishes so.
"""

from __future__ import annotations

import io
import logging
import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from oxrl.machine.secrets import without_secrets

logger = logging.getLogger(__name__)


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


class _OptionalOutput(io.FileIO):
    """Output that may disappear, with its terminal, its reader or room on a disk; it then drops what is written."""

    lost = False

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if not self.lost and self.fileno() != 2:  # else it would be logged to itself
                logger.warning("standard output cannot be written, and is dropped: %s", error)
            self.lost = True
            return len(data)


def make_optional(name: Literal["stdout", "stderr"]) -> None:
    """Let `sys.stdout` or `sys.stderr` drop what cannot be written; for programs that do not depend on a screen."""
    stream = getattr(sys, name)
    if stream is None:  # the process was started with it closed
        setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - to the end
        return
    try:
        descriptor = stream.fileno()
    except (OSError, ValueError):  # not a file: in a notebook or a test
        return
    with suppress(OSError):
        stream.flush()
    raw = _OptionalOutput(descriptor, "w", closefd=False)
    lines = name == "stderr" or stream.line_buffering
    text = io.TextIOWrapper(io.BufferedWriter(raw), stream.encoding, stream.errors, line_buffering=lines)
    setattr(sys, name, text)
