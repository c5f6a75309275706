"""`gym:ID`: a Gymnasium environment as a conversation, with texts, numbers or pictures as observations.

A row is a seed: all episodes of a row begin in the same state. Observations become user messages, pictures their image
parts; the answer becomes an action, read from its text or, with a codec, from its tokens. The rewards of the
environment are those of the turns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import numpy as np

from oxrl.data.actions import ActionCodec, ActionWords, action_codec
from oxrl.data.parts import Content
from oxrl.names import did_you_mean, error_text, import_object
from oxrl.rollouts.environments.observations import flat_entries, observation_content
from oxrl.rollouts.environments.table import Settings
from oxrl.rollouts.envs import gym_env
from oxrl.rollouts.game import close_environment
from oxrl.types import EnvFn, Message, Sample

OWN = (
    "prompt", "actions", "observation", "show", "action", "illegal_reward", "history", "until_success", "wrappers",
)  # fmt: skip
"""Keys of `rollout.env_args` that are read here; the others are arguments of `gymnasium.make`."""

_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")


class GymEnvironment(NamedTuple):
    """A Gymnasium environment that a config names, with its arguments checked."""

    make: Callable[[], Any]
    show: Callable[[Any], Content]  # an observation, as the model reads it
    to_action: Callable[[Any], Any]  # an answer, or with a codec one action of it
    codec: ActionCodec | None
    prompt: str

    @classmethod
    def of(cls, name: str, settings: Settings) -> GymEnvironment:
        own, arguments = settings.split(OWN)
        make = partial(_make, name, own, arguments)
        observations, actions = _spaces(name, make)
        codec = action_codec(own.get("actions"))
        to_action = _action_parser(name, own, actions) if codec is None else _codec_action(name, own, codec, actions)
        prompt = own.get("prompt")
        if prompt is None:  # actions as tokens need no words about them
            shown = name.rpartition(":")[2] if ".py:" in name else name
            prompt = f"You act in {shown}. {_instruction(name, own, actions)}" if codec is None else ""
        if not isinstance(prompt, str):
            raise ValueError(f"rollout.env_args.prompt is {prompt!r:.100}; give the text of the first message")
        return cls(make, _describer(name, own, observations), to_action, codec, prompt)

    def row(self, name: str, seed: int) -> Sample:
        return Sample(f"gym:{name}:{seed}", (Message("user", self.prompt),), metadata={"seed": seed})


def open_gym(name: str, settings: Settings) -> EnvFn:
    gym, own = GymEnvironment.of(name, settings), settings.args
    return gym_env(
        partial(_new, gym.make),
        to_text=gym.show,
        to_action=gym.to_action,
        max_steps=settings.max_turns,
        illegal_reward=_number("illegal_reward", own.get("illegal_reward", 0.0)),
        actions=gym.codec,
        history=_flag("history", own.get("history", gym.codec is None)),
        until_success=_flag("until_success", own.get("until_success", gym.codec is not None)),
    )


def gym_rows(name: str, settings: Settings, size: int, seed: int) -> list[Sample]:
    gym = GymEnvironment.of(name, settings)
    return [gym.row(name, number) for number in range(seed, seed + size)]


def _make(name: str, own: Mapping[str, Any], arguments: Mapping[str, Any]) -> Any:
    wrappers = _wrappers(own.get("wrappers", []))
    try:
        env = _by_name(name, arguments)
        for wrapper, options in wrappers:
            env = wrapper(env, **options)
    except Exception as error:  # an environment may raise anything
        near = "".join(did_you_mean(key, OWN) for key in arguments)
        raise ValueError(
            f"rollout.env: gymnasium cannot make {name} with {dict(arguments)}: {error_text(error)}; it is an id that "
            "gymnasium knows, with the package of its environments before it if they are registered there, as in "
            "gym:minigrid:MiniGrid-Empty-5x5-v0, or FILE.py:CLASS, as in gym:my_env.py:Room; "
            f"{', '.join(OWN)} of rollout.env_args are not passed to it{near}"
        ) from error
    return env


def _by_name(name: str, arguments: Mapping[str, Any]) -> Any:
    """An id of gymnasium, or `FILE.py:NAME`: a class of the file, or an id that it registers."""
    gymnasium = import_module("gymnasium")
    if name.startswith("oxrl/"):
        import_module("oxrl.rollouts.environments.reach")  # registers it
    file, _, last = name.rpartition(":")
    if file.endswith(".py"):
        if last.isidentifier():
            return import_object(name)(**arguments)
        import_object(f"{file}:__name__")  # importing the file registers its ids
        name = last
    return gymnasium.make(name, disable_env_checker=True, **arguments)


def _wrappers(given: Any) -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """`["minigrid.wrappers:RGBImgPartialObsWrapper", {"my.py:Crop": {"size": 64}}]`: the first is the innermost."""
    wrappers: list[tuple[Callable[..., Any], dict[str, Any]]] = []
    for each in given if isinstance(given, list) else [given]:
        one = {each: {}} if isinstance(each, str) else each
        path, options = next(iter(one.items())) if isinstance(one, Mapping) and len(one) == 1 else (None, None)
        if not isinstance(options, Mapping):
            raise ValueError(
                f"rollout.env_args.wrappers has {each!r:.100}; give a list of MODULE:CLASS, or of {{MODULE:CLASS: "
                "{argument: value}} with arguments"
            )
        wrappers.append((_function("wrappers", path), dict(options)))
    return wrappers


def _new(make: Callable[[], Any], sample: Sample) -> Any:  # noqa: ARG001 - the same for every sample, its seed comes later
    return make()


def _spaces(name: str, make: Callable[[], Any]) -> tuple[Any, Any]:
    env = make()
    try:
        return env.observation_space, env.action_space
    except AttributeError as error:
        raise ValueError(
            f"rollout.env: {name} has no observation_space or action_space; give a subclass of gymnasium.Env"
        ) from error
    finally:
        close_environment(env)


def _describer(name: str, own: Mapping[str, Any], space: Any) -> Callable[[Any], Content]:
    if (path := own.get("observation")) is not None:
        return _function("observation", path)
    shown, known = own.get("show"), dict(flat_entries(space))
    if shown is None:
        return observation_content
    if not isinstance(shown, list) or not shown or not isinstance(getattr(space, "spaces", None), Mapping):
        raise ValueError(f"rollout.env_args.show is {shown!r:.100}; give a list of entries of an observation of {name}")
    if unknown := [key for key in shown if key not in known]:
        raise ValueError(
            f"rollout.env_args.show: an observation of {name} has no {unknown[0]!r:.50}"
            f"{did_you_mean(str(unknown[0]), known)}: it has {', '.join(known)}"
        )
    return partial(observation_content, show=shown)


def _codec_action(name: str, own: Mapping[str, Any], codec: ActionCodec, space: Any) -> Callable[[Any], Any]:
    """From a decoded action to one of the environment's space."""
    if (path := own.get("action")) is not None:
        return _function("action", path)
    kind = type(space).__name__
    if isinstance(codec, ActionWords):
        if kind != "Discrete" or len(codec.words) > int(space.n):
            raise ValueError(
                f"rollout.env_args.actions has {len(codec.words)} words, and actions of {name} are {space}: words are "
                "the first numbers of a discrete space"
            )
        return partial(_numbered_action, int(space.start))
    if kind != "Box" or int(np.prod(space.shape)) != codec.size:
        raise ValueError(
            f"rollout.env_args.actions is for actions of {codec.size} numbers, and those of {name} are {space}: low "
            "and high need a number for each dimension of a Box"
        )
    return partial(_boxed_action, space)


def _numbered_action(start: int, number: int) -> int:
    return start + int(number)


def _boxed_action(space: Any, numbers: Any) -> Any:
    action = np.asarray(numbers, dtype=space.dtype).reshape(space.shape)
    return np.clip(action, space.low, space.high)


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


def _flag(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"rollout.env_args.{key} is {value!r:.100}; give true or false")
    return value


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"rollout.env_args.{key} is {value!r:.100}; give a number")
    return float(value)
