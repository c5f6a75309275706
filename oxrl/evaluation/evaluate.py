"""Evaluate a model on held-out rows: accuracy and pass@k with confidence intervals, and comparison with another model.

Rows with responses or pairs are scored without sampling, in `likelihood`. Generators and rewards are those of training,
statistics are in `loops.statistics`.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, TypeAlias

from oxrl.concurrency import run_until_interrupted
from oxrl.data.fill import TEMPLATED
from oxrl.data.prepare import DATASETS, find_dataset, read_card, split_file
from oxrl.data.prompts import as_prompt
from oxrl.data.render import Renderer
from oxrl.data.sources import Loaded, Source, load_samples
from oxrl.evaluation.likelihood import evaluate_rows, kind_of
from oxrl.evaluation.result import Evaluation as Evaluation  # part of this module's interface
from oxrl.loops.evaluate import sample_and_grade
from oxrl.loops.statistics import Comparison, Estimate, compare, estimate, pass_at_k
from oxrl.models.load import check_model, load_model, load_tokenizer
from oxrl.names import did_you_mean
from oxrl.rewards import Reward, as_reward, check_samples
from oxrl.rewards.grade import AnyReward, grade
from oxrl.rewards.length import sampled_tokens
from oxrl.rollouts.collect import RolloutSampler
from oxrl.run.folder import last_stage, read_recorded, resolve_weights, template_kwargs_of
from oxrl.run.reward import reward_variants, summed_rewards
from oxrl.types import GenerationConfig, Rollout, Sample, Status

logger = logging.getLogger(__name__)

Scores: TypeAlias = tuple[tuple[float | None, ...], ...]
"""Reward of each answer to each prompt; None if it could not be graded."""
Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""(title, number of prompts) -> a context with a function to call after each prompt."""

Method: TypeAlias = Literal["reward", "perplexity", "pairs"]

EXAMPLES_SHOWN = 3
SAMPLING_TEMPERATURE = 0.8  # default for several answers to a prompt


def silent(title: str, total: int) -> AbstractContextManager[Callable[[], None]]:  # noqa: ARG001 - one signature for all
    return nullcontext(lambda: None)


class RewardSummary(NamedTuple):
    """Statistics of a model's answers under one variant of the reward."""

    reward: Estimate  # over prompts, each with the mean of its answers
    solved: Estimate  # share of answers with the full reward
    pass_at: Mapping[int, Estimate]
    graded: int
    ungraded: int

    def to_dict(self) -> dict[str, Any]:
        return {
            "reward": self.reward._asdict(),
            "solved": self.solved._asdict(),
            "pass_at": {str(k): each._asdict() for k, each in self.pass_at.items()},
            "graded": self.graded,
            "ungraded": self.ungraded,
        }


