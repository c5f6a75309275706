"""Train a `RunSpec`: load, restore, run the loop, save. The only file that knows both loops and all their parts."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.concurrency import Finished, run_blocking, run_until_interrupted
from oxrl.config import Config, ConfigError
from oxrl.config.registry import find_engine
from oxrl.data.render import Renderer
from oxrl.guard.findings import FindingsFile
from oxrl.guard.monitor import Guard
from oxrl.guard.rows import references_of_samples
from oxrl.loops.callbacks import Callbacks, StopTraining, as_logger
from oxrl.loops.memory_limits import MemoryLimits, resumed_limits
from oxrl.loops.memory_warmup import advice_on_memory, warm_up_memory
from oxrl.loops.progress import reading
from oxrl.models.load import check_model, load_model, load_tokenizer
from oxrl.rollouts.buffer import Group
from oxrl.run.build import open_backend, open_engine
from oxrl.run.checkpoint import (
    advice_on_full_disk,
    best_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from oxrl.run.data import longest_possible_items
from oxrl.run.environment import episode_bounds, open_environment
from oxrl.run.failure import failures_recorded
from oxrl.run.folder import RolloutLog, create_folder, record_config, record_inputs, resolve_weights, template_kwargs_of
from oxrl.run.prepare import prepare_run, starting_from
from oxrl.run.recorder import open_recorder
from oxrl.run.reward import load_reward
from oxrl.run.spec import RunSpec, first_algorithm, renderer, rollout_config, sampling_config
from oxrl.seeds import seed_everything
from oxrl.tracking.activity import Activity
from oxrl.tracking.catalogue import results
from oxrl.tracking.console import LiveConsole
from oxrl.tracking.metrics import JSONLLogger, Sink, all_of, no_log, read_metrics, short_number
from oxrl.tracking.notebook import live_output
from oxrl.tracking.trackers import tracked
from oxrl.types import ModelConfig, TrainingState
from oxrl.weights.checkpoint_names import source_of

_log = logging.getLogger(__name__)

LESS_MEMORY = (
    "lower train.micro_batch_tokens (rows are never split: data.max_seq_len bounds them) or rollout.slots, set "
    "model.gradient_checkpointing: true or lora.enabled: true; `oxrl plan` shows what each of them would need"
)


class _Observers(NamedTuple):
    """What the user passed to follow a run."""

    callbacks: Callbacks
    log: Sink


class _RunFields(NamedTuple):
    folder: Path
    checkpoint: Path
    history: list[dict[str, float]]


class RunResult(_RunFields, Finished):
    """A finished run: its `folder`, its best `checkpoint`, and the `history` of metrics that were logged."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"RunResult({last_metrics(self.history)}; folder={str(self.folder)!r})"


def last_metrics(history: Sequence[Mapping[str, float]]) -> str:
    """`"step 40  loss 1.305"`: the main metrics of the last step."""
    last = history[-1] if history else {}
    shown = ["step", *results(last)[:3]] if last else []
    return "  ".join(f"{key} {last[key]:.4g}" for key in shown) or "no step"


def train_run(
    config: Config,
    output: str | Path | None = None,
    *,
    resume: bool = False,
    callbacks: Iterable[Any] = (),
    logger: Any = None,
) -> RunResult:
    """Prepare and train in one call; `callbacks` and `logger` as in `Trainer.train`."""
    return train_spec(prepare_run(config, output, resume=resume), callbacks=callbacks, logger=logger)


def run_sft(config: Config | Mapping[str, Config], output_dir: str | Path, *, resume: bool = False) -> RunResult:
    """The first stage of a run, in `output_dir/sft`; `config` may be the stages of a file (`load_stages`).

    It blocks; `await run_sft(...)` is the same call.
    """
    return train_run(_stage(config, "sft"), Path(output_dir) / "sft", resume=resume)


def run_rl(
    config: Config | Mapping[str, Config],
    output_dir: str | Path,
    source_checkpoint: str | Path | None = None,
    *,
    resume: bool = False,
) -> RunResult:
    """The second stage, in `output_dir/rl`, from a checkpoint of the first or from the config's model.

    It blocks; `await run_rl(...)` is the same call.
    """
    return train_run(starting_from(_stage(config, "rl"), source_checkpoint), Path(output_dir) / "rl", resume=resume)


