"""A queue of scored groups for training, with a bound on the age of the weights that sampled them."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from oxrl.rollouts.record import rollout_from_json, rollout_to_json
from oxrl.types import Rollout

Group: TypeAlias = tuple[Rollout, ...]
"""The rollouts of one prompt."""


class LeftOut(NamedTuple):
    """`LeftOut("filtered: check_reward_nonzero_std", group)`: rollouts that were sampled and are not trained on."""

    reason: str
    rollouts: Group


def age_of(group: Sequence[Rollout], version: int) -> int:
    """Number of weight versions since the oldest token of the group was sampled."""
    return version - min(rollout.version for rollout in group)


class ReplayBuffer:
    """`ReplayBuffer(max_age=0, capacity=64)`: first in, first out; on-policy by default.

    Groups older than `max_age` when taken are dropped and counted in `expired`; with `strict`, they are an error.
    """

    def __init__(self, *, max_age: int = 0, capacity: int | None = None, strict: bool = False) -> None:
        if max_age < 0 or (capacity is not None and capacity < 1):
            raise ValueError(f"max_age is 0 or more and capacity 1 or more; got {max_age} and {capacity}")
        self.max_age, self.capacity, self.strict = max_age, capacity, strict
        self.expired = 0
        self.dropped: list[Group] = []  # by the last `take`
        self._groups: deque[Group] = deque()

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, groups: Sequence[Group], version: int) -> None:
        for group in groups:
            if self.strict:
                self._refuse_old(group, version)
            if self.capacity is not None and len(self) >= self.capacity:
                raise ValueError(f"the buffer is full: it holds {self.capacity} groups; train on some before adding")
            self._groups.append(group)

    def take(self, count: int, version: int) -> list[Group]:
        """Remove the first `count` groups and return those that are not older than `max_age`."""
        first = [self._groups.popleft() for _ in range(min(count, len(self)))]
        if self.strict:
            for group in first:
                self._refuse_old(group, version)
        young = [group for group in first if age_of(group, version) <= self.max_age]
        self.dropped = [group for group in first if age_of(group, version) > self.max_age]
        self.expired += len(self.dropped)
        return young

    def _refuse_old(self, group: Group, version: int) -> None:
        if (age := age_of(group, version)) > self.max_age:
            raise ValueError(
                f"group {group[0].group} was sampled {age} versions ago and at most {self.max_age} are allowed"
            )

    def state(self) -> dict[str, Any]:
        return {
            "expired": self.expired,
            "groups": [[rollout_to_json(rollout) for rollout in group] for group in self._groups],
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        self.expired = state["expired"]
        self._groups = deque(tuple(rollout_from_json(raw) for raw in group) for group in state["groups"])
