"""A `Config` to a `RunSpec`: everything that it names is resolved, read and checked before a weight is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from oxrl.config import Config, ConfigError
from oxrl.config.checks import contradictions, remarks
from oxrl.config.registry import find_engine
from oxrl.data.actions import action_codec
from oxrl.machine.packages import is_installed, refuse_broken
from oxrl.models.chat_templates import read_template
from oxrl.models.load import check_model, context_length, load_tokenizer
from oxrl.run.build import check_servers
from oxrl.run.checkpoint import latest_checkpoint, read_state
from oxrl.run.data import is_online, load_train_files, prepare_data
from oxrl.run.environment import check_tool_servers, environment
from oxrl.run.folder import (
    actions_of,
    changes,
    check_resumable,
    check_writable,
    choose_folder,
    record_stages,
    recorded_stages,
    run_folder,
    starting_point,
)
from oxrl.run.placement import check_installed, fewer_gpus, placed
from oxrl.run.reward import (
    check_graders,
    check_reward,
    check_reward_names,
    check_reward_source,
    lacks_reward,
    with_default_reward,
)
from oxrl.run.spec import (
    Choice,
    RunSpec,
    algorithm_schedule,
    check_engine_settings,
    first_algorithm,
    lora_settings,
    model_config,
    other_models,
    rollout_config,
)
from oxrl.run.tuning import choose_tuning, with_choices
from oxrl.tracking.trackers import check_trackers
from oxrl.types import Sample

logger = logging.getLogger(__name__)

CHECKED_SAMPLES = 256  # whose masks are compared with what is trained


def prepare_run(config: Config, output: str | Path | None = None, *, resume: bool = False) -> RunSpec:
    """Resolve a config for training in `output`. Wrong input raises a ValueError that explains it."""
    folder = choose_folder(config, output, resume=resume)
    resume_from = starting_point(folder, resume)
    if resume:
        check_resumable(config, folder / "config.yaml")
    check_writable(folder)
    check_trackers(config.run.trackers)
    spec = resolve(config, folder, resume_from=resume_from)
    check_installed(spec.config, online=spec.online)
    refuse_broken("deepspeed")  # transformers imports it when it saves a model
    if spec.online:
        check_servers(spec.config, next((sample.id for sample in spec.rows if sample.media), None))
        check_tool_servers(spec.config)
    if resume_from is not None:
        _restore_rows(spec, resume_from)
    return spec


def _restore_rows(spec: RunSpec, checkpoint: Path) -> None:
    """Detect rows that changed since the checkpoint, and one of another kind of run."""
    from oxrl.loops.progress import reading

    state = read_state(checkpoint)
    sampled = "collector" in state.cursor
    if not sampled and "data" not in state.cursor:
        raise ConfigError(
            f"{checkpoint} is not of a run: it has no position in its rows; start a new run with it as model.name"
        )
    if sampled != spec.online:
        kinds = {True: "samples completions", False: "trains on dataset rows"}
        raise ConfigError(
            f"{checkpoint} is of a run that {kinds[sampled]}, but {spec.config.train.alg_name} {kinds[spec.online]}: "
            f"set train.alg_name in {spec.folder / 'config.yaml'} to what it was, or start a new run with the "
            "checkpoint as model.name"
        )
    with reading(state):
        spec.source.restore(state.cursor["collector"]["data"] if sampled else state.cursor["data"])


def prepare_stages(
    stages: Mapping[str, Config], output: str | Path | None, *, resume: bool = False
) -> Iterator[RunSpec]:
    """The stages of a run one after the other; train each before asking for the next, which starts from its weights.

    All stages are checked before the first one is returned. A resumed run continues in its unfinished stage, or in its
    last one.
    """
    if list(stages) == [""]:
        yield prepare_run(stages[""], output, resume=resume)
        return
    home = choose_folder(next(iter(stages.values())), output, resume=resume)
    finished = [name for name in list(stages)[:-1] if resume and _is_finished(home / name)]
    stages = _with_finished_as_recorded(stages, finished, home)
    first, *later = [name for name in stages if name not in finished]
    for name in later:
        spec = resolve(stages[name], home / name)
        check_installed(spec.config, online=spec.online)
    source: Path | None = None
    for name, config in stages.items():
        if name not in finished:
            started = resume and (home / name / "config.yaml").exists()
            spec = prepare_run(starting_from(config, source), home / name, resume=started)
            if name == first:  # not before: the folder may be that of another run
                record_stages(stages, home)
            yield spec
        source = latest_checkpoint(home / name / "checkpoints")


def _with_finished_as_recorded(stages: Mapping[str, Config], finished: Sequence[str], home: Path) -> dict[str, Config]:
    """The stages, finished ones as they were trained; a change that no other stage uses is refused."""
    before = recorded_stages(home) if finished else {}
    changed = {
        name: changes(before[name].model_dump(mode="json"), stages[name].model_dump(mode="json")).keys()
        for name in stages
        if name in before
    }
    # Later stages start from the weights of the one before, whatever their model.name is.
    used = {key for name, keys in changed.items() if name not in finished for key in keys} - {"model.name"}
    for name in finished:
        if unused := sorted(changed.get(name, set()) - used):
            raise ConfigError(
                f"the stage {name} of the run in {home} is finished, so its {unused[0]} cannot be changed any more: "
                "resume without this change, or start a new run"
            )
    return {name: before.get(name, config) if name in finished else config for name, config in stages.items()}


def _is_finished(folder: Path) -> bool:
    newest = latest_checkpoint(folder / "checkpoints")
    return newest is not None and bool(read_state(newest).cursor.get("finished"))


def starting_from(config: Config, checkpoint: str | Path | None) -> Config:
    """The same config with a checkpoint as its model."""
    if checkpoint is None:
        return config
    return config.model_copy(update={"model": config.model.model_copy(update={"name": str(checkpoint)})})


def resolve(
    config: Config, output: str | Path | None = None, *, resume_from: Path | None = None, gpus: int | None = None
) -> RunSpec:
    """Resolve, read and check all that a config names; nothing is written. Wrong input raises a ValueError.

    `gpus` is the number of GPUs to place the run on; default: this machine's.
    """
    folder = run_folder(config, output)  # first: a reward, which is tried here, may change the working directory
    asked, config = config, placed(config, gpus)
    if message := fewer_gpus(asked, config, gpus):
        logger.warning("%s", message)
    if wrong := contradictions(config):
        raise ConfigError("\n".join(wrong))
    config = _with_template(config)
    model = model_config(config)
    check_model(model)
    choices = choose_tuning(config, model)
    config = with_choices(config, choices)
    _log_remarks(config, choices)
    tokenizer = load_tokenizer(model)
    others = other_models(config)
    _check_tokenizers(config, others, tokenizer)
    loaded = load_train_files(config)
    samples = [sample for part in loaded.values() for sample in part.samples]
    online = is_online(first_algorithm(config), samples)
    _announce_algorithm(config, samples)
    config = _check_online(config, samples) if online else _check_offline(config)
    schedule = algorithm_schedule(config)
    _check_schedule(schedule)
    data = prepare_data(config, loaded, tokenizer, online=online, context=context_length(model))
    steps_per_epoch = config.train.train_steps_per_epoch or -(-len(data.rows) // config.batch_size)
    return RunSpec(
        config=config,
        folder=folder,
        resume_from=resume_from,
        schedule=schedule,
        model=model,
        lora=lora_settings(config),
        other_models=others,
        tokenizer=tokenizer,
        **data._asdict(),
        num_steps=config.train.total_number_of_epochs * steps_per_epoch,
        online=online,
        samples=() if online else tuple(samples[:CHECKED_SAMPLES]),
        choices=choices,
    )


def _with_template(config: Config) -> Config:
    """The config with the content of a template file, so that a resumed run does not depend on the file."""
    if config.model.chat_template is None:
        return config
    template = read_template(config.model.chat_template)
    return config.model_copy(update={"model": config.model.model_copy(update={"chat_template": template})})


def _log_remarks(config: Config, choices: Sequence[Choice]) -> None:
    for choice in choices:
        if choice.value:
            logger.info("%s", choice)
    for remark in remarks(config):
        logger.warning("%s", remark)


def _check_tokenizers(config: Config, others: Mapping[str, str], tokenizer: Any) -> None:
    for role, name in others.items():
        check_model(model_config(config)._replace(name=name, revision=None))
        if load_tokenizer(name).get_vocab() != tokenizer.get_vocab():
            raise ConfigError(
                f"the {role} model {name} has another tokenizer than the policy: token ids cannot be compared"
            )


def _announce_algorithm(config: Config, samples: Sequence[Sample]) -> None:
    """Log the default algorithm where none was chosen; rows with responses are more often meant for SFT."""
    if "alg_name" in config.train.model_fields_set:
        return
    responses = bool(samples and samples[0].messages and samples[0].messages[-1].role == "assistant")
    hint = (
        "these rows have responses, which it uses as reference answers; to imitate them"
        if responses
        else "to change it"
    )
    logger.warning(
        "no algorithm is set, so %s is used, which learns from the model's own responses; %s, set algorithm "
        "to sft (train.alg_name in a config)", config.train.alg_name, hint,
    )  # fmt: skip


def _check_online(config: Config, samples: Sequence[Sample]) -> Config:
    """The config with its reward filled in."""
    config = with_default_reward(config, samples)
    check_reward(config)
    check_graders(config, samples)
    _check_reuse(config)
    rollout_config(config, None)
    environment(config)
    _check_engine_reads_media(config, samples)
    _compare_actions(config)
    check_engine_settings(config)
    return config


def _compare_actions(config: Config) -> None:
    """Warn if tokens stand for different actions than in the run that trained the model."""
    trained, used = actions_of(config.model.name), config.rollout.env_args.get("actions")
    if trained and used and action_codec(trained) != action_codec(used):
        logger.warning(
            "the model was trained with the actions %s, and rollout.env_args.actions is %s: the same token stands for "
            "a different action; use the actions of the model, unless it should learn new ones", trained, used,
        )  # fmt: skip


def _check_engine_reads_media(config: Config, samples: Sequence[Sample]) -> None:
    record = find_engine(config.engine)
    for sample in samples if not record.shares_weights else ():
        if sample.media and not record.reads_media:
            raise ConfigError(
                f"{sample.id} has images or audio, and the engine {config.engine} gets token ids only: set "
                "inference_engine.name to embedded"
            )
        package = record.image_package if any(medium.kind == "image" for medium in sample.media) else None
        if package is not None and not is_installed(package):
            raise ConfigError(
                f"{sample.id} has images, and the engine {config.engine} reads them with {package}, which is not "
                f"installed: install the build of {package} that belongs to this torch, or set inference_engine.name "
                "to embedded"
            )


def _check_offline(config: Config) -> Config:
    if config.makes_rows:
        raise ConfigError(
            f"{config.rollout.env} makes prompts, and {config.train.alg_name} trains on rows with responses: set "
            "train.alg_name to an algorithm that samples, such as grpo"
        )
    if any((config.reward.reward_func, config.reward.model, config.reward.judge)):
        logger.warning("the reward section is not used: these rows have recorded responses with their scores")
    if config.model.ref_update != "fixed":
        raise ConfigError(
            "rows with recorded responses are trained against a fixed reference: set model.ref_update: fixed"
        )
    return config


def _check_reuse(config: Config) -> None:
    from oxrl.loops.online import check_reuse

    check_reuse(first_algorithm(config), config.train.iterations * config.train.mini_batches)


def _check_schedule(schedule: Mapping[int, Any]) -> None:
    from oxrl.loops.progress import scheduled

    scheduled(schedule)


def config_problems(config: Config) -> list[str]:
    """What the schema cannot check, and what needs neither rows nor models: names, and combinations of keys."""
    chosen = first_algorithm(config)
    checks: list[Callable[[], Any]] = [partial(other_models, config)]
    if chosen.online is not None:
        checks += [
            partial(_check_reuse, config),
            partial(rollout_config, config, None),
            partial(check_reward_names, config),
            partial(check_engine_settings, config),
        ]
        if config.rollout.env in ("tools", "dialogue") and not (config.rollout.tools or config.rollout.env_args):
            checks.append(partial(environment, config))
        if not lacks_reward(config):
            checks.append(partial(check_reward_source, config))
    problems = []
    for check in checks:
        try:
            check()
        except ValueError as problem:
            problems.append(str(problem))
    return problems
