"""A generator that says the texts it is given, as a tokenizer reads them: the `Generator` protocol without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oxrl.types import Generation, GenerationConfig, Request, Weights


class Saying:
    """`Saying(tokenizer, ["Hm.", "4"])`: one text after the other, each with `end` behind it; exceptions are raised."""

    def __init__(self, tokenizer: Any, says: Sequence[str | Exception], end: str | None = None) -> None:
        self.tokenizer, self.left = tokenizer, list(says)
        self.end = tokenizer.eos_token if end is None else end
        self.requests: list[Request] = []
        self.samplings: list[GenerationConfig] = []
        self.change: Callable[[Generation], Generation] = lambda generation: generation

    @property
    def version(self) -> int:
        return 3

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        self.requests += requests
        self.samplings.append(sampling)
        return [self.speak(request) for request in requests]

    def speak(self, request: Request) -> Generation:
        text = self.left.pop(0)
        if isinstance(text, Exception):
            raise text
        begun = request.begun.token_ids if request.begun else ()
        ids = (*begun, *self.tokenizer(text + self.end, add_special_tokens=False)["input_ids"])
        words = self.tokenizer.decode(ids, skip_special_tokens=True)
        logprobs = tuple(-0.5 - 0.001 * place for place in range(len(ids)))
        return self.change(Generation(ids, logprobs, "stop", self.version, words))

    async def abort(self) -> None: ...

    async def update_weights(self, weights: Weights) -> None: ...

    async def close(self) -> None: ...
