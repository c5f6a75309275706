"""Where sampler and trainer disagree: the gap of their log-probs, token by token, and which difference explains it.

An engine's tokens and log-probs are taken as they are, and the trainer's own pass over the same tokens is held against
them. Then that pass is done again with one thing different at a time: dtype, temperature, cut-offs, older weights,
re-tokenised text. What makes the gap vanish explains it. Nothing is trained, and the engine's weights are left alone.
"""

from __future__ import annotations

import json
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
import yaml

from oxrl.config import Config, check_config
from oxrl.run.build import check_servers, open_engine
from oxrl.run.checkpoint import checkpoints, read_state
from oxrl.run.folder import last_stage
from oxrl.run.prepare import resolve
from oxrl.run.spec import first_algorithm, model_config, sampling_config
from oxrl.types import GenerationConfig, Generator, Request, Row, Weights

if TYPE_CHECKING:
    from torch import Tensor

    from oxrl.tensors import Statistic

logger = logging.getLogger(__name__)

LogProbs: TypeAlias = list["np.ndarray[Any, np.dtype[np.float64]]"]
"""Of each answer, of each of its tokens."""
TEMPERATURES = (1.0, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5)  # that an engine may be set to by mistake
NOISE = 1e-4  # a mean gap below it is arithmetic: vLLM in float32 was off by 6e-6
EXPLAINED = 0.25  # what may be left of the mean gap where something explains it
LESS = 0.75  # the same where rounding explains it
BUDGET = 2048  # tokens of a pass
CORRECTION = "train.alg_params.correction: truncated (or masked, or sequence)"
ADVICE = {
    "dtype": "let the engine and model.dtype have the same precision, or weigh tokens by the ratio: " + CORRECTION,
    "temperature": "the engine's log-probs must be those at rollout.temperature: start vLLM with "
    "--logprobs-mode processed_logprobs",
    "truncated sampling": "log-probs must be those before cut-offs: leave rollout.top_p, top_k and min_p out, and "
    "start a vLLM server with --generation-config vllm, so that the model's own do not count",
    "stale weights": "the engine did not take the newest weights: start it anew, and look at its log for the last sync",
    "tokeniser": "the engine reads text and tokenises it by itself: send it token ids",
    "nothing": "other weights or another arithmetic; until it is found, weigh tokens by the ratio: " + CORRECTION,
}


class Answer(NamedTuple):
    """What an engine drew, and how likely it found it: `Answer((1, 50), (7, 2), (-0.3, -0.1))`."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


class Kept(NamedTuple):
    """Weights that the run had and that can be loaded: `Kept("step_0002", "runs/first/checkpoints/step_0002", 2)`."""

    name: str
    place: str
    version: int


class Token(NamedTuple):
    """One token that the two sides do not agree on; `position` counts from the answer's first."""

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
    """`Difference("dtype", "bfloat16 instead of float32", 0.0004, 0.01)`: one thing changed, and the gap then."""

    cause: str
    what: str
    mean: float
    largest: float


class Audit(NamedTuple):
    """What was found. `explanation` is None where the two sides agree, or nothing that was tried explains the gap."""

    checkpoint: str
    source: str  # of the answers
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
            f"{self.allowed:g} that is allowed (train.max_logprob_gap)",
            "",
            "  answer  position  token        engine   trainer       gap",
            *(
                f"  {at.answer:6}  {at.position:8}  {at.text!r:10.10} {at.engine:9.4f} {at.trainer:9.4f} {at.gap:9.3g}"
                for at in self.worst
            ),
            "",
            "what is left of the gap if one thing is different:",
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
        return f"nothing explains it\n{self.advice}"


@asynccontextmanager
async def engine_of(config: Config, trainer: _Trainer) -> AsyncIterator[Generator]:
    """The run's engine, speaking with the trainer's weights; beside a trainer of one process, whatever the run had."""
    alone = config.run.model_copy(update={"backend": "local", "training_gpus": None, "rollout_gpus": None})
    engine = config.inference_engine.model_copy(update={"name": config.engine, "colocated": False})
    beside = config.model_copy(update={"run": alone, "inference_engine": engine})
    with tempfile.TemporaryDirectory(prefix="oxrl-mismatch-") as folder:
        async with open_engine(beside, trainer.tokenizer, Path(folder), trainer) as opened:
            if config.engine != "http":  # servers of somebody else keep what they have
                await opened.generator.update_weights(Weights(trainer.model, 1))
            yield opened.generator


