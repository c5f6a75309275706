"""A custom KL penalty against a reference that is a moving average of the policy.

python examples/custom_kl.py [--steps 20]
"""

import argparse

import torch

import oxrl

PROMPTS = ["Say hello.", "Name a colour.", "Where do fish live?", "Who are you?"]

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=20)


def small_letters(rollout: oxrl.Rollout) -> float:
    return sum("a" <= letter <= "z" for letter in rollout.response) / max(1, len(rollout.response))


def only_upwards(logprob: torch.Tensor, ref_logprob: torch.Tensor) -> torch.Tensor:
    """Penalize only tokens that are likelier than under the reference."""
    return (logprob - ref_logprob).clamp(min=0.0).square() / 2


model, tokenizer = oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny")
start, reference = oxrl.create_reference_model(model), oxrl.create_reference_model(model)
follow, optimizer = oxrl.create_ema_updater(decay=0.8), torch.optim.AdamW(model.parameters(), lr=5e-3)
for step in range(parser.parse_args().steps):
    sampling = oxrl.GenerationConfig(max_new_tokens=4, seed=step)
    rollouts = oxrl.create_batch_rollouts(
        model, tokenizer, PROMPTS, sampling, n_samples_per_prompt=8, reward_fn=small_letters
    )
    items = oxrl.prepare_grpo_batch(rollouts)
    batch = oxrl.create_policy_batch(model, items)
    own, rows = batch.logprob[batch.mask], [row for item in items for row in item]
    following, fixed = (torch.cat(oxrl.get_reference_logprobs(each, rows)) for each in (reference, start))
    loss = oxrl.compute_grpo_loss(batch) + 0.05 * oxrl.compute_reverse_kl(own, following, kl_fn=only_upwards)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    reference = oxrl.update_reference_model(reference, model, update_fn=follow)
    near, far = (float(oxrl.compute_reverse_kl(own.detach(), other)) for other in (following, fixed))
    reward = sum(rollout.reward or 0.0 for rollout in rollouts) / len(rollouts)
    print(f"reward {reward:.3f}, KL to the moving reference {near:.3f}, to the start {far:.3f}")
