"""Recognise an out-of-memory error, and free the memory that it holds."""

from __future__ import annotations

import ctypes
import errno
import gc
import traceback
from contextlib import suppress


class MemoryAdviceError(RuntimeError):
    """Memory ran out, and the message has advice for where that happened."""


def ran_out_of_memory(error: BaseException) -> bool:
    """torch has an error class for it on a GPU; on a CPU it is a RuntimeError of the allocator."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    # By name: the error of another process may arrive as a class of the same name.
    if any(each.__name__ == "OutOfMemoryError" for each in type(error).__mro__):
        return True
    if isinstance(error, RuntimeError) and "allocate memory" in str(error):
        return True
    return error.__cause__ is not None and ran_out_of_memory(error.__cause__)  # a rank's arrives as a cause


def return_freed_memory() -> None:
    """Give memory that is not used any more back to the system: glibc keeps what a run freed, run after run."""
    gc.collect()
    with suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def free_memory_of(error: BaseException) -> None:
    """Free the tensors in the frames of an error that was caught: another attempt needs their memory."""
    seen: BaseException | None = error
    while seen is not None:
        traceback.clear_frames(seen.__traceback__)
        seen.__traceback__ = None  # a cleared frame still holds its function, and with it variables of a closure
        seen = seen.__cause__ or seen.__context__
    gc.collect()
