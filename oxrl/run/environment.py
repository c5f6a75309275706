"""The environment of a config: what `rollout.env` names to an `EnvFn`, and the rows that it makes itself."""

from __future__ import annotations

import inspect
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, cast

from oxrl.concurrency import run_blocking
from oxrl.config import Config, ConfigError
from oxrl.data.sources import Loaded
from oxrl.names import import_object
from oxrl.rollouts.environments.table import HELD_OUT_SEED, Settings, find_kind, named_rows, open_named, suggestion
from oxrl.rollouts.envs import dialogue, guarded, own_turns, single_turn, with_tools
from oxrl.rollouts.mcp_tools import PREFIX, check_installed, mcp_tools, named_once
from oxrl.rollouts.tools import Tool
from oxrl.types import EnvFn

logger = logging.getLogger(__name__)

DIALOGUE_KEYS = ("reply", "stop")


def environment(config: Config) -> EnvFn:
    rollout = config.rollout
    if rollout.env == "single_turn":
        return single_turn
    if rollout.env == "dialogue":
        return _dialogue(config)
    if rollout.env == "tools":
        if not rollout.tools:
            raise ConfigError(
                "rollout.env: tools needs rollout.tools, functions such as oxrl.rollouts.tools:calculator"
            )
        return _with_tools(config, {})
    if find_kind(rollout.env) is not None:
        return open_named(rollout.env, settings_of(config))
    return _custom_environment(rollout.env)


@asynccontextmanager
async def open_environment(config: Config) -> AsyncIterator[EnvFn]:
    """The environment with what it needs during a run: servers of tools, which end with the block."""
    servers = _tool_servers(config)
    if not servers:
        yield environment(config)
        return
    async with mcp_tools(servers) as found:
        logger.info("tools of %s: %s", ", ".join(servers), ", ".join(found) or "none")
        yield _with_tools(config, found)


def check_tool_servers(config: Config) -> None:
    """Start every server of tools once, before anything is loaded; a ValueError says what is wrong."""

    async def open_once() -> None:
        async with open_environment(config):
            pass

    if _tool_servers(config):
        run_blocking(open_once)


def _tool_servers(config: Config) -> list[str]:
    servers = [path.removeprefix(PREFIX) for path in config.rollout.tools if path.startswith(PREFIX)]
    if not all(map(str.strip, servers)):
        raise ConfigError(f"rollout.tools has {PREFIX} without a server: write {PREFIX}COMMAND or {PREFIX}URL")
    return servers


def _with_tools(config: Config, found: Mapping[str, Tool]) -> EnvFn:
    """Functions of the config, and tools that servers offer; without a connection only the functions."""
    rollout = config.rollout
    functions = [import_object(path) for path in rollout.tools if not path.startswith(PREFIX)]
    if _tool_servers(config):
        check_installed()
    tools = named_once([*functions, *found.values()])
    return with_tools(tools, max_turns=rollout.max_turns, time_limit=rollout.tool_seconds)


def episode_bounds(config: Config, env: EnvFn) -> dict[str, Any]:
    """Most generations and tokens of an episode, and most seconds in its environment, for a `RolloutSampler`."""
    rollout = config.rollout
    turns = max(rollout.max_turns, own_turns(env))
    return {"max_turns": turns, "max_tokens": config.data.max_seq_len, "env_seconds": rollout.env_seconds}


def settings_of(config: Config) -> Settings:
    rollout = config.rollout
    return Settings(rollout.env_args, rollout.max_turns, rollout.tool_seconds)


def environment_rows(config: Config, *, held_out: bool = False) -> Loaded:
    """Rows that the environment makes: `data.env_rows` of them, or `data.env_val_rows` held out."""
    env = config.rollout.env
    size, seed = (config.data.env_val_rows, HELD_OUT_SEED) if held_out else (config.data.env_rows, config.run.seed)
    samples = named_rows(env, settings_of(config), size, seed)
    if len(samples) < size:
        logger.info("%s has %d rows, not %d", env, len(samples), size)
    return Loaded(samples, f"rows of {env}", [])


def _dialogue(config: Config) -> EnvFn:
    args = config.rollout.env_args
    if unknown := sorted(args.keys() - set(DIALOGUE_KEYS)):
        raise ConfigError(f"rollout.env_args.{unknown[0]} is no argument of dialogue: {', '.join(DIALOGUE_KEYS)}")
    if "reply" not in args:
        raise ConfigError(
            "rollout.env: dialogue needs rollout.env_args.reply, the simulated user as FILE.py:FUNCTION: a function of "
            "the conversation (and the sample) that returns a text, or None to end it"
        )
    functions: dict[str, Any] = {key: import_object(str(path)) for key, path in args.items()}
    if wrong := next((key for key, function in functions.items() if not callable(function)), None):
        raise ConfigError(f"rollout.env_args.{wrong} is {functions[wrong]!r:.100}; it is a function, FILE.py:FUNCTION")
    stop = {"stop_condition": functions["stop"]} if "stop" in functions else {}
    return guarded(dialogue(functions["reply"], max_turns=config.rollout.max_turns, **stop))


def _custom_environment(name: str) -> EnvFn:
    try:
        env = import_object(name)
    except ValueError as error:
        raise ConfigError(f"rollout.env: {error}{suggestion(name)}") from None
    if not callable(env):
        raise ConfigError(
            f"rollout.env: {name} is {env!r:.200}; an environment is an async function of (sample, policy)"
        )
    try:
        inspect.signature(env).bind("sample", "policy")
    except TypeError:
        raise ConfigError(
            f"rollout.env: {name} takes {inspect.signature(env)}; an environment takes (sample, policy) and returns an "
            "Episode; dialogue(reply), with_tools([...]) and gym_env(make) return one"
        ) from None
    return guarded(cast(EnvFn, env))