@dataclass(frozen=True, slots=True)
class Result:
    """One model's answers, with scores and marks by variant of the reward: `{"lenient": ..., "strict": ...}`."""

    model: str
    rollouts: tuple[Rollout, ...]  # all answers to the first prompt, then to the second, ...
    scores: Mapping[str, Scores]
    marks: Mapping[str, RewardSummary]

    @property
    def answered(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.turns]

    @property
    def truncated(self) -> float:
        """Share of answers that reached the token limit."""
        return sum(rollout.status is Status.TRUNCATED for rollout in self.answered) / max(1, len(self.answered))

    @property
    def length(self) -> float:
        """Mean number of tokens per answer."""
        return sum(map(sampled_tokens, self.answered)) / max(1, len(self.answered))

    @property
    def failure(self) -> str | None:
        """Error of the first answer that could not be graded."""
        return next((rollout.error for rollout in self.rollouts if rollout.error is not None), None)

    def to_dict(self) -> dict[str, Any]:
        marks = {name or "reward": each.to_dict() for name, each in self.marks.items()}
        rest = {"truncated": self.truncated, "length": self.length, "failure": self.failure}
        return {"model": self.model, "marks": marks, **rest}


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledEvaluation(Evaluation):
    """An evaluation by a reward: `results[0].marks` has the numbers by variant of the reward, as `comparisons` has."""

    reward: str
    samples: int
    sampling: GenerationConfig
    results: tuple[Result, ...]

    def to_dict(self) -> dict[str, Any]:
        compared = {
            name or "reward": {**each.to_dict(), "sentence": str(each)} for name, each in self.comparisons.items()
        }
        return {
            "data": self.data, "reward": self.reward, "rows": self.rows, "samples": self.samples,
            "temperature": self.sampling.temperature, "max_tokens": self.sampling.max_new_tokens,
            "seed": self.sampling.seed, "results": [each.to_dict() for each in self.results], "against": compared,
        }  # fmt: skip

    def answers(self) -> Iterator[dict[str, Any]]:
        for result in self.results:
            for number, rollout in enumerate(result.rollouts):
                row, index = divmod(number, self.samples)
                rewards = {name or "reward": scores[row][index] for name, scores in result.scores.items()}
                yield {
                    "model": result.model, "id": rollout.sample.id, "index": index, "prompt": rollout.prompt,
                    "answer": rollout.sample.answer, "response": rollout.response, "rewards": rewards,
                    "tokens": sampled_tokens(rollout), "truncated": rollout.status is Status.TRUNCATED,
                    "error": rollout.error,
                }  # fmt: skip

    def __str__(self) -> str:
        decoding = "greedy" if not self.sampling.temperature else f"temperature {self.sampling.temperature:g}"
        samples = f"{self.samples} answers each, " if self.samples > 1 else ""
        lines = [f"{self.data}: {self.rows} rows, {samples}{decoding}, at most {self.sampling.max_new_tokens} tokens"]
        lines.append(f"graded by {self.reward}; 95% confidence intervals over rows in brackets")
        for result in self.results:
            lines += ["", result.model, *_summary_lines(result)]
        if self.comparisons:
            lines += ["", f"{self.results[0].model} against {self.results[1].model}"]
            width = max(map(len, self.comparisons))
            lines += [f"  {name:{width}}  {each}".rstrip() for name, each in self.comparisons.items()]
        lines += ["", f"examples from {self.results[0].model}", *_examples(self.results[0])]
        return "\n".join(lines)


def _summary_lines(result: Result) -> Iterator[str]:
    for name, marks in result.marks.items():
        if marks.reward == marks.solved:  # every reward is 0 or full
            yield f"  {name or 'accuracy':12} {_percent(marks.solved)}"
        else:
            mean, low, high = (f"{each:.3g}" for each in marks.reward)
            yield f"  {f'{name} reward'.strip():12} {mean:>6} ({low} to {high})"
            yield f"  {f'{name} in full'.strip():12} {_percent(marks.solved)}"
        for k, passed in marks.pass_at.items():
            yield f"    {f'pass@{k}':10} {_percent(passed)}"
    ungraded = max(marks.ungraded for marks in result.marks.values())
    why = f" (the first: {result.failure})" if ungraded and result.failure else ""
    yield f"  {result.truncated:.0%} truncated, {result.length:.0f} tokens on average, {ungraded} ungraded{why}"


def _percent(value: Estimate) -> str:
    return f"{value.mean:6.1%} ({value.low:.1%} to {value.high:.1%})"


def _examples(result: Result) -> Iterator[str]:
    """Yield the answer with the highest reward and some others, in row order."""
    firsts = [rollout for rollout in result.rollouts if rollout.index == 0 and rollout.turns]
    best = sorted(firsts, key=lambda rollout: -(rollout.reward if rollout.reward is not None else -math.inf))[:1]
    shown = [*best, *(rollout for rollout in firsts if rollout not in best)][:EXAMPLES_SHOWN]
    for rollout in sorted(shown, key=lambda rollout: rollout.group):
        prompt, response = (" ".join(text.split()) for text in (rollout.prompt, rollout.response))
        expected = f", expected {rollout.sample.answer!r}" if rollout.sample.answer is not None else ""
        reward = "ungraded" if rollout.reward is None else f"reward {rollout.reward:g}"
        yield f"  {_shortened(prompt, 70)!r}\n    -> {_end_of(response, 160)!r}: {reward}{_shortened(expected, 60)}"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def _end_of(text: str, most: int) -> str:
    """Return the end of a response, where the answer usually is."""
    return text if len(text) <= most else f"... {text[-most:]}"


class EvalData(NamedTuple):
    """Rows as they are and as prompts to answer, the name of their dataset, and its default reward."""

    rows: list[Sample]
    samples: list[Sample]
    name: str
    reward: str | None


