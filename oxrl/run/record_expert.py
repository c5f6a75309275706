"""Episodes of an expert in the environment of a config, written as a folder of recorded episodes."""

from __future__ import annotations

from pathlib import Path

from oxrl.config import Config, ConfigError
from oxrl.data.episodes import write_episodes
from oxrl.rollouts.environments.expert import expert_steps, own_expert
from oxrl.rollouts.environments.table import find_kind
from oxrl.run.data import progress_bar
from oxrl.run.environment import settings_of

FILE = "episodes.parquet"


def record_expert(config: Config, folder: Path, episodes: int, expert: str | None = None, seed: int = 0) -> int:
    """Write `episodes` successful episodes; return the number of their steps."""
    env = config.rollout.env
    kind = find_kind(env)
    if kind is None or kind.scheme != "gym":
        raise ConfigError(f"rollout.env is {env}; an expert acts in a Gymnasium environment, gym:ID")
    kind.require()
    if folder.exists():
        raise ConfigError(f"{folder} exists; give another folder for the recorded episodes")
    name = env.partition(":")[2]
    played = expert_steps(name, settings_of(config), episodes, seed=seed, expert=expert or own_expert)
    steps = list(progress_bar("recording steps")(played))
    folder.mkdir(parents=True)
    return write_episodes(folder / FILE, steps)
