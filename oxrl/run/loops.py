"""The two loops with plain arguments: samples for SFT, a rollout manager and engines for RL, a checkpoint folder."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import Any

from oxrl.algorithms import algorithm as named_algorithm
from oxrl.data.buffer import DataBuffer
from oxrl.data.render import Renderer
from oxrl.generators.engines import WeightLoader
from oxrl.generators.pool import WeightSync
from oxrl.guard.findings import Finding, FindingsFile
from oxrl.guard.monitor import Guard, not_written
from oxrl.loops.offline import SFTTrainingConfig, run_offline
from oxrl.loops.online import NO_TEXT, OnlineConfig, RLTrainingConfig, against_baseline, run_online
from oxrl.loops.progress import SaveFn, no_checkpoint
from oxrl.loops.step import check_backend
from oxrl.names import as_record, renamed_keywords
from oxrl.rollouts.batches import as_rollout, compute_reward
from oxrl.rollouts.collect import AsyncRolloutManager, Prompt
from oxrl.run.checkpoint import save_checkpoint
from oxrl.tracking.metrics import Sink, all_of, as_sink, log_to_console
from oxrl.types import (
    Algorithm,
    Backend,
    DataSource,
    Generator,
    Item,
    Message,
    MetricsLogger,
    Render,
    Rollout,
    Row,
    Sample,
    TrainingState,
)


async def run_sft_training(
    backend: Backend,
    samples: Sequence[Sample | Rollout | Row],
    config: SFTTrainingConfig,
    metrics_logger: Sink | MetricsLogger | None = log_to_console,
    *,
    output_dir: str | Path | None = None,
    save: SaveFn | None = None,
    tokenizer: Any = None,
    seed: int = 0,
    checks: Mapping[str, str] = {},
) -> list[dict[str, float]]:
    """Supervised fine-tuning on samples with `tokens` and `loss_mask`, on rows, or on text with its `tokenizer`.

    Checkpoints go to `output_dir/checkpoints/step_NNNN`, every `config.checkpoint_every` steps and at the end, with the
    tokenizer if there is one; all are kept. `metrics_logger` None logs nothing. `checks` are those of `run.checks`:
    all are on by default, `{"all": "off"}` turns them off; with an `output_dir` it has their states (`oxrl check`).
    """
    config = as_record(SFTTrainingConfig, config, "config")
    keep = _saver(config.checkpoint_every, backend, output_dir, save, tokenizer)
    algorithm = named_algorithm("sft")
    items = [item for index, sample in enumerate(samples) for item in _items(index, sample, algorithm, tokenizer)]
    source = DataBuffer(items, seed=seed)
    guarded = _guarded(checks, metrics_logger, output_dir)
    return await run_offline(backend, algorithm, source, config, **guarded, save=keep)


def _guarded(
    checks: Mapping[str, str], logger: Sink | MetricsLogger | None, output_dir: str | Path | None
) -> dict[str, Any]:
    """The guard of a loop and the sink of its metrics, which the guard reads, too."""
    write: Callable[[Finding], None] = not_written
    if output_dir is not None:
        Path(output_dir).mkdir(parents=True, exist_ok=True)
        write = FindingsFile(Path(output_dir))
    guard = Guard(checks, write=write)
    return {"guard": guard, "log": all_of(as_sink(logger), guard.logged)}


def _items(index: int, sample: Sample | Rollout | Row, algorithm: Algorithm, tokenizer: Any) -> list[Item]:
    if isinstance(sample, Row):
        return [(sample,)]
    if is_dataclass(sample) and not isinstance(sample, Sample):
        sample = as_rollout(sample)
        if sample.tokens:
            return [(Row(f"samples:{index}", sample.tokens, sample.loss_mask, media=sample.sample.media),)]  # type: ignore[arg-type]
        response = (*sample.sample.messages, Message("assistant", sample.response))
        sample = replace(sample.sample, messages=response)
    if tokenizer is None:
        raise ValueError(f"sample {index} is text: pass tokenizer=..., or samples with tokens and loss_mask")
    return algorithm.assemble(sample, Renderer(tokenizer))


@renamed_keywords(taking_turns="shares_weights")
async def run_rl_training(
    backend: Backend,
    data_buffer: DataSource[Prompt],
    rollout_manager: AsyncRolloutManager,
    inference_engines: Sequence[Generator | WeightLoader],
    config: RLTrainingConfig,
    metrics_logger: Sink | MetricsLogger | None = log_to_console,
    *,
    algorithm: Algorithm | None = None,
    render: Render = NO_TEXT,
    shares_weights: bool | None = None,
    output_dir: str | Path | None = None,
    save: SaveFn | None = None,
    tokenizer: Any = None,
    checks: Mapping[str, str] = {},
) -> list[dict[str, float]]:
    """Generate, train, sync. The default algorithm is REINFORCE with the config's baseline.

    An engine is a `Generator`, or has `update_weights_from_checkpoint(path)` only and is sampled from by the manager's
    `generate_fn`; without engines, that samples from the trainer's own module. `shares_weights` is whether samples come
    from the trainer's module; by default that is so unless an engine loads checkpoints. Without a `reward_fn` of the
    manager, completions are graded by `compute_reward`. Checkpoints, `metrics_logger` and `checks` are
    those of `run_sft_training`.
    """
    config = as_record(RLTrainingConfig, config, "config")
    keep = _saver(config.checkpoint_every, backend, output_dir, save, tokenizer)
    generators: list[Any] = [engine for engine in inference_engines if hasattr(engine, "update_weights")]
    loaders: list[Any] = [engine for engine in inference_engines if not hasattr(engine, "update_weights")]
    if loaders or not generators:
        generators.append(WeightSync(loaders))
    rollout_manager.data_buffer = data_buffer
    if isinstance(rollout_manager, AsyncRolloutManager) and rollout_manager.config.reward_fn is None:
        rollout_manager.config = replace(rollout_manager.config, reward_fn=compute_reward)  # from `metadata`
    return await run_online(
        backend,
        algorithm or against_baseline(config.baseline),
        rollout_manager,
        generators,
        render,
        OnlineConfig(
            num_steps=config.num_steps,
            lag=config.sync_every - 1,
            sync_every=config.sync_every,
            log_every=config.log_every,
            checkpoint_every=config.checkpoint_every,
        ),
        shares_weights=not loaders if shares_weights is None else shares_weights,
        **_guarded(checks, metrics_logger, output_dir),
        save=keep,
    )


def _saver(every: int, backend: Backend, output_dir: str | Path | None, save: SaveFn | None, tokenizer: Any) -> SaveFn:
    if output_dir is not None and save is not None:
        raise ValueError("output_dir and save are two ways to write checkpoints: pass one of them")
    if output_dir is None and save is None and every:
        raise ValueError(
            f"checkpoint_every is {every}, and there is no folder for checkpoints: pass output_dir=... (or save=..., "
            "an async function of the state and the best step), or set checkpoint_every to 0"
        )
    if output_dir is None:
        return save or no_checkpoint
    check_backend(backend, {"save"})
    root = Path(output_dir) / "checkpoints"

    async def write(state: TrainingState, best_step: int | None) -> None:  # noqa: ARG001 - all are kept
        await save_checkpoint(root, backend, state, tokenizer=tokenizer, keep_last=sys.maxsize)

    return write
