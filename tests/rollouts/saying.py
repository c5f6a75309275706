"""A scripted generator that is never cut off, and whose generations a test can change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oxrl.testing import ScriptedGenerator
from oxrl.types import Generation, GenerationConfig, Request


class Saying(ScriptedGenerator):
    """`Saying(tokenizer, ["Hm.", "4"])`: one text after the other, each with `end` behind it; exceptions are raised."""

    def __init__(self, tokenizer: Any, says: Sequence[str | Exception], end: str | None = None) -> None:
        super().__init__(tokenizer, says, end=end)
        self.version = 3
        self.samplings: list[GenerationConfig] = []
        self.change: Callable[[Generation], Generation] = lambda generation: generation

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        self.samplings.append(sampling)
        said = await super().generate(requests, sampling._replace(max_new_tokens=1_000_000))
        return [self.change(generation) for generation in said]
