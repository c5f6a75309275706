"""The default of `lora.enabled`: all weights, or an adapter for a large model, by the model's config."""

from __future__ import annotations

from typing import Any

from oxrl.config import Config
from oxrl.config.checks import contradictions
from oxrl.config.tasks import task_config
from oxrl.models.load import count_parameters, find_model
from oxrl.run.spec import Choice
from oxrl.types import ModelConfig

LORA_FROM = 7e9  # parameters


def choose_tuning(config: Config, model: ModelConfig) -> tuple[Choice, ...]:
    """Values for `lora.enabled` and a task's learning rate that depends on it; none if the config sets `enabled`."""
    if "enabled" in config.lora.model_fields_set:
        return ()
    if find_model(model.name).kind == "adapter":
        return (Choice("lora.enabled", False, "the model has an adapter, which is trained further"),)
    parameters = count_parameters(model)
    size = f"{parameters / 1e9:.1f} billion" if parameters >= 1e9 else f"{parameters / 1e6:.0f} million"
    why = f"the model has {size} parameters, and LoRA is the default from {LORA_FROM / 1e9:.0f} billion up"
    if parameters < LORA_FROM:
        return (Choice("lora.enabled", False, why),)
    adapted = with_choices(config, (Choice("lora.enabled", True, why),))
    if wrong := contradictions(adapted):
        return (Choice("lora.enabled", False, f"{why}, but {wrong[0]}"),)
    enabled = Choice("lora.enabled", True, f"{why}; to train all weights, set lora.enabled: false")
    return (enabled, *_learning_rate(config))


def _learning_rate(config: Config) -> tuple[Choice, ...]:
    """The task's learning rate for adapters, where its rate for all weights was filled in."""
    if config.run.task is None or "lr" in config.train.model_fields_set:
        return ()
    full, lora = (task_config(config.run.task, lora=adapter)["train"]["lr"] for adapter in (False, True))
    if config.train.lr != full:
        return ()
    return (
        Choice("train.lr", lora, f"the task {config.run.task} trains an adapter with it, and all weights with {full}"),
    )


def with_choices(config: Config, choices: tuple[Choice, ...]) -> Config:
    """The config with chosen values."""
    for key_path, value, _ in choices:
        section, _, key = key_path.partition(".")
        keys: Any = getattr(config, section)
        config = config.model_copy(update={section: keys.model_copy(update={key: value})})
    return config
