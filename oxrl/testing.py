"""Helpers for testing custom rewards, environments and algorithms: a scripted generator and hand-made rollouts.

Nothing here needs a model; a tokenizer is enough. To test a reward on real rows, and against reward hacking, use
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
    """`ScriptedGenerator(tokenizer, ["Hm.", "4"])`: generates these texts in order; an exception is raised.

    Or `ScriptedGenerator(tokenizer, lambda prompt: "4" if "2+2" in prompt else "?")`. Texts are truncated to
    `max_new_tokens`. It is a `Generator`, and can be passed as `generator=` to the primitives. All requests are kept in
    `requests`.
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
        return [self._generation(request, sampling.max_new_tokens) for request in requests]

    def _generation(self, request: Request, max_tokens: int) -> Generation:
        script = self._next(request)
        resumed = request.partial.token_ids if request.partial else ()
        ids = (*resumed, *self.tokenizer(script + self.end, add_special_tokens=False)["input_ids"])
        reason: Literal["stop", "length"] = "stop" if len(ids) <= max_tokens else "length"
        kept = ids[:max_tokens]
        text = self.tokenizer.decode(kept, skip_special_tokens=True)
        logprobs = tuple(-0.5 - 0.001 * position for position in range(len(kept)))  # all different: reveals a shift
        return Generation(kept, logprobs, reason, self.version, text)

    def _next(self, request: Request) -> str:
        if callable(self.script):
            return self.script(self.tokenizer.decode(request.tokens))
        if not self.script:
            raise AssertionError(f"the script has no text for request {len(self.requests)}")
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
    """Return a rollout with this response; `metadata` is its sample's. Its tokens are placeholders."""
    sample = Sample("fake", messages=(Message("user", prompt),), answer=answer, metadata=metadata or {})
    rollout = synthetic_rollout(sample, response)
    if cut_off:
        turn = rollout.turns[0]
        rollout = replace(rollout, turns=(turn._replace(generation=turn.generation._replace(finish_reason="length")),))
    score = Score(float(reward)) if isinstance(reward, int | float) else reward
    return replace(rollout, group=group, index=index, score=score)


ODD = {
    "an empty response": "",
    "white space only": " \n\t",
    "a long response": "word " * 20_000,
    "odd characters": "\x00é漢🙂",
}


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

    AssertionError lists every response whose reward differs from the expected one, could not be computed, or differs
    when computed again. An empty, a long, an odd and a truncated response must be gradable too.
    """

    def rollout_of(text: str, *, cut_off: bool = False) -> Rollout:
        return fake_rollout(text, prompt=prompt, answer=answer, metadata=metadata, cut_off=cut_off)

    cases: list[tuple[str, Rollout, float | None]] = [
        *(
            (repr(text) if len(text) < 60 else f"{text[:56]!r}...", rollout_of(text), reward)
            for text, reward in expected.items()
        ),
        *((name, rollout_of(text), None) for name, text in ODD.items()),
        ("a truncated response", rollout_of(next(iter(expected), ""), cut_off=True), None),
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
        return f"{name} earned {first.reward:g}, and {again.reward} when graded again"
    return None
