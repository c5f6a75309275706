"""Evaluate a model on rows with responses, without sampling: perplexity of responses, or which of a pair is preferred.

A language model scores a response by its log-prob, a reward model by its score. Statistics are in `loops.statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from oxrl.algorithms.assemble import pair_items, supervised_items
from oxrl.data.actions import action_codec
from oxrl.data.pack import collate, pack
from oxrl.data.render import Renderer
from oxrl.evaluation.result import Evaluation
from oxrl.loops.statistics import Comparison, Estimate, compare, estimate, ratio_estimate
from oxrl.models.load import check_model, load_model, load_tokenizer
from oxrl.models.reward_model import is_reward_model
from oxrl.run.folder import actions_of, resolve_weights, template_kwargs_of
from oxrl.types import Item, Sample

Kind: TypeAlias = Literal["perplexity", "pairs"]

TOKENS_AT_ONCE = 4096


def kind_of(samples: Sequence[Sample]) -> Kind | None:
    """What rows like these can be evaluated by; None if some have neither a pair nor a response."""
    if all(sample.chosen and sample.rejected for sample in samples):
        return "pairs"
    return "perplexity" if all(map(_has_response, samples)) else None


def _has_response(sample: Sample) -> bool:
    return sample.text is not None or (bool(sample.messages) and sample.messages[-1].role == "assistant")


class RowScore(NamedTuple):
    """One response: its summed log-prob, its tokens, and how many of them were the most likely ones."""

    logprob: float
    tokens: int
    correct: int


class RowResult(NamedTuple):
    """One model: `measures` with their intervals, and what is compared with another model, one number per row."""

    model: str
    measures: Mapping[str, Estimate]
    compared: Mapping[str, list[float]]
    records: list[dict[str, Any]]  # one per row

    def to_dict(self) -> dict[str, Any]:
        return {"model": self.model, **{name: each._asdict() for name, each in self.measures.items()}}


@dataclass(frozen=True, slots=True, kw_only=True)
class RowEvaluation(Evaluation):
    """An evaluation without sampling: `results[0].measures["perplexity"]` is an `Estimate`."""

    kind: Kind
    results: tuple[RowResult, ...]

    def to_dict(self) -> dict[str, Any]:
        return {
            "data": self.data,
            "by": self.kind,
            "rows": self.rows,
            "results": [result.to_dict() for result in self.results],
            "against": {name: {**each.to_dict(), "sentence": str(each)} for name, each in self.comparisons.items()},
        }

    def answers(self) -> Iterator[dict[str, Any]]:
        for result in self.results:
            yield from ({"model": result.model, **record} for record in result.records)

    def __str__(self) -> str:
        what = {"perplexity": "log-probs of their responses", "pairs": "the preferred response of each pair"}[self.kind]
        lines = [f"{self.data}: {self.rows} rows, {what}; 95% confidence intervals over rows in brackets"]
        for result in self.results:
            lines += ["", result.model]
            lines += [f"  {name:16} {_shown(name, value)}" for name, value in result.measures.items()]
        if self.comparisons:
            lines += ["", f"{self.results[0].model} against {self.results[1].model}"]
            lines += [f"  {name:16} {each}" for name, each in self.comparisons.items()]
        return "\n".join(lines)


def _shown(name: str, value: Estimate) -> str:
    if "accuracy" in name:
        return f"{value.mean:6.1%} ({value.low:.1%} to {value.high:.1%})"
    return f"{value.mean:6.4g} ({value.low:.4g} to {value.high:.4g})"


def evaluate_rows(
    model: str, samples: Sequence[Sample], kind: Any, data: str, against: str | Path | None, seed: int
) -> RowEvaluation:
    """Measure one or two models on these rows. Both are checked before the first is loaded."""
    measure = {"perplexity": _perplexity, "pairs": _preferences}[kind]
    names = [str(name) for name in (model, against) if name is not None]
    actions = next(filter(None, map(actions_of, names)), None)  # a model to compare with may be no run
    models = [_RowModel.find(name, samples, kind, actions) for name in names]
    results = [measure(each, samples) for each in models]
    comparisons: dict[str, Comparison] = {}
    if against is not None:
        first, second = results
        comparisons = {
            name: compare(values, second.compared[name], seed=seed)
            for name, values in first.compared.items()
            if name in second.compared
        }
        if kind == "pairs" and not any(each.is_reward_model for each in models):
            results[0] = _against_reference(first, second)
    return RowEvaluation(data=data, rows=len(samples), results=tuple(results), comparisons=comparisons, kind=kind)


class _RowModel(NamedTuple):
    """A model whose files exist and that can render all rows; its weights are not loaded yet."""

    name: str
    path: str
    items: list[list[Item]]  # of each sample

    @classmethod
    def find(cls, name: str, samples: Sequence[Sample], kind: Kind, actions: Any = None) -> _RowModel:
        path = resolve_weights(name)
        check_model(path)
        tokenizer = load_tokenizer(path)
        render = Renderer(tokenizer, template_kwargs=template_kwargs_of(name), actions=action_codec(actions))
        assemble = pair_items if kind == "pairs" else supervised_items
        items = [assemble(sample, render) for sample in samples]
        if empty := [sample.id for sample, own in zip(samples, items, strict=True) if not _trained(own)]:
            raise ValueError(f"{empty[0]}: the row has no response tokens to score; remove the row")
        found = cls(name, path, items)
        if kind == "perplexity" and found.is_reward_model:
            raise ValueError(f"{name} is a reward model, which has no perplexity: evaluate it on pairs")
        return found

    @property
    def is_reward_model(self) -> bool:
        return is_reward_model(self.path)


def _trained(items: Sequence[Item]) -> int:
    return sum(int(row.mask.sum()) for item in items for row in item)


def _perplexity(model: _RowModel, samples: Sequence[Sample]) -> RowResult:
    scores = [
        RowScore(*map(sum, zip(*(row for item in own for row in item), strict=True))) for own in _row_scores(model)
    ]
    tokens = [score.tokens for score in scores]
    nll = ratio_estimate([-score.logprob for score in scores], tokens)
    return RowResult(
        model.name,
        {
            "perplexity": Estimate(*(math.exp(min(each, 700.0)) for each in nll)),
            "nll": nll,
            "token accuracy": _share(ratio_estimate([score.correct for score in scores], tokens)),
        },
        {"log-prob a token": [score.logprob / score.tokens for score in scores]},
        [{"id": sample.id, **score._asdict()} for sample, score in zip(samples, scores, strict=True)],
    )


def _share(value: Estimate) -> Estimate:
    return Estimate(*(min(1.0, max(0.0, each)) for each in value))


def _mean(values: Sequence[float]) -> Estimate:
    """Of values of any size: the normal approximation."""
    return ratio_estimate(values, [1.0] * len(values))


def _preferences(model: _RowModel, samples: Sequence[Sample]) -> RowResult:
    """By scores of a reward model; else by log-probs, of which the lengths of the responses are a part."""
    pairs = [own[0] for own in (_reward_scores(model) if model.is_reward_model else _logprobs(model))]
    margins = [chosen - rejected for chosen, rejected in pairs]
    right = [float(margin > 0) for margin in margins]
    return RowResult(
        model.name,
        {"accuracy": estimate(right), "margin": _mean(margins)},
        {"accuracy": right},
        [
            {"id": sample.id, "chosen": chosen, "rejected": rejected, "margin": chosen - rejected}
            for sample, (chosen, rejected) in zip(samples, pairs, strict=True)
        ],
    )


def _against_reference(first: RowResult, second: RowResult) -> RowResult:
    """Also by implicit rewards, log p - log p of the second model, as preference losses compare responses."""
    both = zip(first.records, second.records, strict=True)
    margins = [own["margin"] - other["margin"] for own, other in both]
    rewards = {
        "reward accuracy": estimate([float(margin > 0) for margin in margins]),
        "reward margin": _mean(margins),
    }
    return first._replace(measures={**first.measures, **rewards})


def _logprobs(model: _RowModel) -> list[list[tuple[float, ...]]]:
    return [[tuple(row.logprob for row in item) for item in own] for own in _row_scores(model)]


def _reward_scores(model: _RowModel) -> list[list[tuple[float, ...]]]:
    from oxrl.models.reward_model import load_reward_model, score_tokens

    rows = [row for own in model.items for item in own for row in item]
    scores = iter(score_tokens(load_reward_model(model.path), rows))
    return [[tuple(next(scores) for _ in item) for item in own] for own in model.items]


def _row_scores(model: _RowModel) -> list[list[tuple[RowScore, ...]]]:
    """The score of each row of each item of each sample; the order stays."""
    import torch

    from oxrl.backends.forward import LanguageModel
    from oxrl.backends.layout import prepare_layout
    from oxrl.tensors import correct, segment_sums

    module = LanguageModel(load_model(model.path, is_trainable=False))
    layout = prepare_layout(module).layout
    module.eval()
    rows = [(row,) for own in model.items for item in own for row in item]
    scores: dict[int, RowScore] = {}
    for part in pack(rows, TOKENS_AT_ONCE, layout=layout):
        batch = collate(part, module.model.device)
        with torch.no_grad():
            outputs: Any = module(batch, {"correct": correct})
        streams = outputs.logprob.double(), batch.mask.double(), outputs.statistics["correct"].double()
        sums = [segment_sums(stream, batch.segments, batch.num_rows).tolist() for stream in streams]
        for unit, logprob, tokens, hits in zip(part, *sums, strict=True):
            scores[id(unit)] = RowScore(logprob, int(tokens), int(hits))
    ordered = iter([scores[id(unit)] for unit in rows])
    return [[tuple(next(ordered) for _ in item) for item in own] for own in model.items]
