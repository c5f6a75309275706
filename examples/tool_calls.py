"""Tools in conversations of several turns: the model learns to call a tool before it answers, by rewards alone.

A random model cannot write JSON, so its whole turn is one byte here, and a small letter is a call. With a chat model,
leave out `tool_parser` and `stop_token_ids`: calls are read in the form of its chat template.

    python examples/tool_calls.py [--steps 15]
"""

import argparse

import oxrl
from oxrl.rollouts.tool_calls import ToolCall

PROMPTS = ["Which shelf is it on?", "Look it up.", "Where is the tea?", "Find the key."]

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=15)


def shelf(letter: str) -> str:
    """Tells what lies on a shelf."""
    return f"shelf {letter}: empty"


def one_letter_calls(text: str) -> list[ToolCall]:
    return [ToolCall("shelf", {"letter": text})] if len(text) == 1 and "a" <= text <= "z" else []


def tool_calls(rollout: oxrl.Rollout) -> float:
    return float(rollout.metadata["tool_calls"])


calls: list[float] = []
state = oxrl.create_training_state(oxrl.load_model("tiny"), oxrl.load_tokenizer("tiny"), lr=5e-3)
sampling = oxrl.GenerationConfig(max_new_tokens=2, stop_token_ids=tuple(range(256)))
env = oxrl.with_tools([shelf], tool_parser=one_letter_calls, max_turns=2)  # calls in the last turn are not executed
grpo = oxrl.create_algorithm_config("grpo")
for _ in range(parser.parse_args().steps):
    state, stats = oxrl.training_iteration(state, PROMPTS, sampling, grpo, tool_calls, env=env)
    calls.append(stats.reward)
    print(f"step {state.state.step:2}  turns {stats.metrics['turns']:.2f}  tool calls {stats.reward:.2f}")
last = oxrl.create_multiturn_rollout(state.policy, state.tokenizer, PROMPTS[0], sampling, env=env)
print("\n".join(f"{message.role}: {message.content!r}" for message in last.messages))
print(f"tool calls per answer before {calls[0]:.2f}, after {calls[-1]:.2f}")
