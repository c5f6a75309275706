"""One line per reward, and the door to it. A name is read without regard to case, `-` and `_`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

from oxrl.names import did_you_mean, import_object, nearest_name
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
"""Rewards that are made of their parameters and hold something: a model, an endpoint. By the place to import them from,
which may lie above this layer."""


class RewardCard(NamedTuple):
    """`RewardCard("number_match", "1 if ...", {"tolerance": 0.0}, ("answer",))`; a parameter it needs is `...`."""

    name: str
    explanation: str
    parameters: Mapping[str, Any]
    reads: tuple[str, ...]


def reward(name: str, **parameters: Any) -> Reward:
    """`reward("number_match", tolerance=0.01)`; `reward("my_file.py:my_reward")` for a function of one's own."""
    if builder := find_builder(name):
        build = import_object(builder)
        _check_parameters(name, build, parameters)
        built: Reward = build(**parameters)
        return built
    function = import_object(name) if ":" in name else find_reward(name)
    if isinstance(function, Reward) and not parameters:
        return function
    if not callable(function):
        raise ValueError(f"{name} is {function!r}, which is no reward function")
    _check_parameters(name, function, parameters)
    return as_reward(partial(function, **parameters) if parameters else function)


def find_reward(name: str) -> Callable[..., Any]:
    known = {_plain(each): each for each in [*REWARDS, *BUILDERS]}
    if _plain(name) not in known:
        nearest = nearest_name(_plain(name), known)
        hint = f"; did you mean {known[nearest]}?" if nearest else "."
        raise ValueError(
            f"no reward is called {name!r}{hint} There are: {', '.join([*REWARDS, *BUILDERS])}; one of your own is "
            "module:function or file.py:function"
        )
    return REWARDS[known[_plain(name)]]


def find_builder(name: str) -> str | None:
    """Where a reward is made that holds something; None for plain functions."""
    return next((place for each, place in BUILDERS.items() if _plain(each) == _plain(name)), None)


def describe_rewards() -> dict[str, RewardCard]:
    """What there is to know about each, taken from the functions themselves."""
    return {
        name: RewardCard(
            name,
            inspect.cleandoc(function.__doc__ or ""),
            {each: ... if p.default is p.empty else p.default for each, p in defaults_of(function).items()},
            reads_of(function),
        )
        for name, function in (*REWARDS.items(), *((each, import_object(place)) for each, place in BUILDERS.items()))
    }


def document() -> str:
    """The table in `docs/rewards.md`."""
    lines = ["| name | pays | reads | parameters |", "|---|---|---|---|"]
    for card in describe_rewards().values():
        shown = [f"`{each}`" if value is ... else f"`{each}={value!r}`" for each, value in card.parameters.items()]
        pays = " ".join(card.explanation.split("\n\n")[0].split()).replace("|", "\\|")
        reads = ", ".join(f"`{each}`" for each in card.reads) or "-"
        lines.append(f"| `{card.name}` | {pays} | {reads} | {', '.join(shown).replace('|', chr(92) + '|') or '-'} |")
    return "\n".join(lines)


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")


def _check_parameters(name: str, function: Callable[..., Any], given: Mapping[str, Any]) -> None:
    schema = defaults_of(function)
    for each, value in given.items():
        if each not in schema:
            hint = did_you_mean(each, schema, f"; it takes: {', '.join(schema) or 'none'}")
            raise ValueError(f"{name} has no parameter {each}{hint}")
        default = schema[each].default
        is_number = isinstance(default, float | int) and not isinstance(default, bool)
        wrong_number = is_number and (not isinstance(value, float | int) or isinstance(value, bool))
        wrong_bool = isinstance(default, bool) and not isinstance(value, bool)
        wrong_text = isinstance(default, str) and not isinstance(value, str)
        if wrong_number or wrong_bool or wrong_text:
            raise ValueError(f"{name}: {each} must be like its default {default!r}, not {value!r}")
    if missing := [each for each, p in schema.items() if p.default is p.empty and each not in given]:
        raise ValueError(f"{name} needs {', '.join(missing)}")
