"""Task groups that raise plain exceptions, blocking functions in threads, and async functions from sync code."""

from __future__ import annotations

import asyncio
import signal
import threading
from asyncio import CancelledError
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import Context, copy_context
from typing import Any, Self, TypeVar, cast

import anyio
from anyio.abc import TaskGroup, TaskStatus
from anyio.from_thread import BlockingPortal

T = TypeVar("T")
INTERRUPTS = (signal.SIGINT, signal.SIGTERM)
SIGNAL_INTERVAL = 0.5  # seconds within which a waiting main thread handles a signal in any case


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
            with anyio.open_signal_receiver(*INTERRUPTS) as signals:
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


def run_blocking(function: Callable[..., Awaitable[T]], *args: Any, signals: Sequence[int] = (signal.SIGINT,)) -> T:
    """Run an async function to its end from sync code, also where an event loop is running (a notebook, a task).

    There it runs in another thread with its own event loop and the caller's context variables, and the running loop
    waits. `signals` cancel it outside of shielded scopes, then KeyboardInterrupt; after a second one nothing waits.
    """
    return _run_in_thread(function, args, signals) if _in_event_loop() else anyio.run(function, *args)


def _run_in_thread(function: Callable[..., Awaitable[T]], args: Sequence[Any], signals: Sequence[int]) -> T:
    outcome: Future[T | None] = Future()
    interrupted = False
    stop: list[Callable[[], object]] = []

    async def cancellable() -> T | None:
        loop = asyncio.get_running_loop()
        with anyio.CancelScope() as scope:
            stop.append(lambda: loop.call_soon_threadsafe(scope.cancel))
            if interrupted:
                scope.cancel()
            return await function(*args)
        return None  # cancelled by `interrupt`

    def interrupt(number: int, frame: object) -> None:  # noqa: ARG001 - the signature of a signal handler
        nonlocal interrupted
        if interrupted:
            raise KeyboardInterrupt
        interrupted = True
        for cancel in stop:
            with suppress(RuntimeError):  # its loop is closed: it has ended
                cancel()

    def work() -> None:
        try:
            outcome.set_result(context.run(anyio.run, cancellable))
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
            outcome.set_exception(error)

    context = _context_outside_of_loops()
    with _signal_handler(signals, interrupt):
        threading.Thread(target=work, name="oxrl", daemon=True).start()
        value = _wait_for(outcome)
    if interrupted:
        raise KeyboardInterrupt
    return cast("T", value)


def _wait_for(outcome: Future[T]) -> T:
    """Wait in short pieces: a signal that arrives just before a wait blocks is handled only when that wait ends."""
    while not wait([outcome], timeout=SIGNAL_INTERVAL).done:
        pass
    return outcome.result()


def run_until_interrupted(function: Callable[..., Awaitable[T]], *args: Any) -> T:
    """`run_blocking(until_interrupted, ...)`, with the same signals inside a running event loop."""
    value: T = run_blocking(until_interrupted, function, *args, signals=INTERRUPTS)
    return value


def _in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()  # also in a callback, where there is no current task
    except RuntimeError:
        try:
            anyio.get_cancelled_exc_class()
        except RuntimeError:
            return False
    return True


def _context_outside_of_loops() -> Context:
    """A copy of the current context variables, without the record of the event loop that runs here."""
    context = copy_context()
    with suppress(ImportError):  # anyio and trio keep that record in sniffio, if they need it
        from sniffio import current_async_library_cvar

        context.run(current_async_library_cvar.set, None)
    return context


@contextmanager
def _signal_handler(signals: Sequence[int], handler: Callable[[int, object], None]) -> Iterator[None]:
    """Handle these signals inside the block; outside of the main thread, which receives them, do nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, signal.SIG_DFL if previous is None else previous)


class Finished:
    """The result of a blocking function that can also be awaited: `await run_sft(...)`, `trio.run(run_sft, ...)`.

    It has the methods of a coroutine, because `trio.run` and `asyncio.run` accept nothing else.
    """

    __slots__ = ()

    def __await__(self) -> Generator[Any, Any, Self]:
        yield from ()  # `__await__` must return a generator; this one never suspends
        return self

    def send(self, value: Any) -> Any:  # noqa: ARG002 - the signature of a coroutine
        raise StopIteration(self)

    def throw(self, *error: Any) -> Any:
        raise error[1] if len(error) > 1 and error[1] is not None else error[0]

    def close(self) -> None:
        """Do nothing: nothing is left to run."""
