"""Training with a tool: calls are parsed and executed, their results are masked, and the reward rises."""

import re

import anyio
import numpy as np
import pytest

from oxrl.algorithms import algorithm
from oxrl.algorithms.rows import rows_of
from oxrl.backends.local import create_pytorch_backend
from oxrl.data.assemble import assemble
from oxrl.data.buffer import DataBuffer
from oxrl.data.render import Renderer
from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.loops.offline import OfflineConfig, run_offline
from oxrl.loops.online import OnlineConfig, run_online
from oxrl.models.load import load_model
from oxrl.rollouts.collect import RolloutConfig, RolloutSampler, sampling_manager
from oxrl.rollouts.envs import GeneratorClient, with_tools
from oxrl.rollouts.tool_calls import ToolCall
from oxrl.rollouts.tools import calculator, tool_schema
from oxrl.types import Generation, GenerationConfig, Message, Rollout, Sample, Score, Turn

CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "%s"}}</tool_call>'
SHORT_CALL = "[%s]"  # what a model of a million parameters can learn to write in seconds


def calculate(expression: str) -> str:
    """Sums."""
    return calculator(expression)  # its longer description would be in every prompt


TOOLS = (tool_schema(calculate),)


def in_brackets(text):
    return [ToolCall("calculate", {"expression": found}) for found in re.findall(r"\[(.+?)\]", text)]


def question(number):
    return (Message("user", f"{number % 5}+{number % 3}?"),)


def demonstrations():
    """Every question answered once by a guess and once by a call."""
    for number in range(15):
        sum_of = question(number)[0].content[:-1]
        for reply in (SHORT_CALL % sum_of, "I guess 3."):
            yield Sample(f"d{number}{reply[0]}", (*question(number), Message("assistant", reply)), tools=TOOLS)


def used_the_tool(rollout) -> float:
    results = [message for message in rollout.messages if message.role == "tool"]
    return float(any(message.content.strip().lstrip("-").isdigit() for message in results))


@pytest.fixture(scope="module")
def sft_model(tiny):
    """`tiny` after a few demonstrations: it sometimes calls the tool."""
    model, render = load_model(tiny[0]), Renderer(tiny[1])
    sft = algorithm("sft")
    items = assemble(list(demonstrations()), sft, render).items
    backend = create_pytorch_backend(model, lr=3e-3)
    config = OfflineConfig(num_steps=55, batch_size=6, micro_batch_tokens=8192)
    anyio.run(lambda: run_offline(backend, sft, DataBuffer(items), config, log=lambda step, metrics: None))
    return model


@pytest.mark.trains
def test_the_reward_for_using_the_tool_rises(sft_model, tiny):
    render = Renderer(tiny[1])
    backend = create_pytorch_backend(sft_model, lr=5e-4, weight_decay=0.0)
    generator = EmbeddedGenerator(sft_model, tiny[1])
    env = with_tools([calculate], max_turns=2, tool_parser=in_brackets)
    sampler = RolloutSampler(generator, render, GenerationConfig(max_new_tokens=16), env=env)
    samples = [Sample(f"q{number}", question(number)) for number in range(15)]
    config = RolloutConfig(batch_size=4, n_samples_per_prompt=6, reward_fn=used_the_tool, min_group_size=2)
    seen = []
    history = anyio.run(
        lambda: run_online(
            backend,
            algorithm("grpo"),
            sampling_manager(DataBuffer(samples), sampler, config),
            [generator],
            render,
            OnlineConfig(num_steps=8),
            observe=lambda step, groups: seen.extend(groups),
            log=lambda step, metrics: None,
        )
    )
    first, last = history[0]["reward"], np.mean([line["reward"] for line in history[-2:]])
    assert 0.05 < first < 0.85 and last > first + 0.2
    assert max(line["logprob_gap"] for line in history) < 1e-4, "what was sampled is what is trained, turn by turn"
    two_turns = next(rollout for group in seen for rollout in group if len(rollout.turns) == 2 and rollout.reward)
    _check_masks(two_turns, tiny[1])


def _check_masks(rollout, tokenizer):
    (row,) = rows_of(rollout)
    trained = tokenizer.decode(row.tokens[row.mask])
    result = next(message.content for message in rollout.messages if message.role == "tool")
    assert "[" in trained and f"tool\n{result}" in tokenizer.decode(row.tokens)
    assert "<|im_start|>" not in trained, "neither the tool's result nor the template is trained"
    sampled = [token for turn in rollout.turns for token in turn.generation.token_ids]
    assert row.tokens[row.mask].tolist() == sampled


def test_a_real_chat_model_continues_after_a_tool_call(smollm2):
    """SmolLM2's template has no tools, so the prompt describes them. The first turn is a recorded call: it is parsed
    and executed, its result is masked, and what the model generates next is trained on."""
    config, tokenizer = smollm2
    generator, render = EmbeddedGenerator(load_model(config), tokenizer), Renderer(tokenizer)
    sampling, env = GenerationConfig(max_new_tokens=12, temperature=0.0), with_tools([calculator], max_turns=2)
    sample = Sample("s", (Message("user", "What is 1017 + 25?"),))
    first = anyio.run(env, sample, GeneratorClient(generator, render, sampling._replace(max_new_tokens=1), 0)).turns[0]
    assert "calculator" in tokenizer.decode(first.prompt_ids)
    ids = (*tokenizer(CALL % "1017+25")["input_ids"], tokenizer.eos_token_id)
    call = Generation(ids, (-1.0,) * len(ids), "stop", text=CALL % "1017+25")
    recorded = (Turn(first.prompt_ids, call),)
    episode = anyio.run(env, sample, GeneratorClient(generator, render, sampling, 0, recorded))
    rollout = Rollout(sample, episode.turns, score=Score(1.0))
    assert len(rollout.turns) == 2 and any("1042" in str(message.content) for message in rollout.messages[1:])
    (row,) = rows_of(rollout)
    assert row.tokens[row.mask].tolist() == [*ids, *rollout.turns[1].generation.token_ids]
    assert "1042" in tokenizer.decode(row.tokens[~row.mask])
