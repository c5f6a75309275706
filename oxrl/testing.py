"""For tests of one's own rewards, environments and algorithms: a generator with a script, rollouts made by hand.

Nothing here needs a model; a tokenizer is enough. How a reward fares on real rows, and against cheats, is
`oxrl rewards test`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from oxrl.concurrency import run_blocking
from oxrl.rewards.grade import AnyReward, grade
from oxrl.rewards.trial import synthetic_rollout
from oxrl.types import Generation, GenerationConfig, Message, Request, Rollout, Sample, Score, Weights


class ScriptedGenerator:
    """`ScriptedGenerator(tokenizer, ["Hm.", "4"])`: says one text after the other; an exception is raised.

    Or `ScriptedGenerator(tokenizer, lambda prompt: "4" if "2+2" in prompt else "?")`. What is longer than
    `max_new_tokens` is cut off. It is a `Generator`, and also what the primitives take as `generator=`. All that it was
    asked is kept in `requests`.
    """

    def __init__(
        self, tokenizer: Any, script: Sequence[str | Exception] | Callable[[str], str], *, end: str | None = None
    ) -> None:
        self.tokenizer, self.end = tokenizer, tokenizer.eos_token if end is None else end
        self.script = script if callable(script) else list(script)
        self.requests: list[Request] = []
        self.version = 0

    async def generate(self, requests: Sequence[Request], sampling: GenerationConfig) -> list[Generation]:
        self.requests += requests
        return [self._speak(request, sampling.max_new_tokens) for request in requests]

    def __call__(
        self, _model: Any, _tokenizer: Any, prompts: Sequence[Sequence[int]], config: GenerationConfig
    ) -> list[Generation]:
        return run_blocking(self.generate, [Request(tuple(prompt)) for prompt in prompts], config)

    def _speak(self, request: Request, most: int) -> Generation:
        text = self._next(request)
        begun = request.begun.token_ids if request.begun else ()
        ids = (*begun, *self.tokenizer(text + self.end, add_special_tokens=False)["input_ids"])
        reason: Literal["stop", "length"] = "stop" if len(ids) <= most else "length"
        words = self.tokenizer.decode(ids[:most], skip_special_tokens=True)
        logprobs = tuple(-0.5 - 0.001 * place for place in range(len(ids[:most])))  # all different: a shift is seen
        return Generation(ids[:most], logprobs, reason, self.version, words)

    def _next(self, request: Request) -> str:
        if callable(self.script):
            return self.script(self.tokenizer.decode(request.tokens))
        if not self.script:
            raise AssertionError(f"request {len(self.requests)} came when the script was at its end")
        text = self.script.pop(0)
        if isinstance(text, Exception):
            raise text
        return text

    async def abort(self) -> None: ...

    async def update_weights(self, weights: Weights) -> None:
        self.version = weights.version

    async def close(self) -> None: ...


def fake_rollout(
    response: str,
    *,
    prompt: str = "Say something.",
    answer: str | None = None,
    reward: float | Score | None = None,
    group: int = 0,
    index: int = 0,
    cut_off: bool = False,
    metadata: Mapping[str, Any] | None = None,
) -> Rollout:
    """A rollout with this answer; `metadata` is its sample's. Its tokens are made up."""
    asked = Sample("fake", messages=(Message("user", prompt),), answer=answer, metadata=metadata or {})
    rollout = synthetic_rollout(asked, response)
    if cut_off:
        turn = rollout.turns[0]
        rollout = replace(rollout, turns=(turn._replace(generation=turn.generation._replace(finish_reason="length")),))
    score = Score(float(reward)) if isinstance(reward, int | float) else reward
    return replace(rollout, group=group, index=index, score=score)


ODD = {"an empty answer": "", "blanks alone": " \n\t", "a long answer": "word " * 20_000, "odd letters": "\x00é漢🙂"}


def check_reward(
    reward_fn: AnyReward,
    expected: Mapping[str, float],
    *,
    prompt: str = "Say something.",
    answer: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    time_limit: float = 5.0,
) -> None:
    """`check_reward(my_reward, {"144": 1.0, "I think 145": 0.0}, prompt="12 * 12?", answer="144")`.

    AssertionError tells every answer that earned something else, could not be graded, or earned something else when it
    was graded again; an empty, a long, an odd and a cut-off answer must be gradable too.
    """

    def made(text: str, *, cut_off: bool = False) -> Rollout:
        return fake_rollout(text, prompt=prompt, answer=answer, metadata=metadata, cut_off=cut_off)

    cases: list[tuple[str, Rollout, float | None]] = [
        *(
            (repr(text) if len(text) < 60 else f"{text[:56]!r}...", made(text), worth)
            for text, worth in expected.items()
        ),
        *((name, made(text), None) for name, text in ODD.items()),
        ("a cut-off answer", made(next(iter(expected), ""), cut_off=True), None),
    ]
    problems = [run_blocking(_problem, reward_fn, *case, time_limit) for case in cases]
    assert not any(problems), "; ".join(filter(None, problems))


async def _problem(
    reward_fn: AnyReward, name: str, rollout: Rollout, wanted: float | None, time_limit: float
) -> str | None:
    (first,), (again,) = [await grade([rollout], reward_fn, time_limit=time_limit) for _ in range(2)]
    if first.reward is None:
        return f"{name}: {first.error}"
    if wanted is not None and not math.isclose(first.reward, wanted, abs_tol=1e-6):
        return f"{name} earned {first.reward:g}, expected {wanted:g}"
    if first.reward != again.reward:
        return f"{name} earned {first.reward:g}, and {again.reward} when it was graded again"
    return None
