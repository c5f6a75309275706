"""Compare the log-probs of sampler and trainer token by token, and find the difference that explains the gap.

The engine's tokens and log-probs are compared with the trainer's forward pass over the same tokens. That pass is then
repeated with one setting changed at a time: dtype, temperature, cut-offs, older weights, re-tokenised text. The change
that removes the gap explains it. Nothing is trained, and the engine's weights are not modified.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np

from oxrl.config import Config, check_config
from oxrl.config.registry import find_engine
from oxrl.parsing import read_yaml
from oxrl.run.build import check_servers, open_engine
from oxrl.run.checkpoint import checkpoints, read_state
from oxrl.run.folder import last_stage
from oxrl.run.prepare import resolve
from oxrl.run.spec import first_algorithm, model_config, renderer, sampling_config
from oxrl.tracking.metrics import read_metrics
from oxrl.types import GenerationConfig, Generator, Request, Row, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from oxrl.tensors import Statistic

logger = logging.getLogger(__name__)

LogProbs: TypeAlias = list["np.ndarray[Any, np.dtype[np.float64]]"]
"""Per answer, per token."""
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5)  # an engine may be set to one of them by mistake
NOISE = 1e-4  # a mean gap below this is numerical noise: vLLM in float32 was off by 6e-6
EXPLAINED = 0.25  # largest remaining share of the mean gap for a change to explain it
EXPLAINED_BY_ROUNDING = 0.75  # the same for dtype
BUDGET = 2048  # tokens per forward pass
CORRECTION = "train.alg_params.correction: truncated (or masked, or sequence)"
ADVICE = {
    "dtype": "use the same precision for the engine and model.dtype, or weight tokens by the ratio: " + CORRECTION,
    "temperature": "the engine must return log-probs at rollout.temperature: start vLLM with "
    "--logprobs-mode processed_logprobs",
    "truncated sampling": "log-probs must be computed before cut-offs: leave out rollout.top_p, top_k and min_p, and "
    "start a vLLM server with --generation-config vllm, so that it ignores the model's generation_config",
    "stale weights": "the engine did not load the newest weights: restart it, and check its log for the last sync",
    "tokeniser": "the engine tokenises text itself: send it token ids",
    "nothing": "different weights or numerics; until the cause is found, weight tokens by the ratio: " + CORRECTION,
}


class Answer(NamedTuple):
    """A sampled completion with the engine's log-probs: `Answer((1, 50), (7, 2), (-0.3, -0.1))`."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class SavedWeights(NamedTuple):
    """Weights of the run: `SavedWeights("step_0002", "runs/first/checkpoints/step_0002", 2)`."""

    name: str
    path: str
    version: int


class Token(NamedTuple):
    """One token with its two log-probs; `position` counts from the first token of the answer."""

    answer: int
    position: int
    id: int
    text: str
    engine: float
    trainer: float

    @property
    def gap(self) -> float:
        return abs(self.engine - self.trainer)


class Difference(NamedTuple):
    """`Difference("dtype", "bfloat16 instead of float32", 0.0004, 0.01)`: one change, and the remaining gap."""

    cause: str
    what: str
    mean: float
    largest: float


