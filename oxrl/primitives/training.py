"""The training loop as plain functions for scripts and notebooks: a step, an iteration, a run, and a quick start.

The state between calls is a `PolicyState`. Every part of a run, from loading prompts to updating the reference, is a
function that can be replaced.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, overload

from oxrl.algorithms import algorithm
from oxrl.backends.local import PyTorchTrainingBackend, create_pytorch_backend, on_device, set_training_mode
from oxrl.concurrency import run_blocking
from oxrl.data.buffer import DataBuffer
from oxrl.data.pack import collate, count_units
from oxrl.data.render import Renderer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.loops.online import NO_TEXT, NO_UPDATE, rollout_items
from oxrl.loops.step import credit_step, optimizer_steps, step_optimizer
from oxrl.models.load import load_model, load_tokenizer
from oxrl.models.reference import UpdateFn, frozen_copy, keep_reference
from oxrl.primitives.algorithms import AlgorithmConfig, LossBatch, as_algorithm_config, create_algorithm_config
from oxrl.primitives.stages import as_groups, as_items
from oxrl.rewards.grade import AnyReward, Reward, as_reward, check_samples
from oxrl.rewards.table import reward as named_reward
from oxrl.rollouts.batches import group_rollouts
from oxrl.rollouts.buffer import Group
from oxrl.rollouts.collect import RolloutConfig, RolloutSampler, sampling_manager
from oxrl.rollouts.envs import single_turn
from oxrl.rollouts.filters import check_reward_nonzero_std
from oxrl.rollouts.report import rollout_metrics
from oxrl.run import checkpoint as run_checkpoint
from oxrl.run.checkpoint import latest_checkpoint, read_state
from oxrl.tracking.metrics import Sink, log_to_console
from oxrl.types import (
    Algorithm,
    Backend,
    Conversation,
    EnvFn,
    GenerationConfig,
    Item,
    Message,
    Rollout,
    Sample,
    TrainFuture,
    TrainingState,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompts: TypeAlias = Sequence[str | Conversation | Sample]
PromptLoader: TypeAlias = Callable[[int], Prompts] | Prompts | Iterable[Prompts]
"""Iteration, starting at 1 -> its prompts; or the prompts of every iteration; or an iterator over those of each."""
OptimizerStepFn: TypeAlias = Callable[[Backend], TrainFuture[dict[str, float]]]
AlgorithmAt: TypeAlias = Callable[[int], AlgorithmConfig]


class PolicyState(NamedTuple):
    """State of a training run: step and version, and handles to backend, generator and renderer."""

    backend: PyTorchTrainingBackend
    generator: EmbeddedGenerator
    render: Renderer
    state: TrainingState

    @property
    def policy(self) -> PreTrainedModel:
        return self.backend.model

    @property
    def reference(self) -> PreTrainedModel | None:
        return self.backend.others["ref"].model if "ref" in self.backend.others else None

    @property
    def optimizer(self) -> Any:
        return self.backend.optimizer

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.render.tokenizer


class TrainingStats(NamedTuple):
    """`stats.reward`, `stats.loss`, and all metrics of a step in `stats.metrics`."""

    reward: float
    loss: float
    metrics: Mapping[str, float]


def create_training_state(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    lr: float = 1e-5,
    ref_model: PreTrainedModel | None = None,
    teacher: PreTrainedModel | None = None,
    seed: int = 0,
    **backend: Any,
) -> PolicyState:
    """Return the initial state of a model. `backend` options are passed to `create_pytorch_backend`."""
    others = {name: other for name, other in {"ref": ref_model, "teacher": teacher}.items() if other is not None}
    return PolicyState(
        create_pytorch_backend(model, lr=lr, others=others, **backend),
        EmbeddedGenerator(model, tokenizer),
        Renderer(tokenizer),
        TrainingState(seed=seed),
    )


def training_step(
    state: PolicyState,
    groups: Sequence[Group] | Sequence[Rollout],
    algorithm_config: AlgorithmConfig | str,
    *,
    optimizer_step_fn: OptimizerStepFn = step_optimizer,
    micro_batch_tokens: int = 1024,
) -> tuple[PolicyState, TrainingStats]:
    """Train one step on graded rollouts, grouped by prompt; `algorithm_config` may be the name of an algorithm.

    Algorithms that need variance skip groups whose rewards are all equal; if all groups are skipped, weights do not
    change.
    """
    algorithm_config = as_algorithm_config(algorithm_config)
    chosen = _built(algorithm_config)
    _check_state(state, algorithm_config, chosen)
    given = as_groups(groups, "training_step")
    return run_blocking(_training_step, state, given, chosen, optimizer_step_fn, micro_batch_tokens)


async def _training_step(
    state: PolicyState, groups: Sequence[Group], chosen: Algorithm, optimizer_step_fn: OptimizerStepFn, budget: int
) -> tuple[PolicyState, TrainingStats]:
    backend, plain = state.backend, state.state
    memory = dict(plain.cursor.get("memory", {}))
    metrics = rollout_metrics(groups, backend.version)
    used = [group for group in groups if check_reward_nonzero_std(group)] if _needs_variance(chosen) else groups
    if items := rollout_items(chosen, used, state.render):
        (latest,) = await optimizer_steps(backend, chosen, items, budget, memory, optimizer_step=optimizer_step_fn)
        metrics |= latest
    else:
        metrics |= NO_UPDATE
    await state.generator.update_weights(await backend.get_weights())
    after = plain._replace(step=plain.step + 1, version=backend.version, cursor={**plain.cursor, "memory": memory})
    return state._replace(state=after), TrainingStats(metrics.get("reward", 0.0), metrics["loss"], metrics)


def training_iteration(
    state: PolicyState,
    prompts: Prompts,
    gen_config: GenerationConfig,
    algorithm_config: AlgorithmConfig | str,
    reward_fn: AnyReward | str,
    *,
    n_samples_per_prompt: int = 8,
    env: EnvFn = single_turn,
    optimizer_step_fn: OptimizerStepFn = step_optimizer,
    ref_model_update_fn: UpdateFn = keep_reference,
    micro_batch_tokens: int = 1024,
) -> tuple[PolicyState, TrainingStats]:
    """Sample `n_samples_per_prompt` rollouts per prompt in `env`, grade, train, and update the reference."""
    algorithm_config = as_algorithm_config(algorithm_config)
    chosen = _built(algorithm_config)
    assert chosen.online is not None, "_built refuses offline algorithms"
    _check_state(state, algorithm_config, chosen)
    state.backend.set_temperature(gen_config.temperature)
    samples = _samples(prompts)
    seeded = gen_config._replace(seed=state.state.seed + state.state.step)
    manager = sampling_manager(
        DataBuffer(samples, shuffle=False),
        RolloutSampler(state.generator, state.render, seeded, env=env, seed=state.state.seed + state.state.step),
        RolloutConfig(
            batch_size=len(samples),
            n_samples_per_prompt=n_samples_per_prompt,
            reward_fn=_reward(reward_fn),
            greedy=chosen.online.greedy,
            min_group_size=chosen.online.min_group_size,
        ),
    )
    groups = run_blocking(partial(manager.collect, state.backend.version)).groups
    state, stats = training_step(
        state,
        groups,
        algorithm_config,
        optimizer_step_fn=optimizer_step_fn,
        micro_batch_tokens=micro_batch_tokens,
    )
    if state.reference is not None and ref_model_update_fn is not keep_reference:
        state.backend.others["ref"].model = ref_model_update_fn(state.reference, state.policy)
        state.backend.reference_moved = True  # so that checkpoints have it
    return state, stats


def train(
    initial_state: PolicyState,
    prompt_loader: PromptLoader,
    num_iterations: int,
    gen_config: GenerationConfig,
    algorithm_config: AlgorithmConfig | AlgorithmAt | str,
    reward_fn: AnyReward | str,
    *,
    n_samples_per_prompt: int = 8,
    env: EnvFn = single_turn,
    optimizer_step_fn: OptimizerStepFn = step_optimizer,
    ref_model_update_fn: UpdateFn = keep_reference,
    checkpoint_fn: Callable[[PolicyState], Any] = lambda _: None,
    eval_fn: Callable[[PolicyState], Mapping[str, float] | float | None] = lambda _: None,
    logger: Sink = log_to_console,
) -> PolicyState:
    """Run `num_iterations` iterations; `algorithm_config` may be a function of the iteration to switch algorithms.

    `prompt_loader` is a function of the iteration, a list of prompts for every iteration, or an iterator over the
    prompts of each.
    """
    if initial_state.reference is None and ref_model_update_fn is not keep_reference:
        raise ValueError(
            "ref_model_update_fn updates a reference, and the state has none: create_training_state(model, tokenizer, "
            "ref_model=create_reference_model(model))"
        )
    state, prompts_of = initial_state, _prompts_by_iteration(prompt_loader)
    for iteration in range(1, num_iterations + 1):
        config = algorithm_config(iteration) if callable(algorithm_config) else algorithm_config
        state, stats = training_iteration(
            state,
            prompts_of(iteration),
            gen_config,
            config,
            reward_fn,
            n_samples_per_prompt=n_samples_per_prompt,
            env=env,
            optimizer_step_fn=optimizer_step_fn,
            ref_model_update_fn=ref_model_update_fn,
        )
        logger(state.state.step, {**stats.metrics, **_eval_metrics(eval_fn(state))})
        checkpoint_fn(state)
    return state


@overload
def save_checkpoint(state: PolicyState, path: str | Path | None = None, *, keep_last: int = 2) -> Path: ...


@overload
def save_checkpoint(
    state: str | Path, path: Backend, training_state: TrainingState, **options: Any
) -> Coroutine[Any, Any, Path]: ...


def save_checkpoint(state: Any, path: Any = None, *training_state: Any, **options: Any) -> Any:
    """`save_checkpoint(state, "runs/mine")` writes `runs/mine/step_NNNN`, a transformers folder, and returns its path.

    Without a path it is `$OXRL_CHECKPOINT_DIR`, or `./checkpoints`. The last `keep_last` checkpoints are kept. It is a
    `checkpoint_fn` for `train`. Async loops use `await save_checkpoint(root, backend, training_state)`.
    """
    if not isinstance(state, PolicyState):
        return run_checkpoint.save_checkpoint(state, path, *training_state, **options)
    root = _checkpoint_root(path)
    newest = latest_checkpoint(root)
    if newest is not None and read_state(newest).step > state.state.step:
        raise ValueError(
            f"{newest} is of another run, beyond step {state.state.step}; choose an empty folder, or resume "
            "from it with load_checkpoint"
        )
    write = partial(run_checkpoint.save_checkpoint, tokenizer=state.tokenizer, **options)
    return run_blocking(write, root, state.backend, state.state)


def create_checkpointer(root: str | Path, *, every: int = 1, keep_last: int = 2) -> Callable[[PolicyState], None]:
    """Return a `checkpoint_fn` for `train` that calls `save_checkpoint` every `every` steps."""
    if every < 1:
        raise ValueError(f"every is {every}; give 1 or more")

    def save(state: PolicyState) -> None:
        if state.state.step % every == 0:
            save_checkpoint(state, root, keep_last=keep_last)

    return save


@overload
def load_checkpoint(path: PolicyState, backend: str | Path | None = None) -> PolicyState: ...


@overload
def load_checkpoint(path: str | Path, backend: PolicyState) -> PolicyState: ...


@overload
def load_checkpoint(path: str | Path, backend: Backend) -> Coroutine[Any, Any, TrainingState]: ...


def load_checkpoint(path: Any, backend: Any = None) -> Any:
    """`state = load_checkpoint("runs/mine", state)` restores weights, optimizer, reference, heads and step.

    `path` is a checkpoint, or a folder of checkpoints, whose newest is loaded; both orders of the arguments work. Async
    loops use `await load_checkpoint(path, backend)`.
    """
    if isinstance(path, PolicyState):
        return restore_training_state(path, _checkpoint_root(backend))
    if isinstance(backend, PolicyState):
        return restore_training_state(backend, path)
    return run_checkpoint.load_checkpoint(path, backend)


def restore_training_state(state: PolicyState, checkpoint: str | Path) -> PolicyState:
    """Restore weights, optimizer, reference and step from a checkpoint, or from the newest in a folder."""

    async def restore() -> TrainingState:
        found = latest_checkpoint(checkpoint) or checkpoint
        plain = await run_checkpoint.load_checkpoint(found, state.backend)
        await state.generator.update_weights(await state.backend.get_weights())
        return plain

    return state._replace(state=run_blocking(restore))


def _checkpoint_root(path: str | Path | None) -> Path:
    return Path(path or os.environ.get("OXRL_CHECKPOINT_DIR") or "checkpoints")


def create_loss_batch(
    state: PolicyState,
    data: Sequence[Sample] | Sequence[Rollout] | Sequence[Group] | Sequence[Item],
    algorithm_config: AlgorithmConfig | str,
    *,
    micro_batch_tokens: int = 1024,
) -> LossBatch:
    """Return what `compute_loss_by_algorithm` needs for any algorithm, from samples, graded rollouts or their rows.

    Log-probs of other models and advantages are computed as in a training step, then one forward pass with gradient.
    """
    algorithm_config = as_algorithm_config(algorithm_config)
    chosen = algorithm(algorithm_config.source, **algorithm_config.parameters)
    _check_state(state, algorithm_config, chosen)
    memory = dict(state.state.cursor.get("memory", {}))
    items = items_of(data, chosen, state.render, "create_loss_batch")
    credited = run_blocking(credit_step, state.backend, chosen, items, micro_batch_tokens, memory)
    batch = on_device(collate(credited), state.backend.device)
    set_training_mode(state.policy, dropout=not chosen.compares_logprobs)
    outputs = state.backend.outputs(batch, chosen.reads)
    return LossBatch(algorithm_config, outputs, batch, count_units(credited))


def items_of(data: Any, chosen: Algorithm, render: Renderer | None, owner: str) -> list[Item]:
    """Return items of rows for an algorithm, from items, from graded rollouts, or from samples if they are rendered."""
    if render is not None and isinstance(data, Sequence) and data and isinstance(data[0], Sample):
        return [item for sample in data for item in chosen.assemble(sample, render)]
    text = NO_TEXT if render is None else render
    return as_items(data, owner, lambda given: rollout_items(chosen, group_rollouts(given), text))


def quick_start_training(
    model_name: str,
    prompts: Prompts,
    reward_fn: AnyReward | str,
    num_iterations: int,
    *,
    algorithm_config: AlgorithmConfig | AlgorithmAt | str | None = None,
    gen_config: GenerationConfig = GenerationConfig(max_new_tokens=64),  # noqa: B008 - immutable
    prompts_per_iteration: int = 8,
    lr: float = 1e-5,
    seed: int = 0,
    **options: Any,
) -> PolicyState:
    """Load a model by name and train it on prompts, by default with GRPO. `options` are passed to `train`.

    `reward_fn` is a function, or a name from `oxrl rewards list`.
    """
    chosen = algorithm_config or create_algorithm_config("grpo")
    built = _built(as_algorithm_config(chosen(1) if callable(chosen) else chosen))
    graded, samples = _reward(reward_fn), _samples(prompts)
    check_samples(graded, samples)
    model, tokenizer = load_model(model_name), load_tokenizer(model_name)
    may_switch = callable(chosen)  # perhaps to one that needs a reference
    ref_model = frozen_copy(model) if may_switch or "ref" in built.others else None
    state = create_training_state(model, tokenizer, lr=lr, ref_model=ref_model, seed=seed, heads=built.heads)
    source = DataBuffer(samples, seed=seed)
    return train(
        state,
        lambda _: source.get_prompts(min(prompts_per_iteration, len(samples))),
        num_iterations,
        gen_config,
        chosen,
        graded,
        **options,
    )


def _prompts_by_iteration(loader: Any) -> Callable[[int], Prompts]:
    """Return a loader of any kind as a function of the iteration."""
    if callable(loader):
        return loader  # type: ignore[no-any-return]
    if isinstance(loader, str) or not isinstance(loader, Iterable):
        raise ValueError(
            f"prompt_loader is a {type(loader).__name__}; give a function of the iteration, a list of prompts, or an "
            "iterator over the prompts of each iteration"
        )
    if isinstance(loader, Sequence):
        if loader and isinstance(loader[0], list):
            raise ValueError("prompt_loader is a list of lists, and a list holds prompts: pass iter(prompt_loader)")
        return lambda _: loader
    batches = iter(loader)

    def next_batch(iteration: int) -> Prompts:
        nonlocal batches
        batch = next(batches, None)
        if batch is None and batches is not loader:  # a loader such as torch's: start over
            batches = iter(loader)
            batch = next(batches, None)
        if batch is None:
            raise ValueError(f"prompt_loader ended before iteration {iteration}; itertools.cycle repeats one")
        return [batch] if isinstance(batch, str | Conversation | Sample) else batch

    return next_batch


def _eval_metrics(found: Mapping[str, float] | float | None) -> Mapping[str, float]:
    """Return what an `eval_fn` returned as metrics; one number is the metric `eval`."""
    if found is None:
        return {}
    return found if isinstance(found, Mapping) else {"eval": float(found)}


def _built(config: AlgorithmConfig) -> Algorithm:
    built = algorithm(config.source, **config.parameters)
    if built.online is None:
        raise ValueError(f"{config.name} trains on files; here rollouts are sampled: choose an online algorithm")
    return built


def _needs_variance(built: Algorithm) -> bool:
    return built.online is not None and built.online.needs_variance


def _check_state(state: PolicyState, config: AlgorithmConfig, built: Algorithm) -> None:
    """Raise if the state has not all models and heads that the algorithm needs."""
    wanted = f"{config.name} {dict(config.parameters)} needs"
    if "ref" in built.others and state.reference is None:
        raise ValueError(
            f"{wanted} a reference model, and the state has none; give one: "
            "create_training_state(model, tokenizer, ref_model=create_reference_model(model))"
        )
    if "teacher" in built.others and "teacher" not in state.backend.others:
        raise ValueError(f"{wanted} a teacher: create_training_state(model, tokenizer, teacher=load_model(NAME))")
    if missing := sorted(set(built.heads) - set(state.backend.module.heads)):
        raise ValueError(f"{wanted} a {missing[0]} head: create_training_state(model, tokenizer, heads={missing})")


def _reward(given: AnyReward | str) -> Reward:
    return named_reward(given) if isinstance(given, str) else as_reward(given)


def _samples(prompts: Prompts) -> list[Sample]:
    if isinstance(prompts, str) or not len(prompts):
        raise ValueError(f'prompts is {prompts!r}; give a list with at least one prompt, as ["Say hello."]')
    return [_sample(prompt, number) for number, prompt in enumerate(prompts)]


def _sample(prompt: Any, number: int) -> Sample:
    if isinstance(prompt, Sample):
        return prompt
    if isinstance(prompt, str | Conversation):
        chat = (Message("user", prompt),) if isinstance(prompt, str) else prompt.messages
        return Sample(f"prompt {number}", chat)
    raise ValueError(
        f"prompt {number} is a {type(prompt).__name__}; give a text, a Conversation or a Sample. Convert rows with "
        "columns, such as prompt and answer, by load_samples(rows).samples"
    )
