"""`reasoning_gym:TASK`: one turn per generated prompt, graded by the task's own scorer.

`rollout.env_args` are the parameters of the task.
"""

from __future__ import annotations

from oxrl.rewards.gym import reasoning_gym_samples
from oxrl.rollouts.environments.table import Settings
from oxrl.rollouts.envs import single_turn
from oxrl.types import EnvFn, Sample


def open_reasoning_gym(task: str, settings: Settings) -> EnvFn:
    """One completion per prompt; a task or a parameter that does not exist is refused."""
    reasoning_gym_rows(task, settings, size=1, seed=0)
    return single_turn


def reasoning_gym_rows(task: str, settings: Settings, size: int, seed: int) -> list[Sample]:
    return reasoning_gym_samples(task, size=size, seed=seed, **settings.args)
