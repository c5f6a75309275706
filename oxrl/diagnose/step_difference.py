"""The first difference between two records of a step, in the order in which a step computes its numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

from oxrl.tracking.step_files import StepRecord

KIND = "kind of run"
Found: TypeAlias = tuple[str, Any]
"""(where, value): `("group 48, answer 2", 1.0)`."""


class Difference(NamedTuple):
    """`Difference("reward", "group 48, answer 2", 1.0, 0.0)`: what differs first, and where."""

    stage: str
    where: str
    before: Any
    now: Any

    @property
    def gap(self) -> float | None:
        """The distance of two numbers; None of anything else."""
        both = (self.before, self.now)
        numbers = [each for each in both if isinstance(each, int | float) and not isinstance(each, bool)]
        return abs(numbers[0] - numbers[1]) if len(numbers) == 2 else None

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "gap": self.gap}

    def __str__(self) -> str:
        if self.stage == self.where:
            return f"{self.stage}: in what is not recorded token by token (digests {self.before} and {self.now})"
        if self.stage == KIND:
            return f"{self.stage}: one samples its answers, the other trains on rows"
        gap = "" if self.gap is None else f" (a gap of {self.gap:.3g})"
        return f"{self.stage}: {self.where}: {_short(self.before)} and {_short(self.now)}{gap}"


class Stage(NamedTuple):
    """A stage of a step: its digest over everything, and what a record has of it."""

    name: str
    digest: str | None
    values: Callable[[StepRecord], Iterator[Found]]


def _short(value: Any) -> str:
    text = "nothing" if value is None else f"{value:.9g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


def name_of(answer: Mapping[str, Any]) -> str:
    """`group 48, answer 2`, or `item 3, row 0` of a run on rows."""
    if answer["kind"] == "row":
        return f"item {answer['group']}, row {answer['index']}"
    return f"group {answer['group']}, answer {answer['index']}"


def _of_answers(*keys: str) -> Callable[[StepRecord], Iterator[Found]]:
    def values(record: StepRecord) -> Iterator[Found]:
        for answer in record.answers:
            for key in keys:
                yield f"{name_of(answer)}, {key}", answer.get(key)

    return values


def _of_tokens(*names: str) -> Callable[[StepRecord], Iterator[Found]]:
    """The lists of each answer; a difference is narrowed down to its token later."""

    def values(record: StepRecord) -> Iterator[Found]:
        for answer in record.answers:
            for name in names:
                yield f"{name_of(answer)}, {name}", (answer.get("tokens") or {}).get(name)

    return values


def _of_groups(*keys: str) -> Callable[[StepRecord], Iterator[Found]]:
    def values(record: StepRecord) -> Iterator[Found]:
        yield "groups of the step", [group.get("group") for group in record.step["groups"]]
        for group in record.step["groups"]:
            for key in keys:
                yield f"group {group.get('group')}, {key}", group.get(key)

    return values


def _scalars(record: StepRecord) -> Iterator[Found]:
    """The numbers of rows; those of answers are rewards."""
    skipped = {"kind", "group", "index", "sample_id", "left_out", "media", "tokens"}
    for answer in record.answers:
        if answer["kind"] == "row":
            for key in sorted(answer.keys() - skipped):
                yield f"{name_of(answer)}, {key}", answer[key]


def _metrics(record: StepRecord) -> Iterator[Found]:
    """All but times and memory: the loss first."""
    metrics = record.step["metrics"]
    names = [name for name in metrics if "second" not in name and name != "memory_gib"]
    for name in sorted(names, key=lambda name: (name != "loss", name != "grad_norm")):
        yield name, metrics[name]


def _totals(record: StepRecord) -> Iterator[Found]:
    yield from record.step["totals"].items()


def _rest(record: StepRecord) -> Iterator[Found]:
    for answer in record.answers:
        yield name_of(answer), {key: value for key, value in answer.items() if key not in ("versions", "tokens")}


def _nothing(record: StepRecord) -> Iterator[Found]:  # noqa: ARG001 - one signature for all
    yield from ()


STAGES = (
    Stage("weights before the step", "weights_before", _nothing),
    Stage("data", "data", _of_groups("sample_id")),
    Stage("prompt", "prompts", _nothing),
    Stage("version", "versions", _of_tokens("version")),
    Stage("sampling", "tokens", _of_tokens("ids", "rows", "mask", "pieces")),
    Stage("sampler log-prob", "sampler_logprobs", _of_tokens("sampler_logprob")),
    Stage("reward", "rewards", lambda record: _rewards(record)),
    Stage("reference log-prob", None, _of_tokens("ref_logprob")),
    Stage("advantage", "credit", lambda record: _advantages(record)),
    Stage("log-prob", "logprobs", _of_tokens("policy_logprob")),
    Stage("ratio", None, _of_tokens("ratio", "clipped")),
    Stage("loss", None, _metrics),
    Stage("gradient", None, _of_tokens("gradient")),
    Stage("sums over the step", None, _totals),
    Stage("weights", "weights", _nothing),
    Stage("conversation", None, _rest),
)


def _rewards(record: StepRecord) -> Iterator[Found]:
    yield from _of_answers("error", "reward", "parts")(record)
    if record.step["online"]:
        yield from _of_groups("rewards", "mean", "std", "left_out")(record)


def _advantages(record: StepRecord) -> Iterator[Found]:
    yield from _of_tokens("advantage")(record)
    yield from _scalars(record)


def first_difference(before: StepRecord, now: StepRecord) -> Difference | None:
    """The first stage that differs: where records have it token by token, there, else by its digest."""
    if before.step.get("online") != now.step.get("online"):
        return Difference(KIND, "online", before.step.get("online"), now.step.get("online"))
    for stage in STAGES:
        if found := _in_content(stage, before, now) or _in_digest(stage, before.step["digests"], now.step["digests"]):
            return found
    return None


def first_digest(before: Mapping[str, Any], now: Mapping[str, Any]) -> Difference | None:
    """The same for two lines of an index, of steps whose files were removed."""
    for stage in STAGES:
        if found := _in_digest(stage, before["digests"], now["digests"]):
            return found
        if stage.name == "loss":
            for name in ("loss", "grad_norm", "lr"):
                if name in before and name in now and before[name] != now[name]:
                    return Difference(stage.name, name, before.get(name), now.get(name))
    return None


def _in_digest(stage: Stage, before: Mapping[str, Any], now: Mapping[str, Any]) -> Difference | None:
    values = (before.get(stage.digest), now.get(stage.digest)) if stage.digest else (None, None)
    if None in values or values[0] == values[1]:
        return None
    return Difference(stage.name, stage.name, *values)


def _in_content(stage: Stage, before: StepRecord, now: StepRecord) -> Difference | None:
    """What both records have; other groups may have been chosen, which is for the digests to find."""
    others = dict(stage.values(now))
    for where, value in stage.values(before):
        if where in others and others[where] != value:
            return _narrowed(stage.name, where, value, others[where])
    return None


def _narrowed(stage: str, where: str, before: Any, now: Any) -> Difference:
    """The first entry of two lists that differs."""
    if not (isinstance(before, list) and isinstance(now, list)):
        return Difference(stage, where, before, now)
    for index, (old, new) in enumerate(zip(before, now, strict=False)):
        if old != new:
            return Difference(stage, f"{where} {index}", old, new)
    return Difference(stage, f"{where}: how many", len(before), len(now))