async def audit_mismatch(
    run: str | Path,
    engine: Generator | None = None,
    *,
    answers: int = 8,
    max_tokens: int = 64,
    recorded: bool = False,
) -> Audit:
    """Hold a run's engine against its trainer, on the newest checkpoint; before the first, on what the run began with.

    `engine` speaks with whatever weights it has; without one it is the run's own, made for this. With `recorded`, what
    the run drew itself is looked at instead of fresh answers, on the newest checkpoint that it was drawn with.
    """
    config, folder = _online_run(Path(run))
    if engine is None and not recorded:
        check_servers(config)
    kept = _kept(config, folder)
    at, drawn = _drawn_with(folder, kept, answers) if recorded else (len(kept) - 1, [])
    trainer = _Trainer(config, kept[at].place)
    if not recorded:
        prompts = _prompts(config, folder, answers)
        sampling = sampling_config(config)
        sampling = sampling._replace(max_new_tokens=min(sampling.max_new_tokens, max_tokens))
        if engine is not None:
            drawn = await _ask(engine, prompts, answers, sampling)
        else:
            async with engine_of(config, trainer) as own:
                drawn = await _ask(own, prompts, answers, sampling)
    drawn = [answer for answer in drawn if answer.tokens]
    if not drawn:
        raise RuntimeError("the engine drew no token: there is nothing to compare")
    source = "drawn in the run" if recorded else "drawn for this audit"
    return _compared(config, kept[: at + 1], trainer, drawn, source)


def _compared(config: Config, kept: Sequence[Kept], trainer: _Trainer, drawn: Sequence[Answer], source: str) -> Audit:
    said: LogProbs = [np.array(answer.logprobs) for answer in drawn]
    ours = trainer.logprobs(drawn)["logprob"]
    mean, largest = _gap(said, ours)
    alternatives = {cause: each for cause, each in _alternatives(config, kept, trainer, drawn) if each}
    tried = sorted((_best(cause, said, each) for cause, each in alternatives.items()), key=lambda one: one.mean)
    moved = [_gap(ours, each) for each in alternatives.get("dtype", {}).values()]
    explanation = _explanation(mean, tried, max((by for by, _ in moved), default=0.0)) if mean > NOISE else None
    advice = "" if mean <= NOISE else ADVICE[explanation.cause if explanation is not None else "nothing"]
    return Audit(
        checkpoint=kept[-1].place,
        source=source,
        answers=len(drawn),
        tokens=sum(len(answer.tokens) for answer in drawn),
        mean=mean,
        largest=largest,
        allowed=config.allowed_gap(trainer.model.dtype.itemsize),
        worst=_worst(drawn, ours, trainer.tokenizer),
        tried=tuple(tried),
        explanation=explanation,
        advice=advice,
    )


def _explanation(mean: float, tried: Sequence[Difference], rounding: float) -> Difference | None:
    """What leaves next to nothing of the gap.

    Half precision rounds another way in every engine, so that the same dtype leaves a part of it: there it is enough
    that the gap gets smaller, and is no larger than what rounding does to the trainer's own log-probs.
    """
    for each in tried:
        if each.mean <= EXPLAINED * mean:
            return each
    for each in tried:
        if each.cause == "dtype" and each.mean <= LESS * mean and mean <= 2 * rounding:
            return each
    return None


def _online_run(run: Path) -> tuple[Config, Path]:
    folder = last_stage(run)
    file = folder / "config.yaml"
    if not file.is_file():
        raise ValueError(f"there is no run in {run}: it has no config.yaml")
    config = check_config(yaml.safe_load(file.read_text(encoding="utf-8")))
    if first_algorithm(config).online is None:
        raise ValueError(f"{config.train.alg_name} learns from files: this run has no engine to compare with")
    return config, folder


def _kept(config: Config, folder: Path) -> list[Kept]:
    first = Kept("the run's first", model_config(config).name, 0)
    later = checkpoints(folder / "checkpoints")
    return [first, *(Kept(path.name, str(path), read_state(path).version) for path in later)]


def _recorded(folder: Path) -> Iterator[dict[str, Any]]:
    """The turns in `rollouts.jsonl`, newest first."""
    file = folder / "rollouts.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    for line in reversed(lines):
        for sample in json.loads(line)["samples"]:
            if not sample.get("greedy"):
                yield from sample.get("turns", ())


