"""Several rewards, combined by a custom rule: the geometric mean, so that none is raised at the cost of another.

python examples/vector_rewards.py [--steps 25]
"""

import argparse
from collections.abc import Mapping

import oxrl

PROMPTS = ["Say hello.", "Name a colour.", "Where do fish live?", "Who are you?"]

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=25)


def letters(rollout: oxrl.Rollout) -> float:
    return sum(letter.isascii() and letter.isalpha() for letter in rollout.response) / max(1, len(rollout.response))


def variety(rollout: oxrl.Rollout) -> float:
    return len(set(rollout.response)) / max(1, len(rollout.response))


def geometric_mean(values: list[float]) -> float:
    return (values[0] * values[1]) ** 0.5


def both(rollout: oxrl.Rollout) -> oxrl.Score:
    values = oxrl.compute_vector_reward(rollout, [letters, variety])
    worth = oxrl.aggregate_vector_rewards(values, aggregator=geometric_mean)
    return oxrl.Score(worth, parts={"letters": values[0], "variety": values[1]})


history: list[Mapping[str, float]] = []
oxrl.quick_start_training(
    "tiny",
    PROMPTS,
    both,
    parser.parse_args().steps,
    gen_config=oxrl.GenerationConfig(max_new_tokens=6),
    lr=5e-3,
    logger=lambda _, metrics: history.append(metrics),
)
for name in ("reward_letters", "reward_variety", "reward"):
    print(f"{name} before {history[0][name]:.3f}, after {history[-1][name]:.3f}")
