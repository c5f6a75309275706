"""Sandbox for model-written programs: they run isolated, and the process that grades them is another one."""

from oxrl.rewards.sandbox.grading import Tests, Verdict, run_tests
from oxrl.rewards.sandbox.isolation import Isolation, available, require_isolation
from oxrl.rewards.sandbox.names import names_in, undefined_names
from oxrl.rewards.sandbox.process import Limits, SandboxError

__all__ = [
    "Isolation",
    "Limits",
    "SandboxError",
    "Tests",
    "Verdict",
    "available",
    "names_in",
    "require_isolation",
    "run_tests",
    "undefined_names",
]
