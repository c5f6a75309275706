"""Memory warm-up: one forward and backward over the longest rows of a run, so that it runs out of memory at the start.

It has no effect on training: gradients are dropped, random states restored, weights unchanged. Where memory runs out,
here or later, `memory_limits` lowers what can be lowered, and then `advice_on_memory` reports what else to change.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from itertools import cycle, islice
from typing import Protocol

import numpy as np

from oxrl.data.pack import collate, computed_tokens, count_units, pack
from oxrl.loops.memory_limits import Budget, MemoryLimits, limits_of, sized
from oxrl.loops.step import credit_step, layout_of
from oxrl.machine.out_of_memory import MemoryAdviceError, ran_out_of_memory
from oxrl.types import (
    Algorithm,
    Backend,
    Generation,
    Item,
    Layout,
    Render,
    Rollout,
    Sample,
    Score,
    Turn,
)

logger = logging.getLogger(__name__)


class MemoryWarmUpBackend(Backend, Protocol):
    def memory_warm_up(self) -> AbstractContextManager[None]:
        """Inside, memory is as full as in later steps; afterwards the state is restored."""
        ...


async def warm_up_memory(
    backend: MemoryWarmUpBackend, algorithm: Algorithm, items: Sequence[Item], budget: Budget
) -> list[Item]:
    """Run one micro-batch of the longest `items`, forward and backward; return it, or nothing if none could be run.

    Some items alone have no gradient (a group with equal rewards, say) and credit refuses them; a training step would
    report that.
    """
    limits = limits_of(budget)
    return await limits.fit(backend, partial(_run_heaviest, backend, algorithm, items, limits))


async def _run_heaviest(
    backend: MemoryWarmUpBackend, algorithm: Algorithm, items: Sequence[Item], limits: MemoryLimits
) -> list[Item]:
    budget = limits.micro_batch_tokens
    with backend.memory_warm_up():
        try:
            warned = {"warned_of_one_side": 1.0}  # a few items say nothing about the labels of a step
            credited = await credit_step(backend, algorithm, longest_items(items, budget), limits, warned)
        except ValueError as reason:
            logger.debug("no memory warm-up: %s", reason)
            return []
        part = heaviest(credited, budget, layout_of(backend))
        with sized([part], layout_of(backend), trains=True):
            # As one batch that every rank runs: each of them can get one as large in training.
            await backend.forward_backward([collate(part)], algorithm, count_units(part))
    return part


def longest_items(items: Sequence[Item], budget: int) -> list[Item]:
    """The items with the longest rows, as many as fit into a micro-batch of `budget` tokens."""
    chosen: list[Item] = []
    for item in sorted(items, key=lambda item: -max(map(len, item))):
        if computed_tokens(chosen) >= budget:
            break
        chosen.append(item)
    return chosen


def heaviest(items: Sequence[Item], budget: int, layout: Layout) -> list[Item]:
    """The micro-batch with the most tokens."""
    return max(pack(items, budget, layout=layout), key=lambda part: sum(len(row) for item in part for row in item))


def longest_answers(
    samples: Sequence[Sample],
    render: Render,
    algorithm: Algorithm,
    *,
    prompts: int,
    answers: int,
    max_tokens: int,
    vocabulary: int,
    enough: int,
) -> list[Item]:
    """Items of random responses of the maximum length to the longest prompts; every second one has a reward.

    For up to `prompts` prompts, fewer if those have `enough` tokens.
    """
    assert algorithm.online is not None, "only an online run samples"
    chance = np.random.default_rng(0)
    ordinary = np.setdiff1d(np.arange(vocabulary), list(getattr(render, "placeholder_ids", ())))
    items: list[Item] = []
    for number, (sample, prompt) in enumerate(islice(cycle(longest_prompts(samples, render, prompts)), prompts)):
        if computed_tokens(items) >= enough:
            break
        rewards = islice(cycle((1.0, 0.0)), answers + algorithm.online.greedy)
        group = [
            Rollout(
                sample,
                (Turn(prompt, _random_generation(chance.choice(ordinary, max_tokens).tolist())),),
                group=number,
                index=index,
                score=Score(reward),
                greedy=index == answers,
            )
            for index, reward in enumerate(rewards)
        ]
        items += algorithm.online.items(group, render)
    return items


def longest_prompts(samples: Sequence[Sample], render: Render, count: int) -> list[tuple[Sample, tuple[int, ...]]]:
    rendered = ((sample, render.prompt(sample.messages, tools=sample.tools, media=sample.media)) for sample in samples)
    longest = sorted(rendered, key=lambda pair: len(pair[1]), reverse=True)[:count]
    return [(sample, tuple(prompt.tolist())) for sample, prompt in longest]


def _random_generation(tokens: Sequence[int]) -> Generation:
    # A log-prob of 0 is at least the trainer's, so that no ratio of the two can overflow.
    return Generation(tuple(tokens), (0.0,) * len(tokens), "stop")


@contextmanager
def advice_on_memory(advice: str) -> Iterator[None]:
    """Raise an out-of-memory error again with `advice`; other errors, and one with advice, pass unchanged."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MemoryAdviceError) or not ran_out_of_memory(error):
            raise
        raise MemoryAdviceError(f"memory ran out: {advice}") from error