class MismatchReport(NamedTuple):
    """Result of `audit_mismatch`. `explanation` is None if engine and trainer agree or no tried change explains it."""

    checkpoint: str
    source: str  # origin of the answers
    answers: int
    tokens: int
    mean: float
    largest: float
    allowed: float
    worst: tuple[Token, ...]
    tried: tuple[Difference, ...]
    explanation: Difference | None
    advice: str

    @property
    def within(self) -> bool:
        return self.largest <= self.allowed

    def to_json(self) -> dict[str, Any]:
        worst = [{**token._asdict(), "gap": token.gap} for token in self.worst]
        tried = [each._asdict() for each in self.tried]
        found = self.explanation and self.explanation._asdict()
        return {**self._asdict(), "within": self.within, "worst": worst, "tried": tried, "explanation": found}

    def __str__(self) -> str:
        verdict = "within" if self.within else "above"
        lines = [
            f"{self.checkpoint}: {self.tokens} tokens of {self.answers} answers, {self.source}",
            f"gap between engine and trainer: mean {self.mean:.3g}, largest {self.largest:.3g}, {verdict} the "
            f"allowed {self.allowed:g} (train.max_logprob_gap)",
            "",
            "  answer  position  token        engine   trainer       gap",
            *(
                f"  {each.answer:6}  {each.position:8}  {each.text!r:10.10} {each.engine:9.4f} {each.trainer:9.4f} "
                f"{each.gap:9.3g}"
                for each in self.worst
            ),
            "",
            "remaining gap with one setting changed:",
            *(f"  {each.cause:18}  {each.what:44}  mean {each.mean:.3g}" for each in self.tried),
            "",
            self._verdict(),
        ]
        return "\n".join(lines)

    def _verdict(self) -> str:
        if self.explanation is not None:
            return f"explained by {self.explanation.cause}: {self.explanation.what}\n{self.advice}"
        if self.mean <= NOISE:
            return "engine and trainer agree"
        return f"no tried change explains the gap\n{self.advice}"


@asynccontextmanager
async def engine_of(config: Config, trainer: _Trainer) -> AsyncIterator[Generator]:
    """Open the run's engine with the trainer's weights, next to a trainer in a single process."""
    single = config.run.model_copy(update={"backend": "local", "training_gpus": None, "rollout_gpus": None})
    engine = config.inference_engine.model_copy(update={"name": config.engine, "colocated": False})
    changed = config.model_copy(update={"run": single, "inference_engine": engine})
    with tempfile.TemporaryDirectory(prefix="oxrl-mismatch-") as folder:
        async with open_engine(changed, trainer.tokenizer, Path(folder), trainer) as opened:
            if not find_engine(config.engine).external:  # external servers keep their weights
                await opened.generator.update_weights(Weights(trainer.model, 1))
            yield opened.generator


async def audit_mismatch(
    run: str | Path,
    engine: Generator | None = None,
    *,
    answers: int = 8,
    max_tokens: int = 64,
    recorded: bool = False,
) -> MismatchReport:
    """Compare a run's engine with its trainer at the newest checkpoint, or at the initial model if there is none.

    `engine` is used with the weights that it has; without one, the engine of the run's config is started. With
    `recorded`, completions recorded by the run are compared, at the newest checkpoint that sampled any of them.
    """
    config, folder = _online_run(Path(run))
    if engine is None and not recorded:
        check_servers(config)
    saved = _saved_weights(config, folder)
    index, sampled = _sampled_with(folder, saved, answers) if recorded else (len(saved) - 1, [])
    trainer = _Trainer(config, saved[index].path)
    if not recorded:
        prompts = _prompts(config, folder, answers)
        sampling = sampling_config(config)
        sampling = sampling._replace(max_new_tokens=min(sampling.max_new_tokens, max_tokens))
        if engine is not None:
            sampled = await _sample(engine, prompts, answers, sampling)
        else:
            async with engine_of(config, trainer) as own:
                sampled = await _sample(own, prompts, answers, sampling)
    sampled = [answer for answer in sampled if answer.tokens]
    if not sampled:
        raise RuntimeError("the engine sampled no token: there is nothing to compare")
    source = "sampled in the run" if recorded else "sampled for this audit"
    return _compare(config, saved[: index + 1], trainer, sampled, source)


def _compare(
    config: Config, saved: Sequence[SavedWeights], trainer: _Trainer, sampled: Sequence[Answer], source: str
) -> MismatchReport:
    engine: LogProbs = [np.array(answer.logprobs) for answer in sampled]
    ours = trainer.logprobs(sampled)["logprob"]
    mean, largest = _gap(engine, ours)
    alternatives = {cause: each for cause, each in _alternatives(config, saved, trainer, sampled) if each}
    tried = sorted((_best(cause, engine, each) for cause, each in alternatives.items()), key=lambda one: one.mean)
    rounding = max((_gap(ours, each)[0] for each in alternatives.get("dtype", {}).values()), default=0.0)
    explanation = _explanation(mean, tried, rounding) if mean > NOISE else None
    advice = "" if mean <= NOISE else ADVICE[explanation.cause if explanation is not None else "nothing"]
    return MismatchReport(
        checkpoint=saved[-1].path,
        source=source,
        answers=len(sampled),
        tokens=sum(len(answer.tokens) for answer in sampled),
        mean=mean,
        largest=largest,
        allowed=config.allowed_gap(trainer.model.dtype.itemsize),
        worst=_worst(sampled, ours, trainer.tokenizer),
        tried=tuple(tried),
        explanation=explanation,
        advice=advice,
    )


