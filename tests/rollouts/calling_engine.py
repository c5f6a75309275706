"""An engine for runs in tests: it calls the tool `look` for every second request, and answers after a result.

Its completions have no log-probs, so that the trainer's count.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from oxrl.config.registry import EngineRecord
from oxrl.run.build import Engine
from oxrl.testing import ScriptedGenerator
from oxrl.types import Generation, Request


class Caller(ScriptedGenerator):
    def _next(self, request: Request) -> str:
        if "<|im_start|>tool\n" in self.tokenizer.decode(request.tokens):
            return "A shelf."
        return "<function=look></function>" if request.seed % 2 else "No."

    def _generation(self, request: Request, max_tokens: int) -> Generation:
        return super()._generation(request, max_tokens)._replace(logprobs=())


@asynccontextmanager
async def open_caller(config: Any, tokenizer: Any, folder: Any, trainer: Any) -> AsyncIterator[Engine]:
    yield Engine(Caller(tokenizer, lambda prompt: ""))


ENGINE = EngineRecord(open_caller, "calls a tool")
