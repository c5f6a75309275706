"""Files of a run's folder: opened by name, never through a symbolic link, and read from where the last read ended.

A run appends to its files while they are read. Only complete lines count: a torn one is read again when it is whole.
A resumed run replaces files; then the identity of the file is another one, and it is read from its beginning.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

CHUNK = 4 * 2**20  # bytes of one read
MISSING = (FileNotFoundError, NotADirectoryError)


class NewLines(NamedTuple):
    """Complete lines of a file from byte `start` up to `end`; `file` identifies the file, "" if there is none."""

    body: bytes
    start: int
    end: int
    file: str
    more: bool  # the file has more bytes than one read returns


@contextmanager
def open_inside(folder: Path, name: str) -> Iterator[BinaryIO]:
    """Open a regular file of a folder for reading; a link on the way, even one inside of the folder, is refused."""
    *parents, last = name.split("/")
    if not all(part and part not in (".", "..") for part in (*parents, last)):
        raise ValueError(f"{name!r} is not a name in a run's folder")
    held = [os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
    try:
        for part in parents:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            held.append(os.open(part, flags, dir_fd=held[-1]))
        # Opening a pipe would wait for its writer.
        descriptor = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=held[-1])
    finally:
        for each in held:
            os.close(each)
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise FileNotFoundError(f"{name} is not a regular file")
        yield file


def identity(file: BinaryIO) -> str:
    """What stays the same while a file grows, and differs after it was replaced."""
    status = os.fstat(file.fileno())
    return f"{status.st_dev:x}-{status.st_ino:x}"


def size_of(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def new_lines(folder: Path, name: str, start: int = 0, known: str = "", chunk: int = CHUNK) -> NewLines:
    """The lines that a file has gained since byte `start`, if it still is the file that was `known`."""
    try:
        with open_inside(folder, name) as file:
            now, size = identity(file), size_of(file)
            if now != known or not 0 <= start <= size:
                start = 0
            file.seek(start)
            body = file.read(chunk)
            while b"\n" not in body and (further := file.read(chunk)):  # a long line
                body += further
    except MISSING:
        return NewLines(b"", 0, 0, "", False)
    except OSError as error:  # a link: O_NOFOLLOW
        raise ValueError(f"{name} cannot be read: {error.strerror}") from error
    body = body[: body.rfind(b"\n") + 1]
    end = start + len(body)
    return NewLines(body, start, end, now, bool(body) and end < size)


def lines_with_offsets(file: BinaryIO, start: int = 0) -> Iterator[tuple[int, bytes]]:
    """Each complete line of a file and the byte at which it begins."""
    file.seek(start)
    for line in file:
        if not line.endswith(b"\n"):
            return
        yield start, line
        start += len(line)