def _explanation(mean: float, tried: Sequence[Difference], rounding: float) -> Difference | None:
    """Return the change that removes most of the gap.

    Half precision rounds differently in every engine, so that part of the gap remains with the same dtype. For dtype it
    is enough that the gap shrinks and is not larger than the effect of rounding on the trainer's own log-probs.
    """
    for each in tried:
        if each.mean <= EXPLAINED * mean:
            return each
    for each in tried:
        if each.cause == "dtype" and each.mean <= EXPLAINED_BY_ROUNDING * mean and mean <= 2 * rounding:
            return each
    return None


def _online_run(run: Path) -> tuple[Config, Path]:
    folder = last_stage(run)
    file = folder / "config.yaml"
    if not file.is_file():
        raise ValueError(f"there is no run in {run}: it has no config.yaml")
    config = check_config(read_yaml(file))
    if first_algorithm(config).online is None:
        raise ValueError(f"{config.train.alg_name} trains on files: this run has no engine to compare with")
    return config, folder


def _saved_weights(config: Config, folder: Path) -> list[SavedWeights]:
    """Return the initial model and all checkpoints, oldest first."""
    initial = SavedWeights("the initial model", model_config(config).name, 0)
    later = checkpoints(folder / "checkpoints")
    return [initial, *(SavedWeights(path.name, str(path), read_state(path).version) for path in later)]


