"""A `Config` to live objects and a finished run; the only file that knows every name."""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from oxrl.algorithms import algorithm
from oxrl.checkpoint import best_checkpoint, latest_checkpoint, load_checkpoint, read_state, save_checkpoint
from oxrl.config import Config, ConfigError
from oxrl.data.assemble import Assembled, assemble
from oxrl.data.buffer import DataBuffer, MixedBuffer
from oxrl.data.render import Renderer
from oxrl.data.sources import load_samples
from oxrl.metrics import JSONLLogger, LiveConsole, Sink, all_of
from oxrl.models.load import check_model, check_tokenizer, load_model, load_tokenizer
from oxrl.models.lora import LoraSettings, attach_lora, save_adapter
from oxrl.types import Algorithm, DataSource, Item, ModelConfig, Sample, TrainingState

logger = logging.getLogger(__name__)


class RunResult(NamedTuple):
    """Where a run went and what it logged."""

    folder: Path
    checkpoint: Path
    history: list[dict[str, float]]


class Prepared(NamedTuple):
    """All that can be known, and can be wrong, before a weight is loaded."""

    config: Config
    folder: Path
    tokenizer: Any
    source: DataSource[Item]
    held_out: list[Item]
    num_steps: int
    resume_from: Path | None


def train_run(config: Config, output: str | Path | None = None, *, resume: bool = False) -> RunResult:
    """From a config to a finished run: check, prepare, load, train, save."""
    return train_prepared(prepare_run(config, output, resume=resume))


def run_folder(config: Config, output: str | Path | None) -> Path:
    root = config.run.checkpoint_dir or os.environ.get("OXRL_CHECKPOINT_DIR") or "checkpoints"
    return Path(output) if output is not None else Path(root) / config.run.experiment_id


def prepare_run(config: Config, output: str | Path | None = None, *, resume: bool = False) -> Prepared:
    """Everything up to the weights; wrong input ends here, as a ValueError in words."""
    from oxrl.loops.offline import scheduled

    folder = run_folder(config, output)
    resume_from = _starting_point(folder, resume)
    if resume:
        _check_resumable(config, folder / "config.yaml")
    _check_writable(folder)
    check_model(model_config(config))
    tokenizer = load_tokenizer(model_config(config))
    for role, name in other_models(config).items():
        check_model(model_config(config)._replace(name=name, revision=None))
        if load_tokenizer(name).get_vocab() != tokenizer.get_vocab():
            raise ConfigError(f"the {role} model {name} has another tokenizer: its tokens mean something else")
    parts = {name: _items(config, path, tokenizer) for name, path in config.data.train_files.items()}
    for name, part in parts.items():
        logger.info("%s: %s", name, part.describe())
    held_out: list[Item] = []
    for name, path in config.data.val_files.items():
        part = _items(config, path, tokenizer)
        logger.info("%s, held out: %s", name, part.describe())
        held_out += part.items
    rows = sum(len(part.items) for part in parts.values())
    steps_per_epoch = config.train.train_steps_per_epoch or -(-rows // config.train.batch_size)
    if config.train.batch_size > rows:
        logger.warning("a step of %d rows repeats the %d rows there are", config.train.batch_size, rows)
    num_steps = config.train.total_number_of_epochs * steps_per_epoch
    scheduled(algorithm_schedule(config))
    source = _source(config, {name: part.items for name, part in parts.items()})
    if resume_from is not None:
        source.restore(read_state(resume_from).cursor["data"])  # other rows than before are found out here
    return Prepared(config, folder, tokenizer, source, held_out, num_steps, resume_from)


def _starting_point(folder: Path, resume: bool) -> Path | None:
    newest = latest_checkpoint(folder / "checkpoints")
    if resume and newest is None:
        if not (folder / "config.yaml").exists():
            raise ConfigError(f"there is nothing to resume in {folder}: it has no run")
        logger.warning("%s has no checkpoint yet: starting over", folder)
    if not resume and (folder / "metrics.jsonl").exists():
        raise ConfigError(f"{folder} already holds a run: pass --resume to go on with it, or another --output")
    return newest if resume else None


def _check_writable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} cannot be made: {error.strerror}") from error
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the run's folder {folder} cannot be written to")


def _check_resumable(config: Config, path: Path) -> None:
    """Weights of one shape cannot go on in another."""
    if not path.exists():
        return
    before = yaml.safe_load(path.read_text(encoding="utf-8"))
    now = config.model_dump(mode="json")
    for section, key in (("model", "name"), ("lora", "enabled"), ("lora", "r"), ("train", "alg_name")):
        was, wanted = before[section][key], now[section][key]
        if was != wanted:
            raise ConfigError(
                f"this run has {section}.{key} {was!r} and cannot be resumed with {wanted!r}: "
                "start a new run from its checkpoint instead"
            )


