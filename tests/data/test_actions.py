"""Actions as tokens: which ids they use, what comes back, and how a row of actions is rendered."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oxrl import ActionTokens, ActionWords, Message, Renderer
from oxrl.data.actions import UndecodableAction, action_codec
from tests.drawings import png

REACH = ActionTokens(low=[-1, 0], high=[1, 10], bins=20, chunk=2)


def test_each_number_comes_back_as_the_middle_of_its_interval(tiny: Any) -> None:
    given = np.array([[-1.0, 0.2], [0.99, 9.7]])
    ids = REACH.encode(given, tiny[1])
    assert len(ids) == REACH.most_tokens(tiny[1]) == 4
    np.testing.assert_allclose(REACH.decode(ids, tiny[1]), [[-0.95, 0.25], [0.95, 9.75]], rtol=1e-6)
    fine = ActionTokens(-1, 1, bins=256)
    values = np.linspace(-1, 1, 999)
    read = np.array([fine.decode(fine.encode(value, tiny[1]), tiny[1])[0, 0] for value in values])
    assert np.abs(read - values).max() <= 1 / 256 + 1e-6
    assert (np.diff(read) >= 0).all()


def test_the_first_interval_has_the_last_id_that_is_no_special_token(tiny: Any, smollm2: Any) -> None:
    assert REACH.token_ids(tiny[1]) == tuple(range(255, 235, -1))  # ids from 256 on are special tokens
    last = REACH.token_ids(smollm2[1])
    assert last[0] == 49151
    assert not set(last) & set(smollm2[1].all_special_ids)


def test_numbers_outside_of_the_bounds_are_the_nearest_bound(tiny: Any) -> None:
    ids = REACH.token_ids(tiny[1])
    assert REACH.encode([[-7, 10], [1, -3]], tiny[1]) == (ids[0], ids[-1], ids[-1], ids[0])


def test_an_answer_ends_at_the_first_special_token(tiny: Any) -> None:
    ids, end = REACH.encode([[0, 0], [0, 0]], tiny[1]), tiny[1].eos_token_id
    assert REACH.decode((*ids, end, 65), tiny[1]).shape == (2, 2)
    for broken, reason in (
        ((*ids[:3], end), "it has 3 action tokens, not 4"),
        ((*ids, ids[0]), "it has 5 action tokens, not 4"),
        ((*ids[:3], 65), "it has 3 action tokens and 1 others, not 4"),
        ((), "it has 0 action tokens, not 4"),
    ):
        with pytest.raises(UndecodableAction, match=reason):
            REACH.decode(broken, tiny[1])


def test_words_come_back_as_their_numbers(tiny: Any) -> None:
    words = ActionWords(["left", "right", "stay"])
    for number, word in enumerate(words.words):
        ids = words.encode(word, tiny[1])
        assert ids == words.encode(number, tiny[1]) == tuple(word.encode())
        assert words.decode((*ids, tiny[1].eos_token_id), tiny[1]) == [number]
    assert words.token_ids(tiny[1]) == tuple(sorted(set(b"leftrightstay")))
    assert words.most_tokens(tiny[1]) == 5
    with pytest.raises(UndecodableAction, match="Answer with one of: left, right, stay"):
        words.decode(tuple(b"lefight"), tiny[1])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"low": [-1], "high": [1, 2]}, "low has 1 numbers and high 2"),
        ({"low": [-1, 2], "high": [1, 2]}, "low 2 is not below high 2"),
        ({"low": -1, "high": float("inf")}, "high is inf"),
        ({"low": "a", "high": 1}, "low is 'a'"),
        ({"low": -1}, "actions needs high"),
        ({"low": -1, "high": 1, "bins": 1}, "bins is 1; give a whole number from 2"),
        ({"low": -1, "high": 1, "chunks": 2}, "no 'chunks'.*chunk"),
        ({"words": ["left"]}, "two or more words"),
        ({"words": ["a", "a"]}, "a word twice"),
        ({"words": ["a", "b"], "bins": 3}, "no 'bins'"),
    ],
)
def test_what_a_config_gets_wrong_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action_codec(given)


def test_a_config_names_a_codec_or_words_of_free_text() -> None:
    assert action_codec({"low": [-1, -1], "high": [1, 1], "chunk": 2}) == ActionTokens([-1, -1], [1, 1], chunk=2)
    assert action_codec({"words": ["left", "right"]}) == ActionWords(("left", "right"))
    assert action_codec(["left", "right"]) is action_codec(None) is None


def test_more_bins_than_tokens_are_refused(tiny: Any) -> None:
    with pytest.raises(ValueError, match="bins is 300, and the vocabulary has 256 tokens"):
        ActionTokens(-1, 1, bins=300).token_ids(tiny[1])


def test_a_row_of_actions_trains_their_tokens_and_the_end_of_the_turn(tiny_vlm: Any) -> None:
    tokenizer = tiny_vlm[1]
    render = Renderer(tokenizer, actions=REACH)
    question = Message("user", [{"type": "image", "image": png("red")}, {"type": "text", "text": "reach red"}])
    actions = [[0.5, 2.0], [-0.5, 3.0]]
    (row,) = render.conversation([question, Message("assistant", "", {"actions": actions})], id="step 1")
    prompt, answer = render.prompt([question]).tolist(), REACH.encode(actions, tokenizer)
    assert row.tokens.tolist() == [*prompt, *answer, tokenizer.eos_token_id]
    assert row.tokens[row.mask].tolist() == [*answer, tokenizer.eos_token_id]
    assert len(row.media) == len(row.media_spans) == 1
    assert render.allowed_tokens == (*range(236, 256), tokenizer.eos_token_id)


def test_actions_without_a_codec_or_of_another_length_are_refused(tiny: Any) -> None:
    messages = [Message("user", "go"), Message("assistant", "", {"actions": [[0.5, 2.0]]})]
    with pytest.raises(ValueError, match=r"step 1: .*set data\.actions"):
        Renderer(tiny[1]).conversation(messages, id="step 1")
    with pytest.raises(ValueError, match="step 1: an answer has 2 actions of 2 numbers, not 2 numbers"):
        Renderer(tiny[1], actions=REACH).conversation(messages, id="step 1")
    assert Renderer(tiny[1]).allowed_tokens == ()
