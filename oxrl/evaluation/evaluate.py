"""A model and rows with known answers to how good it is, how sure that is, and whether another one is better.

The generators and rewards are those of training, the statistics are `loops.statistics`; printing is left to the command
line.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from oxrl.concurrency import run_blocking, until_interrupted
from oxrl.config import load_config
from oxrl.data.prepare import DATASETS, find_dataset, read_card, split_file
from oxrl.data.render import Renderer
from oxrl.data.sources import Source, load_samples
from oxrl.loops.evaluate import answer_all
from oxrl.loops.statistics import Comparison, Estimate, compare, estimate, pass_at_k
from oxrl.models.load import check_model, load_model, load_tokenizer
from oxrl.names import did_you_mean
from oxrl.rewards import Reward, as_reward, check_samples
from oxrl.rewards.grade import AnyReward, grade
from oxrl.rewards.length import sampled_tokens
from oxrl.rollouts.collect import RolloutSampler
from oxrl.run.folder import resolve_weights
from oxrl.run.spec import as_prompt, variants_of
from oxrl.types import GenerationConfig, Rollout, Sample, Status

logger = logging.getLogger(__name__)

Scores: TypeAlias = tuple[tuple[float | None, ...], ...]
"""What each answer to each prompt earned; None where it could not be graded."""
Progress: TypeAlias = Callable[[str, int], AbstractContextManager[Callable[[], None]]]
"""A title and how many prompts there are to something that is called after each."""

SHOWN = 3  # sample answers
SAMPLED = 0.8  # the temperature for several answers to a prompt, unless told otherwise


def silent(title: str, total: int) -> AbstractContextManager[Callable[[], None]]:  # noqa: ARG001 - one signature for all
    return nullcontext(lambda: None)


class Marks(NamedTuple):
    """What a model's answers are worth by one reading of the reward."""

    reward: Estimate  # over prompts, each with the mean of its answers
    solved: Estimate  # the share of answers with the full reward
    pass_at: Mapping[int, Estimate]
    graded: int
    ungraded: int

    def to_dict(self) -> dict[str, Any]:
        told = {"reward": self.reward._asdict(), "solved": self.solved._asdict()}
        passes = {str(k): each._asdict() for k, each in self.pass_at.items()}
        return {**told, "pass_at": passes, "graded": self.graded, "ungraded": self.ungraded}


