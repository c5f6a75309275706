"""Rewards: a rollout to a float or a `Score`. The table of those that come along, how they compose, how they run."""

from oxrl.rewards.compose import NORMALIZERS, clamp, normalize, scale, weighted
from oxrl.rewards.grade import Reward, as_reward, check_samples, grade, group_reward, reads
from oxrl.rewards.gym import reasoning_gym_samples
from oxrl.rewards.judge import judge_reward
from oxrl.rewards.table import REWARDS, RewardCard, describe_rewards, reward

__all__ = [
    "NORMALIZERS",
    "REWARDS",
    "Reward",
    "RewardCard",
    "as_reward",
    "check_samples",
    "clamp",
    "describe_rewards",
    "grade",
    "group_reward",
    "judge_reward",
    "normalize",
    "reads",
    "reasoning_gym_samples",
    "reward",
    "scale",
    "weighted",
]
