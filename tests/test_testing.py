"""Helpers for users' tests: scripted generators, complete rollouts, and checks that reject a wrong reward."""

import random

import anyio
import pytest

import oxrl
from oxrl import GenerationConfig, ScriptedGenerator, check_reward, fake_rollout
from oxrl.types import Generator, Request


def test_a_scripted_generator_returns_its_texts_in_order_and_truncates_long_ones(tiny):
    tokenizer = tiny[1]
    generator: Generator = ScriptedGenerator(tokenizer, ["Hm.", "a longer one", OSError("gone")])

    async def run():
        first = await generator.generate([Request((1, 2), seed=3)], GenerationConfig(max_new_tokens=8))
        second = await generator.generate([Request((1,))], GenerationConfig(max_new_tokens=8))
        with pytest.raises(OSError, match="gone"):
            await generator.generate([Request((1,))], GenerationConfig())
        return *first, *second

    first, second = anyio.run(run)
    assert (first.text, first.finish_reason, first.token_ids[-1]) == ("Hm.", "stop", tokenizer.eos_token_id)
    assert (second.text, second.finish_reason, len(second.logprobs)) == ("a longer", "length", 8)
    assert generator.requests[0] == Request((1, 2), seed=3)
    with pytest.raises(AssertionError, match="no text for request 4"):
        anyio.run(generator.generate, [Request((1,))], GenerationConfig())


def test_a_script_may_be_a_function_of_the_prompt_and_serve_the_primitives(tiny):
    answers = ScriptedGenerator(tiny[1], lambda prompt: "4" if "2+2" in prompt else "?")
    rollouts = oxrl.create_batch_rollouts(
        None,
        tiny[1],
        ["2+2", "3+3"],
        GenerationConfig(),
        generator=answers,
        reward_fn=lambda r: float(r.response == "4"),
    )
    assert [rollout.reward for rollout in rollouts] == [1.0, 0.0]


def test_an_environment_runs_without_a_model(tiny):
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 12"}}</tool_call>'
    generator = ScriptedGenerator(tiny[1], [call, "144"])
    rollout = oxrl.create_multiturn_rollout(
        None, tiny[1], "12 * 12?", GenerationConfig(), tools=[oxrl.calculator], generator=generator
    )
    assert rollout.messages[2].content == "144" and rollout.metadata["tool_calls"] == 1


def test_a_fake_rollout_has_what_it_was_given():
    rollout = fake_rollout("144", prompt="12 * 12?", answer="144", reward=1, group=3, index=2, metadata={"level": 5})
    assert (rollout.prompt, rollout.response, rollout.sample.answer, rollout.reward) == ("12 * 12?", "144", "144", 1.0)
    assert (rollout.group, rollout.index, rollout.sample.metadata) == (3, 2, {"level": 5})
    assert rollout.status is oxrl.Status.COMPLETED
    assert fake_rollout("so", cut_off=True).status is oxrl.Status.TRUNCATED


def exact(rollout):
    return float(rollout.response.strip() == rollout.sample.answer)


def test_a_good_reward_passes():
    check_reward(exact, {"144": 1.0, " 144\n": 1.0, "145": 0.0}, answer="144")
    check_reward(lambda rollouts: [0.5 for _ in rollouts], {"x": 0.5})


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda rollout: 1.0, "'145' earned 1, expected 0"),
        (lambda rollout: exact(rollout) / len(rollout.response), "an empty response: .*ZeroDivisionError"),
        (lambda rollout: float(rollout.response.split()[0] == "144"), "white space only: .*IndexError"),
        (lambda rollout: exact(rollout) + random.random() * (not rollout.response), "when graded again"),
        (
            lambda rollout: None if rollout.status is oxrl.Status.TRUNCATED else exact(rollout),
            "truncated response: .*None",
        ),
    ],
)
def test_a_wrong_reward_is_rejected(reward, message):
    with pytest.raises(AssertionError, match=message):
        check_reward(reward, {"144": 1.0, "145": 0.0}, answer="144")
