"""Whether a sampler has the newest weights: it continues one prompt, and the trainer computes the same log-probs.

With the same weights and seed a sampler repeats itself. If it does so although the trainer's log-probs have changed, it
still has the weights of before.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from oxrl.data.pack import collate
from oxrl.types import Backend, GenerationConfig, Generator, Media, Request, Row

TOKENS = 8
NOISE = {4: 1e-4, 2: 0.1}  # by bytes of a number: log-probs that differ by less may be equal


class Sampled(NamedTuple):
    """A continuation with the sampler's and the trainer's log-probs, on the trainer's weights of this version."""

    version: int
    tokens: tuple[int, ...]
    engine: tuple[float, ...]
    trainer: tuple[float, ...]

    def gap(self, other: Sampled) -> float:
        """Largest difference of this sampler's log-probs and another trainer's."""
        return max(abs(a - b) for a, b in zip(self.engine, other.trainer, strict=True))

    def moved(self, other: Sampled) -> float:
        return max(abs(a - b) for a, b in zip(self.trainer, other.trainer, strict=True))


class Prompt(NamedTuple):
    """What the probe continues: the first prompt of the run."""

    tokens: tuple[int, ...]
    media: tuple[Media, ...] = ()


async def sample_probe(
    generator: Generator, backend: Backend, prompt: Prompt, sampling: GenerationConfig, version: int
) -> Sampled | None:
    """None if nothing was sampled, as when others abort the engine, or without log-probs."""
    few = sampling._replace(max_new_tokens=TOKENS, top_p=1.0, top_k=0, min_p=0.0, stop=())
    (done,) = await generator.generate([Request(prompt.tokens, seed=0, media=prompt.media)], few)
    if done.finish_reason == "aborted" or not done.token_ids or len(done.logprobs) != len(done.token_ids):
        return None
    start = len(prompt.tokens)
    tokens = np.array([*prompt.tokens, *done.token_ids], np.int64)
    row = Row("probe", tokens, np.arange(len(tokens)) >= max(1, start), media=prompt.media)
    (outputs,) = await backend.logprobs([collate([(row,)])])
    return Sampled(version, done.token_ids, done.logprobs, tuple(outputs.logprob[start:].tolist()))


def is_stale(now: Sampled, before: Sampled, itemsize: int) -> bool | None:
    """Whether the sampler has the weights of `before`; None where the weights have not changed enough to tell."""
    noise = NOISE.get(itemsize, 0.1)
    if now.tokens != before.tokens:
        return False if now.gap(now) < 1.0 else None
    if now.moved(before) < 4 * noise:
        return None
    return now.engine == before.engine or now.gap(before) < min(noise, now.gap(now) / 4)
