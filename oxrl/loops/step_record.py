"""Records of steps: what was sampled, how it was credited, and what the training pass computed for each token.

A `StepRecorder` watches a step without another forward pass: the loop hands it the credited rows, the backend the
outputs of each micro-batch with its losses. The files are written by `tracking.step_files`.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from oxrl.rollouts.buffer import Group, LeftOut
from oxrl.rollouts.step_answers import (
    Computed,
    Pieces,
    answer_lines,
    chosen_groups,
    group_summary,
    item_lines,
    merged_groups,
    numbers_of,
)
from oxrl.seeds import mixed_seed
from oxrl.tracking.step_files import StepFiles
from oxrl.types import Algorithm, Batch, Item, Outputs, Row

if TYPE_CHECKING:
    from torch import Tensor

RECORDED_ITEMS = 4  # rows or pairs of a step of an offline run


class _Pass(NamedTuple):
    """What a pass computed for the tokens of a micro-batch."""

    batch: Batch
    logprob: Tensor
    gradient: Tensor  # of the loss, with respect to each log-prob
    policy_gradient: Tensor  # of its term "policy" alone


class TrainedStep(NamedTuple):
    """A step after its update; `groups` and `left_out` of a run that samples, None of one on rows."""

    step: int
    algorithm: Algorithm
    version: int  # of the weights before the update
    metrics: Mapping[str, float]
    groups: Sequence[Group] | None = None
    left_out: Sequence[LeftOut] = ()


class NoRecord:
    """For runs that record no step."""

    checkpoint: str | None = None  # the newest one

    def begin(self) -> None:
        """A step starts: drop what was seen of the last one."""

    def credited(self, items: Sequence[Item]) -> None:
        """The rows of the step, with all that the loss needs."""

    def record(self, trained: TrainedStep) -> dict[str, float]:  # noqa: ARG002 - that of a recorder
        """Write the record of a step; return metrics of it."""
        return {}


NO_RECORD = NoRecord()


class StepRecorder(NoRecord):
    """`StepRecorder(StepFiles(folder, ...), "groups", seed=42, pieces=..., weights=...)`.

    `weights` returns a digest of the trained weights, or None where they are not in this process.
    """

    def __init__(
        self,
        files: StepFiles,
        mode: str,
        *,
        seed: int,
        pieces: Pieces,
        weights: Callable[[], str | None],
        environment: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.files, self.mode, self.seed, self.pieces, self.weights = files, mode, seed, pieces, weights
        self.environment, self._seconds = dict(environment), 0.0
        self._items: list[Item] = []
        self._passes: list[_Pass] = []
        self._weights_before: str | None = None

    def begin(self) -> None:
        self._items, self._passes, self._seconds = [], [], 0.0
        if self._weights_before is None:
            self._weights_before = self.weights()

    def credited(self, items: Sequence[Item]) -> None:
        self._items = list(items)

    def passed(self, batch: Batch, outputs: Outputs, shares: Mapping[str, Tensor]) -> None:
        """The `observe_pass` of a backend: take the derivatives of the loss before it runs backward."""
        started = time.monotonic()
        gradient = _derivative(shares["loss"], outputs.logprob)
        alone = "policy" in shares and len(shares) > 2
        policy = _derivative(shares["policy"], outputs.logprob) if alone else gradient
        self._passes.append(_Pass(batch, outputs.logprob.detach(), gradient, policy))
        self._seconds += time.monotonic() - started

    def record(self, trained: TrainedStep) -> dict[str, float]:
        started = time.monotonic()
        computed = computed_by_row(self._passes, trained.algorithm)
        header = self._header(trained, computed)
        if trained.groups is None:
            groups, lines = self._items_recorded(trained.step, computed)
            digests = {"data": _digest_of_data(self._items)}
        else:
            groups, lines = self._groups_recorded(trained.step, trained.groups, trained.left_out, computed)
            digests = _rollout_digests(trained.groups, trained.left_out)
        header |= {"groups": groups, "digests": {**digests, **header["digests"]}}
        self.files.write(header, lines, _index_line(header))
        self._items, self._passes = [], []
        return {"record_seconds": self._seconds + time.monotonic() - started}

    def _groups_recorded(
        self, step: int, groups: Sequence[Group], left_out: Sequence[LeftOut], computed: Mapping[str, Computed]
    ) -> tuple[list[dict[str, Any]], list[str]]:
        """The summaries of all groups, and the lines of those that are chosen."""
        merged = merged_groups(groups, left_out)
        chosen = chosen_groups(merged, self.mode, mixed_seed(self.seed, step))
        rows: dict[str, list[Row]] = {}
        for item in self._items:
            for row in item:
                rows.setdefault(row.sequence or row.id, []).append(row)
        kept = [group for group in merged if group.number in chosen]
        lines = [line for group in kept for line in answer_lines(group, rows, computed, self.pieces, self.seed)]
        return [group_summary(group, group.number in chosen) for group in merged], lines

    def _items_recorded(self, step: int, computed: Mapping[str, Computed]) -> tuple[list[dict[str, Any]], list[str]]:
        chosen = self._chosen_items(step, computed)
        groups = [
            {"group": number, "sample_id": item[0].id, "rows": len(item), "recorded": number in chosen}
            for number, item in enumerate(self._items)
        ]
        lines = [
            line for number in sorted(chosen) for line in item_lines(self._items[number], number, computed, self.pieces)
        ]
        return groups, lines

    def _chosen_items(self, step: int, computed: Mapping[str, Computed]) -> set[int]:
        """All items, or those with the least and the most likely tokens, and others at random."""
        count = len(self._items)
        if self.mode == "full" or count <= RECORDED_ITEMS:
            return set(range(count))
        order = sorted(range(count), key=lambda number: _mean_logprob(self._items[number], computed))
        others = np.random.default_rng(mixed_seed(self.seed, step)).permutation(order[1:-1])
        return {order[0], order[-1], *others[: RECORDED_ITEMS - 2].tolist()}

    def _header(self, trained: TrainedStep, computed: Mapping[str, Computed]) -> dict[str, Any]:
        before, self._weights_before = self._weights_before, self.weights()
        seconds = {name: value for name, value in trained.metrics.items() if name.endswith("_seconds")}
        return {
            "kind": "step",
            "step": trained.step,
            "version": trained.version,
            "online": trained.groups is not None,
            "algorithm": trained.algorithm.name,
            "checkpoint": self.checkpoint,
            "seeds": {"run": self.seed},
            "environment": self.environment,
            "metrics": dict(trained.metrics),
            "seconds": {name.removesuffix("_seconds"): value for name, value in seconds.items()},
            "totals": _totals(self._items, computed),
            "digests": {
                "credit": _digest_of_rows(self._items),
                "logprobs": _digest_of_logprobs(self._items, computed),
                "weights_before": before,
                "weights": self._weights_before,
            },
        }


def _index_line(header: Mapping[str, Any]) -> dict[str, Any]:
    groups, metrics = header["groups"], header["metrics"]
    return {
        "groups": len(groups),
        "recorded": sum(group["recorded"] for group in groups),
        **{name: header[name] for name in ("version", "checkpoint", "digests")},
        **{name: metrics.get(name) for name in ("loss", "grad_norm", "lr")},
    }


def _derivative(loss: Tensor, logprob: Tensor) -> Tensor:
    """With respect to the log-prob of each token; zeros where the loss does not depend on any."""
    import torch

    if not (loss.requires_grad and logprob.requires_grad):
        return torch.zeros_like(logprob)
    (found,) = torch.autograd.grad(loss, logprob, retain_graph=True, allow_unused=True)
    return torch.zeros_like(logprob) if found is None else found.detach()


def computed_by_row(passes: Sequence[_Pass], algorithm: Algorithm) -> dict[str, Computed]:
    """The numbers of the last pass over each row, by the row's id."""
    corrected = algorithm.parameters.get("correction", "none") != "none"
    found: dict[str, Computed] = {}
    for each in passes:
        numbers = {"policy_logprob": _array(each.logprob), "gradient": _array(each.gradient)}
        numbers |= _against_sampler(each, corrected)
        borders = each.batch.borders
        for name, start, end in zip(each.batch.ids, borders, borders[1:], strict=False):
            found[name] = {key: values[start:end] for key, values in numbers.items()}
    return found