def evaluate(
    model: str | Path,
    data: Source | Sequence[Sample] | Loaded,
    reward: str | AnyReward | Mapping[Any, float] | None = None,
    *,
    params: Mapping[str, Any] | None = None,
    limit: int | None = None,
    samples: int = 1,
    k: Sequence[int] | None = None,
    temperature: float | None = None,
    max_tokens: int = 512,
    against: str | Path | None = None,
    full: float = 1.0,
    seed: int = 0,
    time_limit: float = 120.0,
    by: Method | None = None,
    progress: Progress = silent,
) -> Evaluation:
    """`evaluate("runs/grpo", "gsm8k", limit=200, against="smollm2-135m")`: accuracy, pass@k, significance of a gain.

    `data` is a dataset name (its test split; `"mbpp:validation"` for another) or anything that `load_samples` reads.
    `reward` is a name with its `params`, a function, or a mapping of these to weights; by default that of the dataset
    or of the run. Without any, the rows are scored: pairs by accuracy and margin, responses by perplexity; `by`
    chooses. With several `samples` per prompt, pass@k is reported for each of `k`; a reward of at least `full` counts
    as solved. Wrong input raises a ValueError before weights are loaded; the same seed gives the same answers.
    """
    from oxrl.generators.embedded.engine import check_sampling

    ks = check_choices(samples, k, temperature, against, model)
    default_temperature = 0.0 if samples == 1 else SAMPLING_TEMPERATURE
    sampling = GenerationConfig(max_tokens, default_temperature if temperature is None else temperature, seed=seed)
    check_sampling(sampling)
    run = _run_config(str(model))
    rows = read_eval_data(data, limit, run)
    variants = _choose(by, reward, params or {}, rows, run)
    if not variants:
        _refuse_sampling(samples, temperature)
        return evaluate_rows(str(model), rows.rows, by or kind_of(rows.rows), rows.name, against, seed)
    if empty := next((sample for sample in rows.samples if not sample.messages), None):
        raise ValueError(f"{empty.id}: the row has no prompt")
    for variant in variants.values():
        check_samples(variant, rows.samples)
    models = [EvalModel.find(str(name), rows.samples) for name in (model, against) if name is not None]
    results = []
    for each in models:
        with progress(each.name, len(rows.samples)) as advance:
            answer = partial(_answer, each, rows.samples, variants, sampling, samples, time_limit, advance)
            rollouts, scores = run_until_interrupted(answer)
        marks = {name: summarize(graded, ks, full, each.name, rollouts) for name, graded in scores.items()}
        results.append(Result(each.name, rollouts, scores, marks))
    compared = {} if against is None else {name: compare_results(results, name, seed) for name in variants}
    reward_name = next(iter(variants.values())).name
    return SampledEvaluation(
        data=rows.name,
        rows=len(rows.samples),
        results=tuple(results),
        comparisons=compared,
        reward=reward_name,
        samples=samples,
        sampling=sampling,
    )


def _choose(
    by: Method | None,
    reward: str | AnyReward | Mapping[Any, float] | None,
    params: Mapping[str, Any],
    rows: EvalData,
    run: Mapping[str, Any],
) -> dict[str, Reward]:
    """The reward with its variants; {} where the responses or pairs of the rows are scored."""
    kind = kind_of(rows.rows)
    if by in ("perplexity", "pairs"):
        if reward is not None:
            raise ValueError(f"a reward has no effect on an evaluation by {by}: leave one of them out")
        if kind != by:
            needed = "chosen and rejected responses" if by == "pairs" else "a response (or a text) and no pair"
            raise ValueError(f"an evaluation by {by} needs rows with {needed}; see docs/datasets.md")
        return {}
    given = reward or rows.reward
    if given is None and (kind != "pairs" or by == "reward") and (own := _own_reward(run)):
        return own
    return {} if given is None and by is None and kind is not None else _variants(given, params)


def _run_config(model: str) -> dict[str, Any]:
    """What a run recorded; {} for any other model.

    Not validated as a config: that would import Python files which it names, and the run may come from someone else.
    """
    file = last_stage(Path(model)) / "config.yaml"
    return read_recorded(file) if file.is_file() else {}


def _own_reward(run: Mapping[str, Any]) -> dict[str, Reward]:
    """The reward that a run was trained with; {} for other models, and for runs without one."""
    section = run.get("reward", {})
    named, params = section.get("reward_func"), section.get("params", {})
    names = [named] if isinstance(named, str) else list(named or {})
    if outside := next((name for name in names if ":" in name), None):
        raise ValueError(
            f"the run was trained with the reward {outside}, and evaluations do not import Python files of a run by "
            f"themselves: set the reward to {named if isinstance(named, str) else json.dumps(named)!r}; or choose by "
            "perplexity or pairs"
        )
    if isinstance(named, str):
        return reward_variants(named, params)
    return {"": summed_rewards(named, params)} if named else {}