def _stage(config: Config | Mapping[str, Config], name: str) -> Config:
    """The config of a stage, whose algorithm must be of its kind."""
    if isinstance(config, Mapping):
        if name not in config:
            raise ConfigError(f"the config has no stage {name!r}; it has: {', '.join(map(repr, config))}")
        config = config[name]
    algorithm = first_algorithm(config)
    if name == "rl" and algorithm.online is None:
        raise ConfigError(f"run_rl samples completions, and train.alg_name {algorithm.name} does not: use run_sft")
    if name == "sft" and algorithm.online is not None:
        _log.warning("run_sft trains with %s, which samples unless the rows have responses", algorithm.name)
    return config


def train_spec(spec: RunSpec, *, callbacks: Iterable[Any] = (), logger: Any = None) -> RunResult:
    """Train to the end. A run that lost Ray actors resumes from its last checkpoint; `launch` restarts other ranks."""
    run, observers = spec.config.run, _Observers(Callbacks(callbacks), as_logger(logger))
    for restarts_left in range(run.max_restarts, -1, -1):
        try:
            return _train_once(spec, observers)
        except RuntimeError as error:
            started = (spec.folder / "config.yaml").exists()
            if spec.config.processes != "actors" or not restarts_left or not started or not _is_lost_rank(error):
                raise
            _log.warning("%s: resuming from the last checkpoint (%d restarts left)", error, restarts_left - 1)
            spec = prepare_run(spec.config, spec.folder, resume=True)
    raise AssertionError("the last attempt returns or raises")


def _is_lost_rank(error: BaseException | None) -> bool:
    from oxrl.backends.distributed.ranks import LostRankError

    return error is not None and (isinstance(error, LostRankError) or _is_lost_rank(error.__cause__))


def _train_once(spec: RunSpec, observers: _Observers) -> RunResult:
    from transformers.utils.logging import disable_progress_bar

    run, plain = spec.config.run, spec.config.model_dump(mode="json")
    with ExitStack() as stack:
        stack.enter_context(_locked(spec))
        track = stack.enter_context(tracked(run.trackers, spec.folder, plain, uri=run.tracking_uri))
        stack.enter_context(failures_recorded(spec.folder, plain))
        stack.enter_context(advice_on_full_disk(spec.folder))
        seed_everything(run.seed)
        done = 0 if spec.resume_from is None else read_state(spec.resume_from).step
        backend = stack.enter_context(open_backend(spec))
        disable_progress_bar()  # two live displays would overwrite each other
        console = stack.enter_context(live_output(spec.num_steps, first_step=done))
        log = all_of(console, track, observers.log)
        history = run_until_interrupted(_run_loop, spec, backend, console, log, observers.callbacks)
    checkpoint = best_checkpoint(spec.folder / "checkpoints")
    assert checkpoint is not None, "a finished run has at least its last checkpoint"
    result = RunResult(spec.folder, checkpoint, history)
    run_blocking(observers.callbacks, "on_end", result)
    return result


@contextmanager
def _locked(spec: RunSpec) -> Iterator[None]:
    """Only one process trains in a folder."""
    from filelock import FileLock, Timeout

    folder = spec.folder
    create_folder(spec.config, folder)
    try:
        held = FileLock(folder / ".lock", blocking=False).acquire()
    except Timeout:
        raise ConfigError(f"another process is training in {folder}: wait for it, or choose another folder") from None
    with held:
        if latest_checkpoint(folder / "checkpoints") != spec.resume_from:
            raise ConfigError(f"the run in {folder} continued while this one was prepared: resume it again")
        yield


def rerun(spec: RunSpec, last: int) -> None:
    """Train from `spec.resume_from`, or from the start, up to the step `last`, without checkpoints and display.

    Its metrics and records are in `spec.folder`.
    """
    from rich.console import Console

    def stop(step: int, _metrics: Mapping[str, float]) -> None:
        if step == last:
            raise StopTraining("it was the last one to repeat")

    spec.folder.mkdir(parents=True, exist_ok=True)
    seed_everything(spec.config.run.seed)
    console = LiveConsole(spec.num_steps, console=Console(quiet=True))
    with open_backend(spec) as backend:
        run_until_interrupted(_run_loop, spec, backend, console, no_log, Callbacks([stop]), _not_saved)


