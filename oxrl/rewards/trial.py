"""Tests a reward on real rows before training: do correct answers earn the full reward, and can it be hacked?

Rows become completions in common answer formats ("forms"), and their rewards a `TrialReport`. A cheat is a completion
that needs no knowledge, or that negates the answer it mentions; it is tested in every form that the reward accepts. No
model is needed.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeAlias

import anyio

from oxrl.concurrency import run_blocking, task_group
from oxrl.rewards.grade import AnyReward, Reward, Ungraded, as_reward, check_samples
from oxrl.rewards.mathematics import boxed, plain, rational
from oxrl.types import Generation, Message, Rollout, Sample, Turn

PaysFor: TypeAlias = Literal["answer", "form", "opinion"]
"""A reward for a form may accept any content in it; an opinion has no zero: cheats must score below correct answers."""

Ways: TypeAlias = Mapping[str, Sequence[tuple[Sample, str]]]
"""Form -> a completion for each row; the form "" is the unformatted text."""

COLUMNS = (
    "reward", "rows", "right answers paid in full", "in the forms", "wrong answers", "other cheats that earn",
    "strict and lenient differ", "same twice", "verdict",
)  # fmt: skip
THRESHOLD = 0.05
LONG = ("a million characters", 1_000_000)
LONG_FOR_A_MODEL = ("ten thousand characters", 10_000)  # a model has to process all of them

FORMS: Mapping[str, Callable[[str], str]] = {
    "bare": "{}".format,
    "sentence": "The answer is {}.".format,
    "hashes": "We work it out step by step.\n#### {}".format,
    "boxed": "We work it out step by step, so it is $\\boxed{{{}}}$.".format,
    "tags": "<think>\nWe work it out.\n</think>\n<answer>\n{}\n</answer>".format,
    "boxed in tags": "<think>\nWe work it out.\n</think>\n<answer>\n\\boxed{{{}}}\n</answer>".format,
}
PROGRAM_FORMS: Mapping[str, Callable[[str], str]] = {
    "bare": "{}".format,
    "as code": "Here it is:\n```python\n{}\n```".format,
}
_LETTER = re.compile(r"\W*([A-E])(?:\W*|\W{1,3}\s.*)", re.DOTALL)


class Case(NamedTuple):
    """`Case(sample, right="42", wrong=("43", "44", "41", "84"))`."""

    sample: Sample
    right: str
    wrong: tuple[str, ...]


class Probe(NamedTuple):
    """`Probe("all answers listed", "sentence", 0.0, 0.0)`: what one kind of completion earns over all rows.

    `form` is the one with the highest reward, `earns` the mean as a fraction of the full reward, `in_full` the fraction
    of rows with the full reward.
    """

    name: str
    form: str
    earns: float
    in_full: float


class TrialReport(NamedTuple):
    """Results of a reward on real rows; `problems` is empty if it is safe to train with."""

    reward: str
    rows: int
    full: float  # the highest reward of a correct answer
    threshold: float
    right: tuple[Probe, ...]
    cheats: tuple[Probe, ...]  # the first is a wrong answer
    changed: int  # completions whose reward differed when they were graded again
    ungraded: int
    reason: str  # why the first ungraded completion was not graded
    median_seconds: float
    worst_seconds: float
    disagreement: Mapping[str, float]  # form -> fraction of rows where the strict and the lenient variant differ
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        probes = {key: [probe._asdict() for probe in getattr(self, key)] for key in ("right", "cheats")}
        return {**self._asdict(), **probes, "disagreement": dict(self.disagreement), "problems": list(self.problems)}

    @property
    def best(self) -> Probe:
        return max(self.right, key=lambda probe: (probe.in_full, probe.earns))

    def row(self) -> str:
        """One line of a Markdown table (`COLUMNS`), without numbers that depend on the machine."""
        paid = ", ".join(probe.name for probe in self.right if probe.in_full == 1.0) or "none"
        wrong, *others = self.cheats
        cheats = ", ".join(f"{each.name} {each.earns:.1%}" for each in others if each.earns > 0) or "nothing"
        if not self.problems and any(probe.earns > self.threshold for probe in self.cheats):
            cheats = "anything inside its form, by design"
        differ = ", ".join(f"{form} {share:.0%}" for form, share in self.disagreement.items() if share) or "never"
        cells = [
            f"`{self.reward}`",
            str(self.rows),
            f"{self.best.in_full:.0%}",
            paid,
            f"{wrong.earns:.1%}",
            cheats,
            differ if self.disagreement else "-",
            "yes" if not self.changed else "no",
            "passes" if not self.problems else "**fails**",
        ]
        return f"| {' | '.join(cells)} |"

    def __str__(self) -> str:
        lines = [
            f"{self.reward} on {self.rows} rows; the full reward is {self.full:g}",
            "",
            "the correct answer",
        ]
        for each in self.right:
            in_full = (
                f", in full {each.in_full:7.1%}" if self.full else ""
            )  # if nothing is earned, 0 is the full reward
            lines.append(f"  {each.name:28} earns {each.earns:7.1%}{in_full}")
        lines += ["", f"must earn nothing (at most {self.threshold:.1%} of the full reward)"]
        lines += [f"  {each.name:28} earns {each.earns:7.1%}{_where(each)}" for each in self.cheats]
        differ = ", ".join(f"{form} {share:.1%}" for form, share in self.disagreement.items() if share)
        lines += ["", f"strict and lenient differ: {differ or 'never'}"] if self.disagreement else [""]
        lines += [
            f"deterministic: {'yes' if not self.changed else f'no, {self.changed} scores changed'}",
            f"seconds per completion: median {self.median_seconds:.2g}, worst {self.worst_seconds:.2g}",
            *(f"PROBLEM: {problem}" for problem in self.problems),
            "the reward can be hacked, is broken, or does not fit these rows" if self.problems else "no problem found",
        ]
        return "\n".join(lines)


def _where(probe: Probe) -> str:
    return f"  as {probe.form}" if probe.earns and probe.form else ""


def try_reward(
    reward: AnyReward,
    samples: Sequence[Sample],
    *,
    pays_for: PaysFor = "answer",
    other: AnyReward | None = None,
    threshold: float = THRESHOLD,
    time_limit: float = 30.0,
    workers: int = 1,
) -> TrialReport:
    """`try_reward(reward("gsm8k_reward_func"), samples)`; `other` is its strict or lenient variant, to compare with.

    `workers` completions are graded concurrently; latencies are realistic with one worker.
    """
    if not samples:
        raise ValueError("testing a reward needs rows, and there are none")
    if missing := [sample.id for sample in samples if not reference_of(sample).strip()]:
        raise ValueError(f"testing a reward needs rows with an `answer` or `solution`; {missing[0]} has neither")
    check_samples(reward, samples)
    cases = cases_of(samples)
    trial = Grader(as_reward(reward), time_limit, workers)
    return run_blocking(partial(_try, trial, cases, pays_for, None if other is None else as_reward(other), threshold))


def cases_of(samples: Sequence[Sample]) -> list[Case]:
    """A correct and several wrong answers for each sample; for samples with tests, both are programs."""
    finals = [reference_of(sample) if is_program(sample) else final_answer(reference_of(sample)) for sample in samples]
    pool = list(dict.fromkeys(finals))
    return [
        Case(sample, right, wrong_programs(right, name) if (name := _function(sample)) else wrong_answers(right, pool))
        for sample, right in zip(samples, finals, strict=True)
    ]


def reference_of(sample: Sample) -> str:
    return sample.answer or str(sample.metadata.get("solution") or "")


def is_program(sample: Sample) -> bool:
    return bool(sample.metadata.get("tests"))


def _function(sample: Sample) -> str:
    return str(sample.metadata.get("entry_point") or "") if is_program(sample) else ""


def final_answer(answer: str) -> str:
    """The final answer of a row: after `####`, in the box, the letter of a choice, or the whole text."""
    final = (boxed(answer) or answer.rpartition("####")[2]).strip()
    letter = _LETTER.fullmatch(final)
    return letter[1] if letter else final


def wrong_answers(right: str, pool: Sequence[str]) -> tuple[str, ...]:
    """Up to four wrong answers that look like the correct one."""
    number = rational(plain(right))
    if number is not None:
        return tuple(str(number + step) for step in (1, 2, -1, 10))
    if re.fullmatch(r"[A-E]", right):
        return tuple(letter for letter in "CABD" if letter != right)
    others = [other for other in pool if plain(other) != plain(right)][:4]
    return (*others, *(f"{right}{letter}" for letter in "xyzw"))[:4]


def wrong_programs(right: str, name: str) -> tuple[str, ...]:
    """Programs like the correct one, except for the return value of the function."""
    return tuple(f"{right}\n\n\ndef {name}(*_, **__):\n    return {word!r}" for word in ("no", "none", "nor", "not"))


class Grader:
    """Grades completions, and keeps latencies and the reasons of ungraded ones.

    `opened` is what each prompt already has of the response.
    """

    def __init__(self, reward: Reward, time_limit: float, workers: int, opened: str = "") -> None:
        self.reward, self.time_limit, self.workers, self.opened = reward, time_limit, workers, opened
        self.seconds: list[float] = []
        self.reasons: list[str] = []

    async def scores(self, completions: Sequence[tuple[Sample, str]]) -> list[float | None]:
        values: dict[int, float | None] = {}
        limiter = anyio.CapacityLimiter(self.workers)

        async def one(index: int) -> None:
            async with limiter:
                start = time.perf_counter()
                rollout = synthetic_rollout(*completions[index], self.opened)
                (outcome,) = await self.reward.outcomes([rollout], self.time_limit)
                self.seconds.append(time.perf_counter() - start)
            values[index] = None if isinstance(outcome, Ungraded) else outcome.value
            if isinstance(outcome, Ungraded):
                self.reasons.append(outcome.reason)

        async with task_group() as tasks:
            for index in range(len(completions)):
                tasks.start_soon(one, index)
        return [values[index] for index in range(len(completions))]


def synthetic_rollout(sample: Sample, text: str, opened: str = "") -> Rollout:
    """A rollout with this response and placeholder tokens, about as many as a model would need."""
    ids = tuple(range(1, math.ceil(len(text) / 4) + 1))
    generation = Generation(ids, (0.0,) * len(ids), "stop", text=text, opened=opened)
    return Rollout(sample, (Turn((0,), generation, (Message("assistant", text),)),))


async def _try(
    trial: Grader, cases: Sequence[Case], pays_for: PaysFor, other: Reward | None, threshold: float
) -> TrialReport:
    correct = right_forms(cases)
    values = {form: await trial.scores(completions) for form, completions in correct.items()}
    full = max((value for scores in values.values() for value in scores if value is not None), default=0.0)
    unit = 1.0 if pays_for == "opinion" or full <= 0 else full
    right = tuple(_probe(form, form, scores, unit, full) for form, scores in values.items())
    forms = forms_of(cases)
    paid = {form: forms[form] for form in forms if max([0.0, *_known(values[form])]) > threshold * unit}
    again = {form: await trial.scores(completions) for form, completions in correct.items()}
    attempts = cheats_of(cases, paid or forms, LONG_FOR_A_MODEL if pays_for == "opinion" else LONG)
    if pays_for == "form":
        attempts = {name: _outside_forms(ways) for name, ways in attempts.items()}
    cheats = [await _best_paid(trial, name, ways, unit, full) for name, ways in attempts.items()]
    disagreement: dict[str, float] = {}
    if other is not None:
        variant = Grader(other, trial.time_limit, trial.workers)
        for form, completions in correct.items():
            disagreement[form] = _differ(values[form], await variant.scores(completions)) / len(completions)
    report = TrialReport(
        reward=trial.reward.name,
        rows=len(cases),
        full=full,
        threshold=threshold,
        right=right,
        cheats=tuple(cheats),
        changed=sum(_differ(values[form], again[form]) for form in values),
        ungraded=len(trial.reasons),
        reason=next(iter(trial.reasons), ""),
        median_seconds=statistics.median(trial.seconds),
        worst_seconds=max(trial.seconds),
        disagreement=disagreement,
        problems=(),
    )
    return report._replace(problems=tuple(_problems(report, pays_for)))


def forms_of(cases: Sequence[Case]) -> Mapping[str, Callable[[str], str]]:
    return PROGRAM_FORMS if all(is_program(case.sample) for case in cases) else FORMS


def right_forms(cases: Sequence[Case]) -> dict[str, list[tuple[Sample, str]]]:
    """The correct answer of each row, in each form that applies to all rows."""
    forms = {name: [(case.sample, form(case.right)) for case in cases] for name, form in forms_of(cases).items()}
    if any(case.right != reference_of(case.sample) for case in cases):
        forms["as in the file"] = [(case.sample, reference_of(case.sample)) for case in cases]
    numbers = [rational(plain(case.right)) for case in cases]
    integers = [int(number) for number in numbers if number is not None and number.denominator == 1]
    if len(integers) == len(cases):
        forms["with separators"] = [
            (case.sample, f"That makes {n:,} in all.") for case, n in zip(cases, integers, strict=True)
        ]
        forms["as an amount"] = [
            (case.sample, f"The answer is **${n:,}.00**.") for case, n in zip(cases, integers, strict=True)
        ]
    return forms


def _outside_forms(ways: Ways) -> Ways:
    """Cheats outside of forms, for rewards that accept any content in a form; all cheats if there are none."""
    return {form: texts for form, texts in ways.items() if form not in FORMS} or ways


def cheats_of(
    cases: Sequence[Case], forms: Mapping[str, Callable[[str], str]], long: tuple[str, int]
) -> dict[str, Ways]:
    """Cheat -> form -> a completion for each row."""

    def in_each(payload: Callable[[Case], str], some: Sequence[Case] = cases) -> Ways:
        return {name: [(case.sample, form(payload(case))) for case in some] for name, form in forms.items()}

    long_name, length = long

    def in_turn(form: Callable[[str], str]) -> list[tuple[Sample, str]]:
        return [(case.sample, "\n".join(form(each) for each in _listed(case))) for case in cases]

    return {
        "wrong answer": in_each(lambda case: case.wrong[0]),
        "nothing": {"": [(case.sample, "") for case in cases]},
        "empty tags": {"": [(case.sample, "<think></think><answer></answer>") for case in cases]},
        "form alone": in_each(lambda _: ""),
        "form with filler": in_each(lambda _: "..."),
        "prompt echoed": {"": [(case.sample, _prompt(case)) for case in cases], **in_each(_prompt)},
        "all answers listed": in_each(lambda case: ", ".join(_listed(case))),
        "each answer in turn": {name: in_turn(form) for name, form in forms.items()},
        "denied": in_each(lambda case: f"not {case.right}"),
        "denied behind a wrong one": in_each(lambda case: f"{case.wrong[0]}, not {case.right}"),
        long_name: {
            "letters": [(case.sample, _repeated("x", length)) for case in cases[:1]],
            **in_each(lambda case: _repeated(f"{case.wrong[0]} ", length), cases[:1]),
        },
    }


def _repeated(text: str, length: int) -> str:
    return text * (length // len(text))


def _prompt(case: Case) -> str:
    return Rollout(case.sample).prompt


def _listed(case: Case) -> Iterable[str]:
    """The correct answer among wrong ones, neither first nor last."""
    return (*case.wrong[:2], case.right, *case.wrong[2:])


async def _best_paid(trial: Grader, name: str, ways: Ways, unit: float, full: float) -> Probe:
    """The form with the highest mean reward over all rows: the one that a model would learn."""
    probes = [_probe(name, form, await trial.scores(texts), unit, full) for form, texts in ways.items()]
    return max(probes, key=lambda probe: probe.earns)


def _probe(name: str, form: str, scores: Sequence[float | None], unit: float, full: float) -> Probe:
    known = _known(scores)
    if not known:
        return Probe(name, form, 0.0, 0.0)
    in_full = sum(math.isclose(value, full) for value in known) / len(scores)
    return Probe(name, form, math.fsum(known) / len(known) / unit, in_full)


def _known(scores: Iterable[float | None]) -> list[float]:
    return [value for value in scores if value is not None]


def _differ(one: Sequence[float | None], other: Sequence[float | None]) -> int:
    return sum(first != second for first, second in zip(one, other, strict=True))


def _problems(report: TrialReport, pays_for: PaysFor) -> Iterable[str]:
    best = report.best
    if report.full <= 0 and pays_for != "opinion":
        yield "the correct answer earns nothing in any form"
    elif pays_for == "answer" and best.in_full < 1:
        yield f"the correct answer earns the full reward in {best.in_full:.1%} of rows at best, as {best.name}"
    most = max(probe.earns for probe in report.right) if pays_for == "opinion" else report.threshold
    for probe in report.cheats:
        if probe.earns > most and not (pays_for == "form" and probe.form in FORMS):
            yield f"{probe.name}{f' ({probe.form})' if probe.form else ''} earns {probe.earns:.1%} of the full reward"
    if report.changed:
        yield f"{report.changed} completions got another score when they were graded again"
    if report.ungraded:
        yield f"{report.ungraded} completions could not be graded; the first: {report.reason}"
