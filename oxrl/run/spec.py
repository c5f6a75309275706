"""A `Config` to what it names, read and checked before a weight is loaded: data, prompts, rewards, environments."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast, get_args

import yaml

from oxrl.algorithms import algorithm
from oxrl.config import Config, ConfigError
from oxrl.config.checks import contradictions, remarks
from oxrl.config.tasks import find_task
from oxrl.data.assemble import assemble
from oxrl.data.buffer import DataBuffer, MixedBuffer
from oxrl.data.prepare import check_trainable, find_dataset, split_file
from oxrl.data.render import Renderer
from oxrl.data.sources import Loaded, load_samples
from oxrl.machine.hardware import detect_hardware
from oxrl.models.load import check_model, load_tokenizer
from oxrl.models.lora import LoraSettings
from oxrl.names import did_you_mean, import_object
from oxrl.rewards import Reward, as_reward, check_samples, clamp, reward, weighted
from oxrl.rewards.grade import AnyReward, defaults_of
from oxrl.rewards.numbers import numbers_in
from oxrl.rewards.table import describe_rewards, find_builder, find_reward
from oxrl.rewards.trial import PaysFor, TrialReport, try_reward
from oxrl.rollouts.collect import RolloutConfig
from oxrl.rollouts.envs import single_turn, with_tools
from oxrl.rollouts.filters import check_reward_nonzero_std, keep_all, named_filter
from oxrl.run.folder import resolve_weights
from oxrl.run.placement import placed
from oxrl.types import Algorithm, DataSource, EnvFn, GenerationConfig, Item, ModelConfig, Sample

logger = logging.getLogger(__name__)


class Inputs(NamedTuple):
    """All that a config names, read and checked, before a weight is loaded.

    An online run draws prompts (`Sample`) and has a reward; any other draws rows that lie ready (`Item`). `config` also
    says what only the rows could tell: the reward, where none was named.
    """

    config: Config
    tokenizer: Any
    source: DataSource[Any]
    held_out: list[Any]
    num_steps: int
    online: bool
    rows: list[Any]  # all that the source draws from
    left_out: int  # rows that could not be read, or are too long


def read_inputs(config: Config) -> Inputs:
    """Wrong input ends here, as a ValueError in words."""
    from oxrl.loops.offline import scheduled
    from oxrl.loops.online import check_reuse

    config = placed(config)
    if wrong := contradictions(config):
        raise ConfigError("\n".join(wrong))
    for remark in remarks(config):
        logger.warning("%s", remark)
    if config.run.training_gpus and config.run.backend == "local" and not detect_hardware().gpus:
        logger.warning(
            "run.training_gpus is %d, and this machine has none: the processor trains, in one process unless "
            "run.backend says otherwise",
            config.run.training_gpus,
        )
    check_model(model_config(config))
    tokenizer = load_tokenizer(model_config(config))
    _check_others(config, tokenizer)
    loaded = {name: _load(config, path) for name, path in _train_files(config).items()}
    samples = [sample for part in loaded.values() for sample in part.samples]
    online = learns_from_samples(chosen_algorithm(config), samples)
    _announce_algorithm(config, samples)
    if online:
        config = settle_reward(config, samples)
        check_reward(config)
        check_reuse(chosen_algorithm(config), config.train.iterations * config.train.mini_batches)
        rollout_config(config, None)
        chosen_env(config)
        _check_engine(config)
    elif any((config.reward.reward_func, config.reward.model, config.reward.judge)):
        logger.warning("the reward section is not used: these replies were recorded and scored before")
    if not online and config.model.ref_update != "fixed":
        raise ConfigError(
            "these replies were recorded before, and there the reference stays: set model.ref_update: fixed"
        )
    scheduled(algorithm_schedule(config))
    read = _prompts if online else _items
    parts = {name: read(config, part, tokenizer, name) for name, part in loaded.items()}
    held_out: list[Any] = []
    for name, path in config.data.val_files.items():
        held_out += read(config, _load(config, path), tokenizer, f"{name}, held out")[0]
    every_row = [row for part, _ in parts.values() for row in part]
    rows = len(every_row)
    if config.batch_size > rows:
        logger.warning("a step of %d rows repeats the %d rows there are", config.batch_size, rows)
    steps_per_epoch = config.train.train_steps_per_epoch or -(-rows // config.batch_size)
    num_steps = config.train.total_number_of_epochs * steps_per_epoch
    source = _source(config, {name: part for name, (part, _) in parts.items()})
    left_out = sum(count for _, count in parts.values())
    return Inputs(config, tokenizer, source, held_out, num_steps, online, every_row, left_out)


def _announce_algorithm(config: Config, samples: Sequence[Sample]) -> None:
    """An algorithm that nobody chose is named aloud; rows with replies are more often meant to be imitated."""
    if "alg_name" in config.train.model_fields_set:
        return
    replies = bool(samples and samples[0].messages and samples[0].messages[-1].role == "assistant")
    hint = "these rows have replies, which it takes as known answers; to imitate them" if replies else "to change it"
    logger.warning(
        "no algorithm is named, so it is %s, which learns from the model's own answers; %s: --algorithm sft, or "
        "train.alg_name", config.train.alg_name, hint,
    )  # fmt: skip


def settle_reward(config: Config, samples: Sequence[Sample]) -> Config:
    """The same config with a reward, where it names none: the dataset's own, the task's, or what the rows tell."""
    if not lacks_reward(config):
        return config
    found = default_reward(config) or _reward_of_rows(samples)
    if found is None:
        return config  # `check_reward` says what is missing
    name, why = found
    logger.info("reward: %s, %s; to change it: --reward NAME, or reward.reward_func", name, why)
    return config.model_copy(update={"reward": config.reward.model_copy(update={"reward_func": name})})


def lacks_reward(config: Config) -> bool:
    """Whether the algorithm learns from a reward and the config names none."""
    online, reward = chosen_algorithm(config).online, config.reward
    named = reward.reward_func, reward.model, reward.judge
    return online is not None and online.reward_source == "reward" and all(each is None for each in named)


def default_reward(config: Config) -> tuple[str, str] | None:
    """Name and reason of the reward that dataset or task bring along; the rows are not looked at."""
    dataset = config.data.dataset
    own = None if dataset is None else find_dataset(dataset).reward
    if own is not None and find_builder(own) is None:  # a model that grades has to be named
        return own, f"which goes with the dataset {dataset}"
    task = None if config.run.task is None else find_task(config.run.task)
    if task is None or task.reward is None:
        return None
    return task.reward, f"which goes with the task {task.name}"


def _reward_of_rows(samples: Sequence[Sample]) -> tuple[str, str] | None:
    """Told only where all rows agree."""
    prompts = [as_prompt(sample) for sample in samples]
    if all(prompt.metadata.get("tests") for prompt in prompts):
        return "code_reward_func", "because the rows have tests"
    answers = [(prompt.answer or "").strip() for prompt in prompts]
    if not all(answers):
        return None
    if all(len(answer) == 1 and answer in "ABCDE" for answer in answers):
        return "mcqa_reward_func", "because all answers are letters from A to E"
    if all(_is_number(answer) for answer in answers):
        return "gsm8k_reward_func", "because all answers are numbers"
    if all("\\" in answer or _is_number(answer) for answer in answers):
        return "math_reward_func", "because the answers are formulas"
    if all(sample.answer is not None and len(answer) <= 100 for sample, answer in zip(samples, answers, strict=True)):
        return "exact_match", "because the answers are short texts"
    return None  # a long reply is hardly said again word for word


def _is_number(answer: str) -> bool:
    final = answer.rpartition("####")[2]
    return len(numbers_in(final)) == 1 and not any(character.isalpha() for character in final)


def _check_others(config: Config, tokenizer: Any) -> None:
    for role, name in other_models(config).items():
        check_model(model_config(config)._replace(name=name, revision=None))
        if load_tokenizer(name).get_vocab() != tokenizer.get_vocab():
            raise ConfigError(f"the {role} model {name} has another tokenizer: its tokens mean something else")


def learns_from_samples(algorithm: Algorithm, samples: Sequence[Sample]) -> bool:
    """Whether the run samples for itself; replies that were recorded and scored before are learnt from as they are."""
    recorded = any(sample.responses or sample.chosen or sample.label is not None for sample in samples)
    return algorithm.online is not None and not recorded


def _train_files(config: Config) -> dict[str, str]:
    """A dataset that is named is prepared when it is first used; one for evaluation only is refused."""
    data = config.data
    files = data.train_files if data.dataset is None else {data.dataset: str(split_file(data.dataset))}
    for path in files.values():
        check_trainable(path)
    return files


def _load(config: Config, path: str) -> Loaded:
    data = config.data
    return load_samples(path, columns=data.columns, format=data.format, bad_rows=data.bad_rows)


def _items(config: Config, loaded: Loaded, tokenizer: Any, name: str) -> tuple[list[Item], int]:
    """What is trained on, and how many rows were left out."""
    data = config.data
    rendered = assemble(
        loaded.samples,
        chosen_algorithm(config),
        Renderer(tokenizer, max_len=data.max_seq_len),
        max_len=data.max_seq_len,
        overlong=data.overlong,
        bad_rows=data.bad_rows,
        track=_progress_bar(f"reading {name}"),
    )
    unread = [f"{where}: {reason}" for where, reason in loaded.skipped]
    logger.info("%s: %s", name, rendered._replace(skipped=[*unread, *rendered.skipped]).describe())
    return rendered.items, len(unread) + len(rendered.skipped) + rendered.dropped


def _prompts(config: Config, loaded: Loaded, tokenizer: Any, name: str) -> tuple[list[Sample], int]:
    """Prompts that leave room for an answer and that the reward can grade."""
    data, render = config.data, Renderer(tokenizer, max_len=config.data.max_seq_len)
    room = None if data.max_seq_len is None else data.max_seq_len - config.rollout.max_tokens
    fitting: list[Sample] = []
    for sample in map(as_prompt, _progress_bar(f"reading {name}")(loaded.samples)):
        length = len(render.prompt(sample.messages, tools=sample.tools))
        if room is None or length <= room:
            fitting.append(sample)
        elif data.overlong == "error":
            raise ConfigError(
                f"{sample.id}: a prompt of {length} tokens leaves no room for rollout.max_tokens="
                f"{config.rollout.max_tokens} in data.max_seq_len={data.max_seq_len}"
            )
    if not fitting:
        raise ConfigError(
            f"{name}: no prompt leaves room for rollout.max_tokens={config.rollout.max_tokens} in "
            f"data.max_seq_len={data.max_seq_len}: raise the one or lower the other"
        )
    if config.reward.reward_func is not None:
        try:
            check_samples(chosen_reward(config), fitting)
        except TypeError as error:
            raise ConfigError(f"reward.params do not suit {config.reward.reward_func}: {error}") from error
    left_out = len(loaded.samples) - len(fitting)
    logger.info("%s: %d prompts%s", name, len(fitting), f", {left_out} left out as over-long" if left_out else "")
    return fitting, left_out + len(loaded.skipped)


def as_prompt(sample: Sample) -> Sample:
    """A conversation that ends with a reply becomes its prompt, and the reply what is known to be right."""
    if not sample.messages or sample.messages[-1].role != "assistant":
        return sample
    reply = str(sample.messages[-1].content)
    return replace(sample, messages=sample.messages[:-1], answer=reply if sample.answer is None else sample.answer)


def made_up_answers(config: Config, inputs: Inputs, vocabulary: int) -> list[Item]:
    """As long as answers may become, to the longest prompts; as many as a micro-batch can hold."""
    from oxrl.loops.memory_warmup import longest_answers

    rollout = config.rollout
    return longest_answers(
        inputs.rows,
        Renderer(inputs.tokenizer),
        chosen_algorithm(config),
        prompts=config.batch_size,
        answers=rollout.n_samples,
        max_tokens=rollout.max_tokens,
        vocabulary=vocabulary,
        enough=config.train.micro_batch_tokens,
    )


def _progress_bar(title: str) -> Callable[[Iterable[Sample]], Iterable[Sample]]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return partial(track, description=title, console=console, transient=True, disable=not console.is_terminal)


def _source(config: Config, parts: dict[str, list[Any]]) -> DataSource[Any]:
    buffers = {name: DataBuffer(items, seed=config.run.seed) for name, items in parts.items()}
    if len(buffers) == 1:
        return next(iter(buffers.values()))
    ratios = config.data.train_ratios or {name: float(len(items)) for name, items in parts.items()}
    return MixedBuffer(buffers, ratios=ratios)


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
    )


def lora_of(config: Config) -> LoraSettings | None:
    lora = config.lora
    targets = lora.target_modules if isinstance(lora.target_modules, str) else tuple(lora.target_modules)
    return LoraSettings(lora.r, lora.alpha, lora.dropout, targets) if lora.enabled else None


def chosen_algorithm(config: Config) -> Algorithm:
    return algorithm(config.train.alg_name, **config.train.alg_params)


def algorithm_schedule(config: Config) -> dict[int, Algorithm]:
    """First step -> algorithm; most runs have one entry."""
    later = {each.step: algorithm(each.alg_name, **each.alg_params) for each in config.train.alg_schedule}
    return {1: chosen_algorithm(config), **dict(sorted(later.items()))}


def other_models(config: Config) -> dict[str, str]:
    """The models that the algorithms compare with, by role; the reference of an adapter is inside the policy."""
    roles = set().union(*(each.others for each in algorithm_schedule(config).values()))
    models: dict[str, str] = {}
    if "teacher" in roles:
        if config.model.teacher is None:
            raise ConfigError(f"{config.train.alg_name} learns from a teacher: set model.teacher to its name")
        models["teacher"] = resolve_weights(config.model.teacher)
    if "ref" in roles and (config.model.ref_model is not None or not config.lora.enabled):
        models["ref"] = resolve_weights(config.model.ref_model or config.model.name)
    return models


def follows_by_adapter(config: Config) -> bool:
    """Whether the reference is a second adapter: its base cannot follow the first one."""
    model = config.model
    compared = any("ref" in each.others for each in algorithm_schedule(config).values())
    return compared and config.lora.enabled and model.ref_model is None and model.ref_update != "fixed"


def chosen_reward(config: Config) -> Reward:
    """The reward function that the config names, or several of them with their weights."""
    named, params = config.reward.reward_func, config.reward.params
    assert named is not None, "asked for only where a function is named"
    if isinstance(named, str):
        return shaped_reward(config, {_reward_of(config, named, params): 1.0})
    if unknown := [name for name, own in params.items() if name not in named or not isinstance(own, dict)]:
        raise ConfigError(f"reward.params: several rewards have theirs by name, {{NAME: {{...}}}}, not {unknown[0]}")
    members: dict[AnyReward, float] = {
        _reward_of(config, name, params.get(name, {})): each for name, each in named.items()
    }
    return shaped_reward(config, members)


def _reward_of(config: Config, name: str, params: Mapping[str, Any]) -> Reward:
    return named_reward(
        name, params, device=model_config(config).device, allow_unsandboxed=config.reward.allow_unsandboxed
    )


def named_reward(
    name: str, params: Mapping[str, Any], *, device: str = "auto", allow_unsandboxed: bool = False
) -> Reward:
    """A reward by its name; a model that grades may be named by the folder of the run that trained it."""
    builder = find_builder(name)
    if builder is not None and builder.endswith(":rm_reward_func") and "model" in params:
        params = {"device": device, **params, "model": resolve_weights(str(params["model"]))}
    plain = builder is None and ":" not in name
    if allow_unsandboxed and plain and "allow_unsandboxed" in defaults_of(find_reward(name)):
        params = {"allow_unsandboxed": True, **params}
    return reward(name, **params)


def variants_of(name: str, params: Mapping[str, Any]) -> dict[str, Reward]:
    """The reward that is asked for, and its other variant behind it where it has a parameter `strict`.

    `{"lenient": ..., "strict": ...}`, or `{"": ...}` for a reward that knows one way to read an answer.
    """
    chosen = named_reward(name, params)
    schema = {} if ":" in name or find_builder(name) else defaults_of(find_reward(name))
    if "strict" not in schema or not isinstance(strict := params.get("strict", schema["strict"].default), bool):
        return {"": chosen}
    names = ("strict", "lenient") if strict else ("lenient", "strict")
    return dict(zip(names, (chosen, named_reward(name, {**params, "strict": not strict})), strict=True))


def trial_of(
    name: str, data: str, params: Sequence[str], *, limit: int, pays_for: str | None, threshold: float, workers: int
) -> TrialReport:
    """`oxrl rewards test`: a reward by name on the first rows of a file, beside its other variant if it has one."""
    given = parameters_of(params)
    card = describe_rewards().get(name)
    told = "opinion" if find_builder(name) else "form" if card is not None and not card.reads else "answer"
    kind = pays_for or told
    if kind not in get_args(PaysFor):
        raise ConfigError(f"--pays-for must be one of {', '.join(get_args(PaysFor))}, not {kind!r}")
    chosen, *others = variants_of(name, given).values()
    samples = [as_prompt(sample) for sample in load_samples(data, limit=limit).samples]
    return try_reward(
        chosen,
        samples,
        pays_for=cast(PaysFor, kind),
        other=others[0] if others else None,
        threshold=threshold,
        workers=workers,
    )


def parameters_of(params: Sequence[str]) -> dict[str, Any]:
    """`parameters_of(["strict=true", "letters=ABCD"]) == {"strict": True, "letters": "ABCD"}`."""
    pairs = [each.partition("=") for each in params]
    if wrong := [key for key, equals, _ in pairs if not key or not equals]:
        raise ConfigError(f"a parameter looks like strict=true, not {wrong[0]!r}")
    return {key.strip(): yaml.safe_load(value) for key, _, value in pairs}


def shaped_reward(config: Config, members: Mapping[AnyReward, float]) -> Reward:
    """Rewards with their weights, less the length penalty, clamped."""
    section = config.reward
    if (penalty := section.length_penalty) is not None:
        overlong = reward("overlong_penalty", limit=penalty.limit, margin=penalty.margin)
        members = {**members, overlong: penalty.weight}
    whole = as_reward(next(iter(members))) if list(members.values()) == [1.0] else weighted(members)
    return whole if section.clamp is None else clamp(whole, *section.clamp)


def named_mistakes(config: Config) -> list[str]:
    """What the schema cannot tell, and neither rows nor models are needed for: names, and what they ask of others."""
    from oxrl.loops.online import check_reuse

    chosen, train = chosen_algorithm(config), config.train
    checks: list[Callable[[], Any]] = [partial(other_models, config)]
    if chosen.online is not None:
        checks += [
            partial(check_reuse, chosen, train.iterations * train.mini_batches),
            partial(rollout_config, config, None),
            partial(_check_reward_names, config),
            partial(_check_engine, config),
        ]
        if config.rollout.env == "tools" and not config.rollout.tools:
            checks.append(partial(chosen_env, config))
        if not lacks_reward(config):
            checks.append(partial(_grader_key, config))
    mistakes = []
    for check in checks:
        try:
            check()
        except ValueError as mistake:
            mistakes.append(str(mistake))
    return mistakes


def _check_reward_names(config: Config) -> None:
    """Functions of one's own and models that grade are left for when they are loaded."""
    named = config.reward.reward_func
    names = list(named) if isinstance(named, dict) else [named] if named is not None else []
    in_table = [name for name in names if ":" not in name and find_builder(name) is None]
    for name in in_table:
        find_reward(name)
    if names and in_table == names:
        chosen_reward(config)