async def _not_saved(root: Path, _backend: Any, state: TrainingState, **_: Any) -> Path:
    """Of a step that is repeated: the checkpoint is where it was."""
    return root / f"step_{state.step:04d}"


async def _run_loop(
    spec: RunSpec,
    backend: Any,
    console: LiveConsole,
    sinks: Sink,
    callbacks: Callbacks,
    write_checkpoint: Callable[..., Awaitable[Path]] = save_checkpoint,
) -> list[dict[str, float]]:
    state = TrainingState(seed=spec.config.run.seed)
    if spec.resume_from is not None:
        state = await load_checkpoint(spec.resume_from, backend)
        _log.info("resuming at step %d from %s", state.step, spec.resume_from)
    resuming = spec.resume_from is not None
    record_inputs(spec.config, spec.held_out, spec.folder / "inputs.json", resuming=resuming)
    record_config(spec.config, spec.folder / "config.yaml", resuming=resuming)
    keep = {"tokenizer": spec.tokenizer, "keep_last": spec.config.train.keep_last}

    recorder = open_recorder(spec, backend, state.step if resuming else -1)

    async def save(reached: TrainingState, best_step: int | None) -> None:
        folder = await write_checkpoint(spec.folder / "checkpoints", backend, reached, keep=best_step, **keep)
        recorder.checkpoint = folder.name
        await callbacks("on_save", reached.step, folder)

    file = spec.folder / "metrics.jsonl"
    write = JSONLLogger(file, keep_until=state.step if resuming else -1)  # of a run without a checkpoint: nothing
    guard = Guard(
        spec.config.run.checks,
        write=FindingsFile(spec.folder, keep_until=state.step if resuming else -1),
        past=read_metrics(file) if file.exists() else (),
        references=references_of_samples(spec.samples, renderer(spec.config, spec.tokenizer)),
        all_trained=spec.lora is None,
    )
    log = all_of(write, sinks, guard.logged)
    await callbacks("on_start", spec)
    with advice_on_memory(LESS_MEMORY):
        with reading(state):
            limits = resumed_limits(spec.config.train.micro_batch_tokens, state, backend)
        await _warm_up(spec, backend, limits)
        rest: dict[str, Any] = {"state": state, "limits": limits, "log": log, "save": save, "callbacks": callbacks}
        rest |= {"recorder": recorder, "guard": guard}
        _report_micro_batches(backend, console.activity)
        if spec.online:
            return await _run_online(spec, backend, console=console, **rest)
        return await _run_offline(spec, backend, **rest)


def _report_micro_batches(backend: Any, activity: Activity) -> None:
    """Where the backend trains in this process; others report nothing before a step is done."""
    from oxrl.backends.local import PyTorchTrainingBackend

    if isinstance(backend, PyTorchTrainingBackend):
        backend.micro_batches_started = partial(activity.start, "micro-batches")
        backend.micro_batch_done = activity.advance


async def _warm_up(spec: RunSpec, backend: Any, limits: MemoryLimits) -> None:
    """Run out of memory now rather than later. A first step with every row in it does so by itself."""
    if not spec.online and len(spec.rows) <= spec.config.batch_size:
        return
    if not hasattr(getattr(backend, "backend", backend), "memory_warm_up"):  # a backend from outside, perhaps queued
        _log.info("no memory warm-up: the backend has no memory_warm_up")
        return
    vocabulary = source_of(await backend.get_weights()).vocabulary
    items = longest_possible_items(spec, vocabulary)
    await warm_up_memory(backend, spec.algorithm, items, limits)


