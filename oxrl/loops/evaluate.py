"""Metrics on held-out items or prompts: loss and accuracy, or reward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import anyio

from oxrl.concurrency import task_group
from oxrl.data.pack import collate, count_units, pack
from oxrl.loops.memory_limits import Budget, MemoryLimits, limits_of, sized
from oxrl.loops.statistics import confidence_interval
from oxrl.loops.step import credit_step, layout_of, parallel_of, with_perplexity
from oxrl.names import renamed_keywords
from oxrl.rewards.grade import AnyReward, grade
from oxrl.rewards.length import sampled_tokens
from oxrl.rollouts.collect import RolloutSampler
from oxrl.tracking.activity import Activity
from oxrl.types import Algorithm, Backend, Item, Memory, Rollout, Sample, Status, Term, merge_metrics

_GRADED_AT_ONCE = 8  # prompts: programs under test that wait for a core would exceed their time limit


async def evaluate_offline(
    backend: Backend, algorithm: Algorithm, items: Sequence[Item], budget: Budget, memory: Memory | None = None
) -> dict[str, float]:
    """The algorithm's loss over all `items`, without training: `eval_loss`, ..."""
    limits = limits_of(budget)
    return await limits.fit(backend, partial(_evaluate_offline, backend, algorithm, items, memory or {}, limits))


async def _evaluate_offline(
    backend: Backend, algorithm: Algorithm, items: Sequence[Item], memory: Memory, limits: MemoryLimits
) -> dict[str, float]:
    # A copy of the running means: an evaluation must not update them.
    credited = await credit_step(backend, algorithm, items, limits, dict(memory))
    counts = count_units(credited)
    sums: dict[str, float] = {}
    reported: list[Mapping[str, Term]] = []
    parts = pack(credited, limits.micro_batch_tokens, layout=layout_of(backend), parallel=parallel_of(backend))
    batches = [collate(part) for part in parts]
    with sized(parts, layout_of(backend)):
        passes = await backend.logprobs(batches, reads=algorithm.reads)
    for batch, outputs in zip(batches, passes, strict=True):
        losses = algorithm.loss(outputs, batch)
        shares = {name: float(term.total) / counts[term.unit] for name, term in losses.terms.items()}
        for name, share in {"loss": sum(shares.values()), **shares}.items():
            sums[name] = sums.get(name, 0.0) + share
        reported.append(losses.metrics)
    measured = with_perplexity(sums | merge_metrics(reported, counts))
    return {f"eval_{name}": value for name, value in measured.items()}


@renamed_keywords(answers="sampler")
async def evaluate_online(
    sampler: RolloutSampler,
    samples: Sequence[Sample],
    reward: AnyReward | None,
    *,
    time_limit: float = 30.0,
    activity: Activity | None = None,
) -> dict[str, float]:
    """The mean reward of one response per held-out prompt, with its 95 % confidence interval: `eval_reward`, ...

    Responses that could not be graded are counted and left out.
    """
    activity = activity or Activity()
    activity.start("held-out answers", len(samples))  # the sampler advances it
    rollouts = await sample_and_grade(sampler, samples, reward, time_limit=time_limit)
    activity.end()
    graded = [rollout for rollout in rollouts if rollout.score is not None]
    if not graded:
        raise RuntimeError(f"none of {len(samples)} held-out responses could be graded: {rollouts[0].error}")
    rewards = [rollout.score.value for rollout in graded if rollout.score is not None]
    low, high = confidence_interval(rewards)
    return {
        "eval_reward": sum(rewards) / len(rewards),
        "eval_reward_low": low,
        "eval_reward_high": high,
        "eval_length": sum(map(sampled_tokens, graded)) / len(graded),
        "eval_truncated": sum(rollout.status is Status.TRUNCATED for rollout in graded) / len(graded),
        "eval_ungraded": float(len(rollouts) - len(graded)),
    }


async def sample_and_grade(
    sampler: RolloutSampler,
    samples: Sequence[Sample],
    reward: AnyReward | None,
    *,
    n: int = 1,
    time_limit: float = 30.0,
    on_prompt_done: Callable[[], None] = lambda: None,
) -> list[Rollout]:
    """`n` graded responses to each prompt, in order."""
    groups = [tuple(Rollout(sample, group=at, index=index) for index in range(n)) for at, sample in enumerate(samples)]

    graders = anyio.CapacityLimiter(_GRADED_AT_ONCE)

    async def serve(index: int) -> None:
        while any(rollout.status in (Status.PENDING, Status.ABORTED) for rollout in groups[index]):
            groups[index] = await sampler(groups[index])  # again if another user of the engine aborted it
        if reward is not None:
            async with graders:
                groups[index] = tuple(await grade(groups[index], reward, time_limit=time_limit))
        on_prompt_done()

    async with task_group() as tasks:
        for index in range(len(samples)):
            tasks.start_soon(serve, index)
    return [rollout for group in groups for rollout in group]