def _items(config: Config, path: str, tokenizer: Any) -> Assembled:
    data = config.data
    loaded = load_samples(path, columns=data.columns, format=data.format, bad_rows=data.bad_rows)
    rendered = assemble(
        loaded.samples,
        chosen_algorithm(config),
        Renderer(tokenizer, max_len=data.max_seq_len),
        max_len=data.max_seq_len,
        overlong=data.overlong,
        bad_rows=data.bad_rows,
        track=_progress_bar(f"reading {Path(path).name}"),
    )
    unread = [f"{where}: {reason}" for where, reason in loaded.skipped]
    return rendered._replace(skipped=[*unread, *rendered.skipped])


def _progress_bar(title: str) -> Callable[[Iterable[Sample]], Iterable[Sample]]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return partial(track, description=title, console=console, transient=True, disable=not console.is_terminal)


def _source(config: Config, parts: dict[str, list[Item]]) -> DataSource[Item]:
    buffers = {name: DataBuffer(items, seed=config.run.seed) for name, items in parts.items()}
    if len(buffers) == 1:
        return next(iter(buffers.values()))
    ratios = config.data.train_ratios or {name: float(len(items)) for name, items in parts.items()}
    return MixedBuffer(buffers, ratios=ratios)


def model_config(config: Config) -> ModelConfig:
    model = config.model
    return ModelConfig(
        name=resolve_weights(model.name),
        dtype=model.dtype,
        attn_implementation=model.attn_implementation,
        gradient_checkpointing=model.gradient_checkpointing,
        trust_remote_code=model.trust_remote_code,
        device=model.device,
        revision=model.revision,
    )


def chosen_algorithm(config: Config) -> Algorithm:
    return algorithm(config.train.alg_name, **config.train.alg_params)


def algorithm_schedule(config: Config) -> dict[int, Algorithm]:
    """First step -> algorithm; most runs have one entry."""
    later = {each.step: algorithm(each.alg_name, **each.alg_params) for each in config.train.alg_schedule}
    return {1: chosen_algorithm(config), **dict(sorted(later.items()))}


def other_models(config: Config) -> dict[str, str]:
    """The models that the algorithms compare with, by role; the reference of an adapter is its base, already there."""
    roles = set().union(*(each.others for each in algorithm_schedule(config).values()))
    models: dict[str, str] = {}
    if "teacher" in roles:
        if config.model.teacher is None:
            raise ConfigError(f"{config.train.alg_name} learns from a teacher: set model.teacher to its name")
        models["teacher"] = config.model.teacher
    if "ref" in roles and (config.model.ref_model is not None or not config.lora.enabled):
        models["ref"] = config.model.ref_model or config.model.name
    return models


def train_prepared(prepared: Prepared) -> RunResult:
    from filelock import FileLock, Timeout

    folder = prepared.folder
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(f"another process is training in {folder}: wait for it, or choose another --output") from None
    with lock:
        return _train_locked(prepared)


def _train_locked(prepared: Prepared) -> RunResult:
    import anyio
    from transformers.utils.logging import disable_progress_bar

    config, folder = prepared.config, prepared.folder
    seed_everything(config.run.seed)
    backend = _backend(config, prepared.tokenizer, prepared.num_steps)
    done = 0 if prepared.resume_from is None else read_state(prepared.resume_from).step
    disable_progress_bar()  # two live displays would write over each other
    with LiveConsole(prepared.num_steps, first_step=done) as console:
        history = anyio.run(_run, prepared, backend, console)
    checkpoint = best_checkpoint(folder / "checkpoints")
    assert checkpoint is not None, "a finished run has at least its last checkpoint"
    return RunResult(folder, checkpoint, history)


