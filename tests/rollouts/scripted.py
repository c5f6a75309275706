"""A scripted generator of token ids, one token per tick: the protocol without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count

import anyio
import numpy as np

from oxrl.types import Generation, GenerationConfig, Message, Request, Row, Sample, Weights


class Scripted:
    """`Scripted(lambda request: [5] * 3)`: the token ids for a request; each takes one tick.

    The first `failures` requests fail.
    """

    def __init__(self, reply: Callable[[Request], Sequence[int]], *, failures: int = 0) -> None:
        self.reply, self.failures, self.version = reply, failures, 0
        self.requests: list[Request] = []
        self.ticks, self._aborts = 0, 0

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        self.requests += requests
        if self.failures:
            self.failures -= 1
            raise ConnectionError("the engine went away")
        return [await self._one(request) for request in requests]

    async def _one(self, request: Request) -> Generation:
        resumed = request.partial or Generation((), (), "aborted", self.version)
        ids, aborts = list(resumed.token_ids), self._aborts
        script = list(self.reply(request))
        for _ in count():
            if len(ids) == len(script):
                return self._generation(ids, "stop", resumed.version)
            await anyio.lowlevel.checkpoint()
            if self._aborts > aborts:
                return self._generation(ids, "aborted", resumed.version)
            ids.append(script[len(ids)])
            self.ticks += 1
        raise AssertionError("count has no end")

    def _generation(self, ids: list[int], reason: str, version: int) -> Generation:
        return Generation(tuple(ids), (-0.5,) * len(ids), reason, version, " ".join(map(str, ids)))

    async def abort(self) -> None:
        self._aborts += 1

    async def update_weights(self, weights: Weights) -> None:
        self.version = weights.version

    async def close(self) -> None:
        pass


class PlainRender:
    """Every prompt is its text's bytes."""

    def conversation(self, messages, *, id, first_trained=0, tools=()):
        return [Row(id, [0, 1], [False, True])]

    def text(self, text, *, id):
        return [Row(id, [0, 1], [False, True])]

    def prompt(self, messages, *, tools=()):
        return np.array([ord(letter) for letter in messages[-1].content])


def question(number: int, answer: str = "") -> Sample:
    return Sample(f"q{number}", messages=(Message("user", f"{number}?"),), answer=answer or str(number))
