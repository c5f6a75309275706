"""One optimizer step: rows get the log-probs and advantages that the loss needs, then run as micro-batches."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, TypeAlias

import numpy as np

from oxrl.data.pack import collate, count_units, pack
from oxrl.guard.monitor import Guard
from oxrl.loops.memory_limits import Budget, MemoryLimits, limits_of, sized
from oxrl.loops.step_record import NoRecord
from oxrl.tracking.metrics import memory_gib
from oxrl.types import Algorithm, Backend, Batch, Item, Layout, Memory, Outputs, Row, TrainFuture


def annotate(error: Exception, **facts: object) -> None:
    """Attach what was being processed to an exception, for the failure record; the innermost value is kept."""
    error.__dict__["oxrl_context"] = {**facts, **error.__dict__.get("oxrl_context", {})}


@contextmanager
def annotated(**facts: object) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        annotate(error, **facts)
        raise


def layout_of(backend: Backend) -> Layout:
    """How the backend runs rows; one without `layout` is taken to compute every token of every row."""
    return getattr(backend, "layout", "packed")


def parallel_of(backend: Backend) -> int:
    """How many micro-batches run in parallel: 1 for a backend without `parallel`."""
    return getattr(backend, "parallel", 1)


def check_backend(backend: Any, needed: Iterable[str]) -> None:
    """Raise if methods of the `Backend` protocol that a run needs are missing, before its first step."""
    missing = sorted(name for name in needed if not callable(getattr(backend, name, None)))
    if missing:
        raise ValueError(
            f"the backend {type(backend).__name__} has no {', '.join(missing)}, and this run needs "
            f"{'it' if len(missing) == 1 else 'them'}; oxrl.types.Backend describes the methods, docs/extending.md has "
            "an example"
        )
    try:
        signature = inspect.signature(backend.forward_backward)
        signature.bind([], None, {})
    except TypeError as error:
        raise ValueError(
            f"{type(backend).__name__}.forward_backward{signature} must take (batches, algorithm, counts): {error}, "
            "as described in oxrl.types.Backend"
        ) from error


def needed_methods(algorithm: Algorithm) -> set[str]:
    """The methods of a backend that a step of this algorithm calls."""
    return {"forward_backward", "optim_step"} | ({"logprobs"} if algorithm.needs else set())


CreditedFn: TypeAlias = Callable[[Sequence[Item]], Awaitable[None]]
"""(the rows of a step with all that the loss needs), before they are trained on: for records and checks of a step."""


async def not_recorded(items: Sequence[Item]) -> None:
    """For steps that are not recorded."""


async def observe_credit(
    recorder: NoRecord,
    guard: Guard,
    backend: Backend,
    algorithm: Algorithm,
    limits: MemoryLimits,
    items: Sequence[Item],
) -> None:
    """Record the rows of a step, and check them."""
    recorder.credited(items)
    await guard.credited(backend, algorithm, items, limits.micro_batch_tokens)


async def train_step(
    backend: Backend,
    algorithm: Algorithm,
    items: Sequence[Item],
    budget: Budget,
    memory: Memory | None = None,
    on_credit: CreditedFn = not_recorded,
) -> dict[str, float]:
    """One optimizer step over `items`. How they are split into micro-batches does not change the result."""
    started, kept = time.monotonic(), {} if memory is None else memory
    (metrics,) = await optimizer_steps(backend, algorithm, items, budget, kept, on_credit=on_credit)
    seconds = time.monotonic() - started
    return metrics | {"tokens_per_second": metrics["tokens"] / seconds, "step_seconds": seconds}


StepFn: TypeAlias = Callable[[Backend], TrainFuture[dict[str, float]]]


def step_optimizer(backend: Backend) -> TrainFuture[dict[str, float]]:
    return backend.optim_step()


async def optimizer_steps(
    backend: Backend,
    algorithm: Algorithm,
    items: Sequence[Item],
    budget: Budget,
    memory: Memory,
    *,
    iterations: int = 1,
    mini_batches: int = 1,
    optimizer_step: StepFn = step_optimizer,
    on_credit: CreditedFn = not_recorded,
) -> list[dict[str, float]]:
    """Credit the items once, then take `mini_batches` optimizer steps in each iteration; return the metrics of each.

    Where memory runs out, everything since the last optimizer step is repeated with smaller micro-batches.
    """
    limits, before, credited = limits_of(budget), dict(memory), list[Item]()

    async def attempt(number: int) -> dict[str, float]:
        nonlocal credited
        if number == 0:
            memory.clear()
            memory.update(before)
            credited = await credit_step(backend, algorithm, items, limits, memory)
            with annotated(items=list(credited)):
                await on_credit(credited)
        indices = np.array_split(np.arange(len(credited)), mini_batches)[number % mini_batches]
        part = [credited[index] for index in indices]
        return await update(backend, algorithm, part, limits.micro_batch_tokens, optimizer_step)

    return [await limits.fit(backend, partial(attempt, number)) for number in range(iterations * mini_batches)]


async def update(
    backend: Backend, algorithm: Algorithm, credited: Sequence[Item], budget: int, optimizer_step: StepFn
) -> dict[str, float]:
    """Forward, backward and optimizer step over rows that carry all that the loss needs."""
    counts = count_units(credited)
    if not counts["token"]:
        with annotated(check="mask"):
            raise ValueError(
                f"none of the {len(credited)} items of this step has a trained token: the loss mask is empty"
            )
    parts = pack(credited, budget, layout=layout_of(backend), parallel=parallel_of(backend))
    batches = [collate(part) for part in parts]
    with annotated(batches=batches):
        with sized(parts, layout_of(backend), trains=True):
            metrics = await backend.forward_backward(batches, algorithm, counts)
        metrics |= await optimizer_step(backend)
    return with_perplexity(metrics) | {
        "tokens": float(sum(batch.num_tokens for batch in batches)),
        "trained_tokens": counts["token"],
        "memory_gib": memory_gib(),
    }


def with_perplexity(metrics: dict[str, float]) -> dict[str, float]:
    """Add the perplexity where the metrics have the mean negative log-likelihood of the tokens."""
    return metrics | ({"perplexity": math.exp(min(metrics["nll"], 700.0))} if "nll" in metrics else {})


async def credit_step(
    backend: Backend, algorithm: Algorithm, items: Sequence[Item], budget: Budget, memory: Memory
) -> list[Item]:
    """The rows of a step with the streams that the algorithm needs: log-probs of other passes, advantages."""
    limits = limits_of(budget)
    with annotated(items=list(items)):
        arranged = algorithm.arrange(list(items))
        for which in algorithm.needs:
            known = which == "sampler" and all("sampler_logprob" in row.streams for item in arranged for row in item)
            arranged = arranged if known else await stamp(backend, arranged, which, limits)
        return algorithm.credit(arranged, memory)


async def stamp(backend: Backend, items: Sequence[Item], which: str, limits: MemoryLimits) -> list[Item]:
    """Add the log-probs of one model to every row, as the stream `ref_logprob` or similar; the order stays."""
    units = [(row,) for item in items for row in item] if limits.by_row else list(items)
    stamped: dict[int, list[Row]] = {}
    parts = pack(units, limits.micro_batch_tokens, layout=layout_of(backend), parallel=parallel_of(backend))
    batches = [collate(part) for part in parts]
    with sized(parts, layout_of(backend), by_row=True):
        passes = await backend.logprobs(batches, "policy" if which == "sampler" else which)
    for part, batch, outputs in zip(parts, batches, passes, strict=True):
        rows = iter(_stamp_rows([row for unit in part for row in unit], batch, outputs, which))
        for unit in part:
            stamped[id(unit)] = [next(rows) for _ in unit]
    done = iter([row for unit in units for row in stamped[id(unit)]])
    return [tuple(next(done) for _ in item) for item in items]


def _stamp_rows(rows: Sequence[Row], batch: Batch, outputs: Outputs, which: str) -> list[Row]:
    streams = {f"{which}_logprob": outputs.logprob.cpu().numpy()}
    scalars = {}
    if outputs.value is not None and outputs.last_value is not None:
        streams["value"] = outputs.value.cpu().numpy()
        scalars["last_value"] = outputs.last_value.tolist()
    return [
        replace(
            row,
            streams={**row.streams, **{name: stream[start:end] for name, stream in streams.items()}},
            scalars={**row.scalars, **{name: values[index] for name, values in scalars.items()}},
        )
        for index, (row, (start, end)) in enumerate(zip(rows, pairwise(batch.borders), strict=True))
    ]