def _refuse_sampling(samples: int, temperature: float | None) -> None:
    if samples > 1 or temperature is not None:
        raise ValueError(
            "samples and temperature have no effect: without a reward nothing is sampled, the rows' own responses are "
            "scored; set a reward, or leave them out"
        )


def check_choices(
    samples: int, k: Sequence[int] | None, temperature: float | None, against: str | Path | None, model: str | Path
) -> tuple[int, ...]:
    """Check the arguments and return the k of each pass@k to report."""
    if samples < 1:
        raise ValueError(f"samples is {samples}; each prompt needs at least 1 answer")
    if samples > 1 and temperature == 0:
        raise ValueError(f"{samples} samples at temperature 0 are identical: use 1 sample, or a temperature above 0")
    if wrong := [each for each in k or () if not 1 <= each <= samples]:
        raise ValueError(
            f"pass@{wrong[0]} needs at least {max(1, wrong[0])} samples per prompt, not {samples}: raise samples"
        )
    if against is not None and resolve_weights(str(against)) == resolve_weights(str(model)):
        raise ValueError(f"{model} cannot be compared with itself: name another model with against")
    if k:
        return tuple(sorted(set(k)))
    return (*(2**power for power in range((samples - 1).bit_length())), samples) if samples > 1 else ()


def _variants(reward: str | AnyReward | Mapping[Any, float] | None, params: Mapping[str, Any]) -> dict[str, Reward]:
    if reward is None:
        raise ValueError(
            "no reward is set: name one (`oxrl rewards list` lists them), or a function as FILE.py:FUNCTION; rows with "
            "responses or pairs need none"
        )
    if isinstance(reward, str):
        return reward_variants(reward, params)
    if isinstance(reward, Mapping):
        return {"": summed_rewards(reward, params)}
    return {"": as_reward(partial(reward, **params) if params and not isinstance(reward, Reward) else reward)}


def read_eval_data(
    data: Source | Sequence[Sample] | Loaded, limit: int | None = None, run: Mapping[str, Any] = MappingProxyType({})
) -> EvalData:
    """Read the test split of a dataset by name, samples in memory, or rows of anything that `load_samples` reads.

    Other rows than those of datasets are read with the columns and templates of `run`, if they have them.
    """
    if isinstance(data, Loaded):
        data = data.samples
    if isinstance(data, Sequence) and not isinstance(data, str) and data and isinstance(data[0], Sample):
        rows = list(data)[:limit]
        return EvalData(rows, [as_prompt(each) for each in rows], "samples in memory", None)
    source, reward, name = data, None, "rows in memory"
    if isinstance(data, str | Path):
        name = str(data)
        if not Path(data).is_file() and (known := _dataset_named(name)):
            name, source, reward = f"{known[0]}:{known[1]}", split_file(*known), find_dataset(known[0]).reward
        elif (Path(data).parent / "card.json").is_file():
            reward = read_card(Path(data).parent).get("reward")
    loaded = _load_rows(source, limit, run.get("data", {}) if reward is None else {})
    return EvalData(loaded, [as_prompt(sample) for sample in loaded], name, reward)


def _load_rows(source: Any, limit: int | None, section: Mapping[str, Any]) -> list[Sample]:
    load = partial(load_samples, source, split="test", limit=limit)
    columns, template = section.get("columns"), {name: section[name] for name in TEMPLATED if section.get(name)}
    if columns or template:
        try:
            return list(load(columns=columns, template=template).samples)
        except ValueError as error:
            logger.info("the rows are read as they are, not with the columns of the run: %s", error)
    return list(load().samples)


def _dataset_named(data: str) -> tuple[str, str] | None:
    """Return `("gsm8k", "test")` for "gsm8k", likewise for "gym:TASK"; None for file names and hub ids."""
    gym = "gym:" if data.startswith("gym:") else ""
    name, _, split = data.removeprefix(gym).partition(":")
    if gym or name in DATASETS:
        return gym + name, split or "test"
    if "/" in data or "." in data or Path(data).exists():
        return None
    hint = did_you_mean(name, DATASETS, ";")
    raise ValueError(f"there is no file {data}, and no dataset is called {name!r}{hint} `oxrl data list` lists them")


