"""Runs the checks of a run: the loops call its methods, each of which makes the checks that can be made there.

A check that finds a fault stops the run by a `CheckError`, or warns once. States are passed on when they change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from oxrl.guard.findings import Finding, State
from oxrl.guard.table import CHECKS, actions_of
from oxrl.tracking.health import CheckError, HealthMonitor

logger = logging.getLogger(__name__)


def nowhere(finding: Finding) -> None:
    """For guards whose findings are not kept in a file."""


class Guard:
    """`Guard({"entropy": "stop"})`: the checks of one run, with the actions of `run.checks`.

    `write` gets each finding; `past` are the logged metrics of a resumed run.
    """

    def __init__(
        self,
        chosen: Mapping[str, str] | None = None,
        *,
        write: Callable[[Finding], None] = nowhere,
        past: Sequence[Mapping[str, Any]] = (),
    ) -> None:
        self.actions = actions_of(chosen or {})
        self.write = write
        self.step = 0
        self.states: dict[str, Finding] = {}
        self._health = HealthMonitor(past)
        for name, action in self.actions.items():
            if action == "off":
                self._note(name, "skipped", "off in run.checks")

    @property
    def findings(self) -> list[Finding]:
        """The faults that were found, in the order of the table."""
        return [self.states[name] for name in CHECKS if name in self.states and self.states[name].is_fault]

    def wants(self, name: str) -> bool:
        """Whether a check is on and has not found a fault yet."""
        return self.actions[name] != "off" and (name not in self.states or not self.states[name].is_fault)

    def passed(self, name: str, message: str = "no fault found") -> None:
        if self.wants(name) and (name not in self.states or self.states[name].state != "passed"):
            self._note(name, "passed", message)

    def skipped(self, name: str, reason: str) -> None:
        if self.wants(name) and name not in self.states:
            self._note(name, "skipped", reason)

    def fault(self, name: str, message: str, remedy: str = "") -> None:
        """Warn, or raise if the check stops the run."""
        if not self.wants(name):
            return
        stops = self.actions[name] == "stop"
        found = self._note(name, "failed" if stops else "warned", message, remedy or CHECKS[name].remedy)
        if stops:
            raise CheckError(name, f"the check {name} failed: {message}; {found.remedy}")
        logger.warning("%s", found)

    def judge(self, name: str, problem: str | None) -> None:
        """Record a check that was made: with a problem as a fault, else as passed."""
        if problem is None:
            self.passed(name)
        else:
            self.fault(name, problem)

    def _note(self, name: str, state: State, message: str, remedy: str = "") -> Finding:
        found = Finding(self.step, name, state, message, remedy)
        self.states[name] = found
        self.write(found)
        return found

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """A sink for the metrics of a run."""
        warnings = self._health.note({"step": step, **metrics})
        for warning in warnings:
            self.fault(warning.name, warning.problem)
        for name in self._health.judged():
            self.passed(name)

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Record an error that ends the run under the check that it belongs to."""
        try:
            yield
        except Exception as error:
            name = _check_of(error)
            if name is not None and name in CHECKS and not self._has_failed(name):
                self._note(name, "failed", str(error), CHECKS[name].remedy)
            raise

    def _has_failed(self, name: str) -> bool:
        return name in self.states and self.states[name].state == "failed"


_OF_ERRORS = {"NonFiniteError": "finite", "NonFiniteWeightsError": "finite", "StaleEngineError": "sampler_weights"}


def _check_of(error: BaseException) -> str | None:
    if isinstance(error, CheckError):
        return error.check
    of_kind = (_OF_ERRORS.get(each.__name__) for each in type(error).__mro__)
    context: Mapping[str, Any] = error.__dict__.get("oxrl_context", {})
    return next((name for name in of_kind if name), context.get("check"))
