"""From nothing to a trained model: it learns to write capital letters. No data set, no GPU, no config.

python examples/quickstart.py                          # a random model of 0.5 M parameters, in seconds
python examples/quickstart.py --model smollm2-135m     # a real chat model, in minutes on two CPU cores
"""

import argparse
from collections.abc import Mapping

import oxrl

PROMPTS = ["Say hello.", "Name a colour.", "Where do fish live?", "Who are you?", "What is tea?", "Name a city."]

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="tiny")
parser.add_argument("--steps", type=int, default=20)
given = parser.parse_args()


def capital_letters(rollout: oxrl.Rollout) -> float:
    """The reward of a completion: its share of capital letters."""
    return sum("A" <= letter <= "Z" for letter in rollout.response) / max(1, len(rollout.response))


rewards: list[float] = []


def log(step: int, metrics: Mapping[str, float]) -> None:
    rewards.append(metrics["reward"])
    print(f"step {step:3}  reward {rewards[-1]:.3f}  {'#' * round(50 * rewards[-1])}", flush=True)


state = oxrl.quick_start_training(
    model_name=given.model,
    prompts=PROMPTS,
    reward_fn=capital_letters,
    num_iterations=given.steps,
    gen_config=oxrl.GenerationConfig(max_new_tokens=8),
    lr=5e-3 if given.model == "tiny" else 3e-5,
    logger=log,
)
answer = oxrl.create_rollout(state.policy, state.tokenizer, "Say hi.", oxrl.GenerationConfig(max_new_tokens=8))
print(f'"Say hi." -> {answer.response!r}')
print(f"reward before {rewards[0]:.3f}, after {rewards[-1]:.3f}")
