"""Onboard models: scout, repair, plan for this machine, verify, and write a record; failures go to the remedies.

Each attempt is written down before the next one starts, so that an interrupted onboarding goes on where it was. Nothing
is changed but settings and copies of small files, and each change is in the record.
"""

from __future__ import annotations

import logging
import shlex
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from oxrl.diagnose.plan import chosen_device, plan_spec
from oxrl.diagnose.verify_model import trial_config, write_record
from oxrl.machine.hardware import detect_hardware
from oxrl.models.builtin import cache_dir
from oxrl.models.load import resolve_device
from oxrl.onboarding.agent import AGENT_ATTEMPTS, ask_agent, check_agent
from oxrl.onboarding.attempt import OUTPUT, Attempt, Outcome, attempt_in_child, failed_outcome
from oxrl.onboarding.records import records_folder, source_digest
from oxrl.onboarding.remedies import Task, next_remedy
from oxrl.onboarding.repair import Repaired, repair, slug
from oxrl.onboarding.scout import scout
from oxrl.onboarding.state import State
from oxrl.onboarding.structure import UNBUILDABLE
from oxrl.parsing import read_json
from oxrl.run.export import fetch_model
from oxrl.run.prepare import resolve

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 10  # for one model
BUDGET, LIMIT = 60.0, 30.0  # minutes for all models, and for one attempt
PLANNED_TRIALS = ("dpo", "grpo")  # a reference, and sampling
GIB = 2**30
AS_BEFORE = "as before: --again tries it anew"
MAX_MESSAGE = 500  # characters of a failure in the result; the failure folder has all of it

Status: TypeAlias = Literal["verified", "verified with changes", "not verified", "unfinished"]


@dataclass(frozen=True, slots=True)
class Options:
    """How models are onboarded; `attempt` may be another function of the same kind."""

    work: Path  # failures and attempts, one folder per model
    output: Path | None = None  # of records; None: `records_folder`
    budget: float = BUDGET  # minutes for all models
    limit: float = LIMIT  # minutes for one attempt
    memory: float | None = None  # GiB that a run may take; None: what this machine has free
    engine: str | None = None
    agent: str | None = None
    by: str | None = None
    trials: tuple[str, ...] | None = None  # None: all
    again: bool = False  # also what was finished before
    trust_remote_code: bool = False
    attempt: Attempt = attempt_in_child
    clock: Callable[[], float] = time.monotonic

    @property
    def conditions(self) -> dict[str, Any]:
        """What the attempts depend on besides the model; attempts under other conditions do not count."""
        keys = ("memory", "engine", "agent", "trials", "trust_remote_code")
        return {key: list(value) if isinstance(value := getattr(self, key), tuple) else value for key in keys}


class Onboarded(NamedTuple):
    """`Onboarded("tiny", "verified", "", Path("tiny.json"))`: the end of one model's onboarding, and why."""

    name: str
    status: Status
    why: str
    record: Path | None = None
    attempts: int = 0
    changes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**self._asdict(), "record": None if self.record is None else str(self.record)}


def onboard(names: Sequence[str], options: Options) -> list[Onboarded]:
    """Onboard models one after the other; those that are done are not done again."""
    if options.agent is not None:
        check_agent(options.agent)
    deadline = options.clock() + 60 * options.budget
    done = []
    for name in names:
        if options.clock() >= deadline:
            done.append(Onboarded(name, "unfinished", "the budget was used up before it; run the command again"))
            continue
        result = _finished(name, options) or _onboard_one(name, options, deadline)
        logger.info("%s: %s%s", name, result.status, f" ({result.why})" if result.why else "")
        done.append(result)
    return done