@dataclass(frozen=True, slots=True)
class Result:
    """One model's answers, and their marks by each reading of the reward: `{"lenient": ..., "strict": ...}`."""

    model: str
    rollouts: tuple[Rollout, ...]  # all answers to the first prompt, then to the second, ...
    scores: Mapping[str, Scores]
    marks: Mapping[str, Marks]

    @property
    def answered(self) -> list[Rollout]:
        return [rollout for rollout in self.rollouts if rollout.turns]

    @property
    def truncated(self) -> float:
        """The share of answers that were cut off before they ended."""
        return sum(rollout.status is Status.TRUNCATED for rollout in self.answered) / max(1, len(self.answered))

    @property
    def length(self) -> float:
        """Tokens per answer, on average."""
        return sum(map(sampled_tokens, self.answered)) / max(1, len(self.answered))

    @property
    def failure(self) -> str | None:
        """Why the first answer that has no reward has none."""
        return next((rollout.error for rollout in self.rollouts if rollout.error is not None), None)

    def to_dict(self) -> dict[str, Any]:
        marks = {name or "reward": each.to_dict() for name, each in self.marks.items()}
        told = {"truncated": self.truncated, "length": self.length, "failure": self.failure}
        return {"model": self.model, "marks": marks, **told}


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What `evaluate` found; `str(evaluation)` tells it, `results[0].marks` holds the numbers.

    `comparisons` are of the model over the one it was held against, by each reading of the reward; else empty.
    """

    data: str
    reward: str
    rows: int
    samples: int
    sampling: GenerationConfig
    results: tuple[Result, ...]
    comparisons: Mapping[str, Comparison]

    def to_dict(self) -> dict[str, Any]:
        compared = {
            name or "reward": {
                **each._asdict(), "gain": each.gain._asdict(), "is_noise": each.is_noise, "sentence": str(each),
            }
            for name, each in self.comparisons.items()
        }  # fmt: skip
        return {
            "data": self.data, "reward": self.reward, "rows": self.rows, "samples": self.samples,
            "temperature": self.sampling.temperature, "max_tokens": self.sampling.max_new_tokens,
            "seed": self.sampling.seed, "results": [each.to_dict() for each in self.results], "against": compared,
        }  # fmt: skip

    def answers(self) -> Iterator[dict[str, Any]]:
        """One record per answer, for a file."""
        for result in self.results:
            for place, rollout in enumerate(result.rollouts):
                row, index = divmod(place, self.samples)
                rewards = {name or "reward": scores[row][index] for name, scores in result.scores.items()}
                yield {
                    "model": result.model, "id": rollout.sample.id, "index": index, "prompt": rollout.prompt,
                    "answer": rollout.sample.answer, "response": rollout.response, "rewards": rewards,
                    "tokens": sampled_tokens(rollout), "truncated": rollout.status is Status.TRUNCATED,
                    "error": rollout.error,
                }  # fmt: skip

    def __str__(self) -> str:
        drawn = "greedy" if not self.sampling.temperature else f"temperature {self.sampling.temperature:g}"
        many = f"{self.samples} answers each, " if self.samples > 1 else ""
        lines = [f"{self.data}: {self.rows} rows, {many}{drawn}, at most {self.sampling.max_new_tokens} tokens"]
        lines.append(f"graded by {self.reward}; in brackets 95% confidence intervals over rows")
        for result in self.results:
            lines += ["", result.model, *_told(result)]
        if self.comparisons:
            lines += ["", f"{self.results[0].model} against {self.results[1].model}"]
            width = max(map(len, self.comparisons))
            lines += [f"  {name:{width}}  {each}".rstrip() for name, each in self.comparisons.items()]
        lines += ["", f"some answers of {self.results[0].model}", *_examples(self.results[0])]
        return "\n".join(lines)


def _told(result: Result) -> Iterator[str]:
    for name, marks in result.marks.items():
        if marks.reward == marks.solved:  # it pays all or nothing
            yield f"  {name or 'accuracy':12} {_percent(marks.solved)}"
        else:
            mean, low, high = (f"{each:.3g}" for each in marks.reward)
            yield f"  {f'{name} reward'.strip():12} {mean:>6} ({low} to {high})"
            yield f"  {f'{name} in full'.strip():12} {_percent(marks.solved)}"
        for k, passed in marks.pass_at.items():
            yield f"    {f'pass@{k}':10} {_percent(passed)}"
    ungraded = max(marks.ungraded for marks in result.marks.values())
    why = f" (the first: {result.failure})" if ungraded and result.failure else ""
    yield f"  {result.truncated:.0%} cut off, {result.length:.0f} tokens on average, {ungraded} ungraded{why}"


def _percent(value: Estimate) -> str:
    return f"{value.mean:6.1%} ({value.low:.1%} to {value.high:.1%})"


def _examples(result: Result) -> Iterator[str]:
    """The best paid of the first answers and some others, in the order of their rows."""
    firsts = [rollout for rollout in result.rollouts if rollout.index == 0 and rollout.turns]
    best = sorted(firsts, key=lambda rollout: -(rollout.reward if rollout.reward is not None else -math.inf))[:1]
    shown = [*best, *(rollout for rollout in firsts if rollout not in best)][:SHOWN]
    for rollout in sorted(shown, key=lambda rollout: rollout.group):
        asked, said = (" ".join(text.split()) for text in (rollout.prompt, rollout.response))
        right = f", right is {rollout.sample.answer!r}" if rollout.sample.answer is not None else ""
        earned = "ungraded" if rollout.reward is None else f"reward {rollout.reward:g}"
        yield f"  {_shortened(asked, 70)!r}\n    -> {_end_of(said, 160)!r}: {earned}{_shortened(right, 60)}"


def _shortened(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]} ..."


def _end_of(text: str, most: int) -> str:
    """Answers stand at the end."""
    return text if len(text) <= most else f"... {text[-most:]}"


class Questions(NamedTuple):
    """What is asked, what it is called, and the reward that comes with it."""

    samples: list[Sample]
    name: str
    reward: str | None


def evaluate(
    model: str | Path,
    data: Source | Sequence[Sample],
    reward: str | AnyReward | None = None,
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
    progress: Progress = silent,
) -> Evaluation:
    """`evaluate("runs/grpo", "gsm8k", limit=200, against="smollm2-135m")`: accuracy, pass@k, and whether it is noise.

    `data` is a dataset's name (its test split; `"mbpp:validation"` for another) or what `load_samples` reads. A dataset
    brings its reward along; `reward` is a name with its `params`, or a function. With several `samples` to a prompt
    pass@k is told for each of `k`; what earns `full` counts as solved. Wrong input is a ValueError before any weight is
    read; the same seed gives the same answers.
    """
    from oxrl.generators.embedded.engine import check_sampling

    ks = _check_choices(samples, k, temperature, against, model)
    usual = 0.0 if samples == 1 else SAMPLED
    sampling = GenerationConfig(max_tokens, usual if temperature is None else temperature, seed=seed)
    check_sampling(sampling)
    questions = read_questions(data, limit)
    variants = _variants(reward or questions.reward, params or {})
    for variant in variants.values():
        check_samples(variant, questions.samples)
    speakers = [Speaker.find(str(name), questions.samples) for name in (model, against) if name is not None]
    results = []
    for speaker in speakers:
        with progress(speaker.name, len(questions.samples)) as tell:
            answer = partial(_answer, speaker, questions.samples, variants, sampling, samples, time_limit, tell)
            rollouts, scores = run_blocking(until_interrupted, answer)
        marks = {name: _marks(each, ks, full, speaker.name, rollouts) for name, each in scores.items()}
        results.append(Result(speaker.name, rollouts, scores, marks))
    compared = {} if against is None else {name: _compare(results, name, seed) for name in variants}
    named = next(iter(variants.values())).name
    return Evaluation(questions.name, named, len(questions.samples), samples, sampling, tuple(results), compared)


def _check_choices(
    samples: int, k: Sequence[int] | None, temperature: float | None, against: str | Path | None, model: str | Path
) -> tuple[int, ...]:
    """Which pass@k to tell."""
    if samples < 1:
        raise ValueError(f"samples is {samples}; each prompt needs at least 1 answer")
    if samples > 1 and temperature == 0:
        raise ValueError(f"{samples} samples at temperature 0 are all the same: take 1, or a temperature above 0")
    if wrong := [each for each in k or () if not 1 <= each <= samples]:
        raise ValueError(
            f"pass@{wrong[0]} needs at least {max(1, wrong[0])} samples to a prompt, not {samples}: raise samples"
        )
    if against is not None and resolve_weights(str(against)) == resolve_weights(str(model)):
        raise ValueError(f"{model} cannot be held against itself")
    if k:
        return tuple(sorted(set(k)))
    return (*(2**power for power in range((samples - 1).bit_length())), samples) if samples > 1 else ()


def _variants(reward: str | AnyReward | None, params: Mapping[str, Any]) -> dict[str, Reward]:
    if reward is None:
        raise ValueError(
            "say how answers are graded: --reward NAME (`oxrl rewards list` shows them) or FILE.py:FUNCTION"
        )
    if isinstance(reward, str):
        return variants_of(reward, params)
    return {"": as_reward(partial(reward, **params) if params and not isinstance(reward, Reward) else reward)}


def read_questions(data: Source | Sequence[Sample], limit: int | None = None) -> Questions:
    """The test split of a dataset by its name, samples as they are, or rows of anything that `load_samples` reads."""
    if isinstance(data, Sequence) and not isinstance(data, str) and data and isinstance(data[0], Sample):
        return Questions([as_prompt(each) for each in list(data)[:limit]], "samples in memory", None)
    source, reward, name = data, None, "rows in memory"
    if isinstance(data, str | Path):
        name = str(data)
        if not Path(data).is_file() and (known := _dataset_named(name)):
            name, source, reward = f"{known[0]}:{known[1]}", split_file(*known), find_dataset(known[0]).reward
        elif (Path(data).parent / "card.json").is_file():
            reward = read_card(Path(data).parent).get("reward")
    loaded = load_samples(source, split="test", limit=limit).samples  # type: ignore[arg-type]
    asked = [as_prompt(sample) for sample in loaded]
    if mute := next((sample for sample in asked if not sample.messages), None):
        raise ValueError(f"{mute.id}: there is no prompt to answer")
    return Questions(asked, name, reward)


def _dataset_named(data: str) -> tuple[str, str] | None:
    """`("gsm8k", "test")` for "gsm8k", and so for "gym:TASK"; None for what looks like a file or a hub id."""
    gym = "gym:" if data.startswith("gym:") else ""
    name, _, split = data.removeprefix(gym).partition(":")
    if gym or name in DATASETS:
        return gym + name, split or "test"
    if "/" in data or "." in data or Path(data).exists():
        return None
    hint = did_you_mean(name, DATASETS, ";")
    raise ValueError(f"there is no file {data}, and no dataset is called {name!r}{hint} `oxrl data list` shows them")


class Speaker(NamedTuple):
    """A model that was found and whose tokenizer can write all prompts; no weight of it was read."""

    name: str
    place: str
    tokenizer: Any
    longest: tuple[int, str]  # tokens of the longest prompt, and whose it is

    @classmethod
    def find(cls, name: str, samples: Sequence[Sample]) -> Speaker:
        place = resolve_weights(name)
        check_model(place)
        if place != name:
            _warn_of_tools(Path(name) / "config.yaml")
        tokenizer = load_tokenizer(place)
        render = Renderer(tokenizer)
        longest = max((len(render.prompt(each.messages, tools=each.tools)), each.id) for each in samples)
        return cls(name, place, tokenizer, longest)

    def load(self) -> Any:
        model = load_model(self.place, is_trainable=False)
        room = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        if room is not None and self.longest[0] >= room:
            raise ValueError(
                f"{self.longest[1]}: a prompt of {self.longest[0]} tokens, and {self.name} has room for {room} "
                "with the answer: leave it out"
            )
        return model


def _warn_of_tools(config: Path) -> None:
    if config.is_file() and (env := load_config(config).rollout.env) != "single_turn":
        logger.warning("this run was trained with rollout.env %s; here it answers once, without it", env)


async def _answer(
    speaker: Speaker,
    samples: Sequence[Sample],
    variants: Mapping[str, Reward],
    sampling: GenerationConfig,
    n: int,
    time_limit: float,
    tell: Callable[[], None],
) -> tuple[tuple[Rollout, ...], dict[str, Scores]]:
    """Every answer once, graded by each variant of the reward."""
    from oxrl.generators.embedded.generator import EmbeddedGenerator

    generator = EmbeddedGenerator(speaker.load(), speaker.tokenizer)
    sampler = RolloutSampler(generator, Renderer(speaker.tokenizer), sampling, seed=sampling.seed)
    first, *others = variants
    rollouts = await answer_all(sampler, samples, variants[first], n=n, time_limit=time_limit, tell=tell)
    graded = {first: rollouts}
    for other in others:
        bare = [replace(rollout, score=None, error=None) if rollout.turns else rollout for rollout in rollouts]
        graded[other] = [
            rollout
            for start in range(0, len(bare), n)  # not all at once: each answer is graded in a thread of its own
            for rollout in await grade(bare[start : start + n], variants[other], time_limit=time_limit)
        ]
    return tuple(rollouts), {name: _scores(each, n) for name, each in graded.items()}


def _scores(rollouts: Sequence[Rollout], n: int) -> Scores:
    return tuple(tuple(each.reward for each in rollouts[start : start + n]) for start in range(0, len(rollouts), n))


def _marks(scores: Scores, ks: Sequence[int], full: float, model: str, rollouts: Sequence[Rollout]) -> Marks:
    rows = [[earned for earned in row if earned is not None] for row in scores]
    graded = [row for row in rows if row]
    if not graded:
        failure = next((rollout.error for rollout in rollouts if rollout.error), "no reason was given")
        raise RuntimeError(f"none of {len(rollouts)} answers of {model} could be graded: {failure}")
    right = [[earned >= full - 1e-9 for earned in row] for row in graded]
    passes = {k: [pass_at_k(len(row), sum(row), k) for row in right if len(row) >= k] for k in ks}
    count = sum(map(len, graded))
    return Marks(
        estimate([math.fsum(row) / len(row) for row in graded]),
        estimate([sum(row) / len(row) for row in right]),
        {k: estimate(each) for k, each in passes.items() if each},
        count,
        len(rollouts) - count,
    )


def _compare(results: Sequence[Result], variant: str, seed: int) -> Comparison:
    """Prompt by prompt, where both have a reward."""
    pairs = zip(*(map(_mean, result.scores[variant]) for result in results), strict=True)
    both = [(first, second) for first, second in pairs if first is not None and second is not None]
    if not both:
        raise RuntimeError("no row has a graded answer of both models: there is nothing to compare")
    return compare([first for first, _ in both], [second for _, second in both], seed=seed)


def _mean(earned: Sequence[float | None]) -> float | None:
    known = [each for each in earned if each is not None]
    return math.fsum(known) / len(known) if known else None
