"""Callbacks of a run: functions of (step, metrics), or objects with any of the methods in `EVENTS`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

from oxrl.names import did_you_mean, error_text
from oxrl.tracking.metrics import Sink, as_sink

logger = logging.getLogger(__name__)

EVENTS: Mapping[str, tuple[str, ...]] = {
    "on_start": ("run",),
    "on_step": ("step", "metrics"),
    "on_evaluate": ("step", "metrics"),
    "on_save": ("step", "folder"),
    "on_end": ("result",),
}
"""Methods of a callback and their arguments."""
STOPPING = ("on_step", "on_evaluate")


class StopTraining(Exception):  # noqa: N818 - not an error
    """`raise StopTraining("the reward is above 0.9")` in `on_step` or `on_evaluate` ends a run after this step."""


class _Method(NamedTuple):
    event: str
    name: str
    function: Callable[..., Any]


class Callbacks:
    """`Callbacks([print, MyCallback()])`: calls each of them, sync or async, in order."""

    def __init__(self, given: Iterable[Any] = ()) -> None:
        if callable(given) or not isinstance(given, Iterable):
            raise ValueError(f"callbacks is a list, as in callbacks=[{_name_of(given)}]")
        self._methods = [method for each in given for method in _methods_of(each)]

    async def __call__(self, event: str, *args: Any) -> bool:
        """Call the methods of an event. Return whether one of them stops the run; any other exception ends it."""
        stopped = False
        for method in self._methods:
            if method.event != event:
                continue
            try:
                value = method.function(*args)
                if inspect.isawaitable(value):
                    await value
            except StopTraining as reason:
                if event not in STOPPING:
                    raise RuntimeError(
                        f"the callback {method.name} raised StopTraining; {' and '.join(STOPPING)} can stop a run"
                    ) from reason
                logger.info("step %d: %s stops the run: %s", args[0], method.name, reason)
                stopped = True
            except Exception as error:
                raise RuntimeError(f"the callback {method.name} failed: {error_text(error)}") from error
        return stopped

    def __bool__(self) -> bool:
        return bool(self._methods)


def _methods_of(given: Any) -> list[_Method]:
    """A class is instantiated; an object with none of the methods is a function of (step, metrics)."""
    callback = given() if isinstance(given, type) else given
    named = [each for each in dir(callback) if each.startswith("on_")]
    if unknown := [each for each in named if each not in EVENTS]:
        hint = did_you_mean(unknown[0], EVENTS, f"; there are: {', '.join(EVENTS)}")
        raise ValueError(f"{_name_of(callback)} has the method {unknown[0]}, which is not called{hint}")
    if named:
        kind = type(callback).__name__
        return [_checked(_Method(each, f"{kind}.{each}", getattr(callback, each))) for each in named]
    if not callable(callback):
        raise ValueError(
            f"{callback!r:.100} is not a callback: pass a function of (step, metrics), or an object with any of "
            f"{', '.join(EVENTS)}"
        )
    return [_checked(_Method("on_step", _name_of(callback), callback))]


def _checked(method: _Method) -> _Method:
    arguments = EVENTS[method.event]
    try:
        signature = inspect.signature(method.function)
    except ValueError:  # not written in Python
        return method
    try:
        signature.bind(*arguments)
    except TypeError:
        raise ValueError(
            f"the callback {method.name} takes {signature}; it is called with ({', '.join(arguments)})"
        ) from None
    return method


def _name_of(callback: Any) -> str:
    return str(getattr(callback, "__qualname__", type(callback).__name__))


def as_logger(given: Any) -> Sink:
    """A function of (step, metrics), or an object with such a `log`; an exception ends the run with its name."""
    sink = as_sink(given)

    def log(step: int, metrics: Mapping[str, float]) -> None:
        try:
            sink(step, metrics)
        except Exception as error:
            raise RuntimeError(f"the logger {_name_of(given)} failed: {error_text(error)}") from error

    return log