def _drawn_with(folder: Path, kept: Sequence[Kept], answers: int) -> tuple[int, list[Answer]]:
    """Which of the checkpoints was sampled with and recorded last, and what was drawn."""
    for at in reversed(range(len(kept))):
        turns = (turn for turn in _recorded(folder) if turn["token_ids"])
        own = [turn for turn in turns if set(turn["versions"]) == {kept[at].version}]
        if own:
            names = ("prompt_ids", "token_ids", "logprobs")
            return at, [Answer(*(tuple(turn[name]) for name in names)) for turn in own[:answers]]
    raise ValueError(
        f"no answer in {folder / 'rollouts.jsonl'} was drawn with the weights of a checkpoint that is still there: set "
        "rollout.log_samples and train.checkpoint_every (or train.keep_last) higher, or leave out --recorded"
    )


def _prompts(config: Config, folder: Path, count: int) -> list[tuple[int, ...]]:
    """What the run asked last; where it recorded nothing, what it begins with."""
    asked = dict.fromkeys(tuple(turn["prompt_ids"]) for turn in _recorded(folder))
    if asked:
        return list(asked)[:count]
    from oxrl.data.render import Renderer

    spec = resolve(config)
    render = Renderer(spec.tokenizer)
    samples = spec.source.get_prompts(count)
    return [tuple(map(int, render.prompt(sample.messages, tools=sample.tools))) for sample in samples]


async def _ask(
    engine: Generator, prompts: Sequence[tuple[int, ...]], answers: int, sampling: GenerationConfig
) -> list[Answer]:
    requests = [Request(prompts[seed % len(prompts)], seed=seed) for seed in range(answers)]
    said = await engine.generate(requests, sampling)
    return [Answer(one.tokens, all_of.token_ids, all_of.logprobs) for one, all_of in zip(requests, said, strict=True)]


class _Trainer:
    """The trainer's pass over answers, in its dtype and layout, at the temperature of the run."""

    def __init__(self, config: Config, weights: str, dtype: str | None = None) -> None:
        from oxrl.backends.local import frozen
        from oxrl.models.load import load_model, load_tokenizer

        given = model_config(config)
        own = given._replace(name=weights, gradient_checkpointing=False, dtype=dtype or given.dtype)
        self.model = load_model(own if own.name == given.name else own._replace(revision=None), is_trainable=False)
        self.tokenizer = load_tokenizer(own)
        self.temperature = config.rollout.temperature
        self.module = frozen(self.model, self.temperature)

    def logprobs(
        self, answers: Sequence[Answer], statistics: Mapping[str, Statistic] = MappingProxyType({})
    ) -> dict[str, LogProbs]:
        """`logprob` and the named statistics of each answer's tokens."""
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
"""What is different, in words -> the log-probs then."""


def _alternatives(
    config: Config, kept: Sequence[Kept], trainer: _Trainer, drawn: Sequence[Answer]
) -> Iterator[tuple[str, _Alternative]]:
    at = trainer.temperature
    others = [each for each in TEMPERATURES if each != at]
    warmer = {f"{each:g} instead of {at:g}": partial(_at_temperature, at / each) for each in others}
    cut = {what: partial(_cut, rule) for what, rule in _cut_offs(config, trainer.model).items()}
    read = trainer.logprobs(drawn, {**warmer, **cut})
    yield "temperature", {what: read[what] for what in warmer}
    yield "truncated sampling", {what: read[what] for what in cut}
    yield "tokeniser", _retokenised(trainer, drawn)
    yield "dtype", dict(_other_dtypes(config, kept[-1].place, trainer, drawn))
    yield "stale weights", dict(_older_weights(config, kept[:-1], drawn))


def _at_temperature(factor: float, logits: Tensor, targets: Tensor, _other: Tensor | None) -> Tensor:
    return (logits * factor).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def _cut(rule: GenerationConfig, logits: Tensor, targets: Tensor, _other: Tensor | None) -> Tensor:
    """Renormalised over what the rule keeps; for a token that it does not keep, over all."""
    from oxrl.generators.embedded.sampling import likeliest

    p = logits.softmax(-1)
    kept, order = likeliest(p, rule, p.shape[1])
    own = kept.gather(1, (order == targets[:, None]).int().argmax(1, keepdim=True))[:, 0]
    total = kept.sum(-1).where(own > 0, p.new_ones(()))
    return p.gather(1, targets[:, None])[:, 0].log() - total.log()


