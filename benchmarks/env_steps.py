"""What a step of an environment costs: alone, in Gymnasium's vector environments, and as a run takes it.

    python benchmarks/env_steps.py

CPU microseconds per step and environment. In a run every call is made in a thread of its own, so that a step can be
abandoned after `rollout.env_seconds` and those of concurrent episodes overlap where an environment waits or releases
the lock of the interpreter. `--model` measures a turn of a model for comparison.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import anyio
import gymnasium

import oxrl.rollouts.environments.reach  # noqa: F401 - registers its id
from oxrl.data.render import Renderer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.models.load import load_model, load_tokenizer
from oxrl.rollouts.game import call_environment
from oxrl.types import GenerationConfig, Message, ModelConfig, Request

TOGETHER = 16


def microseconds(run: Callable[[], int]) -> float:
    """CPU time per step of `run`, which returns the number of its steps."""
    before = time.process_time()
    steps = run()
    return 1e6 * (time.process_time() - before) / steps


def alone(name: str, steps: int) -> int:
    env = gymnasium.make(name, disable_env_checker=True)
    env.reset(seed=0)
    action = env.action_space.sample()
    for _ in range(steps):
        _, _, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            env.reset()
    return steps


def as_vector(name: str, steps: int, mode: str) -> int:
    envs = gymnasium.make_vec(name, num_envs=TOGETHER, vectorization_mode=mode)
    envs.reset(seed=0)
    actions = envs.action_space.sample()
    for _ in range(steps):
        envs.step(actions)
    return steps * TOGETHER


async def in_run(name: str, steps: int) -> int:
    async def episode() -> None:
        env = gymnasium.make(name, disable_env_checker=True)
        await call_environment(env.reset, seed=0)
        action = env.action_space.sample()
        for _ in range(steps):
            _, _, terminated, truncated, _ = await call_environment(env.step, action)
            if terminated or truncated:
                await call_environment(env.reset)

    async with anyio.create_task_group() as tasks:
        for _ in range(TOGETHER):
            tasks.start_soon(episode)
    return steps * TOGETHER


async def turns(name: str, rounds: int) -> int:
    """Concurrent turns of 8 tokens after a prompt of some words."""
    config = ModelConfig(name, dtype="float32", device="cpu")
    tokenizer = load_tokenizer(config)
    generator = EmbeddedGenerator(load_model(config), tokenizer)
    prompt = tuple(Renderer(tokenizer).prompt((Message("user", "x: 0\ngoal: 3. Answer left or right."),)).tolist())
    for number in range(rounds):
        requests = [Request(prompt, seed=number * TOGETHER + index) for index in range(TOGETHER)]
        await generator.generate(requests, GenerationConfig(max_new_tokens=8))
    return rounds * TOGETHER


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", default="tiny")
    given = parser.parse_args()
    for name in ("CartPole-v1", "oxrl/Reach-v0"):
        found: dict[str, Any] = {
            "alone": microseconds(partial(alone, name, 10 * given.steps)),
            f"vector of {TOGETHER}": microseconds(partial(as_vector, name, given.steps, "sync")),
        }
        if gymnasium.spec(name).vector_entry_point is not None:
            found["vector in one array"] = microseconds(partial(as_vector, name, given.steps, "vector_entry_point"))
        found[f"in a run, {TOGETHER} episodes"] = microseconds(lambda name=name: anyio.run(in_run, name, given.steps))
        shown = ", ".join(f"{what} {value:.0f}" for what, value in found.items())
        sys.stdout.write(f"{name}: {shown} microseconds\n")
    value = microseconds(lambda: anyio.run(turns, given.model, 4))
    sys.stdout.write(f"a turn of 8 tokens of {given.model}, {TOGETHER} at a time: {value:.0f} microseconds\n")


if __name__ == "__main__":
    main()
