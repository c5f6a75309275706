"""Prompt ids to sampled ids with their log-probs, with the trainer's own weights: no copy, no reload.

Tasks that wait for generations share one engine, and one of them drives it: it steps the engine, yielding to the others
in between, until its own requests are done; then the next task takes over. `engine` implements a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from oxrl.generators.embedded.captured import Capture
from oxrl.generators.embedded.decoders import Mode
from oxrl.generators.embedded.engine import Engine, Job
from oxrl.types import Generation, GenerationConfig, Media, Request, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EmbeddedGenerator:
    """`await EmbeddedGenerator(model, tokenizer).generate([Request(prompt_ids)], GenerationConfig(max_new_tokens=32))`.

    At most `slots` sequences run in one batch, fewer after memory ran out. In the mode "shrinking" the batch is as wide
    as there are sequences: the fastest, with log-probs to 1e-4. In the mode "fixed" it is always `slots` wide, and on a
    CPU tokens and log-probs are batch-invariant, to the bit.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        *,
        slots: int = 64,
        mode: Mode = "shrinking",
        capture: Capture = Capture(),  # noqa: B008 - immutable
    ) -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; a generator needs at least 1")
        if mode not in ("shrinking", "fixed"):
            raise ValueError(f'mode is {mode!r}; it must be "shrinking" or "fixed"')
        self.model = model
        self.tokenizer = tokenizer
        self._engine = Engine(model, tokenizer, slots, mode, capture)
        self._calls: list[_Call] = []
        self._driver: _Call | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    @property
    def slots(self) -> int:
        """At most this many sequences run in one batch; halved where memory runs out."""
        return self._engine.slots

    @slots.setter
    def slots(self, slots: int) -> None:
        self._engine.limit_slots(slots)

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        """Return one generation per request, in order. Calls of several tasks share the engine."""
        call = _Call()
        self._calls.append(call)
        try:
            for request in requests:
                call.jobs.append(self._engine.submit(request, sampling))
            await self._until_done(call)
        finally:
            self._calls.remove(call)
            self._engine.drop(call.jobs)
            if self._driver is call:
                self._hand_over()
        return call.results

    async def abort(self) -> None:
        """End all generations in flight; each returns its partial result as "aborted"."""
        self._engine.abort()
        self._wake_done()
        await checkpoint()

    async def update_weights(self, weights: Weights) -> None:
        """Set the version; the module must be the one that this generator was built with."""
        if weights.module is not self.model:
            raise ValueError(
                "an embedded generator uses the module it was built with; build another one for this module"
            )
        self._engine.change_version(weights.version)
        await checkpoint()

    async def close(self) -> None:
        await self.abort()

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: GenerationConfig,
        on_token: Callable[[int, int], None] = lambda _prompt, _token: None,
        *,
        media: Sequence[tuple[Media, ...]] = (),
    ) -> list[Generation]:
        """Generate synchronously, for scripts: a prompt's seed is its index; `media` are those of each prompt.

        `on_token(prompt index, token)` is called with each token as it is sampled.
        """
        call = _Call()
        try:
            for index, prompt in enumerate(prompts):
                request = Request(tuple(prompt), seed=index, media=media[index] if media else ())
                call.jobs.append(self._engine.submit(request, sampling, partial(on_token, index)))
            while not call.done:
                self._engine.step()
        finally:
            self._engine.drop(call.jobs)
        return call.results

    async def _until_done(self, call: _Call) -> None:
        while not call.done:
            if self._driver is None:
                self._driver = call
            if self._driver is not call:
                await call.wake.wait()
                continue
            # Twice: a task that a step woke needs one turn, and its next requests must not race the next step.
            await checkpoint()
            await checkpoint()
            if not call.done:
                self._engine.step()
                self._wake_done()

    def _wake_done(self) -> None:
        for call in self._calls:
            if call.done:
                call.wake.set()

    def _hand_over(self) -> None:
        self._wake_done()
        self._driver = next((call for call in self._calls if not call.done), None)
        if self._driver is not None:
            self._driver.wake.set()


class _Call:
    """The jobs that one task waits for; it is woken when they are done, or when it becomes the driver."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.wake = anyio.Event()

    @property
    def done(self) -> bool:
        return all(job.result is not None for job in self.jobs)

    @property
    def results(self) -> list[Generation]:
        results = [job.result for job in self.jobs if job.result is not None]
        assert len(results) == len(self.jobs), f"{len(self.jobs) - len(results)} generations are missing"
        return results
