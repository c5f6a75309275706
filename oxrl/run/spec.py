"""`RunSpec`: a `Config` with everything that it names resolved, and the functions that resolve its parts.

Rewards are resolved in `reward`, rows in `data`; `prepare` puts a `RunSpec` together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.algorithms import algorithm
from oxrl.config import Config, ConfigError
from oxrl.config.registry import find_engine, resolved
from oxrl.data.actions import action_codec
from oxrl.data.render import Renderer
from oxrl.models.lora import LoraSettings
from oxrl.names import did_you_mean
from oxrl.rewards import Reward
from oxrl.rollouts.collect import RolloutConfig
from oxrl.rollouts.filters import check_reward_nonzero_std, keep_all, named_filter
from oxrl.run.folder import resolve_weights
from oxrl.types import Algorithm, DataSource, GenerationConfig, ModelConfig, Sample


class Choice(NamedTuple):
    """`Choice("lora.enabled", True, "the model has 7.6 billion parameters")`: a value chosen for the user, and why."""

    key: str
    value: Any
    why: str

    def __str__(self) -> str:
        return f"{self.key} {self.value}: {self.why}"


@dataclass(frozen=True)
class RunSpec:
    """All that a run needs before weights are loaded.

    An online run draws prompts (`Sample`) from `source`, any other run rows (`Item`).
    """

    config: Config  # with device placement and reward decided
    folder: Path
    resume_from: Path | None
    schedule: Mapping[int, Algorithm]  # first step -> algorithm; most runs have one entry
    model: ModelConfig
    lora: LoraSettings | None
    other_models: Mapping[str, str]  # role -> weights: "ref", "teacher"
    tokenizer: Any
    source: DataSource[Any]
    rows: list[Any]  # all that `source` draws from
    held_out: list[Any]
    left_out: int  # rows that could not be read, or are too long
    num_steps: int
    online: bool
    samples: tuple[Sample, ...] = ()  # of an offline run, the first of what its rows were made from
    choices: tuple[Choice, ...] = ()  # values of its config that depend on the model

    @property
    def algorithm(self) -> Algorithm:
        """The one that the run starts with."""
        return self.schedule[1]

    def with_config(self, config: Config) -> RunSpec:
        """The same run with other sizes in its config: micro-batch, checkpointing, slots."""
        return replace(self, config=config, model=model_config(config))


def renderer(config: Config, tokenizer: Any) -> Renderer:
    """How a run renders its rows and prompts."""
    data = config.data
    return Renderer(
        tokenizer,
        max_len=data.max_seq_len,
        template_kwargs=data.template_kwargs,
        actions=action_codec(data.actions),
    )


def expected_samples(config: Config, steps: int) -> float:
    """About how many tokens so many steps sample: half of the allowed lengths."""
    rollout = config.rollout
    return 0.5 * steps * config.batch_size * rollout.n_samples * rollout.max_tokens


def model_config(config: Config) -> ModelConfig:
    model = config.model
    device = "cpu" if model.device == "auto" and config.run.training_gpus == 0 else model.device
    return ModelConfig(
        name=resolve_weights(model.name),
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        gradient_checkpointing=model.gradient_checkpointing,
        trust_remote_code=model.trust_remote_code,
        device=device,
        revision=model.revision,
        chat_template=model.chat_template,
        freeze=model.freeze,
    )


def frozen_model_config(config: Config, name: str) -> ModelConfig:
    """Another model that is not trained: a reference, a teacher, a reward model or a judge."""
    return model_config(config)._replace(
        name=resolve_weights(name), revision=None, chat_template=None, gradient_checkpointing=False
    )


def lora_settings(config: Config) -> LoraSettings | None:
    lora = config.lora
    targets = lora.target_modules if isinstance(lora.target_modules, str) else tuple(lora.target_modules)
    return LoraSettings(lora.r, lora.alpha, lora.dropout, targets) if lora.enabled else None


def first_algorithm(config: Config) -> Algorithm:
    return algorithm(config.train.alg_name, **config.train.alg_params)


def algorithm_schedule(config: Config) -> dict[int, Algorithm]:
    """First step -> algorithm; most runs have one entry."""
    later = {each.step: algorithm(each.alg_name, **each.alg_params) for each in config.train.alg_schedule}
    return {1: first_algorithm(config), **dict(sorted(later.items()))}


def other_models(config: Config) -> dict[str, str]:
    """The weights of models that the algorithms compare with, by role; the reference of an adapter is its base."""
    roles = set().union(*(each.others for each in algorithm_schedule(config).values()))
    models: dict[str, str] = {}
    if "teacher" in roles:
        if config.model.teacher is None:
            raise ConfigError(f"{config.train.alg_name} learns from a teacher: set model.teacher to its name")
        models["teacher"] = resolve_weights(config.model.teacher)
    if "ref" in roles and (config.model.ref_model is not None or not config.lora.enabled):
        models["ref"] = resolve_weights(config.model.ref_model or config.model.name)
    return models


def reference_is_adapter(config: Config) -> bool:
    """Whether the reference is a second adapter: with LoRA and `model.ref_update`, where the base stays fixed."""
    model = config.model
    compared = any("ref" in each.others for each in algorithm_schedule(config).values())
    return compared and config.lora.enabled and model.ref_model is None and model.ref_update != "fixed"


def check_engine_settings(config: Config) -> None:
    from oxrl.generators.connection import Connection, check_distinct
    from oxrl.generators.vllm.settings import vllm_settings

    engine, check = config.inference_engine, find_engine(config.engine).check_settings
    if check is not None:
        resolved(check)(engine.others)
    elif engine.others:  # settings of another engine have no effect; a misspelt key is an error
        for key in sorted(engine.others.keys() - vllm_settings()):
            if meant := did_you_mean(key, type(engine).model_fields):
                raise ConfigError(f"inference_engine.{key} is no key{meant}")
    for url in config.inference_engine.urls:
        Connection(url).checked()
    check_distinct(config.inference_engine.urls)


def rollout_config(config: Config, reward_fn: Reward | None) -> RolloutConfig:
    rollout, online = config.rollout, first_algorithm(config).online
    assert online is not None, "only an online run samples"
    filter_fn = check_reward_nonzero_std if online.needs_variance else keep_all
    return RolloutConfig(
        batch_size=config.batch_size,
        n_samples_per_prompt=rollout.n_samples,
        over_sampling_factor=rollout.over_sampling_factor,
        reward_fn=reward_fn,
        filter_fn=filter_fn if rollout.filter is None else named_filter(rollout.filter, **rollout.filter_params),
        greedy=online.greedy,
        min_group_size=online.min_group_size,
        max_draws=rollout.max_draws,
        partial_rollouts=rollout.partial_rollouts,
        # In versions, of which a step makes one per optimizer step.
        max_age=(rollout.lag + rollout.partial_rollouts) * config.train.iterations * config.train.mini_batches,
        reward_time_limit=config.reward.time_limit,
    )


def sampling_config(config: Config) -> GenerationConfig:
    rollout = config.rollout
    return GenerationConfig(
        max_new_tokens=rollout.max_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop=tuple(rollout.stop),
        seed=config.run.seed,
    )
