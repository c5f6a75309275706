"""An environment of the verifiers library for tests: pays for answers that end with a vowel."""

from typing import Any

import verifiers as vf
from datasets import Dataset


def ends_with_a_vowel(completion: Any) -> float:
    return float(completion[-1]["content"][-1:] in set("aeiou"))


def raises(completion: Any) -> float:
    raise KeyError("judge")


def compared(completions: Any) -> list[float]:
    return [0.0 for _ in completions]


class Asked(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:
        return [{"role": "user", "content": "Go on."}]


def load_environment(rows: int = 4, turns: int = 1, reward: str = "ends_with_a_vowel") -> vf.Environment:
    data = Dataset.from_list([{"question": f"Say {number}.", "answer": str(number)} for number in range(rows)])
    return Asked(dataset=data, rubric=vf.Rubric(funcs=[globals()[reward]]), max_turns=turns)
