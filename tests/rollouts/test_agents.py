"""Trajectories of external agents: sampled tokens are trained, everything else is refused with a reason."""

import pytest

from oxrl.data.render import Renderer
from oxrl.rollouts.agents import rollout_from_messages
from oxrl.types import Message, Score, Status

QUESTION = {"role": "user", "content": "What is 12 * 12?"}
CALL_TEXT = '<tool_call>{"name": "calculator",  "arguments": {"expression": "12*12"}}</tool_call>'
CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "12*12"}}}
RESULT = {"role": "tool", "content": "144"}


@pytest.fixture
def render(tiny):
    return Renderer(tiny[1])


def ids(tiny, text):
    return tiny[1](text, add_special_tokens=False)["input_ids"]


def trained(tiny, rollout):
    kept = [token for token, on in zip(rollout.tokens, rollout.loss_mask, strict=True) if on]
    return tiny[1].decode(kept, skip_special_tokens=False)


def test_sampled_ids_are_trained_as_sampled(tiny, render):
    first, second = ids(tiny, CALL_TEXT + "<|im_end|>"), ids(tiny, "It is 144<|im_end|>")
    rollout = rollout_from_messages(
        [
            QUESTION,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [CALL],
                "token_ids": first,
                "logprobs": [-0.5] * len(first),
            },
            RESULT,
            {"role": "assistant", "content": "It is 144", "token_ids": second, "version": 4, "finish_reason": "length"},
        ],
        render,
        id="run 7",
        score=1,
        group=3,
        metadata={"agent": "mine"},
    )
    assert (rollout.id, rollout.reward, rollout.status) == ("run 7#3/0", 1.0, Status.TRUNCATED)
    assert trained(tiny, rollout) == f"{CALL_TEXT}<|im_end|>It is 144<|im_end|>"
    one, two = rollout.turns
    assert list(one.prompt_ids) == render.prompt([Message("user", QUESTION["content"])]).tolist()
    assert two.prompt_ids[: len(one.prompt_ids) + len(first)] == one.prompt_ids + tuple(first)
    assert one.messages == (Message("assistant", "", {"tool_calls": [CALL]}), Message("tool", "144"))
    assert one.generation.text == CALL_TEXT
    assert (one.generation.logprobs, two.generation.logprobs) == ((-0.5,) * len(first), ())
    assert rollout.sample.messages == (Message("user", QUESTION["content"]),)


def test_prompt_ids_can_be_given(tiny, render):
    message = {"role": "assistant", "content": "144", "token_ids": ids(tiny, "144"), "prompt_ids": [1, 2, 3]}
    rollout = rollout_from_messages([QUESTION, message], render, score=Score(0.5, {"part": 0.5}))
    assert rollout.turns[0].prompt_ids == (1, 2, 3)
    assert rollout.score.parts == {"part": 0.5}


def test_an_example_before_the_first_sampled_message_is_part_of_the_prompt(tiny, render):
    example = {"role": "assistant", "content": "4"}
    rollout = rollout_from_messages(
        [QUESTION, example, QUESTION, {"role": "assistant", "content": "144", "token_ids": ids(tiny, "144<|im_end|>")}],
        render,
    )
    assert len(rollout.turns) == 1 and len(rollout.sample.messages) == 3
    assert trained(tiny, rollout) == "144<|im_end|>"


def test_text_is_tokenised_only_with_tokenize(tiny, render):
    chat = [QUESTION, {"role": "assistant", "content": "Hm"}, QUESTION, {"role": "assistant", "content": "144"}]
    with pytest.raises(ValueError, match="none of 2 assistant messages has token_ids.*tokenize=True"):
        rollout_from_messages(chat, render)
    rollout = rollout_from_messages(chat, render, tokenize=True)
    assert trained(tiny, rollout) == "Hm<|im_end|>144<|im_end|>"
    assert all(turn.generation.logprobs == () for turn in rollout.turns)
    (row,) = render.conversation([Message.from_dict(each) for each in chat], id="x")
    assert rollout.tokens == row.tokens.tolist()


@pytest.mark.parametrize(
    ("messages", "error"),
    [
        ([QUESTION, {"role": "assistant", "content": "a", "token_ids": []}], "has 0 token_ids"),
        ([QUESTION, {"role": "assistant", "content": "a", "token_ids": [1], "logprobs": [-1, -2]}], "2 logprobs"),
        ([QUESTION, {"role": "assistant", "content": "a", "token_ids": [1], "finish_reason": "x"}], "finish_reason"),
        ([{"role": "assistant", "content": "a", "token_ids": [1]}], "first message is a sampled one"),
        (
            [
                QUESTION,
                {"role": "assistant", "content": "a", "token_ids": [1]},
                QUESTION,
                {"role": "assistant", "content": "b"},
            ],
            "message 3 comes after sampled ones and has no token_ids",
        ),
        ([QUESTION], "none of 0 assistant messages"),
    ],
)
def test_invalid_trajectories_are_refused_with_the_reason(render, messages, error):
    with pytest.raises(ValueError, match=error):
        rollout_from_messages(messages, render)
