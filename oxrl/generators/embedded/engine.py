"""Requests to generations, one step at a time: continuous batching, sampling, and the end of a sequence.

Finished sequences leave the batch and waiting ones enter. All of it is synchronous; `generator` calls `step` and waits
for results.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from oxrl.data.media import identity
from oxrl.data.media_features import MediaRow, check_placeholders, never_sampled
from oxrl.generators.embedded.captured import ENDS, NOT_FINITE, UNDECIDED, Capture, CapturedDecoder, Feed, Started
from oxrl.generators.embedded.decoders import Decoder, Mode, choose_decoder
from oxrl.generators.embedded.pages import PAGE
from oxrl.generators.embedded.sampling import Draws, draw, stream_key, uniforms
from oxrl.machine.out_of_memory import free_memory_of, ran_out_of_memory
from oxrl.types import Generation, GenerationConfig, Request
from oxrl.weights.checkpoint_names import eval_mode

if TYPE_CHECKING:
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

PREFILL = 16384  # tokens per prefill pass on a GPU, if a single prompt is not longer


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
    entered: int = 0  # when it was admitted, among all admissions

    @property
    def context(self) -> list[int]:
        return [*self.request.tokens, *self.tokens]

    @property
    def order(self) -> tuple[Any, ...]:
        """Sort key of jobs that were submitted together; equal prompts are neighbours."""
        media = [identity(medium)[1:2] for medium in self.request.media]
        return (self.request.tokens, self.tokens, str(media), self.request.seed, self.sampling)

    def length_after(self, tokens: int) -> int:
        """Of the sequence, when up to so many tokens have been added."""
        return len(self.request.tokens) + min(len(self.tokens) + tokens, self.max_tokens)

    @property
    def feed(self) -> Feed:
        return Feed(
            token=self.tokens[-1],
            position=len(self.request.tokens) + len(self.tokens) - 1,
            drawn=len(self.tokens),
            left=self.max_tokens - len(self.tokens),
            key=self.key,
            end_token_ids=tuple(self.end_token_ids),
            rule=self.sampling,
        )


class Flight(NamedTuple):
    """A span that was started, and the jobs of its rows."""

    jobs: list[Job]
    started: Started


def ignore_token(token: int) -> None:
    """For requests whose tokens are not streamed."""


class Engine:
    """`submit` jobs, then `step` until each has its `result`; the model's mode and attention are restored."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        slots: int,
        mode: Mode,
        capture: Capture = Capture(),  # noqa: B008
    ) -> None:
        self.model: PreTrainedModel = model.get_base_model() if hasattr(model, "peft_config") else model
        self.tokenizer, self.slots, self.mode, self.capture = tokenizer, slots, mode, capture
        self.version = 0
        never = never_sampled(self.model)
        self.never = torch.tensor(never, device=self.model.device) if never else None
        self.arrived: list[Job] = []
        self.waiting: list[Job] = []
        self.rows: list[Job | None] = []
        self.ready: dict[int, Job] = {}  # prefilled, by their key in the decoder: they enter as rows become free
        self.admissions = 0
        self._decoder: Decoder | CapturedDecoder | None = None
        self._flight: Flight | None = None  # of a `CapturedDecoder`

    def submit(
        self, request: Request, sampling: GenerationConfig, on_token: Callable[[int], None] = ignore_token
    ) -> Job:
        check_sampling(sampling)
        if sampling.allowed_tokens:
            self._allow(sampling.allowed_tokens)
        tokens = np.asarray(request.tokens, dtype=np.int64)
        check_placeholders(self.model, MediaRow(f"of seed {request.seed}", tokens, request.media))
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
        """Admit waiting sequences to free rows, then sample the next token of every sequence, or the next few.

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
                    self._decoder = choose_decoder(self.model, self.slots, self.mode, self.capture)
                if isinstance(self._decoder, CapturedDecoder):
                    self._span(self._decoder)
                else:
                    self._admit(self._decoder)
                    self._continue(self._decoder)
            except BaseException:  # in the middle of a step tokens and cache may be inconsistent
                self._start_over()
                raise

    def _allow(self, tokens: Sequence[int]) -> None:
        """Check that these tokens can be sampled; captured graphs, which draw from all tokens, are left for good."""
        vocabulary = self.model.get_input_embeddings().weight.shape[0]
        forbidden = set() if self.never is None else set(self.never.tolist())
        if wrong := [token for token in tokens if not 0 <= token < vocabulary or token in forbidden]:
            raise ValueError(
                f"allowed_tokens has {wrong[0]}, which cannot be sampled: ids are from 0 to {vocabulary - 1}, without "
                "the placeholders of media"
            )
        if self.capture.capture:
            raise ValueError(
                "inference_engine.capture is true, and captured graphs draw from all tokens: with allowed_tokens, set "
                "auto or false"
            )
        if self.capture.capture is None and self.model.device.type == "cuda":
            logger.warning("generation runs without captured graphs, which is slower: requests have allowed_tokens")
            self.capture = self.capture._replace(capture=False)
            self.limit_slots(self.slots)

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
        self.drop([*self.waiting, *self.arrived, *self.ready.values(), *filter(None, self.rows)])

    def drop(self, jobs: Sequence[Job]) -> None:
        """Remove these jobs, finished or not."""
        dropped = set(map(id, jobs))
        if any(id(job) in dropped for job in self.rows):
            self._discard_span()
        self.arrived = [job for job in self.arrived if id(job) not in dropped]
        self.waiting = [job for job in self.waiting if id(job) not in dropped]
        self._unready([key for key, job in self.ready.items() if id(job) in dropped])
        self._vacate([row for row, job in enumerate(self.rows) if id(job) in dropped])

    def change_version(self, version: int) -> None:
        """Set the version of new weights; sequences in flight continue after a fresh prefill."""
        self.version = version
        self._start_over()

    def _start_over(self) -> None:
        self._discard_span()
        running = [*filter(None, self.rows), *self._unready(list(self.ready))]
        self.waiting = [*(job for job in running if job.result is None), *self.waiting]
        self._vacate(range(len(self.rows)))

    def _unready(self, keys: Sequence[int]) -> list[Job]:
        """Take these jobs from those that were prefilled ahead, and free their memory."""
        if isinstance(self._decoder, CapturedDecoder):
            for key in keys:
                self._decoder.leave(key)
        return [self.ready.pop(key) for key in keys]

    def _unfinished(self) -> list[Job]:
        return [
            job
            for job in (*self.rows, *self.ready.values(), *self.waiting, *self.arrived)
            if job is not None and job.result is None
        ]

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
        contexts = [job.context for job in entering.values()]
        logits = decoder.enter(list(entering), contexts, [job.request.media for job in entering.values()])
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

    def _span(self, decoder: CapturedDecoder) -> None:
        """Sample the next tokens of every sequence on the device.

        The next span starts before the tokens of the last one are read, so that the device does not wait for the host.
        Sequences that enter next are prefilled meanwhile.
        """
        if self._flight is None:
            self._fill_ready(decoder, self.slots - len(self.rows), self.slots - len(self.rows))
            self._enter_ready(decoder)
            self._preempt(decoder)
            self._flight = self._launch(decoder, 0)
            if self._flight is None:
                return
        flight = self._flight
        self._enter_ready(decoder)
        self._flight = self._launch(decoder, flight.started.steps)
        with decoder.beside():
            self._fill_ready(decoder, max(2, self.slots // 16), max(4, self.slots // 4))
        self._take_span(decoder, flight)

    def _fill_ready(self, decoder: CapturedDecoder, fewest: int, most: int) -> None:
        """If fewer than `fewest` sequences are prefilled, prefill up to `most`: many at once are cheaper."""
        while len(self.ready) < fewest and self._prefill(decoder, most - len(self.ready)):
            pass

    def _enter_ready(self, decoder: CapturedDecoder) -> None:
        for key in list(self.ready)[: self.slots - len(self.rows)]:
            decoder.move(key, len(self.rows))
            self.rows.append(self.ready.pop(key))

    def _launch(self, decoder: CapturedDecoder, ahead: int) -> Flight | None:
        """Start the next span of all rows; `ahead` tokens of them may be in flight.

        None if there is nothing to sample, or if memory has to be freed first.
        """
        jobs = [job for job in self.rows if job is not None]
        steps = min(decoder.span, max((job.max_tokens - len(job.tokens) - ahead for job in jobs), default=0))
        if steps <= 0:
            return None
        for row, job in enumerate(jobs):
            if not decoder.extend(row, job.length_after(ahead + steps)):
                return None
        feeds = {row: jobs[row].feed for row in decoder.missing(len(jobs))}
        draws = Draws.of(job.sampling for job in jobs)
        return Flight(jobs, decoder.start(len(jobs), feeds, draws, steps))

    def _discard_span(self) -> None:
        """Discard the span in flight: its tokens are sampled again, with the same random numbers."""
        self._flight = None
        if isinstance(self._decoder, CapturedDecoder):
            self._decoder.settle()

    def _prefill(self, decoder: CapturedDecoder, most: int) -> bool:
        """Prefill waiting jobs in one pass, as many as there is memory for, and sample their first tokens.

        Return whether there were any.
        """
        candidates = self._one_pass(self.waiting[: max(0, most)])
        if not candidates:
            return False
        running = any(self.rows) or bool(self.ready)
        lengths = [len(job.request.tokens) + job.max_tokens for job in candidates]
        count = decoder.fits([job.context for job in candidates], lengths, alone=not running)
        if not count and not running:
            raise ValueError(
                f"a sequence of {lengths[0]} tokens does not fit into the key-value cache of "
                f"{(decoder.tables.pages - 1) * PAGE} tokens: raise inference_engine.cache_gib or lower "
                "rollout.max_tokens"
            )
        keys = [key for key in range(self.slots, 2 * self.slots) if key not in self.ready][:count]
        if not keys:
            return False
        entering = candidates[: len(keys)]
        logits = decoder.enter(keys, [job.context for job in entering])
        del self.waiting[: len(entering)]
        for key, job in zip(keys, entering, strict=True):
            self.admissions += 1
            job.entered, self.ready[key] = self.admissions, job
        self._sample(logits, entering)
        self._unready([key for key in keys if self.ready[key].result is not None])
        return True

    def _one_pass(self, jobs: Sequence[Job]) -> list[Job]:
        """The first of these jobs, up to PREFILL tokens; equal contexts are computed once."""
        chosen: list[Job] = []
        seen: set[tuple[int, ...]] = set()
        tokens = 0
        for job in jobs:
            context = tuple(job.context)
            tokens += 0 if context in seen else len(context)
            if chosen and tokens > PREFILL:
                break
            seen.add(context)
            chosen.append(job)
        return chosen

    def _preempt(self, decoder: CapturedDecoder) -> None:
        """Give every sequence pages for the next span; if they run out, the youngest go back to waiting."""
        jobs = {row: job for row, job in [*enumerate(self.rows), *self.ready.items()] if job is not None}
        by_age = sorted(jobs, key=lambda row: jobs[row].entered)
        evicted: list[int] = []
        while by_age:
            row = by_age.pop(0)
            while row < self.slots and not decoder.extend(row, jobs[row].length_after(decoder.span)):
                youngest = by_age.pop() if by_age else row
                decoder.leave(youngest)
                evicted.append(youngest)
                if youngest == row:
                    break
        if evicted:
            logger.info("%d sequences wait for key-value memory and are prefilled again", len(evicted))
            self.waiting = [*(jobs[row] for row in reversed(evicted)), *self.waiting]
            for row in evicted:
                self.ready.pop(row, None)
            self._vacate([row for row in evicted if row < self.slots])

    def _take_span(self, decoder: CapturedDecoder, flight: Flight) -> None:
        span = decoder.finish(flight.started)
        sampled = span.tokens >= 0
        if not np.isfinite(span.logprobs[sampled]).all():
            raise FloatingPointError(NOT_FINITE)
        tokens, logprobs, cut_mass = (each.T.tolist() for each in span)
        for row, (job, count) in enumerate(zip(flight.jobs, sampled.sum(0).tolist(), strict=True)):
            if job.result is None:
                self._take_all(job, tokens[row][:count], logprobs[row][:count], cut_mass[row][:count])
        self._decide(decoder, flight, (span.tokens == UNDECIDED).any(0).nonzero()[0].tolist())
        self._vacate([row for row, job in enumerate(self.rows) if job is not None and job.result is not None])

    def _decide(self, decoder: CapturedDecoder, flight: Flight, undecided: Sequence[int]) -> None:
        """Sample the next tokens of sequences that the device could not decide."""
        jobs = [flight.jobs[row] for row in undecided if flight.jobs[row].result is None]
        if jobs:
            rows = [self.rows.index(job) for job in jobs]
            self._sample(decoder.next_logits(rows, [job.feed for job in jobs]), jobs)
            for row in rows:
                decoder.reload(row)

    def _take_all(self, job: Job, tokens: list[int], logprobs: list[float], cut_mass: list[float]) -> None:
        """The tokens of a span, up to the end of the sequence."""
        if job.sampling.stop or job.on_token is not ignore_token or len(job.end_token_ids) > ENDS:
            for line in zip(tokens, logprobs, cut_mass, strict=True):
                self._take(job, *line)
                if job.result is not None:
                    return
        elif tokens:  # only the last one can be an end token: the device stops there
            job.tokens += tokens[:-1]
            job.logprobs += logprobs[:-1]
            job.versions += [self.version] * (len(tokens) - 1)
            job.cut_mass += sum(cut_mass[:-1])
            self._take(job, tokens[-1], logprobs[-1], cut_mass[-1])

    def _draw(self, logits: Tensor, jobs: dict[int, Job], rows: Sequence[int] | None = None) -> None:
        """Sample one token for each of `jobs`; `rows` maps the rows of the logits to jobs if some have none."""
        self._sample(logits, [jobs.get(row) for row in (list(jobs) if rows is None else rows)])
        self._vacate([row for row, job in jobs.items() if job.result is not None])

    def _sample(self, logits: Tensor, owners: Sequence[Job | None]) -> None:
        numbers = uniforms(
            [0 if job is None else job.key for job in owners], [0 if job is None else len(job.tokens) for job in owners]
        )
        drawn = draw(logits, [_IDLE if job is None else job.sampling for job in owners], numbers, self.never)
        # One transfer for all three; float64 holds each of them exactly.
        lines = torch.stack([drawn.tokens.double(), drawn.logprobs.double(), drawn.cut_mass], dim=1).tolist()
        if not all(isfinite(logprob) for _, logprob, _ in lines):
            raise FloatingPointError(NOT_FINITE)
        for job, (token, logprob, cut_mass) in zip(owners, lines, strict=True):
            if job is not None:
                self._take(job, int(token), logprob, cut_mass)

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
        allowed = job.sampling.allowed_tokens
        generation = Generation(
            tuple(job.tokens), tuple(job.logprobs), reason, self.version, text, mean_cut, allowed_tokens=allowed
        )
        job.result = generation.with_versions(job.versions)

    def _vacate(self, rows: Sequence[int]) -> None:
        """Free these rows; if rows can be moved, the last ones fill the gaps."""
        for row in sorted(rows, reverse=True):
            self.rows[row] = None
            if isinstance(self._decoder, CapturedDecoder):
                self._decoder.leave(row)
            if self._decoder is not None and self._decoder.shrinks:
                if row != len(self.rows) - 1:
                    self._decoder.move(len(self.rows) - 1, row)
                    self.rows[row] = self.rows[-1]
                self.rows.pop()
        if not any(self.rows):
            self.rows = []
            idle = not self.waiting and not self.arrived and not self.ready
            if self._decoder is not None and (idle or not self._decoder.late_entry):
                self._flight = None
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
