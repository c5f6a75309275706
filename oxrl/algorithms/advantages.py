"""The groups of a step to the same rows with advantages as streams: the formulas of `credit`, per rollout.

A rollout counts once, whatever the number of its rows; its rows stay together in one item and have the same scalar
`rollout`, by which a loss groups rows into sequences.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from oxrl.algorithms import credit as crediting
from oxrl.algorithms import kl
from oxrl.types import CreditFn, Item, Memory, Row


def accepted(function: Callable[..., Any], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return those of `parameters` that `function` takes by keyword."""
    return {name: value for name, value in parameters.items() if name in inspect.signature(function).parameters}


def rollouts_in(group: Item) -> list[Item]:
    """Group the rows of an item by rollout, in order."""
    by_rollout: dict[str, list[Row]] = {}
    for row in group:
        by_rollout.setdefault(row.sequence or row.id, []).append(row)
    return [tuple(rows) for rows in by_rollout.values()]


def group_credit(
    advantage: Callable[..., Tensor],
    *,
    overlong_buffer: int = 0,
    max_length: int = 1024,
    length_penalty: float = 0.0,
    kl_in_reward: float = 0.0,
) -> CreditFn:
    """One advantage per rollout from the rewards of its group, the same on all its sampled tokens.

    A rollout's reward is its total reward, less `kl_in_reward` times its KL to the reference (the sum of
    log p - log p_ref over its tokens, as in RLOO), less DAPO's penalty for the last `overlong_buffer` of `max_length`
    tokens, plus `length_penalty` times Kimi's preference for short responses (correct: a reward above 0).
    Other parameters of `advantage` are filled by name, from the scalars of the group's rows or with `step_mean`.
    """
    if overlong_buffer:  # raises for a buffer larger than max_length before anything is sampled
        crediting.soft_overlong_penalty(torch.zeros(1), max_length=max_length, buffer=overlong_buffer)

    def reward(rollouts: Sequence[Item]) -> Tensor:
        rewards = torch.tensor([rows[0].scalars["reward"] for rows in rollouts])
        lengths = torch.tensor([float(_trained(rows)) for rows in rollouts])
        if overlong_buffer:
            penalty = crediting.soft_overlong_penalty(lengths, max_length=max_length, buffer=overlong_buffer)
            rewards = rewards + penalty
        if kl_in_reward:
            rewards = rewards - kl_in_reward * torch.stack([_kl(rows).sum() for rows in rollouts])
        if length_penalty:
            rewards = rewards + length_penalty * crediting.length_penalty(lengths, rewards > 0)
        return rewards

    def credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
        groups = [rollouts_in(group) for group in items]
        rewards = [reward(rollouts) for rollouts in groups]
        step_mean = float(torch.cat(rewards).mean())
        credited: list[Item] = []
        for rollouts, own in zip(groups, rewards, strict=True):
            scalars = {**rollouts[0][0].scalars, "step_mean": step_mean}
            values = advantage(own, **accepted(advantage, scalars))
            credited += [_constant_advantage(rows, float(value)) for rows, value in zip(rollouts, values, strict=True)]
        return _numbered(credited)

    return credit


def step_credit(over_step: Callable[[list[Tensor]], list[Tensor]], *, kl_in_reward: float = 0.0) -> CreditFn:
    """Advantages per token that depend on the whole step, from rewards per token.

    `kl_in_reward` times log p - log p_ref is subtracted at each token.
    """

    def shaped(rows: Item) -> Tensor:
        return _rewards(rows) - kl_in_reward * _kl(rows) if kl_in_reward else _rewards(rows)

    def credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
        rollouts = [rows for group in items for rows in rollouts_in(group)]
        advantages = over_step([shaped(rows) for rows in rollouts])
        return _numbered([_with_streams(rows, advantage=each) for rows, each in zip(rollouts, advantages, strict=True)])

    return credit


def gae_credit(*, gamma: float = 1.0, lam: float = 0.95, kl_in_reward: float = 0.0) -> CreditFn:
    """GAE over the recorded values; the rows of a rollout are one sequence, truncated only at its end."""

    def credited(rows: Item) -> Item:
        rewards, values, last = _rewards(rows), _stream(rows, "value"), rows[-1].scalars
        if kl_in_reward:
            policy_logprob, reference = _stream(rows, "policy_logprob"), _stream(rows, "ref_logprob")
            rewards = kl.shape_rewards_with_kl(rewards, policy_logprob, reference, kl_coef=kl_in_reward)
        advantage = crediting.gae(
            rewards, values, ended=bool(last["ended"]), last_value=last["last_value"], gamma=gamma, lam=lam
        )
        return _with_streams(rows, advantage=advantage, **{"return": advantage + values})

    def credit(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
        return _numbered([credited(rows) for group in items for rows in rollouts_in(group)])

    return credit


def row_by_row(items: list[Item], memory: Memory) -> list[Item]:  # noqa: ARG001 - the signature of credit
    """For losses per token without groups: each row is an item."""
    return [(row,) for group in items for row in group]


def _trained(rows: Item) -> int:
    return sum(int(row.mask.sum()) for row in rows)


def _stream(rows: Item, name: str) -> Tensor:
    """The values of a stream on the trained tokens of a rollout, rows concatenated."""
    return torch.from_numpy(np.concatenate([row.streams[name][row.mask] for row in rows]))


def _rewards(rows: Item) -> Tensor:
    """Per trained token: as recorded, else the total reward on the last one."""
    if "reward" in rows[0].streams:
        return _stream(rows, "reward")
    return crediting.reward_on_last_token(rows[-1].scalars["reward"], torch.ones(_trained(rows), dtype=torch.bool))


def _kl(rows: Item) -> Tensor:
    """Per trained token, from the sampler to the reference."""
    own = "sampler_logprob" if "sampler_logprob" in rows[0].streams else "policy_logprob"
    return kl.k1(_stream(rows, own), _stream(rows, "ref_logprob"))


def _constant_advantage(rows: Item, advantage: float) -> Item:
    return _with_streams(rows, advantage=torch.full((_trained(rows),), advantage))


def _with_streams(rows: Item, **values: Tensor) -> Item:
    """Add values of a rollout's trained tokens to its rows, as streams.

    The sampler's log-probs are the recorded ones; without them, the policy before this step is the sampler.
    """
    ends = np.cumsum([int(row.mask.sum()) for row in rows])[:-1]
    parts = {name: np.split(value.numpy(), ends) for name, value in values.items()}
    new_rows = []
    for index, row in enumerate(rows):
        own = "sampler_logprob" if "sampler_logprob" in row.streams else "policy_logprob"
        sampler = {"sampler_logprob": row.streams[own]} if own in row.streams else {}
        streams = {name: np.zeros(len(row), dtype=np.float32) for name in parts}
        for name, stream in streams.items():
            stream[row.mask] = parts[name][index]
        new_rows.append(replace(row, streams={**row.streams, **streams, **sampler}))
    return tuple(new_rows)


def _numbered(rollouts: Sequence[Item]) -> list[Item]:
    return [
        tuple(replace(row, scalars={**row.scalars, "rollout": float(number)}) for row in rows)
        for number, rows in enumerate(rollouts)
    ]
