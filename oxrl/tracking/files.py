"""Files of a run: small ones are replaced as a whole; a full disk is recognised."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def is_full_disk(error: OSError) -> bool:
    """Whether there is no room to write: on the disk, in the user's quota, or by a limit on the size of files."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_atomically(path: Path, text: str) -> None:
    """Replace a file: whenever the process ends, the file is either the old one or the complete new one."""
    draft = path.with_name(f".{path.name}.draft")
    try:
        with draft.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
