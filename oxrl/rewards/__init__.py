"""Rewards: functions from a rollout to a float or a `Score`, their table, composition and grading."""

from oxrl.rewards.compose import NORMALIZERS, clamp, normalize, scale, weighted
from oxrl.rewards.grade import Reward, as_reward, check_samples, grade, group_reward, reads
from oxrl.rewards.gym import reasoning_gym_samples
from oxrl.rewards.judge import judge_reward
from oxrl.rewards.table import BUILDERS, REWARDS, RewardCard, describe_rewards, reward
from oxrl.rewards.trial import TrialReport, try_reward

__all__ = [
    "BUILDERS",
    "NORMALIZERS",
    "REWARDS",
    "Reward",
    "RewardCard",
    "TrialReport",
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
    "try_reward",
    "weighted",
]
