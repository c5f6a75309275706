"""A scripted generator without truncation whose generations a test can change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oxrl.testing import ScriptedGenerator
from oxrl.types import Generation, GenerationConfig, Request


class ScriptedText(ScriptedGenerator):
    """`ScriptedText(tokenizer, ["Hm.", "4"])`: generates these texts, each with `end`; exceptions are raised."""

    def __init__(self, tokenizer: Any, texts: Sequence[str | Exception], end: str | None = None) -> None:
        super().__init__(tokenizer, texts, end=end)
        self.version = 3
        self.samplings: list[GenerationConfig] = []
        self.change: Callable[[Generation], Generation] = lambda generation: generation

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        self.samplings.append(sampling)
        generations = await super().generate(requests, sampling._replace(max_new_tokens=1_000_000))
        return [self.change(generation) for generation in generations]
