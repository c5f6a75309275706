"""Tasks side by side that fail as one, plain functions in threads that can be abandoned, async ones from plain code."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup, TaskStatus
from anyio.from_thread import BlockingPortal

T = TypeVar("T")


@asynccontextmanager
async def task_group() -> AsyncIterator[TaskGroup]:
    """`anyio.create_task_group`, whose first error comes out as itself, for callers that catch plain exceptions."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        error = _first(group)
        raise error from error.__cause__  # whose own cause stays, and not the group


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def until_interrupted(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """The function's value; SIGINT and SIGTERM cancel it where it can be cancelled, and then raise KeyboardInterrupt.

    The event loop's own answer to SIGINT is a cancellation that no shield holds off, in the middle of anything.
    """
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's affair
        return await function(*args)
    interrupted = False
    async with task_group() as tasks:

        async def watch(*, task_status: TaskStatus[None]) -> None:
            nonlocal interrupted
            with anyio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                task_status.started()
                async for _ in signals:
                    interrupted = True
                    tasks.cancel_scope.cancel()
                    return

        await tasks.start(watch)
        value = await function(*args)
        tasks.cancel_scope.cancel()
    if interrupted:
        raise KeyboardInterrupt
    return value


async def in_thread(function: Callable[[], T]) -> T:
    """The value of a plain function that may take long, or for ever: whoever waits can give up on it.

    Not anyio's own worker threads: Python waits for those at exit.
    """
    outcome: Future[T] = Future()
    done = anyio.Event()

    def work() -> None:
        try:
            outcome.set_result(function())
        except (StopIteration, SystemExit) as error:  # which would silently end whoever waits
            outcome.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        except BaseException as error:  # noqa: BLE001 - raised again by the one who waits
            outcome.set_exception(error)
        with suppress(RuntimeError):  # nobody waits any more
            portal.start_task_soon(done.set)

    async with BlockingPortal() as portal:
        threading.Thread(target=work, name="oxrl", daemon=True).start()
        await done.wait()
    return outcome.result()


def run_blocking(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """An async function from plain code: also from a notebook, whose own event loop is running."""
    try:
        anyio.lowlevel.current_token()
    except RuntimeError:
        return anyio.run(function, *args)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(anyio.run, function, *args).result()
