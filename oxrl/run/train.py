"""A `Config` to live objects and a finished run; the only file that knows every backend, generator and loop."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from oxrl.concurrency import until_interrupted
from oxrl.config import Config, ConfigError
from oxrl.data.render import Renderer
from oxrl.loops.memory_warmup import advice_on_memory, warm_up_memory
from oxrl.models.load import check_model, load_model, load_tokenizer
from oxrl.rewards import Reward, judge_reward
from oxrl.rewards.judge import RUBRIC
from oxrl.rollouts.buffer import Group
from oxrl.run.build import Engine, check_servers, open_backend, open_engine
from oxrl.run.checkpoint import best_checkpoint, latest_checkpoint, load_checkpoint, read_state, save_checkpoint
from oxrl.run.failure import failures_recorded
from oxrl.run.folder import (
    RolloutLog,
    check_resumable,
    check_writable,
    record_config,
    record_stages,
    resolve_weights,
    run_folder,
    starting_point,
)
from oxrl.run.spec import (
    Inputs,
    algorithm_schedule,
    chosen_algorithm,
    chosen_env,
    chosen_reward,
    grader,
    made_up_answers,
    read_inputs,
    rollout_config,
    sampling_of,
    shaped_reward,
)
from oxrl.tracking.metrics import JSONLLogger, LiveConsole, Sink, all_of
from oxrl.tracking.trackers import check_trackers, tracked
from oxrl.types import GenerationConfig, Message, ModelConfig, Request, TrainingState
from oxrl.weights.checkpoint_names import source_of

logger = logging.getLogger(__name__)


class RunResult(NamedTuple):
    """Where a run went and what it logged."""

    folder: Path
    checkpoint: Path
    history: list[dict[str, float]]


class Prepared(NamedTuple):
    """A run before its weights are loaded."""

    config: Config
    folder: Path
    inputs: Inputs
    resume_from: Path | None


def train_run(config: Config, output: str | Path | None = None, *, resume: bool = False) -> RunResult:
    """From a config to a finished run: check, prepare, load, train, save."""
    return train_prepared(prepare_run(config, output, resume=resume))


def run_sft(config: Config, output_dir: str | Path, *, resume: bool = False) -> RunResult:
    """The first stage of a run, in `output_dir/sft`."""
    return train_run(config, Path(output_dir) / "sft", resume=resume)


def run_rl(
    config: Config, output_dir: str | Path, source_checkpoint: str | Path | None = None, *, resume: bool = False
) -> RunResult:
    """The second stage, in `output_dir/rl`, from a checkpoint of the first or from the config's model."""
    return train_run(_starting_from(config, source_checkpoint), Path(output_dir) / "rl", resume=resume)


def _starting_from(config: Config, checkpoint: str | Path | None) -> Config:
    if checkpoint is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"name": str(checkpoint)})})


def run_stages(
    stages: Mapping[str, Config],
    output: str | Path | None,
    *,
    resume: bool = False,
    train: Callable[[Prepared], RunResult] | None = None,
) -> RunResult:
    """Stage after stage, each from the latest checkpoint of the one before; a resumed run goes on in its stage.

    All of them are checked before the first one loads a weight.
    """
    train = train or train_prepared
    if list(stages) == [""]:
        return train(prepare_run(stages[""], output, resume=resume))
    home = run_folder(next(iter(stages.values())), output)
    unfinished = [name for name in stages if not (resume and _is_finished(home / name))]
    if not unfinished:
        raise ConfigError(f"the run in {home} is finished; there is nothing to resume")
    for name in unfinished[1:]:
        read_inputs(stages[name])
    record_stages(stages, home)
    source: Path | None = None
    for name, config in stages.items():
        if name in unfinished:
            begun = resume and (home / name / "config.yaml").exists()
            result = train(prepare_run(_starting_from(config, source), home / name, resume=begun))
        source = latest_checkpoint(home / name / "checkpoints")
    return result


