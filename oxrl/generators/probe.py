"""Verification that an engine has the trainer's weights: both compute the log-probs of one fixed sequence.

The trainer's own forward pass is the reference. The generators get the engine's log-probs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from oxrl.data.media_features import example
from oxrl.data.processor import MediaProcessor
from oxrl.generators.engines import MediaPrompt
from oxrl.types import WeightSource

LENGTH = 48
# For the arithmetic of another engine: vLLM in float32 on a CPU differed by 5e-5 at most; half precision is a guess.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.3}


class StaleEngineError(RuntimeError):
    """An engine does not have the weights that it was given; the message begins with its name."""


def probe_tokens(vocabulary: int) -> tuple[int, ...]:
    """Return a fixed sequence that is spread over the vocabulary, so that it uses many rows of the embedding."""
    return tuple((7 + 7919 * index * (index + 3)) % vocabulary for index in range(LENGTH))


def probe_prompt(tokens: Sequence[int], processor: MediaProcessor) -> tuple[tuple[int, ...], MediaPrompt]:
    """Put a medium of each kind that the model reads between these tokens; return the ids, and the prompt for engines.

    The towers' weights are then verified, too, and that the engine's processor makes the same of a medium.
    """
    media = tuple(example(kind, 84, 56) for kind in processor.placeholders)
    text = "".join(processor.placeholders[medium.kind] for medium in media)
    free = [token for token in tokens if token not in processor.placeholder_ids]
    half = len(free) // 2
    ids = (*free[:half], *processor.ids(text, media), *free[half:])
    return ids, MediaPrompt.of(ids, media, processor)


class Probe(NamedTuple):
    """The trainer's current log-probs of the probe sequence, and by how much an engine's may differ."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    media: MediaPrompt | None = None

    @classmethod
    def of(cls, source: WeightSource, tolerance: float | None = None, processor: MediaProcessor | None = None) -> Probe:
        """Compute it; `processor` is that of a model which reads media."""
        tokens = probe_tokens(source.vocabulary)
        allowed = TOLERANCE.get(source.dtype, 0.3) if tolerance is None else tolerance
        if processor is None:
            return cls(tokens, source.logprobs(tokens), allowed)
        tokens, media = probe_prompt(tokens, processor)
        return cls(tokens, source.logprobs(tokens, media.media), allowed, media)

    def check(self, name: str, logprobs: Sequence[float], version: int, before: ProbeResult | None) -> ProbeResult:
        """Return the result for the next check; raise if the engine's log-probs are not the trainer's.

        An update can be smaller than the tolerance. Stale weights are then detected by the previous result: the
        trainer's log-probs have changed, and the engine's are bit-identical.
        """
        gap = max(abs(theirs - ours) for theirs, ours in zip(logprobs, self.logprobs, strict=True))
        if not gap <= self.tolerance:
            raise StaleEngineError(
                f"{name} does not have version {version} of the weights: its log-probs of a probe sequence differ from "
                f"the trainer's by {gap:.2g}, more than the tolerance {self.tolerance:g}"
            )
        if before is not None and before.engine == tuple(logprobs):
            if self._moved(before) > self.tolerance / 20:
                raise StaleEngineError(
                    f"{name} still has old weights: the trainer's log-probs of a probe sequence have changed with "
                    f"version {version}, the engine's have not"
                )
            return before  # the older result, so that small changes of the trainer add up
        return ProbeResult(self.logprobs, tuple(logprobs), gap)

    def _moved(self, before: ProbeResult) -> float:
        return max(abs(now - then) for now, then in zip(self.logprobs, before.trainer, strict=True))


class ProbeResult(NamedTuple):
    """The log-probs of the probe sequence by trainer and engine, and the largest difference."""

    trainer: tuple[float, ...]
    engine: tuple[float, ...]
    gap: float
