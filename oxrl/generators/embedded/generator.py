"""Prompt ids to sampled ids with their log-probs, by the trainer's own weights: no copy, no reload.

Tasks that wait for generations share one engine, and one of them drives it: step by step, letting the others run in
between, until its own work is done; then the next one takes over. How a step works is `engine`'s affair.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import anyio
from anyio.lowlevel import checkpoint

from oxrl.generators.embedded.decoders import Mode
from oxrl.generators.embedded.engine import Engine, Job
from oxrl.types import Generation, GenerationConfig, Request, Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EmbeddedGenerator:
    """`await EmbeddedGenerator(model, tokenizer).generate([Request(prompt_ids)], GenerationConfig(max_new_tokens=32))`.

    At most `slots` sequences run side by side. In the mode "shrinking" the batch is as wide as there are sequences: the
    fastest way, log-probs to 1e-4. In the mode "fixed" it is always `slots` wide, and on a CPU no bit of a token or
    log-prob depends on what else is under way.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, *, slots: int = 64, mode: Mode = "shrinking") -> None:
        if slots < 1:
            raise ValueError(f"slots is {slots}; a generator needs at least 1")
        if mode not in ("shrinking", "fixed"):
            raise ValueError(f'mode is {mode!r}; it must be "shrinking" or "fixed"')
        self.model = model
        self.tokenizer = tokenizer
        self._engine = Engine(model, tokenizer, slots, mode)
        self._calls: list[_Call] = []
        self._driver: _Call | None = None

    @property
    def version(self) -> int:
        return self._engine.version

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        """One generation per request, in order. Calls of several tasks share the engine."""
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
        """Everything under way returns now, as "aborted", with what it has."""
        self._engine.abort()
        self._wake_done()
        await checkpoint()

    async def update_weights(self, weights: Weights) -> None:
        """Speak as this version from now on; the module is the one that it always spoke with."""
        if weights.module is not self.model:
            raise ValueError("an embedded generator speaks with the module it was made with; make another one for this")
        self._engine.change_version(weights.version)
        await checkpoint()

    async def close(self) -> None:
        await self.abort()

    def complete(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: GenerationConfig,
        on_token: Callable[[int, int], None] = lambda _prompt, _token: None,
    ) -> list[Generation]:
        """The same without waiting, for scripts: a prompt's seed is its index.

        `on_token(prompt index, token)` sees each token as it is drawn.
        """
        call = _Call()
        try:
            for index, prompt in enumerate(prompts):
                request = Request(tuple(prompt), seed=index)
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
            # Twice: who is woken by a step needs one turn, and who comes back with more must not race the next step.
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
    """What one task waits for; it is woken when that is done, or when it is to drive."""

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
