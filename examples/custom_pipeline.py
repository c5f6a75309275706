"""A complete custom pipeline: prompts, reward, evaluation, checkpoints and log are all plain functions.

python examples/custom_pipeline.py [--steps 20] [--output runs/pipeline]
"""

import argparse
import random
import shutil
import string
from collections.abc import Mapping
from pathlib import Path

import oxrl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--output", type=Path, default=Path("runs/pipeline"))
given = parser.parse_args()
shutil.rmtree(given.output, ignore_errors=True)

rows = [{"word": word, "answer": string.ascii_lowercase} for word in "tea sun key fish bread river stone cloud".split()]
samples = oxrl.fill_prompts("Write about {word}.", rows, system="Small letters only.")
held_out, seen, sampling = samples[:2], samples[2:], oxrl.GenerationConfig(max_new_tokens=4)


def load_prompts(iteration: int) -> list[oxrl.Sample]:
    return random.Random(iteration).sample(seen, 4)


def obeys(rollout: oxrl.Rollout) -> float:
    return sum(letter in str(rollout.sample.answer) for letter in rollout.response) / max(1, len(rollout.response))


def evaluate(state: oxrl.PolicyState) -> dict[str, float]:
    rollouts = oxrl.create_batch_rollouts(state.policy, state.tokenizer, held_out, sampling, n_samples_per_prompt=8)
    return {"eval_reward": sum(map(obeys, rollouts)) / len(rollouts)}


def log(step: int, metrics: Mapping[str, float]) -> None:
    history.append({"step": step, **metrics})


start, history = oxrl.create_training_state(oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny"), lr=5e-3), []
before = evaluate(start)["eval_reward"]
parts = {"checkpoint_fn": oxrl.create_checkpointer(given.output, every=5), "eval_fn": evaluate, "logger": log}
grpo = oxrl.create_algorithm_config("grpo", {"clip_high": 0.28})
oxrl.train(start, load_prompts, given.steps, sampling, grpo, obeys, **parts)
oxrl.plot_history(history, given.output / "curves.png", metrics=["reward", "eval_reward", "grad_norm"])
print(f"held-out reward before {before:.3f}, after {history[-1]['eval_reward']:.3f}; model in {given.output}")
