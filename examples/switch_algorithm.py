"""The algorithm changes in the middle of training: a function of the iteration selects it.

python examples/switch_algorithm.py [--steps 24]
"""

import argparse
from collections.abc import Mapping

import oxrl

PROMPTS = ["Say hello.", "Name a colour.", "Where do fish live?", "Who are you?"]

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=24)
steps = parser.parse_args().steps


def small_letters(rollout: oxrl.Rollout) -> float:
    return sum("a" <= letter <= "z" for letter in rollout.response) / max(1, len(rollout.response))


def algorithm_at(iteration: int) -> oxrl.AlgorithmConfig:
    if iteration <= steps // 3:
        return oxrl.create_algorithm_config("grpo", {"kl_coef": 0.2})
    if iteration <= 2 * steps // 3:
        return oxrl.create_algorithm_config("grpo", {"kl_coef": 0.05})
    return oxrl.create_algorithm_config("dapo", {"beta": 0.1})  # the best answer against the worst, as pairs


rewards: dict[str, list[float]] = {}


def log(step: int, metrics: Mapping[str, float]) -> None:
    config = algorithm_at(step)
    rewards.setdefault(f"{config.name} {config.parameters}", []).append(metrics["reward"])
    print(f"step {step:2}  {config.name:10}  reward {metrics['reward']:.3f}")


model, tokenizer = oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny")
start = oxrl.create_training_state(model, tokenizer, lr=3e-3, ref_model=oxrl.create_reference_model(model))
sampling = oxrl.GenerationConfig(max_new_tokens=4)
oxrl.train(start, lambda _: PROMPTS, steps, sampling, algorithm_at, small_letters, logger=log)
for name, values in rewards.items():
    print(f"{name}: reward before {values[0]:.3f}, after {values[-1]:.3f}")