def _against_sampler(each: _Pass, corrected: bool) -> dict[str, np.ndarray[Any, Any]]:
    """The ratio in the loss, and the tokens that it gives no gradient though they have an advantage."""
    streams = each.batch.streams
    if "advantage" not in streams:
        return {}
    clipped = each.batch.mask & (streams["advantage"] != 0) & (each.policy_gradient == 0)
    before = streams.get("policy_logprob" if corrected else "sampler_logprob")
    ratio = {} if before is None else {"ratio": _array((each.logprob - before).clamp(max=80.0).exp())}
    return {**ratio, "clipped": _array(clipped)}


def _array(values: Tensor) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any] = values.float().cpu().numpy()
    return found


def _totals(items: Sequence[Item], computed: Mapping[str, Computed]) -> dict[str, float]:
    """Sums over all rows of the step, recorded or not."""
    rows = [row for item in items for row in item]
    gradients = [np.abs(each["gradient"], dtype=np.float64).sum() for each in computed.values()]
    return {
        "rows": len(rows),
        "tokens": sum(map(len, rows)),
        "trained": sum(int(row.mask.sum()) for row in rows),
        "credited": sum(int(row.mask.sum()) for row in rows if "advantage" in row.streams),
        "with_advantage": sum(
            int((row.mask & (row.streams["advantage"] != 0)).sum()) for row in rows if "advantage" in row.streams
        ),
        "clipped": sum(int(each["clipped"].sum()) for each in computed.values() if "clipped" in each),
        "gradient": float(sum(gradients)),
    }