def _onboard_one(name: str, options: Options, deadline: float) -> Onboarded:
    try:
        report = scout(name, trust_remote_code=options.trust_remote_code)
        if report.blockers:
            return Onboarded(name, "not verified", "; ".join(finding.message for finding in report.blockers))
        if report.kind == "hub" and not report.has_weights:  # else they are downloaded in the time of an attempt
            fetch_model(name)
            report = scout(name, trust_remote_code=options.trust_remote_code)
        fixed = repair(report, trust_remote_code=options.trust_remote_code)
    except (ValueError, OSError) as error:
        return Onboarded(name, "not verified", str(error))
    except (
        Exception
    ) as error:  # in code of the model, or for files of a new kind; the others are onboarded all the same
        logger.error("%s could not be scouted", name, exc_info=error)
        return Onboarded(name, "not verified", f"scouting failed with {type(error).__name__}: {error}")
    if fixed.failed:
        return Onboarded(name, "not verified", f"a repair did not help: {'; '.join(fixed.failed)}")
    folder = options.work / slug(name)
    folder.mkdir(parents=True, exist_ok=True)
    state = _state(name, options)
    if state.result is not None or options.again:  # its record is gone, or it is to be done again
        state = State(folder, name, options.conditions)
    result = _attempts(fixed, state, options, deadline)
    if result.status != "unfinished":
        state.finish(result.as_dict())
    return result


def _finished(name: str, options: Options) -> Onboarded | None:
    """Return the result of an earlier onboarding of the same files with the same versions."""
    result = None if options.again else _state(name, options).result
    if result is None:
        return None
    record = Path(result["record"]) if result["record"] else None
    if result["status"] != "not verified" and (record is None or not record.is_file()):
        return None
    lists = {"changes": tuple(result["changes"]), "record": record}
    return Onboarded(**{**result, **lists, "why": "; ".join(filter(None, (result["why"], AS_BEFORE)))})


def _state(name: str, options: Options) -> State:
    return State.load(options.work / slug(name), name, options.conditions)


def _first_task(fixed: Repaired, options: Options) -> Task:
    entry, config = fixed.report.entry or {}, fixed.report.config or {}
    task = Task(fixed.name, settings=fixed.settings, lora_targets=tuple(entry.get("lora_targets", ())))
    if config.get("lora", {}).get("enabled"):  # all weights of it do not fit on one device
        task = replace(task, strategy="lora")
    if options.trials is not None:
        task = replace(task, trials=options.trials)
    if options.trust_remote_code:
        task = task.having("model", trust_remote_code=True)
    return task if options.engine is None else task.having("inference_engine", name=options.engine)


def _attempts(fixed: Repaired, state: State, options: Options, deadline: float) -> Onboarded:
    """Verify, and after a failure again with the next remedy, until it works or there is none left."""
    name, attempts, failure = state.name, state.attempts, state.folder / "failure"
    task = Task.from_dict(attempts[-1]["next"]) if attempts else _first_task(fixed, options)
    while len(attempts) < MAX_ATTEMPTS:
        seconds = deadline - options.clock()
        if seconds <= 0:
            return Onboarded(name, "unfinished", "the budget was used up; run the command again", None, len(attempts))
        remedy = attempts[-1]["remedy"] if attempts else None
        with_remedy = f", {remedy}" if remedy else ""
        logger.info("%s: attempt %d%s, output in %s", name, len(attempts) + 1, with_remedy, failure / OUTPUT)
        started = options.clock()
        outcome = planned(task, options.memory, failure) or options.attempt(
            task, failure, min(seconds, 60 * options.limit)
        )
        made = {"task": task.as_dict(), "signal": outcome.signal, "seconds": round(options.clock() - started, 1)}
        if outcome.record is not None:
            state.add({**made, "skipped": [], "remedy": None, "next": task.as_dict()})
            return _verified(fixed, outcome.record, state, options)
        following, remedy, skipped = _next(outcome, task, state, options, deadline)
        proceed = following or task
        state.add({**made, "skipped": skipped, "remedy": remedy, "next": proceed.as_dict()})
        if following is None:
            break
        task = following
    return _given_up(state)


def planned(task: Task, memory: float | None, folder: Path) -> Outcome | None:
    """Return a failure if the planner finds that a run does not fit; None if it fits, or cannot be planned."""
    peak, limit = 0, 0
    with tempfile.TemporaryDirectory(prefix="oxrl-plan-") as scratch:
        for trial in (each for each in PLANNED_TRIALS if each in task.trials):
            try:
                config = trial_config(
                    task.weights, trial, task.strategy, task.lora_targets, Path(scratch), task.settings
                )
                hardware = detect_hardware()
                device = chosen_device(resolve_device(config.model.device), hardware)
                if memory is not None:
                    device = device._replace(memory=int(memory * GIB), free=int(memory * GIB))
                plan = plan_spec(resolve(config, Path(scratch) / "run"), hardware, device=device)
            except UNBUILDABLE as error:
                logger.info("the memory of %s cannot be planned: %s", trial, error)  # the attempt reports its failure
                continue
            if not plan.fits and plan.memory.peak > peak:
                peak, limit = plan.memory.peak, device.free
    if not peak:
        return None
    message = f"the plan needs {peak / GIB:.3f} GiB, and {limit / GIB:.3f} GiB may be used"
    return failed_outcome(folder, task, "out_of_memory", message)


