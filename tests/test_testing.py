"""Helpers for tests of one's own: the script is kept, rollouts are whole, and a bad reward is told from a good one."""

import random

import anyio
import pytest

import oxrl
from oxrl import GenerationConfig, ScriptedGenerator, check_reward, fake_rollout
from oxrl.types import Generator, Request


def test_a_scripted_generator_says_its_lines_in_order_and_cuts_long_ones_off(tiny):
    tokenizer = tiny[1]
    speaker: Generator = ScriptedGenerator(tokenizer, ["Hm.", "a longer one", OSError("gone")])

    async def talk():
        first = await speaker.generate([Request((1, 2), seed=3)], GenerationConfig(max_new_tokens=8))
        second = await speaker.generate([Request((1,))], GenerationConfig(max_new_tokens=8))
        with pytest.raises(OSError, match="gone"):
            await speaker.generate([Request((1,))], GenerationConfig())
        return *first, *second

    first, second = anyio.run(talk)
    assert (first.text, first.finish_reason, first.token_ids[-1]) == ("Hm.", "stop", tokenizer.eos_token_id)
    assert (second.text, second.finish_reason, len(second.logprobs)) == ("a longer", "length", 8)
    assert speaker.requests[0] == Request((1, 2), seed=3)
    with pytest.raises(AssertionError, match="no text for request 4"):
        anyio.run(speaker.generate, [Request((1,))], GenerationConfig())


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


def test_an_environment_is_tried_without_a_model(tiny):
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "12 * 12"}}</tool_call>'
    speaker = ScriptedGenerator(tiny[1], [call, "144"])
    rollout = oxrl.create_multiturn_rollout(
        None, tiny[1], "12 * 12?", GenerationConfig(), tools=[oxrl.calculator], generator=speaker
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
    ("reward", "complaint"),
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
def test_a_bad_reward_is_told(reward, complaint):
    with pytest.raises(AssertionError, match=complaint):
        check_reward(reward, {"144": 1.0, "145": 0.0}, answer="144")
