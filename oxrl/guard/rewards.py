"""What rewards and responses show over a window of steps: ungraded responses, rewards that length or format predict,
and repetition. Nothing here runs a model.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from oxrl.rewards.length import sampled_tokens
from oxrl.rollouts.buffer import Group, LeftOut
from oxrl.types import Rollout, Status

WINDOW = 8  # steps
LEAST_PAIRS = 200  # pairs of responses to one prompt with different rewards
LEAST_STEPS = 3
PREDICTED = 0.95  # of a rank correlation
DETERMINED = 0.995  # the same of rewards with few levels
MANY_LEVELS = 5
LENGTH, ENDED = "length", "length of responses that ended"
MANY_UNGRADED = 0.2  # of the responses of a step
GRAM = 4
REPEATED, NOT_REPEATED = 0.9, 0.5  # shares of repeated 4-grams

FORMATS: Mapping[str, Callable[[str], bool]] = {
    "a number": lambda text: bool(re.search(r"\d", text)),
    "a tag": lambda text: bool(re.search(r"</?\w+>", text)),
    "a box": lambda text: "\\boxed" in text,
    "a block of code": lambda text: "```" in text,
    "more than one line": lambda text: "\n" in text.strip(),
    "a full stop at its end": lambda text: text.rstrip().endswith("."),
    "a capital letter at its start": lambda text: text.lstrip()[:1].isupper(),
}


class Pairs(NamedTuple):
    """Pairs of responses to one prompt, by whether rewards and feature have the same order or opposite ones."""

    agree: int = 0
    disagree: int = 0
    rewards_differ: int = 0
    features_differ: int = 0

    def plus(self, other: Pairs) -> Pairs:
        return Pairs(*(a + b for a, b in zip(self, other, strict=True)))


def pairs_of(rewards: Sequence[float], features: Sequence[float]) -> Pairs:
    """Count all pairs of one group."""
    reward, feature = np.asarray(rewards, float), np.asarray(features, float)
    upper = np.triu_indices(len(reward), 1)
    by_reward = np.sign(reward[:, None] - reward[None])[upper]
    by_feature = np.sign(feature[:, None] - feature[None])[upper]
    agreement = by_reward * by_feature
    return Pairs(
        int((agreement > 0).sum()),
        int((agreement < 0).sum()),
        int((by_reward != 0).sum()),
        int((by_feature != 0).sum()),
    )


class RewardWatch:
    """`RewardWatch().note(groups)` at each step, then `by_length()`, `by_format()` and `repetition()`."""

    def __init__(self) -> None:
        self._steps: deque[dict[str, Pairs]] = deque(maxlen=WINDOW)
        self._levels: deque[set[float]] = deque(maxlen=WINDOW)
        self._repeated: list[float] = []
        self.first_repeated: float | None = None

    def note(self, groups: Sequence[Group]) -> None:
        counted = {name: Pairs() for name in (LENGTH, ENDED, *FORMATS)}
        levels: set[float] = set()
        for group in groups:
            graded = [each for each in group if each.score is not None and not each.greedy]
            rewards = [each.score.value for each in graded if each.score is not None]
            if len(set(rewards)) < 2:
                continue
            levels.update(rewards)
            lengths = [sampled_tokens(each) for each in graded]
            counted[LENGTH] = counted[LENGTH].plus(pairs_of(rewards, lengths))
            ended = [index for index, each in enumerate(graded) if each.status is Status.COMPLETED]
            of_ended = pairs_of([rewards[index] for index in ended], [lengths[index] for index in ended])
            counted[ENDED] = counted[ENDED].plus(of_ended)
            for name, test in FORMATS.items():
                features = [float(test(each.response)) for each in graded]
                counted[name] = counted[name].plus(pairs_of(rewards, features))
        self._steps.append(counted)
        self._levels.append(levels)
        self._note_repetition(groups)

    def _note_repetition(self, groups: Sequence[Group]) -> None:
        shares = [share for group in groups for each in group[:4] if (share := repeated_share(each)) is not None]
        if shares:
            mean = float(np.mean(shares))
            self.first_repeated = mean if self.first_repeated is None else self.first_repeated
            self._repeated = [*self._repeated, mean][-5:]

    def _total(self, name: str) -> Pairs:
        total = Pairs()
        for step in self._steps:
            total = total.plus(step[name])
        return total

    @property
    def enough(self) -> bool:
        return len(self._steps) >= LEAST_STEPS and self._total(LENGTH).rewards_differ >= LEAST_PAIRS

    def by_length(self) -> str | None:
        """Of 0 and 1 alone, correct responses may well be shorter, or just those that end: there, more is needed."""
        few = len(set().union(*self._levels)) < MANY_LEVELS
        pairs = self._total(ENDED if few else LENGTH)
        correlation = (pairs.agree - pairs.disagree) / max(1, pairs.rewards_differ)
        if pairs.rewards_differ < LEAST_PAIRS or abs(correlation) < (DETERMINED if few else PREDICTED):
            return None
        return (
            f"suspicion: {'longer' if correlation > 0 else 'shorter'} responses to a prompt earn more, with a rank "
            f"correlation of {correlation:.3f} over {len(self._steps)} steps: length alone predicts the reward"
        )

    def by_format(self) -> str | None:
        """By tau-b, which is near 1 only if the feature says all about the reward and the reward all about it."""
        for name in FORMATS:
            pairs = self._total(name)
            scale = float(np.sqrt(float(pairs.rewards_differ) * pairs.features_differ))
            correlation = (pairs.agree - pairs.disagree) / max(1.0, scale)
            if pairs.features_differ >= LEAST_PAIRS and abs(correlation) >= PREDICTED:
                return (
                    f"suspicion: a response earns {'more' if correlation > 0 else 'less'} if it has {name}, with a "
                    f"rank correlation of {correlation:.3f} over {len(self._steps)} steps: format alone predicts it"
                )
        return None

    @property
    def enough_text(self) -> bool:
        return len(self._repeated) == 5

    def repetition(self) -> str | None:
        first = self.first_repeated
        if first is None or first > NOT_REPEATED or min(self._repeated) < REPEATED:
            return None
        return f"the share of repeated 4-grams in a response rose from {first:.2f} to {self._repeated[-1]:.2f}"


def repeated_share(rollout: Rollout) -> float | None:
    """The share of its 4-grams that occurred before in the same response; None for short ones."""
    tokens = [token for turn in rollout.turns for token in turn.generation.token_ids]
    grams = [tuple(tokens[at : at + GRAM]) for at in range(len(tokens) - GRAM + 1)]
    return 1.0 - len(set(grams)) / len(grams) if len(grams) >= 16 else None


def ungraded(groups: Sequence[Group], left_out: Sequence[LeftOut]) -> str | None:
    """Of a step in which the reward did not grade many responses."""
    failed = [each for _, rollouts in left_out for each in rollouts if _failed_grading(each)]
    graded = sum(len(group) for group in groups) + sum(
        each.score is not None for reason, rollouts in left_out if reason != "carried" for each in rollouts
    )
    if len(failed) < MANY_UNGRADED * (len(failed) + graded) or not failed:
        return None
    return f"{len(failed)} of {len(failed) + graded} responses could not be graded; the first: {failed[0].error}"


def _failed_grading(rollout: Rollout) -> bool:
    return rollout.status is Status.FAILED and (rollout.error or "").startswith("reward ")
