"""Episodes of an expert in a Gymnasium environment, as steps of a recording: the rows of imitation before RL.

A step has what a model would be shown there, and the expert's action. `data.episodes` reads them back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, TypeAlias

import numpy as np

from oxrl.data.parts import Content, take_media
from oxrl.names import import_object
from oxrl.rollouts.environments.gymnasium_env import GymEnvironment
from oxrl.rollouts.environments.table import Settings
from oxrl.rollouts.envs import with_user
from oxrl.rollouts.episode import EpisodeError
from oxrl.rollouts.game import as_episode_error, close_environment, reported_success, reset_values, step_values
from oxrl.types import Sample

logger = logging.getLogger(__name__)

Expert: TypeAlias = Callable[[Any], Callable[[], Any]]
"""An environment after its reset -> a function that returns the next action."""

_MOST_STEPS = 10_000  # of an environment without a limit
_LEAST_TRIED = 40  # episodes before an expert is refused that seldom succeeds


def babyai_bot(env: Any) -> Callable[[], Any]:
    """The planner of BabyAI's levels, of the package `minigrid`."""
    bot = import_module("minigrid.utils.baby_ai_bot").BabyAIBot(env.unwrapped)
    return lambda: int(bot.replan())


def own_expert(env: Any) -> Callable[[], Any]:
    """The method `expert` of an environment."""
    found = getattr(env.unwrapped, "expert", None)
    if found is None:
        raise ValueError(
            f"{type(env.unwrapped).__name__} has no method expert: give one as FILE.py:FUNCTION, a function of the "
            "environment after its reset that returns a function to the next action"
        )
    return found  # type: ignore[no-any-return]


def expert_steps(
    name: str, settings: Settings, episodes: int, *, seed: int = 0, expert: str | Expert = own_expert
) -> Iterator[dict[str, Any]]:
    """The steps of `episodes` episodes, with seeds from `seed` on; those without success are left out and replaced.

    Success is what the environment reports, else a positive return.
    """
    plan: Expert = import_object(expert) if isinstance(expert, str) else expert
    gym = GymEnvironment.of(name, settings)
    kept, tried, reason = 0, 0, "no success"
    while kept < episodes:
        if tried >= _LEAST_TRIED and kept < tried / 20:
            raise ValueError(
                f"the expert of {name} succeeded in {kept} of {tried} episodes: is it made for it? The last "
                f"one: {reason}"
            )
        row, tried = gym.row(name, seed + tried), tried + 1
        try:
            steps = _successful_episode(gym, row, plan)
        except EpisodeError as error:  # planners may find no way
            reason = str(error)
            logger.info("no episode from the seed %d: %s", row.metadata["seed"], reason)
            continue
        yield from ({"episode": kept, **step} for step in steps)
        kept += 1
    logger.info("%d of %d episodes of the expert succeeded", kept, tried)


def _successful_episode(gym: GymEnvironment, row: Sample, plan: Expert) -> list[dict[str, Any]]:
    """The steps of an episode that ended with success; else an EpisodeError."""
    env, steps, total = gym.make(), [], 0.0
    try:
        with as_episode_error(env.reset):
            observation, _ = reset_values(env.reset(seed=row.metadata["seed"]))
        with as_episode_error(plan, ValueError):
            next_action = plan(env)
        if not callable(next_action):
            raise ValueError(
                f"the expert returned {next_action!r:.50} for an environment; it returns a function to the next action"
            )
        for _ in range(_MOST_STEPS):
            with as_episode_error(next_action):
                action = next_action()
            _check_number(action, env.action_space)
            steps.append({**_shown(row, gym.show(observation)), "action": _plain(action, env.action_space)})
            with as_episode_error(env.step):
                observation, reward, terminated, truncated, info = step_values(env.step(action))
            total += reward
            success = reported_success(info)
            if terminated or truncated or success:
                if success or (success is None and total > 0):
                    return steps
                raise EpisodeError(f"it ended without success after {len(steps)} steps, with the return {total:g}")
    finally:
        close_environment(env)
    raise EpisodeError(f"it did not end within {_MOST_STEPS} steps")


def _check_number(action: Any, space: Any) -> None:
    if type(space).__name__ == "Discrete" and not space.contains(action):
        raise EpisodeError(f"the expert's action {action!r:.50} is not in {space}")


def _shown(row: Sample, content: Content) -> dict[str, Any]:
    """The prompt of a step as columns: a text, with `<image>` where pictures do not precede one, and the pictures."""
    messages, media = take_media(with_user(row.messages, content))
    parts = messages[-1].content
    if isinstance(parts, str):
        return {"instruction": parts}
    first = len(parts) > len(media) and all(part["type"] == "image" for part in parts[: len(media)])
    texts = [part.get("text", "" if first else "<image>") for part in parts]
    return {"instruction": "".join(texts), "images": [{"bytes": each.data, "path": None} for each in media]}


def _plain(action: Any, space: Any) -> Any:
    """Numbers as a list; the number of a discrete action counted from 0."""
    if type(space).__name__ == "Discrete":
        return int(action) - int(space.start)
    return np.asarray(action, dtype=np.float32).ravel().tolist()