def _recorded(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the turns in `rollouts.jsonl`, newest first."""
    file = folder / "rollouts.jsonl"
    for row in reversed(read_metrics(file) if file.exists() else []):
        for sample in row["samples"]:
            if not sample.get("greedy"):
                yield from sample.get("turns", ())


def _sampled_with(folder: Path, saved: Sequence[SavedWeights], answers: int) -> tuple[int, list[Answer]]:
    """Return the index of the newest weights with recorded completions, and these completions."""
    for index in reversed(range(len(saved))):
        turns = (turn for turn in _recorded(folder) if turn["token_ids"])
        own = [turn for turn in turns if set(turn["versions"]) == {saved[index].version}]
        if own:
            names = ("prompt_ids", "token_ids", "logprobs")
            return index, [Answer(*(tuple(turn[name]) for name in names)) for turn in own[:answers]]
    raise ValueError(
        f"no answer in {folder / 'rollouts.jsonl'} was sampled with the weights of an existing checkpoint: raise "
        "rollout.log_samples or train.keep_last, lower train.checkpoint_every, or leave out --recorded"
    )


def _prompts(config: Config, folder: Path, count: int) -> list[tuple[int, ...]]:
    """Return the run's most recent prompts, or the first prompts of its data if none was recorded."""
    recent = dict.fromkeys(tuple(turn["prompt_ids"]) for turn in _recorded(folder))
    if recent:
        return list(recent)[:count]

    spec = resolve(config)
    render = renderer(spec.config, spec.tokenizer)
    samples = spec.source.get_prompts(count)
    return [
        tuple(map(int, render.prompt(sample.messages, tools=sample.tools, media=sample.media))) for sample in samples
    ]


async def _sample(
    engine: Generator, prompts: Sequence[tuple[int, ...]], answers: int, sampling: GenerationConfig
) -> list[Answer]:
    requests = [Request(prompts[seed % len(prompts)], seed=seed) for seed in range(answers)]
    generations = await engine.generate(requests, sampling)
    pairs = zip(requests, generations, strict=True)
    return [Answer(request.tokens, generation.token_ids, generation.logprobs) for request, generation in pairs]


class _Trainer:
    """The trainer's forward pass over answers, in its dtype and layout, at the temperature of the run."""

    def __init__(self, config: Config, weights: str, dtype: str | None = None) -> None:
        from oxrl.backends.local import frozen
        from oxrl.models.load import load_model, load_tokenizer

        initial = model_config(config)
        own = initial._replace(name=weights, gradient_checkpointing=False, dtype=dtype or initial.dtype)
        self.model = load_model(own if own.name == initial.name else own._replace(revision=None), is_trainable=False)
        self.tokenizer = load_tokenizer(own)
        self.temperature = config.rollout.temperature
        self.module = frozen(self.model, self.temperature)

    def logprobs(
        self, answers: Sequence[Answer], statistics: Mapping[str, Statistic] = MappingProxyType({})
    ) -> dict[str, LogProbs]:
        """Return `logprob` and the named statistics of each answer's tokens."""
        import torch

        from oxrl.data.pack import collate, pack

        items = [(_row(str(number), answer),) for number, answer in enumerate(answers)]
        found: dict[str, dict[int, Any]] = {name: {} for name in ("logprob", *statistics)}
        for part in pack(items, BUDGET, layout=self.module.layout):
            batch = collate(part, self.model.device)
            with torch.no_grad():
                outputs = self.module(batch, statistics)
            values = {"logprob": outputs.logprob, **outputs.statistics}
            for number, (start, end) in zip(batch.ids, pairwise(batch.borders), strict=True):
                mask = batch.mask[start:end]
                for name, each in values.items():
                    found[name][int(number)] = each[start:end][mask].double().cpu().numpy()
        return {name: [each[number] for number in range(len(answers))] for name, each in found.items()}


def _row(id: str, answer: Answer) -> Row:
    mask = [False] * len(answer.prompt) + [True] * len(answer.tokens)
    return Row(id, np.array([*answer.prompt, *answer.tokens]), np.array(mask))


_Alternative: TypeAlias = dict[str, LogProbs]
"""Description of the change -> the log-probs with it."""


def _alternatives(
    config: Config, saved: Sequence[SavedWeights], trainer: _Trainer, sampled: Sequence[Answer]
) -> Iterator[tuple[str, _Alternative]]:
    own = trainer.temperature
    others = [each for each in TEMPERATURES if each != own]
    scaled = {f"{each:g} instead of {own:g}": partial(_at_temperature, own / each) for each in others}
    truncated = {what: partial(_truncated, rule) for what, rule in _cut_offs(config, trainer.model).items()}
    read = trainer.logprobs(sampled, {**scaled, **truncated})
    yield "temperature", {what: read[what] for what in scaled}
    yield "truncated sampling", {what: read[what] for what in truncated}
    yield "tokeniser", _retokenised(trainer, sampled)
    yield "dtype", dict(_other_dtypes(config, saved[-1].path, trainer, sampled))
    yield "stale weights", dict(_older_weights(config, saved[:-1], sampled))


def _at_temperature(factor: float, logits: Tensor, targets: Tensor, _other: Tensor | None) -> Tensor:
    return (logits * factor).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _truncated(rule: GenerationConfig, logits: Tensor, targets: Tensor, _other: Tensor | None) -> Tensor:
    """Renormalise over the tokens that the rule keeps; for a token that it drops, over all tokens."""
    from oxrl.generators.embedded.sampling import likeliest

    p = logits.softmax(-1)
    kept, order = likeliest(p, rule, p.shape[1])
    own = kept.gather(1, (order == targets[:, None]).int().argmax(1, keepdim=True))[:, 0]
    total = kept.sum(-1).where(own > 0, p.new_ones(()))
    return p.gather(1, targets[:, None])[:, 0].log() - total.log()


def _cut_offs(config: Config, model: Any) -> dict[str, GenerationConfig]:
    """Return the run's cut-offs, and those that a server reads from the model's generation_config by default."""
    run, own = sampling_config(config), model.generation_config
    models = GenerationConfig(top_p=own.top_p or 1.0, top_k=own.top_k or 0, min_p=own.min_p or 0.0)
    rules = {"from rollout": run, "from the model's generation_config": models}
    names = ("top_p", "top_k", "min_p")
    return {
        f"{', '.join(f'{name} {getattr(rule, name):g}' for name in names)}, {source}": rule
        for source, rule in rules.items()
        if rule.top_p < 1 or rule.top_k or rule.min_p
    }


def _retokenised(trainer: _Trainer, sampled: Sequence[Answer]) -> _Alternative:
    """Decode and tokenise again, with or without special tokens, as an engine that receives text would."""
    ways: dict[str, Callable[[Sequence[int]], tuple[int, ...]]] = {
        "text with special tokens added": partial(_tokenised_again, trainer.tokenizer, skip=False, add=True),
        "text as it is": partial(_tokenised_again, trainer.tokenizer, skip=False, add=False),
        "text without special tokens": partial(_tokenised_again, trainer.tokenizer, skip=True, add=False),
        "text with special tokens replaced": partial(_tokenised_again, trainer.tokenizer, skip=True, add=True),
    }
    found: _Alternative = {}
    for what, way in ways.items():
        prompts = [answer._replace(prompt=way(answer.prompt)) for answer in sampled]
        answers = [answer._replace(tokens=_if_as_long(way(answer.tokens), answer.tokens)) for answer in sampled]
        for part, others in (("prompt", prompts), ("answer", answers)):
            if others != list(sampled) and all(other.prompt for other in others):
                found[f"the {part} as {what}"] = trainer.logprobs(others)["logprob"]
    return found


def _tokenised_again(tokenizer: Any, ids: Sequence[int], *, skip: bool, add: bool) -> tuple[int, ...]:
    text = tokenizer.decode(list(ids), skip_special_tokens=skip)
    return tuple(tokenizer.encode(text, add_special_tokens=add))


def _if_as_long(tokens: tuple[int, ...], original: tuple[int, ...]) -> tuple[int, ...]:
    """Return `tokens` if there are as many as the engine's log-probs: otherwise the two could not be paired."""
    return tokens if len(tokens) == len(original) else original


def _other_dtypes(
    config: Config, checkpoint: str, trainer: _Trainer, sampled: Sequence[Answer]
) -> Iterator[tuple[str, LogProbs]]:
    own = str(trainer.model.dtype).removeprefix("torch.")
    for dtype in ("float32", "bfloat16"):
        if dtype != own:
            yield f"{dtype} instead of {own}", _Trainer(config, checkpoint, dtype).logprobs(sampled)["logprob"]


def _older_weights(
    config: Config, older: Sequence[SavedWeights], sampled: Sequence[Answer]
) -> Iterator[tuple[str, LogProbs]]:
    for weights in reversed(older):
        try:
            yield f"those of {weights.name}", _Trainer(config, weights.path).logprobs(sampled)["logprob"]
        except ValueError as error:  # the initial model may have been deleted
            logger.warning("%s cannot be compared with: %s", weights.path, error)


def _best(cause: str, engine: LogProbs, each: _Alternative) -> Difference:
    return min((Difference(cause, what, *_gap(engine, ours)) for what, ours in each.items()), key=lambda one: one.mean)


def _gap(engine: LogProbs, ours: LogProbs) -> tuple[float, float]:
    """Return mean and largest absolute difference."""
    gaps = np.abs(np.concatenate(engine) - np.concatenate(ours))
    return float(gaps.mean()), float(gaps.max())


def _worst(sampled: Sequence[Answer], ours: LogProbs, tokenizer: Any, count: int = 5) -> tuple[Token, ...]:
    tokens = [
        Token(number, position, id, str(tokenizer.decode([id])), theirs, float(own))
        for number, (answer, logprobs) in enumerate(zip(sampled, ours, strict=True))
        for position, (id, theirs, own) in enumerate(zip(answer.tokens, answer.logprobs, logprobs, strict=True))
    ]
    return tuple(sorted(tokens, key=lambda token: -token.gap)[:count])