def _next(
    outcome: Outcome, task: Task, state: State, options: Options, deadline: float
) -> tuple[Task | None, str | None, list[dict[str, str]]]:
    """Return the next task, the remedy that it has, and the remedies that were passed over."""
    assert outcome.signal is not None
    used = [str(attempt["remedy"]) for attempt in state.attempts]
    remedy, changed, skipped = next_remedy(str(outcome.signal["kind"]), task, used)
    if remedy is not None:
        return changed, remedy.name, skipped
    if options.agent is None or used.count("agent") >= AGENT_ATTEMPTS:
        return None, None, skipped
    failure = state.folder / "failure"
    proposed = ask_agent(options.agent, failure, task, state.attempts, max(1.0, deadline - options.clock()))
    if isinstance(proposed, str):
        return None, None, [*skipped, {"remedy": "agent", "why_not": proposed}]
    return proposed, "agent", skipped


def _verified(fixed: Repaired, record: dict[str, Any], state: State, options: Options) -> Onboarded:
    name, attempts = state.name, state.attempts
    entry = dict(fixed.report.entry or {})
    own = str(entry.get("name") or slug(name))
    changes = [change._asdict() for change in fixed.changes]
    remedies = [str(attempt["remedy"]) for attempt in attempts if attempt["remedy"]]
    full = {
        "name": own,
        "source": name,
        "by": options.by,
        "command": command_of(name, options),
        "digest": source_digest(name),
        **record,
        "changes": changes,
        "attempts": [_as_recorded(attempt) for attempt in attempts],
        "entry": entry,
    }
    path = (options.output or records_folder(own)) / f"{own}.json"
    if path.is_file() and read_json(path).get("source") != name:  # another model of the same name
        path = path.with_stem(f"{own}-{full['digest'][:6]}")
    write_record(full, path)
    said = (*(f"{change.repair}: {change.message}" for change in fixed.changes), *remedies)
    status: Status = "verified with changes" if said else "verified"
    return Onboarded(name, status, "", path, len(attempts), said)


def command_of(name: str, options: Options) -> str:
    """Return the command that repeats an onboarding, with the options on which the attempts depend."""
    chosen = {"--memory": options.memory, "--engine": options.engine, "--agent": options.agent}
    given = [word for option, value in chosen.items() if value is not None for word in (option, str(value))]
    trusted = ["--trust-remote-code"] if options.trust_remote_code else []
    return shlex.join(["oxrl", "models", "onboard", name, *given, *trusted])


def _as_recorded(attempt: Mapping[str, Any]) -> dict[str, Any]:
    """Of an attempt what others can use: its settings, its signal and the remedy that followed."""
    task = attempt["task"]
    return {
        "settings": task["settings"],
        "strategy": task["strategy"],
        "signal": attempt["signal"],
        "skipped": attempt["skipped"],
        "remedy": attempt["remedy"],
        "seconds": attempt["seconds"],
    }


def _given_up(state: State) -> Onboarded:
    """Say which failure was the last one, what was tried, and where the rest is."""
    attempts = state.attempts
    last = attempts[-1]["signal"]
    tried = [str(attempt["remedy"]) for attempt in attempts if attempt["remedy"]]
    skipped = [f"{each['remedy']} ({each['why_not']})" for each in attempts[-1]["skipped"]]
    message = " ".join(str(last["message"]).split())[:MAX_MESSAGE]
    parts = [f"{last['kind']}: {message or last['exception']}"]
    parts.append(f"tried {', '.join(tried)}" if tried else "there is no remedy for it in the table")
    parts += [f"not possible: {', '.join(skipped)}"] if skipped else []
    parts.append(f"see {state.folder / 'failure'}")
    return Onboarded(state.name, "not verified", "; ".join(parts), None, len(attempts), tuple(tried))


def default_work() -> Path:
    return cache_dir() / "onboarding"
