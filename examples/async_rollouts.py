"""Concurrent rollouts: more are started than needed, the slowest are resumed in the next batch, a filter drops some.

An answer ends with its first small letter, so some take longer than others; a shorter one earns more.

    python examples/async_rollouts.py [--steps 12]
"""

import argparse
from collections.abc import Mapping

import anyio

import oxrl

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=12)
steps = parser.parse_args().steps


def brief(rollout: oxrl.Rollout) -> float:
    return 1.0 / max(1, len(rollout.generation.token_ids))


def log(step: int, metrics: Mapping[str, float]) -> None:
    shown = ("reward", "length", "drawn", "filtered_groups", "carried", "age")
    print(f"step {step:2}  " + "  ".join(f"{name} {metrics[name]:.3g}" for name in shown))


model, tokenizer = oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny")
backend, generator = oxrl.create_pytorch_backend(model, lr=5e-3), oxrl.EmbeddedGenerator(model, tokenizer)
samples = oxrl.fill_prompts("Write about {word}.", [{"word": word} for word in "tea sun key fish bread river".split()])
sampling = oxrl.GenerationConfig(max_new_tokens=16, stop_token_ids=tuple(range(ord("a"), ord("z") + 1)))
config = oxrl.RolloutConfig(
    batch_size=4,
    n_samples_per_prompt=8,
    over_sampling_factor=1.5,  # six prompts are started where four are needed
    partial_rollouts=True,  # aborted ones are resumed
    max_age=1,  # unless their first tokens are more than one version old
    reward_fn=brief,
    filter_fn=oxrl.check_reward_nonzero_std,
)
sampler = oxrl.RolloutSampler(generator, oxrl.Renderer(tokenizer), sampling)
manager = oxrl.sampling_manager(oxrl.DataBuffer(samples, seed=1), sampler, config)
plan, grpo = oxrl.OnlineConfig(num_steps=steps, max_age=1), oxrl.algorithm("grpo", correction="truncated")
history = anyio.run(lambda: oxrl.run_online(backend, grpo, manager, [generator], sampler.render, plan, log=log))
carried = sum(line["carried"] for line in history)
print(f"carried over {carried:.0f}; length before {history[0]['length']:.2f}, after {history[-1]['length']:.2f}")