def loop_intervals(spec: RunSpec) -> dict[str, Any]:
    """How often a loop logs, evaluates and saves, in steps; ten evaluations in a run by default."""
    train = spec.config.train
    eval_every = train.eval_every or max(1, spec.num_steps // 10)
    return {
        "num_steps": spec.num_steps,
        "log_every": train.log_every,
        "checkpoint_every": train.checkpoint_every,
        "eval_every": eval_every if spec.held_out else 0,
        "eval_at_start": train.eval_at_start and bool(spec.held_out),
        "patience": train.patience,
        "micro_batch_tokens": train.micro_batch_tokens,
    }


async def _run_offline(spec: RunSpec, backend: Any, *, limits: MemoryLimits, **rest: Any) -> list[dict[str, float]]:
    from oxrl.loops.evaluate import evaluate_offline
    from oxrl.loops.offline import OfflineConfig, run_offline
    from oxrl.loops.progress import scheduled

    config = spec.config
    rest["guard"].prepared(spec.rows[: len(spec.samples)])
    return await run_offline(
        backend,
        scheduled(spec.schedule),
        spec.source,
        OfflineConfig(batch_size=config.batch_size, **loop_intervals(spec)),
        evaluate=partial(evaluate_offline, backend, spec.algorithm, spec.held_out, limits),
        limits=limits,
        **rest,
    )


async def _run_online(
    spec: RunSpec, backend: Any, *, state: TrainingState, console: LiveConsole, **rest: Any
) -> list[dict[str, float]]:
    from oxrl.loops.evaluate import evaluate_online
    from oxrl.loops.online import OnlineConfig, normalised, run_online, unchanged_rewards
    from oxrl.loops.progress import scheduled
    from oxrl.rollouts.collect import RolloutSampler, sampling_manager

    config, rollout, train = spec.config, spec.config.rollout, spec.config.train
    render, sampling = renderer(config, spec.tokenizer), sampling_config(config)
    async with (
        open_engine(config, spec.tokenizer, spec.folder, backend) as engine,
        open_environment(config) as env,
    ):
        activity = console.activity
        shared: dict[str, Any] = {"env": env, "activity": activity, **episode_bounds(config, env)}
        sampler = RolloutSampler(engine.generator, render, sampling, seed=config.run.seed, **shared)
        evaluation = sampling._replace(temperature=rollout.eval_temperature)
        eval_sampler = RolloutSampler(engine.generator, render, evaluation, **shared)
        reward = load_reward(config)
        itemsize = source_of(await backend.get_weights()).dtype.itemsize
        return await run_online(
            backend,
            scheduled(spec.schedule),
            sampling_manager(spec.source, sampler, rollout_config(config, reward), activity),
            [engine.generator],
            render,
            OnlineConfig(
                lag=rollout.lag,
                iterations=train.iterations,
                mini_batches=train.mini_batches,
                max_logprob_gap=config.allowed_gap(itemsize),
                max_age=rollout.lag + rollout.partial_rollouts,
                **loop_intervals(spec),
            ),
            state=state,
            shares_weights=find_engine(config.engine).shares_weights,
            evaluate=partial(
                evaluate_online,
                eval_sampler,
                spec.held_out,
                reward,
                time_limit=config.reward.time_limit,
                activity=activity,
            ),
            shape=normalised if config.reward.normalize == "batch" else unchanged_rewards,
            move_reference=partial(_update_reference, spec, backend),
            offload_engine=engine.offload,
            observe=_observer(spec, state.step, console.print_line),
            **rest,
        )


def _observer(spec: RunSpec, done: int, show: Callable[[str], None]) -> Callable[[int, Sequence[Group]], None]:
    """Write the rollouts of each step to a file, and show one of them every ten steps."""
    write = None
    if spec.config.rollout.record != "off":
        write = RolloutLog(spec.folder / "rollouts.jsonl", spec.config.rollout.log_samples, keep_until=done)

    def observe(step: int, groups: Sequence[Group]) -> None:
        if write is not None:
            write(step, groups)
        if step == done + 1 or step % 10 == 0:
            first = groups[0][0]
            prompt, response = (" ".join(text.split()) for text in (first.prompt[-60:], first.response[:100]))
            grade = "ungraded" if first.reward is None else f"reward {short_number(first.reward)}"
            show(f"  sample: {prompt!r} -> {response!r}, {grade}")

    return observe


async def _update_reference(spec: RunSpec, backend: Any, step: int) -> None:
    model = spec.config.model
    if model.ref_update == "fixed" or not any("ref" in each.others for each in spec.schedule.values()):
        return
    if model.ref_update == "ema":
        await backend.update_reference(model.ref_decay)
    elif step % model.ref_every == 0:
        await backend.update_reference(0.0)


def open_model(name: str) -> tuple[Any, Renderer]:
    """A generator for a run folder or a model, and the renderer of its prompts."""
    from oxrl.generators.embedded.generator import EmbeddedGenerator

    weights = resolve_weights(name)
    check_model(ModelConfig(weights))
    tokenizer = load_tokenizer(weights)
    return EmbeddedGenerator(load_model(weights, is_trainable=False), tokenizer), Renderer(
        tokenizer, template_kwargs=template_kwargs_of(name)
    )
