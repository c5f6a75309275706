"""The table of rewards, one line each, and lookup by name. Case, `-` and `_` in a name do not matter."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from oxrl.names import check_keywords, find_name, import_object, plain_name
from oxrl.rewards.choice import multiple_choice
from oxrl.rewards.code import code_reward_func
from oxrl.rewards.exact import contains, exact_match
from oxrl.rewards.grade import Reward, as_reward, defaults_of, reads_of
from oxrl.rewards.gym import reasoning_gym_score
from oxrl.rewards.length import length_target, overlong_penalty
from oxrl.rewards.mathematics import math_match
from oxrl.rewards.named import (
    format_reward_func,
    gsm8k_reward_func,
    math_reward_func,
    mcqa_reward_func,
    reasoning_reward_func,
    soft_math,
)
from oxrl.rewards.numbers import number_match
from oxrl.rewards.pattern import regex_match, tag_format

_TABLE: tuple[Callable[..., Any], ...] = (
    exact_match,
    contains,
    number_match,
    multiple_choice,
    math_match,
    regex_match,
    tag_format,
    length_target,
    overlong_penalty,
    reasoning_gym_score,
    code_reward_func,
    gsm8k_reward_func,
    math_reward_func,
    soft_math,
    format_reward_func,
    mcqa_reward_func,
    reasoning_reward_func,
)

REWARDS: Mapping[str, Callable[..., Any]] = {function.__name__: function for function in _TABLE}

BUILDERS: Mapping[str, str] = {
    "rm_reward_func": "oxrl.models.reward_model:rm_reward_func",
    "llm_judge": "oxrl.rewards.http_judge:llm_judge",
}
"""Rewards that are built from their parameters and hold a model or an endpoint: import paths, which may be in a higher
layer."""


class RewardCard(NamedTuple):
    """`RewardCard("number_match", "1 if ...", {"tolerance": 0.0}, ("answer",))`; a required parameter is `...`."""

    name: str
    explanation: str
    parameters: Mapping[str, Any]
    reads: tuple[str, ...]


def reward(name: str, **parameters: Any) -> Reward:
    """`reward("number_match", tolerance=0.01)`; `reward("my_file.py:my_reward")` for a custom function."""
    if builder := find_builder(name):
        build = import_object(builder)
        check_keywords(name, defaults_of(build), parameters, partial(_check_type, name))
        built: Reward = build(**parameters)
        return built
    function = import_object(name) if ":" in name else find_reward(name)
    if isinstance(function, Reward) and not parameters:
        return function
    if not callable(function):
        raise ValueError(f"{name} is {function!r}, which is not a reward function")
    check_keywords(name, defaults_of(function), parameters, partial(_check_type, name))
    return as_reward(partial(function, **parameters) if parameters else function)


def find_reward(name: str) -> Callable[..., Any]:
    custom = "; a custom reward is module:function or file.py:function"
    return REWARDS[find_name(name, [*REWARDS, *BUILDERS], f"no reward is called {name!r}", custom)]


def find_builder(name: str) -> str | None:
    """The import path of a reward's builder; None for plain functions."""
    return next((path for each, path in BUILDERS.items() if plain_name(each) == plain_name(name)), None)


def describe_rewards() -> dict[str, RewardCard]:
    """A card for each reward, taken from the signature and docstring of its function."""
    return {
        name: RewardCard(
            name,
            inspect.cleandoc(function.__doc__ or ""),
            {each: ... if p.default is p.empty else p.default for each, p in defaults_of(function).items()},
            reads_of(function),
        )
        for name, function in (*REWARDS.items(), *((each, import_object(path)) for each, path in BUILDERS.items()))
    }


def document() -> str:
    """The table in `docs/rewards.md`."""
    lines = ["| name | reward | reads | parameters |", "|---|---|---|---|"]
    for card in describe_rewards().values():
        shown = [f"`{each}`" if value is ... else f"`{each}={value!r}`" for each, value in card.parameters.items()]
        summary = " ".join(card.explanation.split("\n\n")[0].split()).replace("|", "\\|")
        reads = ", ".join(f"`{each}`" for each in card.reads) or "-"
        lines.append(f"| `{card.name}` | {summary} | {reads} | {', '.join(shown).replace('|', chr(92) + '|') or '-'} |")
    return "\n".join(lines)


def _check_type(reward: str, parameter: str, value: Any, default: Any) -> None:
    is_number = isinstance(default, float | int) and not isinstance(default, bool)
    wrong_number = is_number and (not isinstance(value, float | int) or isinstance(value, bool))
    wrong_bool = isinstance(default, bool) and not isinstance(value, bool)
    wrong_text = isinstance(default, str) and not isinstance(value, str)
    if wrong_number or wrong_bool or wrong_text:
        raise ValueError(f"{reward}: {parameter} must be like its default {default!r}, not {value!r}")