def _is_finished(folder: Path) -> bool:
    newest = latest_checkpoint(folder / "checkpoints")
    return newest is not None and bool(read_state(newest).cursor.get("finished"))


def prepare_run(config: Config, output: str | Path | None = None, *, resume: bool = False) -> Prepared:
    """Everything up to the weights; wrong input ends here, as a ValueError in words."""
    folder = run_folder(config, output)
    resume_from = starting_point(folder, resume)
    if resume:
        check_resumable(config, folder / "config.yaml")
    check_writable(folder)
    check_trackers(config.run.trackers)
    inputs = read_inputs(config)
    if inputs.online:
        check_servers(inputs.config)
    if resume_from is not None:  # other rows than before are found out here
        cursor = read_state(resume_from).cursor
        inputs.source.restore(cursor["collector"]["data"] if inputs.online else cursor["data"])
    return Prepared(inputs.config, folder, inputs, resume_from)


def train_prepared(prepared: Prepared) -> RunResult:
    """To its end. A run whose actors were lost goes on from its last checkpoint; ranks are `launch`'s to restart."""
    run = prepared.config.run
    for left in range(run.max_restarts, -1, -1):
        try:
            return _train_once(prepared)
        except RuntimeError as error:
            begun = (prepared.folder / "config.yaml").exists()
            if run.backend != "ray" or not left or not begun or not _is_lost_rank(error):
                raise
            logger.warning("%s: going on from the last checkpoint (%d restarts left)", error, left - 1)
            prepared = prepare_run(prepared.config, prepared.folder, resume=True)
    raise AssertionError("the last try returns or raises")


def _is_lost_rank(error: BaseException | None) -> bool:
    from oxrl.backends.distributed.ranks import LostRankError

    return error is not None and (isinstance(error, LostRankError) or _is_lost_rank(error.__cause__))


def _train_once(prepared: Prepared) -> RunResult:
    from filelock import FileLock, Timeout

    folder = prepared.folder
    lock = FileLock(folder / ".lock", blocking=False)
    try:
        held = lock.acquire()
    except Timeout:
        raise ConfigError(f"another process is training in {folder}: wait for it, or choose another --output") from None
    with held:
        if latest_checkpoint(folder / "checkpoints") != prepared.resume_from:
            raise ConfigError(f"the run in {folder} went on while this one was prepared: start again with --resume")
        run, plain = prepared.config.run, prepared.config.model_dump(mode="json")
        with tracked(run.trackers, folder, plain, uri=run.tracking_uri) as track, failures_recorded(folder, plain):
            return _train_locked(prepared, track)


def _train_locked(prepared: Prepared, track: Sink) -> RunResult:
    import anyio
    from transformers.utils.logging import disable_progress_bar

    config, folder = prepared.config, prepared.folder
    seed_everything(config.run.seed)
    done = 0 if prepared.resume_from is None else read_state(prepared.resume_from).step
    with ExitStack() as parts:
        backend = parts.enter_context(open_backend(config, prepared.inputs))
        disable_progress_bar()  # two live displays would write over each other
        console = parts.enter_context(LiveConsole(prepared.inputs.num_steps, first_step=done))
        history = anyio.run(until_interrupted, _run, prepared, backend, console, track)
    checkpoint = best_checkpoint(folder / "checkpoints")
    assert checkpoint is not None, "a finished run has at least its last checkpoint"
    return RunResult(folder, checkpoint, history)


def open_model(name: str) -> tuple[Any, Renderer]:
    """What speaks for a run's folder or a model, and what makes prompts for it."""
    from oxrl.generators.embedded.generator import EmbeddedGenerator

    place = resolve_weights(name)
    check_model(ModelConfig(place))
    tokenizer = load_tokenizer(place)
    return EmbeddedGenerator(load_model(place, is_trainable=False), tokenizer), Renderer(tokenizer)


