"""Episodes of a `RunSpec` without training: its model, its environment and its reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from oxrl.loops.evaluate import sample_and_grade
from oxrl.models.load import load_model
from oxrl.rollouts.collect import RolloutSampler
from oxrl.run.environment import episode_bounds, open_environment
from oxrl.run.reward import load_reward
from oxrl.run.spec import RunSpec, renderer
from oxrl.types import GenerationConfig, Rollout, Sample


async def play(
    spec: RunSpec,
    samples: Sequence[Sample],
    sampling: GenerationConfig,
    *,
    n: int = 1,
    on_prompt_done: Callable[[], None] = lambda: None,
) -> list[Rollout]:
    """`n` episodes of each sample, played and graded as in the run."""
    from oxrl.generators.embedded.generator import EmbeddedGenerator

    config = spec.config
    reward = load_reward(config)
    generator = EmbeddedGenerator(load_model(spec.model, is_trainable=False), spec.tokenizer)
    async with open_environment(config) as env:
        sampler = RolloutSampler(
            generator,
            renderer(config, spec.tokenizer),
            sampling,
            env=env,
            seed=sampling.seed,
            **episode_bounds(config, env),
        )
        limit = config.reward.time_limit
        return await sample_and_grade(sampler, samples, reward, n=n, time_limit=limit, on_prompt_done=on_prompt_done)