def check_reward(config: Config) -> None:
    """One source of rewards, and the one that the algorithm asks for."""
    key = _grader_key(config)
    if key == "reward_func":
        chosen_reward(config)
    elif key is not None:
        check_model(model_config(config)._replace(name=resolve_weights(getattr(config.reward, key)), revision=None))


def _grader_key(config: Config) -> str | None:
    online = chosen_algorithm(config).online
    assert online is not None, "asked for only where the run samples"
    keys = {"reward": "reward_func", "reward model": "model", "judge": "judge"}
    given = [key for key in keys.values() if getattr(config.reward, key) is not None]
    if len(given) > 1:
        raise ConfigError(f"reward: {' and '.join(given)} are set; an answer is graded by one of them")
    if online.reward_source is None:
        if not given and config.data.val_files:
            raise ConfigError(
                f"{config.train.alg_name} looks at no rewards, and held-out answers are measured by one: set "
                "reward.reward_func (`oxrl rewards list` shows them), or leave data.val_files_path out"
            )
        return given[0] if given else None
    if online.reward_source not in ("reward", _graded_by_name(config)) and given != [keys[online.reward_source]]:
        raise ConfigError(
            f"{config.train.alg_name} is graded by a {online.reward_source}: set reward.{keys[online.reward_source]}"
        )
    if not given:
        raise ConfigError(
            f"{config.train.alg_name} learns from rewards: set reward.reward_func (`oxrl rewards list` shows them; "
            "FILE.py:FUNCTION is one of your own), reward.model or reward.judge"
        )
    return given[0]


