"""Programs that a model wrote, run where they can do no harm, and judged where they can forge nothing."""

from oxrl.rewards.sandbox.isolation import Isolation, available, isolation_or_refusal
from oxrl.rewards.sandbox.process import Limits, SandboxError
from oxrl.rewards.sandbox.run import Outcome, run_program
from oxrl.rewards.sandbox.trial import Tests, Trial, names_of_program, run_tests

__all__ = [
    "Isolation",
    "Limits",
    "Outcome",
    "SandboxError",
    "Tests",
    "Trial",
    "available",
    "isolation_or_refusal",
    "names_of_program",
    "run_program",
    "run_tests",
]
