"""Task groups that raise plain exceptions, blocking functions in threads, and async functions from sync code."""

from __future__ import annotations

import asyncio
import signal
import threading
from asyncio import CancelledError
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
    """`anyio.create_task_group` that raises its first error instead of an exception group."""
    try:
        async with anyio.create_task_group() as tasks:
            yield tasks
    except BaseExceptionGroup as group:
        error = _first(group)
        raise error from error.__cause__  # keeps the error's own cause instead of the group


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


async def until_interrupted(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Return the function's value; SIGINT and SIGTERM cancel it outside of shielded scopes, then KeyboardInterrupt.

    The event loop's default handling of SIGINT is a cancellation that ignores shields.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread receives signals
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
    """Return the value of a blocking function run in a daemon thread; the caller can be cancelled while it waits.

    anyio's own worker threads are not used: Python joins those at exit.
    """
    outcome: Future[T] = Future()
    done = anyio.Event()

    def work() -> None:
        try:
            outcome.set_result(function())
        except (StopIteration, SystemExit, CancelledError) as error:  # these would silently end the waiting task
            outcome.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting task
            outcome.set_exception(error)
        with suppress(RuntimeError):  # the waiting task was cancelled
            portal.start_task_soon(done.set)

    async with BlockingPortal() as portal:
        threading.Thread(target=work, name="oxrl", daemon=True).start()
        await done.wait()
    return outcome.result()


def is_cancelled() -> bool:
    """Whether a CancelledError of asyncio is a request to this task; a function may also raise one by itself."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # another event loop
        return False
    return task is not None and task.cancelling() > 0


def run_blocking(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """Run an async function from sync code, also inside a running event loop, e.g. in a notebook."""
    try:
        anyio.lowlevel.current_token()
    except RuntimeError:
        return anyio.run(function, *args)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(anyio.run, function, *args).result()