def _graded_by_name(config: Config) -> str | None:
    """A reward model or a judge may also be named as a reward function."""
    named = config.reward.reward_func
    place = find_builder(named) if isinstance(named, str) else None
    return None if place is None else {"rm_reward_func": "reward model", "llm_judge": "judge"}[place.partition(":")[2]]


def grader(config: Config, name: str) -> ModelConfig:
    """A model that grades and is not trained."""
    return model_config(config)._replace(name=resolve_weights(name), revision=None, gradient_checkpointing=False)


def chosen_env(config: Config) -> EnvFn:
    rollout = config.rollout
    if rollout.env == "single_turn":
        return single_turn
    if not rollout.tools:
        raise ConfigError("rollout.env: tools needs rollout.tools, functions such as oxrl.rollouts.tools:calculator")
    return with_tools([import_object(place) for place in rollout.tools], max_turns=rollout.max_turns)


def _check_engine(config: Config) -> None:
    from oxrl.generators.connection import Connection, check_distinct
    from oxrl.generators.vllm.settings import check_settings, vllm_settings

    engine = config.inference_engine
    if config.engine == "vllm":
        check_settings(engine.others)
    elif engine.others:
        for key in sorted(engine.others.keys() - vllm_settings()):
            if meant := did_you_mean(key, type(engine).model_fields):
                raise ConfigError(f"inference_engine.{key} is no key{meant}")
    for url in config.inference_engine.urls:
        Connection(url).checked()
    check_distinct(config.inference_engine.urls)


def rollout_config(config: Config, reward_source: Reward | None) -> RolloutConfig:
    rollout, online = config.rollout, chosen_algorithm(config).online
    assert online is not None, "asked for only where the run samples"
    filter_fn = check_reward_nonzero_std if online.needs_variance else keep_all
    return RolloutConfig(
        batch_size=config.batch_size,
        n_samples_per_prompt=rollout.n_samples,
        over_sampling_factor=rollout.over_sampling_factor,
        reward_fn=reward_source,
        filter_fn=filter_fn if rollout.filter is None else named_filter(rollout.filter, **rollout.filter_params),
        greedy=online.greedy,
        min_group_size=online.min_group_size,
        max_draws=rollout.max_draws,
        partial_rollouts=rollout.partial_rollouts,
        # In versions, of which a step makes one per optimizer step.
        max_age=(rollout.lag + rollout.partial_rollouts) * config.train.iterations * config.train.mini_batches,
        reward_time_limit=config.reward.time_limit,
    )


def sampling_of(config: Config) -> GenerationConfig:
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