def seed_everything(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


async def _run(prepared: Prepared, backend: Any, console: LiveConsole, track: Sink) -> list[dict[str, float]]:
    config, folder = prepared.config, prepared.folder
    state = TrainingState(seed=config.run.seed)
    if prepared.resume_from is not None:
        state = await load_checkpoint(prepared.resume_from, backend)
        logger.info("resuming at step %d from %s", state.step, prepared.resume_from)
    record_config(config, folder / "config.yaml", resuming=prepared.resume_from is not None)
    keep = {"tokenizer": prepared.inputs.tokenizer, "keep_last": config.train.keep_last}

    async def save(reached: TrainingState, best_step: int | None) -> None:
        await save_checkpoint(folder / "checkpoints", backend, reached, keep=best_step, **keep)

    log = all_of(JSONLLogger(folder / "metrics.jsonl", keep_until=state.step), console, track)
    run = partial(_run_online, say=console.say) if prepared.inputs.online else _run_offline
    with advice_on_memory(LESS_MEMORY):
        await _try_longest(prepared, backend)
        return await run(prepared, backend, state=state, log=log, save=save)


LESS_MEMORY = (
    "lower train.micro_batch_tokens (rows are never split: data.max_seq_len bounds them) or rollout.slots, set "
    "model.gradient_checkpointing: true or lora.enabled: true; `oxrl plan` says what each of them would take"
)


async def _try_longest(prepared: Prepared, backend: Any) -> None:
    """Memory that will not be enough runs out now. A first step that sees every row tries them by itself."""
    config, inputs = prepared.config, prepared.inputs
    if not inputs.online and len(inputs.rows) <= config.batch_size:
        return
    vocabulary = source_of(await backend.get_weights()).vocabulary
    items = made_up_answers(config, inputs, vocabulary) if inputs.online else inputs.rows
    await warm_up_memory(backend, chosen_algorithm(config), items, config.train.micro_batch_tokens)


def _loop_intervals(prepared: Prepared) -> dict[str, int]:
    """How often what happens, in steps; ten evaluations in a run unless told otherwise."""
    train = prepared.config.train
    eval_every = train.eval_every or max(1, prepared.inputs.num_steps // 10)
    return {
        "num_steps": prepared.inputs.num_steps,
        "log_every": train.log_every,
        "checkpoint_every": train.checkpoint_every,
        "eval_every": eval_every if prepared.inputs.held_out else 0,
        "patience": train.patience,
        "micro_batch_tokens": train.micro_batch_tokens,
    }


async def _run_offline(prepared: Prepared, backend: Any, **rest: Any) -> list[dict[str, float]]:
    from oxrl.loops.evaluate import evaluate_offline
    from oxrl.loops.offline import OfflineConfig, run_offline, scheduled

    config = prepared.config
    evaluate = partial(
        evaluate_offline, backend, chosen_algorithm(config), prepared.inputs.held_out, config.train.micro_batch_tokens
    )
    return await run_offline(
        backend,
        scheduled(algorithm_schedule(config)),
        prepared.inputs.source,
        OfflineConfig(batch_size=config.batch_size, **_loop_intervals(prepared)),
        evaluate=evaluate,
        **rest,
    )


async def _run_online(prepared: Prepared, backend: Any, **rest: Any) -> list[dict[str, float]]:
    async with open_engine(prepared.config, prepared.inputs.tokenizer, prepared.folder, backend) as engine:
        return await _sample_and_train(prepared, backend, engine, **rest)


async def _sample_and_train(
    prepared: Prepared,
    backend: Any,
    engine: Engine,
    *,
    state: TrainingState,
    say: Callable[[str], None],
    **rest: Any,
) -> list[dict[str, float]]:
    from oxrl.loops.evaluate import evaluate_online
    from oxrl.loops.offline import scheduled
    from oxrl.loops.online import OnlineConfig, normalised, run_online, unchanged_rewards
    from oxrl.rollouts.collect import RolloutSampler, sampling_manager

    config, rollout, train = prepared.config, prepared.config.rollout, prepared.config.train
    render = Renderer(prepared.inputs.tokenizer)
    sampling = sampling_of(config)
    sampler = RolloutSampler(engine.generator, render, sampling, env=chosen_env(config), seed=config.run.seed)
    eval_sampler = RolloutSampler(
        engine.generator, render, sampling._replace(temperature=rollout.eval_temperature), env=sampler.env
    )
    reward_source = live_reward(config)
    width = source_of(await backend.get_weights()).dtype.itemsize
    return await run_online(
        backend,
        scheduled(algorithm_schedule(config)),
        sampling_manager(prepared.inputs.source, sampler, rollout_config(config, reward_source)),
        [engine.generator],
        render,
        OnlineConfig(
            lag=rollout.lag,
            iterations=train.iterations,
            mini_batches=train.mini_batches,
            max_logprob_gap=config.allowed_gap(width),
            max_age=rollout.lag + rollout.partial_rollouts,
            **_loop_intervals(prepared),
        ),
        state=state,
        shares_weights=engine.shares_weights,
        evaluate=partial(
            evaluate_online,
            eval_sampler,
            prepared.inputs.held_out,
            reward_source,
            time_limit=config.reward.time_limit,
        ),
        shape=normalised if config.reward.normalize == "batch" else unchanged_rewards,
        move_reference=partial(_move_reference, config, backend),
        offload_engine=engine.aside,
        observe=_observer(prepared, state.step, say),
        **rest,
    )


def _observer(prepared: Prepared, done: int, say: Callable[[str], None]) -> Callable[[int, Sequence[Group]], None]:
    """What was said goes to a file, and now and then to whoever watches."""
    write = RolloutLog(prepared.folder / "rollouts.jsonl", prepared.config.rollout.log_samples, keep_until=done)

    def observe(step: int, groups: Sequence[Group]) -> None:
        write(step, groups)
        if step == done + 1 or step % 10 == 0:
            first = groups[0][0]
            asked, said = (" ".join(text.split()) for text in (first.prompt[-60:], first.response[:100]))
            say(f"  sample: {asked!r} -> {said!r}, reward {first.reward}")

    return observe


async def _move_reference(config: Config, backend: Any, step: int) -> None:
    model = config.model
    if model.ref_update == "fixed" or not any("ref" in each.others for each in algorithm_schedule(config).values()):
        return
    if model.ref_update == "ema":
        await backend.update_reference(model.ref_decay)
    elif step % model.ref_every == 0:
        await backend.update_reference(0.0)


def live_reward(config: Config) -> Reward | None:
    """The reward of a run, with the model that it needs."""
    if config.reward.reward_func is not None:
        return chosen_reward(config)
    reward_source = _model_that_grades(config)
    return None if reward_source is None else shaped_reward(config, {reward_source: 1.0})


def _model_that_grades(config: Config) -> Reward | None:
    from oxrl.generators.embedded.generator import EmbeddedGenerator
    from oxrl.models.reward_model import load_reward_model, reward_model_reward

    section = config.reward
    if section.model is not None:
        return reward_model_reward(load_reward_model(grader(config, section.model)))
    if section.judge is None:
        return None
    place = grader(config, section.judge)
    tokenizer = load_tokenizer(place)
    judge, render = EmbeddedGenerator(load_model(place, is_trainable=False), tokenizer), Renderer(tokenizer)

    async def ask(messages: Sequence[Message]) -> str:
        request = Request(tuple(int(token) for token in render.prompt(messages)))
        (reply,) = await judge.generate([request], GenerationConfig(max_new_tokens=256, temperature=0.0))
        return reply.text

    return judge_reward(ask, rubric=section.rubric or RUBRIC)
