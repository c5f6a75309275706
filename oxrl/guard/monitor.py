"""Runs the checks of a run: the loops call its methods, each of which makes the checks that can be made there.

A check that finds a fault stops the run by a `CheckError`, or warns once. States are passed on when they change. What
needs a pass of the model is done in the first steps and then every 100; nothing here changes what is trained.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import MappingProxyType
from typing import Any

from oxrl.data.media_features import media_towers
from oxrl.data.render import Renderer
from oxrl.guard.findings import Finding, State
from oxrl.guard.losses import run_alone_and_packed, smallest_items, wrong_packing, wrong_split
from oxrl.guard.parameters import ParameterWatch
from oxrl.guard.rewards import RewardWatch, ungraded
from oxrl.guard.rows import (
    References,
    broken_turns,
    empty_rows,
    references_of_rollouts,
    wrong_advantages,
    wrong_mask,
    wrong_tokens,
)
from oxrl.guard.sampler import Prompt, Sampled, is_stale, sample_probe
from oxrl.guard.table import CHECKS, actions_of
from oxrl.rollouts.buffer import Group, LeftOut
from oxrl.tracking.health import CheckError, HealthMonitor
from oxrl.types import Algorithm, Backend, BoolArray, GenerationConfig, Item, Render, Rollout, WeightSource
from oxrl.weights.checkpoint_names import source_of

logger = logging.getLogger(__name__)

FIRST_STEPS = 3  # in which all rows are checked
SOME_ROWS = 16  # of later steps
PASSES_IN_FIRST, PASSES_EVERY = 2, 100  # steps in which the model is run for a check


def not_written(finding: Finding) -> None:
    """For guards whose findings are not kept in a file."""


class Guard:
    """`Guard({"entropy": "stop"})`: the checks of one run, with the actions of `run.checks`.

    `write` gets each finding; `past` are the logged metrics of a resumed run. `references` are the masks that rows of
    the dataset should have (`references_of_samples`). `all_trained`: no weight should be frozen, as without LoRA.
    """

    def __init__(
        self,
        chosen: Mapping[str, str] | None = None,
        *,
        write: Callable[[Finding], None] = not_written,
        past: Sequence[Mapping[str, Any]] = (),
        references: References = MappingProxyType({}),
        all_trained: bool = False,
    ) -> None:
        self.actions = actions_of(chosen or {})
        self.active = any(action != "off" for name, action in self.actions.items() if not CHECKS[name].fixed)
        self.write = write
        self.all_trained = all_trained
        self.step = self._started = 0
        self._references, self._sampled_references = references, dict[bytes, BoolArray]()
        self._group_of: dict[str, int] = {}  # of the rollouts of the step
        self._rewards = RewardWatch()
        self._prompt: Prompt | None = None
        self._probes: list[Sampled] = []
        self._parameters: ParameterWatch | None = None
        self._online = False
        self._seconds = 0.0
        self.states: dict[str, Finding] = {}
        self._health = HealthMonitor(past)
        for name, action in self.actions.items():
            if action == "off":
                self._note(name, "skipped", "off in run.checks")

    @property
    def findings(self) -> list[Finding]:
        """The faults that were found, in the order of the table."""
        return [self.states[name] for name in CHECKS if name in self.states and self.states[name].is_fault]

    def wants(self, name: str) -> bool:
        """Whether a check is on and has not found a fault yet."""
        return self.actions[name] != "off" and (name not in self.states or not self.states[name].is_fault)

    def passed(self, name: str, message: str = "no fault found") -> None:
        if self.wants(name) and (name not in self.states or self.states[name].state != "passed"):
            self._note(name, "passed", message)

    def skipped(self, name: str, reason: str) -> None:
        if self.wants(name) and name not in self.states:
            self._note(name, "skipped", reason)

    def fault(self, name: str, message: str, remedy: str = "") -> None:
        """Warn, or raise if the check stops the run."""
        if not self.wants(name):
            return
        stops = self.actions[name] == "stop"
        found = self._note(name, "failed" if stops else "warned", message, remedy or CHECKS[name].remedy)
        if stops:
            raise CheckError(name, f"the check {name} failed: {message}; {found.remedy}")
        logger.warning("%s", found)

    def judge(self, name: str, problem: str | None) -> None:
        """Record a check that was made: with a problem as a fault, else as passed."""
        if problem is None:
            self.passed(name)
        else:
            self.fault(name, problem)

    def _note(self, name: str, state: State, message: str, remedy: str = "") -> Finding:
        found = Finding(self.step, name, state, message, remedy)
        self.states[name] = found
        self.write(found)
        return found

    def logged(self, step: int, metrics: Mapping[str, float]) -> None:
        """A sink for the metrics of a run."""
        self.step = step
        warnings = self._health.note({"step": step, **metrics})
        for warning in warnings:
            self.fault(warning.name, warning.problem)
        for name in self._health.judged():
            self.passed(name)
        for name, missing in self._health.missing().items():
            none = "does not log" if len(missing) == 1 else "logs none of"
            self.skipped(name, f"the run {none} {', '.join(missing)}")

    def prepared(self, items: Sequence[Item]) -> None:
        """Rows of the dataset, before the first step."""
        if self.active and self.wants("mask") and items:
            self.judge("mask", wrong_mask((row for item in items for row in item), self._references))

    def begin(self, step: int) -> None:
        """A step starts."""
        self.step = step
        self._started = self._started or step

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds += time.monotonic() - started

    def costs(self) -> dict[str, float]:
        """The seconds that the checks of a step took, as a metric; none for a guard whose checks are off."""
        seconds, self._seconds = self._seconds, 0.0
        return {"check_seconds": seconds} if self.active else {}

    @property
    def _age(self) -> int:
        """Steps since the start or the resume of the run."""
        return self.step - self._started

    @property
    def _is_early(self) -> bool:
        return self._age < FIRST_STEPS

    @property
    def _runs_model(self) -> bool:
        """Whether checks that need passes of the model are due."""
        return self.active and (self._age < PASSES_IN_FIRST or self._age % PASSES_EVERY == 0)

    def sampled(
        self, groups: Sequence[Group], left_out: Sequence[LeftOut], items: Sequence[Item], render: Render
    ) -> None:
        """The rollouts of a step, and the rows that they became."""
        if self.active:
            with self._timed():
                self._check_sampled(groups, left_out, items, render)

    def _check_sampled(
        self, groups: Sequence[Group], left_out: Sequence[LeftOut], items: Sequence[Item], render: Render
    ) -> None:
        self._online = True
        tokenizer = render.tokenizer if isinstance(render, Renderer) else None
        rollouts = [each for group in groups for each in group if not each.greedy and each.error is None]
        if self._prompt is None and rollouts and rollouts[0].turns:
            first = rollouts[0].turns[0]
            self._prompt = Prompt(first.prompt_ids, first.media or rollouts[0].sample.media)
        chosen = rollouts if self._is_early else rollouts[:SOME_ROWS]
        names = {each.id for each in chosen}
        rows = [row for item in items for row in item if (row.sequence or row.id) in names]
        if self.wants("tokens") and rows:
            self.judge("tokens", wrong_tokens(rows, chosen, tokenizer))
        self._check_turns(chosen, tokenizer)
        self._sampled_references = references_of_rollouts(chosen)
        self._group_of = {each.id: each.group for each in rollouts}
        self._check_rewards(groups, left_out)

    def _check_turns(self, rollouts: Sequence[Rollout], tokenizer: Any) -> None:
        if not any(len(rollout.turns) > 1 for rollout in rollouts):
            self.skipped("turns", "every response has one turn")
        elif tokenizer is None:
            self.skipped("turns", "there is no tokenizer to read the prompts with")
        elif self.wants("turns"):
            self.judge("turns", broken_turns(rollouts, tokenizer))

    def _check_rewards(self, groups: Sequence[Group], left_out: Sequence[LeftOut]) -> None:
        if self.wants("reward_errors"):
            self.judge("reward_errors", ungraded(groups, left_out))
        watch = self._rewards
        if not any(map(self.wants, ("reward_by_length", "reward_by_format", "repetition"))):
            return
        watch.note(groups)
        if watch.enough:
            self.judge("reward_by_length", watch.by_length() if self.wants("reward_by_length") else None)
            self.judge("reward_by_format", watch.by_format() if self.wants("reward_by_format") else None)
        if watch.enough_text:
            self.judge("repetition", watch.repetition())

    async def credited(self, backend: Backend, algorithm: Algorithm, items: Sequence[Item], budget: int) -> None:
        """The rows of a step with advantages and log-probs of other models, before they are trained on."""
        if self.active:
            with self._timed():
                await self._check_credited(backend, algorithm, items, budget)

    async def _check_credited(self, backend: Backend, algorithm: Algorithm, items: Sequence[Item], budget: int) -> None:
        rows = [row for item in items for row in item]
        if self.wants("mask"):
            references = {**self._references, **self._sampled_references}
            problem = wrong_mask(rows if self._is_early else rows[:SOME_ROWS], references) or empty_rows(rows)
            self.judge("mask", problem)
        if any("advantage" in row.streams for row in rows):
            self.judge("advantages", wrong_advantages(items, self._group_of) if self.wants("advantages") else None)
        elif self._online:
            self.skipped("advantages", f"{algorithm.name} has no advantages")
        if self._parameters is None and self._is_early:
            await self._watch_parameters(backend)
        if self._runs_model and (self.wants("packed_rows") or self.wants("loss_split")):
            await self._check_passes(backend, algorithm, items, budget)

    async def _check_passes(self, backend: Backend, algorithm: Algorithm, items: Sequence[Item], budget: int) -> None:
        chosen = smallest_items(items, budget)
        if not chosen or not hasattr(backend, "logprobs"):
            reason = "no two items of the step fit into a micro-batch" if not chosen else "the backend has no logprobs"
            self.skipped("packed_rows", reason)
            self.skipped("loss_split", reason)
            return
        passes = await run_alone_and_packed(backend, algorithm, chosen)
        self.judge("packed_rows", wrong_packing(passes, await _itemsize(backend)))
        self.judge("loss_split", wrong_split(passes, algorithm))

    async def _watch_parameters(self, backend: Backend) -> None:
        module = (await backend.get_weights()).module if hasattr(backend, "get_weights") else None
        if module is None:
            self.skipped("trained_parameters", "the weights are not in this process")
            self.skipped("frozen_parameters", "the weights are not in this process")
        else:
            self._parameters = ParameterWatch(module, backend)
            self.all_trained &= media_towers(module) is None  # towers may be frozen on purpose

    def updated(self, metrics: Mapping[str, float]) -> None:
        """The metrics of an update."""
        if self.active:
            with self._timed():
                self._check_updated(metrics)

    def _check_updated(self, metrics: Mapping[str, float]) -> None:
        wrong = [name for name in ("loss", "grad_norm") if not math.isfinite(metrics.get(name, 0.0))]
        self.judge("finite", f"{' and '.join(wrong)} is not finite" if wrong else None)
        if "logprob_gap" in metrics and metrics.get("age") == 0:
            self.passed("logprob_gap")
        if not self._online:
            for check in CHECKS.values():
                if check.samples:
                    self.skipped(check.name, "the run does not sample")
        watch = self._parameters
        if watch is None or not self.wants("trained_parameters") or "trained_parameters" in self.states:
            return
        watch.after(metrics)
        if watch.decided:
            self.judge("trained_parameters", watch.unmoved(all_trained=self.all_trained))
            if watch.frozen:
                self.judge("frozen_parameters", watch.moved_frozen())
            else:
                self.skipped("frozen_parameters", "no tensor is frozen")

    async def probe(
        self, backend: Backend, generator: Any, sampling: GenerationConfig | None, *, updated: bool = True
    ) -> None:
        """Whether the sampler has the trainer's weights: after an update, and once before the first."""
        wanted = self.wants("sampler_weights") or self.wants("sampler_adapter")
        undecided = "sampler_weights" not in self.states and (self._age + 1).bit_count() == 1
        if not wanted or not (self._runs_model or (self.active and undecided)) or (self._probes and not updated):
            return
        if self._prompt is None or sampling is None or not hasattr(generator, "generate"):
            self.skipped("sampler_weights", "the engine is not the one that samples")
            self.skipped("sampler_adapter", "the engine is not the one that samples")
            return
        weights = await backend.get_weights()
        if generator.version != weights.version:
            self.fault(
                "sampler_weights",
                f"after the update to version {weights.version} of the weights the engine has version "
                f"{generator.version}",
            )
        with self._timed():
            now = await sample_probe(generator, backend, self._prompt, sampling, weights.version)
        if now is not None:
            self._compare(now, source_of(weights))

    def _compare(self, now: Sampled, source: WeightSource) -> None:
        if not self._probes:
            self._probes = [now]
            return
        size = source.dtype.itemsize
        first, last = self._probes[0], self._probes[-1]
        verdicts = [is_stale(now, first, size), is_stale(now, last, size)]
        if not source.adapted:
            self.skipped("sampler_adapter", "the model has no adapter")
        if any(verdicts):
            before = first if verdicts[0] else last
            what = (
                f"the trainer's log-probs of a continuation have moved by up to {now.moved(before):.2g} since version "
                f"{before.version}, the sampler's have not: it samples with "
            )
            if source.adapted and verdicts[0]:
                self.fault("sampler_adapter", f"{what}the weights without what the adapter has learned")
            self.fault("sampler_weights", f"{what}old weights")
        elif False in verdicts:
            self.passed("sampler_weights")
            if source.adapted:
                self.passed("sampler_adapter")
            self._probes = [first, now]

    @asynccontextmanager
    async def explaining(self) -> AsyncIterator[None]:
        """Record an error that ends the run under the check that it belongs to."""
        try:
            yield
        except Exception as error:
            name = _check_of(error)
            if name is not None and name in CHECKS and not self._has_failed(name):
                self.step = error.__dict__.get("oxrl_context", {}).get("step", self.step)
                self._note(name, "failed", str(error), CHECKS[name].remedy)
            raise

    def _has_failed(self, name: str) -> bool:
        return name in self.states and self.states[name].state == "failed"


_OF_ERRORS = {"NonFiniteError": "finite", "NonFiniteWeightsError": "finite", "StaleEngineError": "sampler_weights"}


def _check_of(error: BaseException) -> str | None:
    if isinstance(error, CheckError):
        return error.check
    of_kind = (_OF_ERRORS.get(each.__name__) for each in type(error).__mro__)
    context: Mapping[str, Any] = error.__dict__.get("oxrl_context", {})
    return next((name for name in of_kind if name), context.get("check"))


async def _itemsize(backend: Backend) -> int:
    """Bytes of a number of the model."""
    return source_of(await backend.get_weights()).dtype.itemsize if hasattr(backend, "get_weights") else 4


UNGUARDED = Guard({"all": "off"})
"""For loops without checks; what has no check keeps its errors."""
