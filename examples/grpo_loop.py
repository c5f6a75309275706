"""GRPO as a plain PyTorch loop: sample, grade, compare within each prompt, step. Every line can be replaced.

python examples/grpo_loop.py [--steps 20]
"""

import argparse

import torch

import oxrl

PROMPTS = ["Say hello.", "Name a colour.", "Where do fish live?", "Who are you?"]

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)


def small_letters(rollout: oxrl.Rollout) -> float:
    return sum("a" <= letter <= "z" for letter in rollout.response) / max(1, len(rollout.response))


model, tokenizer = oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny")
optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.0)
history: list[float] = []
for step in range(parser.parse_args().steps):
    sampling = oxrl.GenerationConfig(max_new_tokens=4, seed=step)
    rollouts = oxrl.create_batch_rollouts(
        model, tokenizer, PROMPTS, sampling, n_samples_per_prompt=8, reward_fn=small_letters
    )
    rewards = [torch.tensor([each.reward for each in group]) for group in oxrl.group_rollouts(rollouts)]
    advantages = oxrl.compute_grpo_advantages(rewards)

    batch = oxrl.create_policy_batch(model, oxrl.prepare_grpo_batch(rollouts))
    loss = oxrl.compute_grpo_loss(batch, torch.cat(advantages))
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()

    history.append(float(torch.cat(rewards).mean()))
    print(f"step {step + 1:2}  reward {history[-1]:.3f}  loss {loss.item():+.4f}")
print(f"reward before {history[0]:.3f}, after {history[-1]:.3f}")
