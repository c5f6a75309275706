"""Metrics of a batch of rollouts."""

from dataclasses import replace

import numpy as np

from oxrl.rollouts.report import reward_std, rollout_metrics
from oxrl.testing import fake_rollout
from oxrl.types import Score


def test_equal_rewards_have_no_spread_although_their_mean_is_rounded():
    rewards = [16 / 17] * 6
    assert np.std(rewards) > 0, "the mean is rounded"
    assert reward_std(rewards) == 0
    group = tuple(replace(fake_rollout("x"), score=Score(reward)) for reward in rewards)
    assert rollout_metrics([group], 0)["reward_std"] == 0
    assert reward_std([0.0, 1.0]) == 0.5
