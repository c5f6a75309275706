"""The longest rows of a run through one forward and backward before its first step: memory that will run out does now.

Nothing of it stays: gradients are dropped, random states are as before, no weight has moved. Where memory does run out,
here or later, `advice_on_memory` says what to lower.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import cycle, islice
from typing import Protocol

import numpy as np

from oxrl.data.pack import collate, computed_tokens, count_units, pack
from oxrl.loops.step import credit_step
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
        """Inside, memory is as full as in later steps; afterwards all is as it was."""
        ...


async def warm_up_memory(
    backend: MemoryWarmUpBackend, algorithm: Algorithm, items: Sequence[Item], budget: int
) -> list[Item]:
    """One micro-batch of the longest `items`, forward and backward; returns what was run, nothing if nothing could be.

    Some items teach nothing by themselves (answers that were all paid alike, say) and then credit refuses them. That
    they do so in a step is for the step to say.
    """
    with backend.memory_warm_up():
        try:
            warned = {"warned_of_one_side": 1.0}  # the longest few say nothing about the labels of a step
            credited = await credit_step(backend, algorithm, longest_items(items, budget), budget, warned)
        except ValueError as reason:
            logger.debug("the longest rows were not tried: %s", reason)
            return []
        part = heaviest(credited, budget, backend.layout)
        # As one batch, not divided over ranks: each of them may meet one as heavy, and runs this one.
        await backend.forward_backward([collate(part)], algorithm, count_units(part))
    return part


def longest_items(items: Sequence[Item], budget: int) -> list[Item]:
    """Those with the longest rows, as many as a micro-batch of `budget` tokens can hold."""
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
    """Items of made-up answers, as long as answers may become, to the longest prompts; every second one is paid.

    To as many as a step has `prompts`, or fewer if those have `enough` tokens.
    """
    assert algorithm.online is not None, "asked for only where a run samples"
    chance = np.random.default_rng(0)
    items: list[Item] = []
    for number, (sample, prompt) in enumerate(islice(cycle(longest_prompts(samples, render, prompts)), prompts)):
        if computed_tokens(items) >= enough:
            break
        rewards = islice(cycle((1.0, 0.0)), answers + algorithm.online.greedy)
        group = [
            Rollout(
                sample,
                (Turn(prompt, _made_up(chance.integers(0, vocabulary, max_tokens).tolist())),),
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
    rendered = ((sample, render.prompt(sample.messages, tools=sample.tools)) for sample in samples)
    longest = sorted(rendered, key=lambda pair: len(pair[1]), reverse=True)[:count]
    return [(sample, tuple(prompt.tolist())) for sample, prompt in longest]


def _made_up(tokens: Sequence[int]) -> Generation:
    # A log-prob of 0 is at least the trainer's, so that no ratio of the two can overflow.
    return Generation(tuple(tokens), (0.0,) * len(tokens), "stop")


@contextmanager
def advice_on_memory(advice: str) -> Iterator[None]:
    """A device that runs out of memory ends the run with `advice`; other failures pass."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not ran_out_of_memory(error):
            raise
        raise RuntimeError(f"memory ran out: {advice}") from error


def ran_out_of_memory(error: BaseException) -> bool:
    """torch has a name for it on a GPU; on a CPU it is a RuntimeError of its allocator."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, RuntimeError) and "allocate memory" in str(error):
        return True
    return error.__cause__ is not None and ran_out_of_memory(error.__cause__)  # a rank's arrives as a cause
