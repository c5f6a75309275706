"""`gym:ID`: a Gymnasium environment as a conversation, with texts or numbers as observations.

A row is a seed: all episodes of a row begin in the same state. Observations become user messages, the answer becomes an
action; the rewards of the environment are those of the turns. Pictures are not shown to the model yet:
`observation_text` is where they would become messages with image parts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np

from oxrl.names import error_text, import_object
from oxrl.rollouts.environments.table import Settings
from oxrl.rollouts.envs import gym_env
from oxrl.types import EnvFn, Message, Sample

OWN = ("prompt", "actions", "observation", "action", "illegal_reward")
"""Keys of `rollout.env_args` that are read here; the others are arguments of `gymnasium.make`."""

_MOST_NUMBERS = 256  # of an observation
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


def open_gym(name: str, settings: Settings) -> EnvFn:
    own, arguments = settings.split(OWN)
    make = partial(_make, name, arguments)
    observations, actions = _spaces(name, make)
    return gym_env(
        partial(_new, make),
        to_text=_describer(name, own, observations),
        to_action=_action_parser(name, own, actions),
        max_steps=settings.max_turns,
        illegal_reward=_number("illegal_reward", own.get("illegal_reward", 0.0)),
    )


def gym_rows(name: str, settings: Settings, size: int, seed: int) -> list[Sample]:
    own, arguments = settings.split(OWN)
    _, actions = _spaces(name, partial(_make, name, arguments))
    prompt = own.get("prompt") or f"You act in {name}. {_instruction(name, own, actions)}"
    if not isinstance(prompt, str):
        raise ValueError(f"rollout.env_args.prompt is {prompt!r:.100}; give the text of the first message")
    return [
        Sample(f"gym:{name}:{number}", (Message("user", prompt),), metadata={"seed": number})
        for number in range(seed, seed + size)
    ]


def _make(name: str, arguments: Mapping[str, Any]) -> Any:
    gymnasium = import_module("gymnasium")
    if name.startswith("oxrl/"):
        import_module("oxrl.rollouts.environments.reach")  # registers it
    try:
        return gymnasium.make(name, disable_env_checker=True, **arguments)
    except Exception as error:  # an environment may raise anything
        raise ValueError(
            f"rollout.env: gymnasium cannot make {name} with {dict(arguments)}: {error_text(error)}; it is an id that "
            "gymnasium knows, with the package of its environments before it if they are registered there, as in "
            f"gym:minigrid:MiniGrid-Empty-5x5-v0; {', '.join(OWN)} of rollout.env_args are not passed to it"
        ) from error


def _new(make: Callable[[], Any], sample: Sample) -> Any:  # noqa: ARG001 - every sample has the same world, from its seed
    return make()


def _spaces(name: str, make: Callable[[], Any]) -> tuple[Any, Any]:
    world = make()
    try:
        return world.observation_space, world.action_space
    except AttributeError as error:
        raise ValueError(f"{name} has no observation_space or action_space") from error
    finally:
        world.close()


def _describer(name: str, own: Mapping[str, Any], space: Any) -> Callable[[Any], str]:
    if (path := own.get("observation")) is not None:
        return _function("observation", path)
    kinds = {type(each).__name__: each for each in _leaves(space)}
    pictures = [each for each in kinds.values() if getattr(each, "dtype", None) == np.uint8 and len(each.shape) == 3]
    if pictures:
        raise ValueError(
            f"observations of {name} are pictures, which are not shown to a model yet: set "
            "rollout.env_args.observation to FILE.py:FUNCTION, a function from an observation to a text"
        )
    return observation_text


def _leaves(space: Any) -> list[Any]:
    inner = getattr(space, "spaces", None)
    if inner is None:
        return [space]
    return [leaf for each in (inner.values() if hasattr(inner, "values") else inner) for leaf in _leaves(each)]


def observation_text(observation: Any) -> str:
    """Numbers with four digits, one line per entry of a dict; a text as it is."""
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {observation_text(value)}" for key, value in observation.items())
    if isinstance(observation, str):
        return observation
    numbers = np.asarray(observation)
    if numbers.dtype.kind not in "iufb":
        return str(observation)
    if numbers.size > _MOST_NUMBERS:
        raise ValueError(
            f"an observation has {numbers.size} numbers, more than {_MOST_NUMBERS}: set rollout.env_args.observation "
            "to FILE.py:FUNCTION, a function from an observation to a text"
        )
    return " ".join(f"{value:.4g}" for value in numbers.ravel().tolist())


def _action_parser(name: str, own: Mapping[str, Any], space: Any) -> Callable[[str], Any]:
    if (path := own.get("action")) is not None:
        return _function("action", path)
    kind = type(space).__name__
    if kind == "Discrete":
        words = _words(name, own, space)
        return partial(_word_action, {word.lower(): int(space.start) + at for at, word in enumerate(words)})
    if kind in ("Box", "MultiDiscrete", "MultiBinary"):
        return partial(_number_action, space)
    if kind == "Text":
        return str
    raise ValueError(
        f"actions of {name} are of the space {kind}: set rollout.env_args.action to FILE.py:FUNCTION, a function from "
        "the model's answer to an action"
    )


def _instruction(name: str, own: Mapping[str, Any], space: Any) -> str:
    kind = type(space).__name__
    if kind == "Discrete" and "action" not in own:
        return f"Answer with one of: {', '.join(_words(name, own, space))}."
    if kind in ("Box", "MultiDiscrete", "MultiBinary") and "action" not in own:
        count = int(np.prod(space.shape))
        return f"Answer with {count} number{'s' if count > 1 else ''}."
    return "Answer with your action."


def _words(name: str, own: Mapping[str, Any], space: Any) -> Sequence[str]:
    start, count = int(space.start), int(space.n)
    words = own.get("actions", [str(number) for number in range(start, start + count)])
    if not isinstance(words, list) or len({str(word).lower() for word in words}) != count:
        raise ValueError(f"rollout.env_args.actions is {words!r:.200}; {name} needs a list of {count} different words")
    return [str(word) for word in words]


def _word_action(actions: Mapping[str, int], answer: str) -> int:
    """The action that the answer names last."""
    pattern = "|".join(re.escape(word) for word in sorted(actions, key=len, reverse=True))
    named = re.findall(rf"(?<!\w)(?:{pattern})(?!\w)", answer.lower())
    if not named:
        raise ValueError(f"That is no action. Answer with one of: {', '.join(actions)}.")
    return actions[named[-1]]


def _number_action(space: Any, answer: str) -> Any:
    found, count = _NUMBER.findall(answer), int(np.prod(space.shape))
    if len(found) != count:
        raise ValueError(f"That is no action. Answer with {count} number{'s' if count > 1 else ''}.")
    action = np.array([float(each) for each in found]).reshape(space.shape)
    if space.dtype.kind in "iu" and not np.array_equal(action, np.trunc(action)):
        raise ValueError("That is no action. Answer with whole numbers.")
    action = action.astype(space.dtype)
    if not space.contains(action):
        raise ValueError(f"That is no action. It must be in {space}.")
    return action


def _function(key: str, path: Any) -> Callable[[Any], Any]:
    function = import_object(path) if isinstance(path, str) else path
    if not callable(function):
        raise ValueError(f"rollout.env_args.{key} is {path!r:.100}; give a function as FILE.py:FUNCTION")
    return function  # type: ignore[no-any-return]


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"rollout.env_args.{key} is {value!r:.100}; give a number")
    return float(value)