def seed_everything(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def _backend(config: Config, tokenizer: Any, num_steps: int) -> Any:
    from oxrl.backends._forward import HEADS
    from oxrl.backends.local import create_pytorch_backend, write_plain

    model = load_model(model_config(config))
    check_tokenizer(model, tokenizer)
    others = {
        role: load_model(model_config(config)._replace(name=name, gradient_checkpointing=False), is_trainable=False)
        for role, name in other_models(config).items()
    }
    for other in others.values():
        check_tokenizer(other, tokenizer)
    if config.lora.enabled:
        lora = config.lora
        targets = lora.target_modules if isinstance(lora.target_modules, str) else tuple(lora.target_modules)
        model = attach_lora(model, LoraSettings(lora.r, lora.alpha, lora.dropout, targets), seed=config.run.seed)
    train = config.train
    backend = create_pytorch_backend(
        model,
        lr=train.lr,
        weight_decay=train.weight_decay,
        betas=(train.betas[0], train.betas[1]),
        eps=train.adam_epsilon,
        lr_scheduler=train.lr_scheduler,
        num_steps=num_steps,
        warmup_steps=int(train.warmup_steps_ratio * num_steps),
        max_grad_norm=train.clip_grad_norm or float("inf"),
        heads=sorted({head for each in algorithm_schedule(config).values() for head in each.heads}),
        others=others,
        write_model=save_adapter if hasattr(model, "peft_config") else write_plain,
    )
    weights = Path(model_config(config).name)
    if (weights / HEADS).exists():  # a model that was trained with heads goes on with them
        backend.module.load_heads(weights)
    return backend


async def _run(prepared: Prepared, backend: Any, console: Sink) -> list[dict[str, float]]:
    from oxrl.backends.local import NonFiniteError
    from oxrl.loops.evaluate import evaluate_offline
    from oxrl.loops.offline import OfflineConfig, no_evaluation, run_offline, scheduled

    config, folder, train = prepared.config, prepared.folder, prepared.config.train
    state = TrainingState(seed=config.run.seed)
    if prepared.resume_from is not None:
        state = await load_checkpoint(prepared.resume_from, backend)
        logger.info("resuming at step %d from %s", state.step, prepared.resume_from)
    _record_config(config, folder / "config.yaml", resuming=prepared.resume_from is not None)
    chosen = chosen_algorithm(config)
    eval_every = train.eval_every or max(1, prepared.num_steps // 10)
    save = partial(_save, folder / "checkpoints", backend, prepared.tokenizer, train.keep_last)
    try:
        return await run_offline(
            backend,
            scheduled(algorithm_schedule(config)),
            prepared.source,
            OfflineConfig(
                num_steps=prepared.num_steps,
                batch_size=train.batch_size,
                log_every=train.log_every,
                checkpoint_every=train.checkpoint_every,
                eval_every=eval_every if prepared.held_out else 0,
                patience=train.patience,
                micro_batch_tokens=train.micro_batch_tokens,
            ),
            state=state,
            evaluate=partial(evaluate_offline, backend, chosen, prepared.held_out, train.micro_batch_tokens)
            if prepared.held_out
            else no_evaluation,
            log=all_of(JSONLLogger(folder / "metrics.jsonl", keep_until=state.step), console),
            save=save,
        )
    except NonFiniteError as error:
        raise RuntimeError(f"{error}; the batch is in {_save_suspects(folder / 'failure', error)}") from error


async def _save(
    root: Path, backend: Any, tokenizer: Any, keep_last: int, state: TrainingState, best_step: int | None
) -> None:
    await save_checkpoint(root, backend, state, tokenizer=tokenizer, keep_last=keep_last, keep=best_step)


def _save_suspects(folder: Path, error: Any) -> Path:
    """The rows of a batch that gave no number, as token ids and mask, for a person to look into."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "batch.jsonl"
    with file.open("w", encoding="utf-8") as out:
        for batch in error.batches:
            for row, (start, end) in enumerate(zip(batch.borders, batch.borders[1:], strict=False)):
                tokens, mask = batch.tokens[start:end].tolist(), batch.mask[start:end].int().tolist()
                out.write(json.dumps({"id": batch.ids[row], "tokens": tokens, "mask": mask}) + "\n")
    return file


def _record_config(config: Config, path: Path, *, resuming: bool) -> None:
    """What a resume will be held against; a change is said aloud."""
    now = config.model_dump(mode="json")
    if resuming and path.exists():
        before = yaml.safe_load(path.read_text(encoding="utf-8"))
        for section, keys in now.items():
            for key, value in keys.items():
                if (old := before.get(section, {}).get(key)) != value:
                    logger.warning("resuming with another %s.%s: %r instead of %r", section, key, value, old)
    path.write_text(yaml.safe_dump(now, sort_keys=False), encoding="utf-8")


def resolve_weights(name: str) -> str:
    """The folder to load for a run folder (its best checkpoint) or anything that `load_model` takes."""
    best = best_checkpoint(Path(name) / "checkpoints") if Path(name).is_dir() else None
    return str(best) if best is not None else name
