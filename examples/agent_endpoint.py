"""Train an agent that has its own loop and only knows an OpenAI-compatible URL, on exactly the tokens it sampled.

python examples/agent_endpoint.py [--steps 15]
"""

import argparse
import json
import urllib.request
from dataclasses import replace

import anyio

import oxrl

QUESTIONS, SAMPLING = ["Where is the tea?", "Name a city."], oxrl.GenerationConfig(max_new_tokens=4)

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=15)


def agent(base_url: str, question: str) -> float:
    """Send two requests, as any client would, and return the reward of the conversation."""
    chat, text = [{"role": "user", "content": question}], ""
    for _ in range(2):
        request = urllib.request.Request(f"{base_url}/chat/completions", json.dumps({"messages": chat}).encode())
        with urllib.request.urlopen(request) as response:
            reply = json.load(response)["choices"][0]["message"]
        text += reply["content"]
        chat += [reply, {"role": "user", "content": "Go on."}]
    return sum("a" <= letter <= "z" for letter in text) / max(1, len(text))


async def episode(state: oxrl.PolicyState, seed: int) -> oxrl.Rollout:
    async with oxrl.recording_endpoint(state.generator, state.render, SAMPLING, seed=seed) as endpoint:
        question = QUESTIONS[seed % 2]
        reward = await anyio.to_thread.run_sync(agent, endpoint.base_url("me"), question)
        return replace(endpoint.rollout("me"), group=seed % 2, index=seed, score=oxrl.Score(reward))


state = oxrl.create_training_state(oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny"), lr=5e-3)
grpo, rewards = oxrl.create_algorithm_config("grpo"), []
for step in range(parser.parse_args().steps):
    rollouts = [anyio.run(episode, state, seed) for seed in range(16 * step, 16 * (step + 1))]
    state, stats = oxrl.training_step(state, oxrl.group_rollouts(rollouts), grpo)
    rewards.append(stats.reward)
    print(f"step {step + 1:2}  turns {stats.metrics['turns']:.0f}  reward {stats.reward:.3f}")
print(f"reward before {rewards[0]:.3f}, after {rewards[-1]:.3f}")
