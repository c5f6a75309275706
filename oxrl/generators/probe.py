"""Proof that an engine speaks with the trainer's weights: both say how likely one fixed sequence is.

The trainer's own forward pass is the measure. How an engine is asked is left to the generators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from oxrl.types import WeightSource

LENGTH = 48
# Room for another engine's arithmetic: vLLM in float32 on a CPU was off by 5e-5 at most; half precision is a guess.
TOLERANCE = {torch.float32: 2e-3, torch.float16: 0.1, torch.bfloat16: 0.3}


class StaleEngineError(RuntimeError):
    """An engine that does not speak with the weights it was given; the message begins with its name."""


def probe_tokens(vocabulary: int) -> tuple[int, ...]:
    """A fixed sequence that is spread over the vocabulary, so that many rows of the embedding have a part in it."""
    return tuple((7 + 7919 * place * (place + 3)) % vocabulary for place in range(LENGTH))


class Probe(NamedTuple):
    """What the trainer says about the probe sequence now, and how far an engine may be off."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float

    @classmethod
    def of(cls, source: WeightSource, tolerance: float | None = None) -> Probe:
        tokens = probe_tokens(source.vocabulary)
        most = TOLERANCE.get(source.dtype, 0.3) if tolerance is None else tolerance
        return cls(tokens, source.logprobs(tokens), most)

    def check(self, name: str, said: Sequence[float], version: int, before: ProbeResult | None) -> ProbeResult:
        """What the engine says now, to be remembered; stops if it is not what the trainer says.

        An update can be smaller than the tolerance. Then what an engine said before gives it away: the trainer's
        numbers have moved, and its own are the same to the bit.
        """
        gap = max(abs(theirs - ours) for theirs, ours in zip(said, self.logprobs, strict=True))
        if not gap <= self.tolerance:
            raise StaleEngineError(
                f"{name} does not speak with version {version} of the weights: its log-probs of a probe sequence are "
                f"off by {gap:.2g}, and at most {self.tolerance:g} is explained by arithmetic"
            )
        if before is not None and before.engine == tuple(said) and self._moved(before) > self.tolerance / 20:
            raise StaleEngineError(
                f"{name} still speaks with old weights: the trainer's log-probs of a probe sequence have changed with "
                f"version {version}, and its own have not"
            )
        if before is not None and before.engine == tuple(said):  # what the trainer has moved since then adds up
            return before
        return ProbeResult(self.logprobs, tuple(said), gap)

    def _moved(self, before: ProbeResult) -> float:
        return max(abs(now - then) for now, then in zip(self.logprobs, before.trainer, strict=True))


class ProbeResult(NamedTuple):
    """What both sides said about the probe sequence, and the largest difference."""

    trainer: tuple[float, ...]
    engine: tuple[float, ...]
    gap: float