def _mean_logprob(item: Item, computed: Mapping[str, Computed]) -> float:
    known = [(row, numbers["policy_logprob"]) for row in item if (numbers := numbers_of(row, computed))]
    total = sum(float((logprob * row.mask).sum()) for row, logprob in known)
    return total / max(1, sum(int(row.mask.sum()) for row, _ in known))


def _digest(parts: Iterable[bytes]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()


def _rollout_digests(groups: Sequence[Group], left_out: Sequence[LeftOut]) -> dict[str, str]:
    """Of all groups of a step: their prompts, what was sampled, and its rewards."""
    others = [each for reason, rollouts in left_out if reason != "carried" for each in rollouts]
    rollouts = [*(each for group in groups for each in group), *others]
    turns = [turn for each in rollouts for turn in each.turns]
    return {
        "data": _digest(f"{each.group} {each.index} {each.sample.id}".encode() for each in rollouts),
        "prompts": _digest(np.array(each.turns[0].prompt_ids).tobytes() for each in rollouts if each.turns),
        "versions": _digest(repr(turn.generation.versions or turn.generation.version).encode() for turn in turns),
        "tokens": _digest(np.array(turn.generation.token_ids, np.int64).tobytes() for turn in turns),
        "sampler_logprobs": _digest(np.array(turn.generation.logprobs, np.float64).tobytes() for turn in turns),
        "rewards": _digest(
            repr((each.error, None if each.score is None else (each.score.value, dict(each.score.parts)))).encode()
            for each in rollouts
        ),
    }


def _digest_of_data(items: Sequence[Item]) -> str:
    return _digest(
        part for item in items for row in item for part in (row.id.encode(), row.tokens.tobytes(), row.mask.tobytes())
    )


def _digest_of_rows(items: Sequence[Item]) -> str:
    """Of all that the loss reads from the rows: masks, advantages, log-probs of other models, scalars."""
    return _digest(
        part
        for item in items
        for row in item
        for part in (
            row.mask.tobytes(),
            *(np.asarray(row.streams[name], np.float32).tobytes() for name in sorted(row.streams)),
            repr(sorted(row.scalars.items())).encode(),
        )
    )


def _digest_of_logprobs(items: Sequence[Item], computed: Mapping[str, Computed]) -> str | None:
    found = [computed[row.id]["policy_logprob"] for item in items for row in item if row.id in computed]
    return _digest(each.tobytes() for each in found) if found else None