class EvalModel(NamedTuple):
    """A model whose files exist and whose tokenizer can render all prompts; its weights are not loaded yet."""

    name: str
    path: str
    tokenizer: Any
    longest: tuple[int, str]  # tokens and sample id of the longest prompt
    render: Renderer  # with the template variables of a run

    @classmethod
    def find(cls, name: str, samples: Sequence[Sample]) -> EvalModel:
        path = resolve_weights(name)
        check_model(path)
        if path != name:
            _warn_of_tools(Path(name) / "config.yaml")
        tokenizer = load_tokenizer(path)
        render = Renderer(tokenizer, template_kwargs=template_kwargs_of(name))
        longest = max(
            (len(render.prompt(each.messages, tools=each.tools, media=each.media)), each.id) for each in samples
        )
        return cls(name, path, tokenizer, longest, render)

    def load(self) -> Any:
        model = load_model(self.path, is_trainable=False)
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if limit is not None and self.longest[0] >= limit:
            raise ValueError(
                f"{self.longest[1]}: a prompt of {self.longest[0]} tokens does not fit: {self.name} has a context of "
                f"{limit} tokens for prompt and answer; remove the row"
            )
        return model


def _warn_of_tools(config: Path) -> None:
    rollout = read_recorded(config).get("rollout", {}) if config.is_file() else {}
    if (env := rollout.get("env", "single_turn")) != "single_turn":
        logger.warning("this run was trained with rollout.env %s; it is evaluated with a single turn, without it", env)


async def _answer(
    model: EvalModel,
    samples: Sequence[Sample],
    variants: Mapping[str, Reward],
    sampling: GenerationConfig,
    n: int,
    time_limit: float,
    advance: Callable[[], None],
) -> tuple[tuple[Rollout, ...], dict[str, Scores]]:
    """Sample all answers, and grade them with each variant of the reward."""
    from oxrl.generators.embedded.generator import EmbeddedGenerator

    generator = EmbeddedGenerator(model.load(), model.tokenizer)
    sampler = RolloutSampler(generator, model.render, sampling, seed=sampling.seed)
    first, *others = variants
    rollouts = await sample_and_grade(
        sampler, samples, variants[first], n=n, time_limit=time_limit, on_prompt_done=advance
    )
    graded = {first: rollouts}
    for other in others:
        ungraded = [replace(rollout, score=None, error=None) if rollout.turns else rollout for rollout in rollouts]
        graded[other] = [
            rollout
            for start in range(0, len(ungraded), n)  # in groups, since each answer is graded in its own thread
            for rollout in await grade(ungraded[start : start + n], variants[other], time_limit=time_limit)
        ]
    return tuple(rollouts), {name: scores_of(each, n) for name, each in graded.items()}


def scores_of(rollouts: Sequence[Rollout], n: int) -> Scores:
    return tuple(tuple(each.reward for each in rollouts[start : start + n]) for start in range(0, len(rollouts), n))


def summarize(scores: Scores, ks: Sequence[int], full: float, model: str, rollouts: Sequence[Rollout]) -> RewardSummary:
    rows = [[reward for reward in row if reward is not None] for row in scores]
    graded = [row for row in rows if row]
    if not graded:
        failure = next((rollout.error for rollout in rollouts if rollout.error), "no reason was given")
        raise RuntimeError(f"none of {len(rollouts)} answers of {model} could be graded: {failure}")
    solved = [[reward >= full - 1e-9 for reward in row] for row in graded]
    passes = {k: [pass_at_k(len(row), sum(row), k) for row in solved if len(row) >= k] for k in ks}
    count = sum(map(len, graded))
    return RewardSummary(
        estimate([math.fsum(row) / len(row) for row in graded]),
        estimate([sum(row) / len(row) for row in solved]),
        {k: estimate(each) for k, each in passes.items() if each},
        count,
        len(rollouts) - count,
    )


def compare_results(results: Sequence[Result], variant: str, seed: int) -> Comparison:
    """Compare prompt by prompt, where both models have a reward."""
    pairs = zip(*(map(_mean, result.scores[variant]) for result in results), strict=True)
    both = [(first, second) for first, second in pairs if first is not None and second is not None]
    if not both:
        raise RuntimeError("no row has a graded answer from both models: there is nothing to compare")
    return compare([first for first, _ in both], [second for _, second in both], seed=seed)


def _mean(rewards: Sequence[float | None]) -> float | None:
    known = [each for each in rewards if each is not None]
    return math.fsum(known) / len(known) if known else None
