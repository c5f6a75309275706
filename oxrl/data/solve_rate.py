"""A stream of prompts that prefers those that teach: each draw is weighted by the last mean rewards of the prompt.

A prompt whose completions all earn the same gives a group-relative algorithm no gradient. The memory of rewards is part
of the state, so that a resumed run draws the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oxrl.data.buffer import DataBuffer
from oxrl.types import Sample

POOLS = ("unseen", "mixed", "solved", "unsolved")


class SolveRateBuffer(DataBuffer[Sample]):
    """`SolveRateBuffer(samples, seed=1, solved=0.1).get_prompts(8)`: solved prompts are drawn a tenth as often.

    The pool of a prompt is given by the mean of its last `groups` mean rewards: at least `high` is solved, at most
    `low` unsolved. A prompt is drawn once per call, as long as there are others.
    """

    def __init__(
        self,
        items: Sequence[Sample],
        *,
        seed: int = 0,
        groups: int = 2,
        low: float = 0.0,
        high: float = 1.0,
        solved: float = 0.1,
        unsolved: float = 0.2,
    ) -> None:
        super().__init__(items, seed=seed)
        if groups < 1 or low >= high:
            raise ValueError(f"groups is 1 or more, and low less than high, not {groups}, {low} and {high}")
        if not (0 < solved <= 1 and 0 < unsolved <= 1):
            raise ValueError(f"weights are above 0 and at most 1, not solved {solved} and unsolved {unsolved}")
        self._groups, self._low, self._high = groups, low, high
        self._weights = {"unseen": 1.0, "mixed": 1.0, "solved": solved, "unsolved": unsolved}
        self._indices = {item.id: index for index, item in enumerate(items)}
        self._rewards: dict[int, list[float]] = {}
        self._drawn = 0

    def get_prompts(self, n: int) -> list[Sample]:
        drawn: list[Sample] = []
        left = self._current_weights()
        for _ in range(n):
            if not left.any():
                left = self._current_weights()
            chance = np.random.default_rng(np.random.SeedSequence([self._seed, self._drawn])).random()
            index = int(np.searchsorted(np.cumsum(left), chance * left.sum(), side="right"))
            index = min(index, int(np.flatnonzero(left)[-1]))  # rounding of the sum
            drawn.append(self._items[index])
            left[index] = 0.0
            self._drawn += 1
        return drawn

    def note(self, id: str, reward: float) -> None:
        """Remember the mean reward of a group of completions; prompts of other streams are ignored."""
        if (index := self._indices.get(id)) is not None:
            self._rewards[index] = [*self._rewards.get(index, ()), reward][-self._groups :]

    def pool(self, id: str) -> str:
        rewards = self._rewards.get(self._indices[id])
        if not rewards:
            return "unseen"
        mean = sum(rewards) / len(rewards)
        return "solved" if mean >= self._high else "unsolved" if mean <= self._low else "mixed"

    def report(self) -> dict[str, float]:
        """The share of each pool: `sampler_mixed` and so on."""
        pools = [self.pool(id) for id in self._indices]
        return {f"sampler_{pool}": pools.count(pool) / len(pools) for pool in POOLS}

    def _current_weights(self) -> Any:
        return np.array([self._weights[self.pool(item.id)] for item in self._items])

    def state(self) -> dict[str, Any]:
        rewards = {str(index): values for index, values in self._rewards.items()}
        return {**super().state(), "drawn": self._drawn, "rewards": rewards}

    def restore(self, state: Mapping[str, Any]) -> None:
        if "rewards" not in state:
            raise ValueError("the checkpoint has no memory of rewards: resume with rollout.sampler: uniform")
        super().restore(state)
        self._drawn = int(state["drawn"])
        self._rewards = {int(index): [float(each) for each in values] for index, values in state["rewards"].items()}
