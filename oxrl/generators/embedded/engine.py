"""Requests to generations, one step at a time: continuous batching, sampling, and the end of a sequence.

Finished sequences leave the batch and waiting ones enter. All of it is synchronous; `generator` calls `step` and waits
for results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from oxrl.generators.embedded.decoders import NOT_FINITE, Decoder, Mode, choose_decoder
from oxrl.generators.embedded.sampling import draw, stream_key, uniforms
from oxrl.machine.out_of_memory import free_memory_of, ran_out_of_memory
from oxrl.types import Generation, GenerationConfig, Request
from oxrl.weights.checkpoint_names import eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class Job:
    """A request and its tokens so far."""

    request: Request
    sampling: GenerationConfig
    key: int  # of its random numbers
    max_tokens: int  # in all, those of a resumed generation included
    end_token_ids: frozenset[int]
    versions: list[int]  # of the weights that sampled each token
    tokens: list[int]
    logprobs: list[float]
    cut_mass: float
    on_token: Callable[[int], None]
    result: Generation | None = None

    @property
    def context(self) -> list[int]:
        return [*self.request.tokens, *self.tokens]

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key of jobs that were submitted together; equal prompts are neighbours."""
        return (self.request.tokens, self.tokens, self.request.seed, self.sampling)


class Engine:
    """`submit` jobs, then `step` until each has its `result`; the model's mode and attention are restored."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, slots: int, mode: Mode) -> None:
        self.model: PreTrainedModel = model.get_base_model() if hasattr(model, "peft_config") else model
        self.tokenizer, self.slots, self.mode = tokenizer, slots, mode
        self.version = 0
        self.arrived: list[Job] = []
        self.waiting: list[Job] = []
        self.rows: list[Job | None] = []
        self._decoder: Decoder | None = None

    def submit(
        self, request: Request, sampling: GenerationConfig, on_token: Callable[[int], None] = lambda _: None
    ) -> Job:
        check_sampling(sampling)
        if request.media:  # equal tokens share a prefill
            raise ValueError(
                f"the request has media, and the embedded engine gives {type(self.model).__name__} tokens only"
            )
        partial = request.partial or Generation((), (), "aborted", self.version)
        if partial.finish_reason != "aborted":
            raise ValueError(
                f"only an aborted generation can be resumed, not one with finish_reason {partial.finish_reason}"
            )
        job = Job(
            request._replace(tokens=tuple(map(int, request.tokens))),
            sampling,
            stream_key(sampling.seed, request.seed),
            min(sampling.max_new_tokens, self._max_new_tokens(request.tokens)),
            self._end_tokens(sampling),
            list(partial.token_versions),
            list(partial.token_ids),
            list(partial.logprobs),
            partial.cut_mass * len(partial.token_ids),
            on_token,
        )
        if len(job.tokens) >= job.max_tokens:
            self._finish(job, "length")
        else:
            self.arrived.append(job)
        return job

    def step(self) -> None:
        """Admit waiting sequences to free rows, then sample the next token of every sequence.

        If memory runs out, the slots are halved: sequences in flight wait, and continue after a fresh prefill.
        """
        self.waiting += sorted(self.arrived, key=lambda job: job.order)
        self.arrived.clear()
        try:
            self._step()
        except (RuntimeError, MemoryError) as error:
            if not ran_out_of_memory(error) or not (slots := self._fewer_slots()):
                raise
            logger.warning(
                "memory ran out while sampling (%s). At most %d sequences run concurrently from now on; those in "
                "flight continue with their tokens so far. Set rollout.slots: %d for the next run",
                str(error).partition("\n")[0],
                slots,
                slots,
            )
            free_memory_of(error)
            self.limit_slots(slots)

    def _fewer_slots(self) -> int:
        """Half of the slots, and again until fewer sequences run than now; 0 if only one does."""
        running = self.slots if self.mode == "fixed" else min(self.slots, len(self._unfinished()))
        slots = self.slots // 2
        while slots >= running:
            slots //= 2
        return slots

    def _step(self) -> None:
        with eval_mode(self.model):
            try:
                if self._decoder is None:
                    self._decoder = choose_decoder(self.model, self.slots, self.mode)
                self._admit(self._decoder)
                self._continue(self._decoder)
            except BaseException:  # in the middle of a step tokens and cache may be inconsistent
                self._start_over()
                raise

    def limit_slots(self, slots: int) -> None:
        """Run at most this many sequences; those in flight continue after a fresh prefill."""
        self._start_over()
        self.slots, self._decoder = slots, None  # frees the cache
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()

    def abort(self) -> None:
        """Finish all jobs now, with their tokens so far."""
        for job in self._unfinished():
            self._finish(job, "aborted")
        self.drop([*self.waiting, *self.arrived, *filter(None, self.rows)])

    def drop(self, jobs: Sequence[Job]) -> None:
        """Remove these jobs, finished or not."""
        dropped = set(map(id, jobs))
        self.arrived = [job for job in self.arrived if id(job) not in dropped]
        self.waiting = [job for job in self.waiting if id(job) not in dropped]
        self._vacate([row for row, job in enumerate(self.rows) if id(job) in dropped])

    def change_version(self, version: int) -> None:
        """Set the version of new weights; sequences in flight continue after a fresh prefill."""
        self.version = version
        self._start_over()

    def _start_over(self) -> None:
        self.waiting = [*(job for job in self.rows if job is not None and job.result is None), *self.waiting]
        self._vacate(range(len(self.rows)))

    def _unfinished(self) -> list[Job]:
        return [job for job in (*self.rows, *self.waiting, *self.arrived) if job is not None and job.result is None]

    def _max_new_tokens(self, tokens: Sequence[int]) -> int:
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        if not len(tokens):
            raise ValueError("the prompt is empty: every prompt needs at least one token")
        if not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise ValueError(f"the prompt has token ids outside of the model's vocabulary of {vocabulary}")
        max_length = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        if max_length is not None and len(tokens) >= max_length:
            raise ValueError(
                f"the prompt has {len(tokens)} tokens; prompt and completion together may have {max_length}"
            )
        return int(max_length - len(tokens)) if max_length is not None else 2**63

    def _admit(self, decoder: Decoder) -> None:
        if not self.waiting or (not decoder.late_entry and any(self.rows)):
            return
        if decoder.shrinks or not decoder.late_entry:
            free = list(range(len(self.rows), self.slots))
        else:
            self.rows += [None] * (self.slots - len(self.rows))
            free = [row for row, job in enumerate(self.rows) if job is None]
        entering = dict(zip(free, self.waiting, strict=False))
        if not entering:
            return
        logits = decoder.enter(list(entering), [job.context for job in entering.values()])
        del self.waiting[: len(entering)]
        self.rows += [None] * (max(entering) + 1 - len(self.rows))
        for row, job in entering.items():
            self.rows[row] = job
        if decoder.shrinks or not decoder.late_entry:
            self._draw(logits, entering)
        else:  # always as wide as there are slots, so that the result is batch-invariant
            wide = logits.new_zeros(self.slots, logits.shape[1])
            wide[list(entering)] = logits
            self._draw(wide, entering, list(range(self.slots)))

    def _continue(self, decoder: Decoder) -> None:
        occupied = {row: job for row, job in enumerate(self.rows) if job is not None}
        if occupied:
            logits = decoder.next_logits([None if job is None else job.tokens[-1] for job in self.rows])
            self._draw(logits, occupied, list(range(len(self.rows))))

    def _draw(self, logits: Tensor, jobs: dict[int, Job], rows: Sequence[int] | None = None) -> None:
        """Sample one token for each of `jobs`; `rows` maps the rows of the logits to jobs if some have none."""
        owners = [jobs.get(row) for row in (list(jobs) if rows is None else rows)]
        numbers = uniforms(
            [0 if job is None else job.key for job in owners], [0 if job is None else len(job.tokens) for job in owners]
        )
        drawn = draw(logits, [_IDLE if job is None else job.sampling for job in owners], numbers)
        # One transfer for all three; float64 holds each of them exactly.
        lines = torch.stack([drawn.tokens.double(), drawn.logprobs.double(), drawn.cut_mass], dim=1).tolist()
        if not all(isfinite(logprob) for _, logprob, _ in lines):
            raise FloatingPointError(NOT_FINITE)
        for job, (token, logprob, cut_mass) in zip(owners, lines, strict=True):
            if job is not None:
                self._take(job, int(token), logprob, cut_mass)
        self._vacate([row for row, job in jobs.items() if job.result is not None])

    def _take(self, job: Job, token: int, logprob: float, cut_mass: float) -> None:
        job.tokens.append(token)
        job.logprobs.append(logprob)
        job.versions.append(self.version)
        job.cut_mass += cut_mass
        job.on_token(token)
        if token in job.end_token_ids or self._has_stop(job.tokens, job.sampling.stop):
            self._finish(job, "stop")
        elif len(job.tokens) >= job.max_tokens:
            self._finish(job, "length")

    def _finish(self, job: Job, reason: Literal["stop", "length", "aborted"]) -> None:
        mean_cut = job.cut_mass / max(len(job.tokens), 1)
        text = self._text(job.tokens)
        generation = Generation(tuple(job.tokens), tuple(job.logprobs), reason, self.version, text, mean_cut)
        job.result = generation.with_versions(job.versions)

    def _vacate(self, rows: Sequence[int]) -> None:
        """Free these rows; if rows can be moved, the last ones fill the gaps."""
        for row in sorted(rows, reverse=True):
            self.rows[row] = None
            if self._decoder is not None and self._decoder.shrinks:
                if row != len(self.rows) - 1:
                    self._decoder.move(len(self.rows) - 1, row)
                    self.rows[row] = self.rows[-1]
                self.rows.pop()
        if not any(self.rows):
            self.rows = []
            idle = not self.waiting and not self.arrived
            if self._decoder is not None and (idle or not self._decoder.late_entry):
                self._decoder.clear()

    def _end_tokens(self, sampling: GenerationConfig) -> frozenset[int]:
        eos = self.model.generation_config.eos_token_id
        listed = eos if isinstance(eos, list) else [eos]
        return frozenset({*listed, self.tokenizer.eos_token_id, *sampling.stop_token_ids} - {None})

    def _has_stop(self, ids: list[int], stop: tuple[str, ...]) -> bool:
        if not stop:
            return False
        # A stop text that ends with this token spans at most as many tokens as bytes; decode all only after a hit.
        tail = self._text(ids[-max(len(text.encode()) for text in stop) - 16 :])
        return any(text in tail for text in stop) and any(text in self._text(ids) for text in stop)

    def _text(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=True))


_IDLE = GenerationConfig(temperature=0)


def check_sampling(sampling: GenerationConfig) -> None:
    allowed = {
        "max_new_tokens": (sampling.max_new_tokens >= 1, "at least 1"),
        "temperature": (0 <= sampling.temperature < float("inf"), "0 for greedy, or above"),
        "top_p": (0 < sampling.top_p <= 1, "above 0 and at most 1"),
        "top_k": (sampling.top_k >= 0, "0 for no limit, or above"),
        "min_p": (0 <= sampling.min_p <= 1, "between 0 and 1"),
        "stop": (all(sampling.stop), "texts with at least one character"),
    }
    for name, (valid, rule) in allowed.items():
        if not valid:
            raise ValueError(f"{name} is {getattr(sampling, name)!r}; it must be {rule}")