def _cut_offs(config: Config, model: Any) -> dict[str, GenerationConfig]:
    """The run's, and those that a server takes from the model's folder unless told otherwise."""
    run, own = sampling_config(config), model.generation_config
    models = GenerationConfig(top_p=own.top_p or 1.0, top_k=own.top_k or 0, min_p=own.min_p or 0.0)
    told = {"as rollout says": run, "as the model's generation_config says": models}
    names = ("top_p", "top_k", "min_p")
    return {
        f"{', '.join(f'{name} {getattr(rule, name):g}' for name in names)}, {what}": rule
        for what, rule in told.items()
        if rule.top_p < 1 or rule.top_k or rule.min_p
    }


def _retokenised(trainer: _Trainer, drawn: Sequence[Answer]) -> _Alternative:
    """As somebody sees it who gets text: with the tokenizer's own special tokens added, or with none at all."""
    ways: dict[str, Callable[[Sequence[int]], tuple[int, ...]]] = {
        "text with special tokens added": partial(_again, trainer.tokenizer, skip=False, add=True),
        "text as it is": partial(_again, trainer.tokenizer, skip=False, add=False),
        "text without special tokens": partial(_again, trainer.tokenizer, skip=True, add=False),
        "text whose special tokens are new": partial(_again, trainer.tokenizer, skip=True, add=True),
    }
    found: _Alternative = {}
    for what, way in ways.items():
        prompts = [answer._replace(prompt=way(answer.prompt)) for answer in drawn]
        answers = [answer._replace(tokens=_as_long(way(answer.tokens), answer.tokens)) for answer in drawn]
        for part, others in (("prompt", prompts), ("answer", answers)):
            if others != list(drawn) and all(other.prompt for other in others):
                found[f"the {part} as {what}"] = trainer.logprobs(others)["logprob"]
    return found


def _again(tokenizer: Any, ids: Sequence[int], *, skip: bool, add: bool) -> tuple[int, ...]:
    text = tokenizer.decode(list(ids), skip_special_tokens=skip)
    return tuple(tokenizer.encode(text, add_special_tokens=add))


def _as_long(tokens: tuple[int, ...], original: tuple[int, ...]) -> tuple[int, ...]:
    """Log-probs were given for as many tokens as there are; where there are others, nobody could pair them."""
    return tokens if len(tokens) == len(original) else original


def _other_dtypes(
    config: Config, checkpoint: str, trainer: _Trainer, drawn: Sequence[Answer]
) -> Iterator[tuple[str, LogProbs]]:
    own = str(trainer.model.dtype).removeprefix("torch.")
    for dtype in ("float32", "bfloat16"):
        if dtype != own:
            yield f"{dtype} instead of {own}", _Trainer(config, checkpoint, dtype).logprobs(drawn)["logprob"]


def _older_weights(config: Config, older: Sequence[Kept], drawn: Sequence[Answer]) -> Iterator[tuple[str, LogProbs]]:
    for weights in reversed(older):
        try:
            yield f"those of {weights.name}", _Trainer(config, weights.place).logprobs(drawn)["logprob"]
        except ValueError as error:  # the model that the run began with need not be there any more
            logger.warning("%s cannot be compared with: %s", weights.place, error)


def _best(cause: str, said: LogProbs, each: _Alternative) -> Difference:
    return min((Difference(cause, what, *_gap(said, ours)) for what, ours in each.items()), key=lambda one: one.mean)


def _gap(said: LogProbs, ours: LogProbs) -> tuple[float, float]:
    gaps = np.abs(np.concatenate(said) - np.concatenate(ours))
    return float(gaps.mean()), float(gaps.max())


def _worst(drawn: Sequence[Answer], ours: LogProbs, tokenizer: Any, count: int = 5) -> tuple[Token, ...]:
    tokens = [
        Token(number, position, id, str(tokenizer.decode([id])), theirs, float(own))
        for number, (answer, logprobs) in enumerate(zip(drawn, ours, strict=True))
        for position, (id, theirs, own) in enumerate(zip(answer.tokens, answer.logprobs, logprobs, strict=True))
    ]
    return tuple(sorted(tokens, key=lambda token: -token.gap)[:count])
