"""The reward section of a config to a reward: which one a run uses, checks, and the models that it needs."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from oxrl.config import Config, ConfigError
from oxrl.config.tasks import find_task
from oxrl.data.parts import take_media
from oxrl.data.prepare import find_dataset
from oxrl.data.prompts import as_prompt
from oxrl.data.render import Renderer
from oxrl.data.sources import load_samples
from oxrl.models.load import check_model, load_model, load_tokenizer
from oxrl.parsing import parse_yaml
from oxrl.rewards import Reward, as_reward, clamp, judge_reward, reward, weighted
from oxrl.rewards.grade import AnyReward, Ungraded, defaults_of
from oxrl.rewards.judge import RUBRIC
from oxrl.rewards.numbers import numbers_in
from oxrl.rewards.references import compare_references
from oxrl.rewards.table import describe_rewards, find_builder, find_reward
from oxrl.rewards.trial import PaysFor, TrialReport, try_reward
from oxrl.rollouts.environments.table import find_kind
from oxrl.run.folder import resolve_weights
from oxrl.run.spec import first_algorithm, frozen_model_config, model_config
from oxrl.types import GenerationConfig, Message, Request, Rollout, Sample, Score

logger = logging.getLogger(__name__)


def with_default_reward(config: Config, samples: Sequence[Sample]) -> Config:
    """The same config with a reward, where it names none: the dataset's, the task's, or one that fits all rows."""
    if not lacks_reward(config) or config.has_custom_env:
        return config
    found = default_reward(config) or _reward_for_rows(samples)
    if found is None:
        return config  # `check_reward` reports what is missing
    name, reason = found
    logger.info("reward: %s, %s; to change it, set reward (reward.reward_func in a config)", name, reason)
    return config.model_copy(update={"reward": config.reward.model_copy(update={"reward_func": name})})


def lacks_reward(config: Config) -> bool:
    """Whether the algorithm learns from a reward and the config names none."""
    online, section = first_algorithm(config).online, config.reward
    named = section.reward_func, section.model, section.judge
    return online is not None and online.reward_source == "reward" and all(each is None for each in named)


def default_reward(config: Config) -> tuple[str, str] | None:
    """Name and reason of the reward that the environment, the dataset or the task defines; rows are not read."""
    kind = find_kind(config.rollout.env)
    if kind is not None and kind.reward is not None and config.makes_rows:
        return kind.reward, f"the scorer of {config.rollout.env}"
    dataset = config.data.dataset
    own = None if dataset is None else find_dataset(dataset).reward
    if own is not None and find_builder(own) is None:  # a reward model has to be named by the user
        return own, f"the reward of the dataset {dataset}"
    task = None if config.run.task is None else find_task(config.run.task)
    if task is None or task.reward is None:
        return None
    return task.reward, f"the reward of the task {task.name}"


def _reward_for_rows(samples: Sequence[Sample]) -> tuple[str, str] | None:
    """Only where all rows agree."""
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
    return None  # a long reference response is hardly generated word for word


def _is_number(answer: str) -> bool:
    final = answer.rpartition("####")[2]
    return len(numbers_in(final)) == 1 and not any(character.isalpha() for character in final)


def configured_reward(config: Config) -> Reward:
    """The reward function that the config names, or several of them with their weights."""
    named, params = config.reward.reward_func, config.reward.params
    assert named is not None, "the caller has checked that a function is named"
    if isinstance(named, str):
        return compose_reward(config, {_build_reward(config, named, params): 1.0})
    if unknown := [name for name, own in params.items() if name not in named or not isinstance(own, dict)]:
        raise ConfigError(
            f"reward.params: several rewards have their parameters by name, {{NAME: {{...}}}}, not {unknown[0]}"
        )
    members: dict[AnyReward, float] = {
        _build_reward(config, name, params.get(name, {})): weight for name, weight in named.items()
    }
    return compose_reward(config, members)


def _build_reward(config: Config, name: str, params: Mapping[str, Any]) -> Reward:
    return named_reward(
        name, params, device=model_config(config).device, allow_unsandboxed=config.reward.allow_unsandboxed
    )


def named_reward(
    name: str, params: Mapping[str, Any], *, device: str = "auto", allow_unsandboxed: bool = False
) -> Reward:
    """A reward by name; a reward model may be named by the folder of the run that trained it."""
    builder = find_builder(name)
    if builder is not None and builder.endswith(":rm_reward_func") and "model" in params:
        params = {"device": device, **params, "model": resolve_weights(str(params["model"]))}
    in_table = builder is None and ":" not in name
    if allow_unsandboxed and in_table and "allow_unsandboxed" in defaults_of(find_reward(name)):
        params = {"allow_unsandboxed": True, **params}
    return reward(name, **params)


def summed_rewards(members: Mapping[Any, float], params: Mapping[str, Any]) -> Reward:
    """Rewards by name, or functions, with their weights; `params` has those of a reward by its name."""
    if unknown := [name for name, own in params.items() if name not in members or not isinstance(own, Mapping)]:
        raise ConfigError(f"several rewards have their parameters by name, NAME={{KEY: VALUE}}, not {unknown[0]}")
    return weighted(
        {named_reward(each, params.get(each, {})) if isinstance(each, str) else each: w for each, w in members.items()}
    )


def reward_variants(name: str, params: Mapping[str, Any]) -> dict[str, Reward]:
    """The reward, followed by its other variant if it has a parameter `strict`.

    `{"lenient": ..., "strict": ...}`, or `{"": ...}` for a reward without variants.
    """
    chosen = named_reward(name, params)
    schema = {} if ":" in name or find_builder(name) else defaults_of(find_reward(name))
    if "strict" not in schema or not isinstance(strict := params.get("strict", schema["strict"].default), bool):
        return {"": chosen}
    names = ("strict", "lenient") if strict else ("lenient", "strict")
    return dict(zip(names, (chosen, named_reward(name, {**params, "strict": not strict})), strict=True))


def try_named_reward(
    name: str, data: str, params: Sequence[str], *, limit: int, pays_for: str | None, threshold: float, workers: int
) -> TrialReport:
    """`oxrl rewards test`: a reward by name on the first rows of a file, beside its other variant if it has one."""
    card = describe_rewards().get(name)
    default = "opinion" if find_builder(name) else "form" if card is not None and not card.reads else "answer"
    kind = pays_for or default
    if kind not in get_args(PaysFor):
        raise ConfigError(f"--pays-for must be one of {', '.join(get_args(PaysFor))}, not {kind!r}")
    chosen, *others = reward_variants(name, parse_parameters(params)).values()
    samples = [as_prompt(sample) for sample in load_samples(data, limit=limit).samples]
    return try_reward(
        chosen,
        samples,
        pays_for=cast(PaysFor, kind),
        other=others[0] if others else None,
        threshold=threshold,
        workers=workers,
    )


def parse_parameters(params: Sequence[str]) -> dict[str, Any]:
    """`parse_parameters(["strict=true", "letters=ABCD"]) == {"strict": True, "letters": "ABCD"}`."""
    pairs = [each.partition("=") for each in params]
    if wrong := [key for key, equals, _ in pairs if not key or not equals]:
        raise ConfigError(f"a parameter looks like strict=true, not {wrong[0]!r}")
    return {key.strip(): parse_yaml(value, f"the value of {key.strip()}") for key, _, value in pairs}


def compose_reward(config: Config, members: Mapping[AnyReward, float]) -> Reward:
    """The weighted sum of rewards, less the length penalty, clamped."""
    section = config.reward
    if (penalty := section.length_penalty) is not None:
        overlong = reward("overlong_penalty", limit=penalty.limit, margin=penalty.margin)
        members = {**members, overlong: penalty.weight}
    total = as_reward(next(iter(members))) if list(members.values()) == [1.0] else weighted(members)
    return total if section.clamp is None else clamp(total, *section.clamp)


def check_reward(config: Config) -> None:
    """There is exactly one source of rewards, it is the one that the algorithm needs, and it can be built."""
    key = check_reward_source(config)
    if key == "reward_func":
        configured_reward(config)
    elif key is not None:
        check_model(model_config(config)._replace(name=resolve_weights(getattr(config.reward, key)), revision=None))


def check_graders(config: Config, samples: Sequence[Sample]) -> None:
    """A reward model or a judge can read the images and sounds that the answers are about."""
    from oxrl.models.reward_model import check_reads_media

    for name in (config.reward.model, config.reward.judge):
        for sample in samples if name is not None else ():
            check_reads_media(frozen_model_config(config, str(name)), sample)


def reads_answers(config: Config) -> bool | None:
    """Whether correct answers must earn more than wrong ones; None for custom functions, which need not read answers.

    Reward models and judges have opinions of their own.
    """
    named = config.reward.reward_func
    names = list(named) if isinstance(named, dict) else [named] if named is not None else []
    if any(":" in name for name in names):
        return None
    cards = describe_rewards()
    return any(cards[name].reads for name in names if find_builder(name) is None)


def check_references(config: Config, samples: Sequence[Sample], render: Renderer) -> None:
    """Reference answers, as the model would have to sample them, earn more than wrong ones; else nothing is learned."""
    expected = reads_answers(config)
    if expected is False or not samples:
        return
    opened = render.opened(render.prompt(samples[0].messages, tools=samples[0].tools, media=samples[0].media).tolist())
    found = compare_references(
        configured_reward(config), samples, opened=opened, as_sampled=render.as_sampled,
        time_limit=config.reward.time_limit,
    )  # fmt: skip
    if found is None or found.right_earns > found.wrong_earns:
        return
    problem = (
        f"the reward {config.reward.reward_func} pays correct answers no more than wrong ones, in any common format. "
        f"For {samples[0].id} the completion {found.right!r} with the correct answer earns {found.right_earns:g}, "
        f"{found.wrong!r} with a wrong one {found.wrong_earns:g}"
        + (f" (the prompt already has {opened!r} of the response)" if opened else "")
        + ". Check the answers of the rows, the reward and its parameters: `oxrl rewards test NAME --data FILE`"
    )
    if expected:
        raise ConfigError(problem)
    logger.warning("%s; a reward that does not depend on answers is fine", problem)


def check_reward_names(config: Config) -> None:
    """Without loading anything: custom functions and reward models are checked when they are loaded."""
    named = config.reward.reward_func
    names = list(named) if isinstance(named, dict) else [named] if named is not None else []
    in_table = [name for name in names if ":" not in name and find_builder(name) is None]
    for name in in_table:
        find_reward(name)
    if names and in_table == names:
        configured_reward(config)


def check_reward_source(config: Config) -> str | None:
    """The key of the reward section that is used: `reward_func`, `model` or `judge`."""
    online = first_algorithm(config).online
    assert online is not None, "only an online run has a reward"
    keys = {"reward": "reward_func", "reward model": "model", "judge": "judge"}
    given = [key for key in keys.values() if getattr(config.reward, key) is not None]
    if len(given) > 1:
        raise ConfigError(f"reward: {' and '.join(given)} are set; only one of them can grade a response")
    if online.reward_source is None:
        if not given and config.data.val_files:
            raise ConfigError(
                f"{config.train.alg_name} uses no rewards, but the evaluation on data.val_files_path does: set "
                "reward.reward_func (`oxrl rewards list` shows them), or leave data.val_files_path out"
            )
        return given[0] if given else None
    if online.reward_source not in ("reward", _source_of_function(config)) and given != [keys[online.reward_source]]:
        raise ConfigError(
            f"{config.train.alg_name} is graded by a {online.reward_source}: set reward.{keys[online.reward_source]}"
        )
    if not given and config.has_custom_env:
        return None
    if not given:
        raise ConfigError(
            f"{config.train.alg_name} learns from rewards: set reward to a name (`oxrl rewards list` shows them) or a "
            "function (in a config reward.reward_func, with FILE.py:FUNCTION), or set reward.model or reward.judge"
        )
    return given[0]


def _source_of_function(config: Config) -> str | None:
    """A reward model or a judge may also be named as a reward function."""
    named = config.reward.reward_func
    builder = find_builder(named) if isinstance(named, str) else None
    sources = {"rm_reward_func": "reward model", "llm_judge": "judge"}
    return None if builder is None else sources[builder.partition(":")[2]]


def load_reward(config: Config) -> Reward | None:
    """The reward of a run, with the reward model or the judge loaded; None for an algorithm without rewards."""
    if config.reward.reward_func is not None:
        return configured_reward(config)
    reward_model = _load_reward_model(config)
    if reward_model is None and config.has_custom_env:
        reward_model = _scored_by_environment()
    return None if reward_model is None else compose_reward(config, {reward_model: 1.0})


def _scored_by_environment() -> Reward:
    """The reward of a run whose environment scores its episodes; it is called for those without a score."""
    reason = "the environment gave no score, and no reward is set: return Episode(turns, Score(...)), or set a reward"

    async def outcomes(rollouts: Sequence[Rollout], _: float) -> list[Score | Ungraded]:
        return [Ungraded(reason) for _ in rollouts]

    return Reward("of the environment", outcomes, fallback=True)


def _load_reward_model(config: Config) -> Reward | None:
    from oxrl.generators.embedded.generator import EmbeddedGenerator
    from oxrl.models.reward_model import load_reward_model, reward_model_reward

    section = config.reward
    if section.model is not None:
        return reward_model_reward(load_reward_model(frozen_model_config(config, section.model)))
    if section.judge is None:
        return None
    model = frozen_model_config(config, section.judge)
    tokenizer = load_tokenizer(model)
    judge, render = EmbeddedGenerator(load_model(model, is_trainable=False), tokenizer), Renderer(tokenizer)

    async def ask(messages: Sequence[Message]) -> str:
        bare, media = take_media(messages)
        request = Request(tuple(int(token) for token in render.prompt(bare, media=media)), media=media)
        (reply,) = await judge.generate([request], GenerationConfig(max_new_tokens=256, temperature=0.0))
        return reply.text

    return judge_reward(ask, rubric=section.rubric or RUBRIC)
