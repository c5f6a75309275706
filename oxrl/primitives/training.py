"""The training loop as plain functions for scripts and notebooks: a step, an iteration, a run, and a quick start.

The state between calls is a `PolicyState`. Every part of a run, from loading prompts to updating the reference, is a
function that can be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from oxrl.algorithms import algorithm
from oxrl.backends.local import PyTorchTrainingBackend, create_pytorch_backend
from oxrl.concurrency import run_blocking
from oxrl.data.buffer import DataBuffer
from oxrl.data.render import Renderer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.loops.online import NO_UPDATE, rollout_items
from oxrl.loops.step import optimizer_steps, step_optimizer
from oxrl.models.load import load_model, load_tokenizer
from oxrl.models.reference import UpdateFn, frozen_copy, keep_reference
from oxrl.primitives.algorithms import AlgorithmConfig, create_algorithm_config
from oxrl.rewards.grade import AnyReward, Reward, as_reward, check_samples
from oxrl.rewards.table import reward as named_reward
from oxrl.rollouts.buffer import Group
from oxrl.rollouts.collect import RolloutConfig, RolloutSampler, sampling_manager
from oxrl.rollouts.envs import single_turn
from oxrl.rollouts.filters import check_reward_nonzero_std
from oxrl.rollouts.report import rollout_metrics
from oxrl.run.checkpoint import latest_checkpoint, load_checkpoint, read_state, save_checkpoint
from oxrl.tracking.metrics import Sink, log_to_console
from oxrl.types import (
    Algorithm,
    Backend,
    Conversation,
    EnvFn,
    GenerationConfig,
    Message,
    Sample,
    TrainFuture,
    TrainingState,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

Prompts: TypeAlias = Sequence[str | Conversation | Sample]
PromptLoader: TypeAlias = Callable[[int], Prompts]
"""Iteration, starting at 1 -> its prompts."""
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
    seed: int = 0,
    **backend: Any,
) -> PolicyState:
    """Return the initial state of a model. `backend` options are passed to `create_pytorch_backend`."""
    others = {} if ref_model is None else {"ref": ref_model}
    return PolicyState(
        create_pytorch_backend(model, lr=lr, others=others, **backend),
        EmbeddedGenerator(model, tokenizer),
        Renderer(tokenizer),
        TrainingState(seed=seed),
    )


def training_step(
    state: PolicyState,
    groups: Sequence[Group],
    algorithm_config: AlgorithmConfig,
    *,
    optimizer_step_fn: OptimizerStepFn = step_optimizer,
    micro_batch_tokens: int = 1024,
) -> tuple[PolicyState, TrainingStats]:
    """Train one step on graded groups of rollouts.

    Algorithms that need variance skip groups whose rewards are all equal; if all groups are skipped, weights do not
    change.
    """
    return run_blocking(
        partial(_training_step, state, groups, _built(algorithm_config), optimizer_step_fn, micro_batch_tokens)
    )


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
    algorithm_config: AlgorithmConfig,
    reward_fn: AnyReward | str,
    *,
    n_samples_per_prompt: int = 8,
    env: EnvFn = single_turn,
    optimizer_step_fn: OptimizerStepFn = step_optimizer,
    ref_model_update_fn: UpdateFn = keep_reference,
    micro_batch_tokens: int = 1024,
) -> tuple[PolicyState, TrainingStats]:
    """Sample `n_samples_per_prompt` rollouts per prompt in `env`, grade, train, and update the reference."""
    chosen = _built(algorithm_config)
    assert chosen.online is not None, "_built refuses offline algorithms"
    _check_reference(state, algorithm_config, chosen)
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
    if state.reference is not None:
        state.backend.others["ref"].model = ref_model_update_fn(state.reference, state.policy)
    return state, stats


def train(
    initial_state: PolicyState,
    prompt_loader: PromptLoader,
    num_iterations: int,
    gen_config: GenerationConfig,
    algorithm_config: AlgorithmConfig | AlgorithmAt,
    reward_fn: AnyReward | str,
    *,
    n_samples_per_prompt: int = 8,
    env: EnvFn = single_turn,
    optimizer_step_fn: OptimizerStepFn = step_optimizer,
    ref_model_update_fn: UpdateFn = keep_reference,
    checkpoint_fn: Callable[[PolicyState], None] = lambda _: None,
    eval_fn: Callable[[PolicyState], Mapping[str, float]] = lambda _: {},
    logger: Sink = log_to_console,
) -> PolicyState:
    """Run `num_iterations` iterations; `algorithm_config` may be a function of the iteration to switch algorithms."""
    state = initial_state
    for iteration in range(1, num_iterations + 1):
        config = algorithm_config if isinstance(algorithm_config, AlgorithmConfig) else algorithm_config(iteration)
        state, stats = training_iteration(
            state,
            prompt_loader(iteration),
            gen_config,
            config,
            reward_fn,
            n_samples_per_prompt=n_samples_per_prompt,
            env=env,
            optimizer_step_fn=optimizer_step_fn,
            ref_model_update_fn=ref_model_update_fn,
        )
        logger(state.state.step, {**stats.metrics, **eval_fn(state)})
        checkpoint_fn(state)
    return state


def create_checkpointer(root: str | Path, *, every: int = 1, keep_last: int = 2) -> Callable[[PolicyState], None]:
    """Return a `checkpoint_fn` for `train`: writes `root/step_NNNN`, a transformers folder, every `every` steps."""
    if every < 1:
        raise ValueError(f"every is {every}; give 1 or more")

    def save(state: PolicyState) -> None:
        if state.state.step % every:
            return
        newest = latest_checkpoint(root)
        if newest is not None and read_state(newest).step > state.state.step:
            raise ValueError(
                f"{newest} is of another run, beyond step {state.state.step}; choose an empty folder, or resume "
                "from it with restore_training_state"
            )
        write = partial(save_checkpoint, tokenizer=state.tokenizer, keep_last=keep_last)
        run_blocking(write, root, state.backend, state.state)

    return save


def restore_training_state(state: PolicyState, checkpoint: str | Path) -> PolicyState:
    """Restore weights, optimizer, reference and step from a checkpoint."""

    async def restore() -> TrainingState:
        plain = await load_checkpoint(checkpoint, state.backend)
        await state.generator.update_weights(await state.backend.get_weights())
        return plain

    return state._replace(state=run_blocking(restore))


def quick_start_training(
    model_name: str,
    prompts: Prompts,
    reward_fn: AnyReward | str,
    num_iterations: int,
    *,
    algorithm_config: AlgorithmConfig | None = None,
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
    built, graded, samples = _built(chosen), _reward(reward_fn), _samples(prompts)
    check_samples(graded, samples)
    model, tokenizer = load_model(model_name), load_tokenizer(model_name)
    ref_model = frozen_copy(model) if "ref" in built.others else None
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


def _built(config: AlgorithmConfig) -> Algorithm:
    built = algorithm(config.name, **config.parameters)
    if built.online is None:
        raise ValueError(f"{config.name} trains on files; here rollouts are sampled: choose an online algorithm")
    return built


def _needs_variance(built: Algorithm) -> bool:
    return built.online is not None and built.online.needs_variance


def _check_reference(state: PolicyState, config: AlgorithmConfig, built: Algorithm) -> None:
    if "ref" in built.others and state.reference is None:
        raise ValueError(
            f"{config.name} {dict(config.parameters)} needs a reference model, and the state has none; give one: "
            "create_training_state(model, tokenizer, ref_model=create_reference_model(model))"
        )


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
