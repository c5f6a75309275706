"""Rollouts to rows: every sampled token is trained once, as sampled, and no other token is."""

from dataclasses import replace

import numpy as np
import pytest

from oxrl.algorithms.rows import rows_of, ungraded_rows_of
from oxrl.types import Generation, Rollout, Sample, Score, Turn

SAMPLE = Sample("train.jsonl:7")


def turn(prompt, sampled, reason="stop", first=-0.5):
    logprobs = tuple(first - 0.25 * index for index in range(len(sampled)))
    return Turn(tuple(prompt), Generation(tuple(sampled), logprobs, reason))


def rollout(*turns, score=Score(1.5), **others):  # noqa: B008 - immutable
    return Rollout(SAMPLE, tuple(turns), group=3, index=2, score=score, **others)


def numbers(row):
    return {name: stream.tolist() for name, stream in row.streams.items()}


def test_a_single_turn_is_one_row_whose_reward_is_on_its_last_token():
    (row,) = rows_of(rollout(turn([1, 2, 3], [40, 41, 2])))
    assert row.tokens.tolist() == [1, 2, 3, 40, 41, 2]
    assert row.mask.tolist() == [False] * 3 + [True] * 3
    assert numbers(row) == {
        "sampler_logprob": [0, 0, 0, -0.5, -0.75, -1.0],
        "sampler_version": [0] * 6,
        "reward": [0, 0, 0, 0, 0, 1.5],
    }
    assert row.scalars == {"reward": 1.5, "ended": 1.0}
    assert row.sequence == row.id == "train.jsonl:7#3/2"


CONTINUED = (turn([1, 2], [40, 41]), turn([1, 2, 40, 41, 9, 9], [50], first=-3.0))
REWRITTEN = (turn([1, 2], [40, 41]), turn([1, 9, 9], [50], first=-3.0))


def test_a_prompt_that_continues_the_row_extends_it_and_tokens_that_were_not_sampled_are_masked():
    (row,) = rows_of(rollout(*CONTINUED))
    assert row.tokens.tolist() == [1, 2, 40, 41, 9, 9, 50]
    assert row.mask.tolist() == [False, False, True, True, False, False, True]
    assert numbers(row)["sampler_logprob"] == [0, 0, -0.5, -0.75, 0, 0, -3.0]
    assert numbers(row)["reward"] == [0, 0, 0, 0, 0, 0, 1.5]


def test_a_turn_with_other_allowed_tokens_starts_a_new_row():
    first, later = CONTINUED
    first = first._replace(generation=first.generation._replace(allowed_tokens=(40, 41)))
    rows = rows_of(rollout(first, later))
    assert [row.allowed_tokens for row in rows] == [(40, 41), ()]
    assert [row.tokens[row.mask].tolist() for row in rows] == [[40, 41], [50]]
    later = later._replace(generation=later.generation._replace(allowed_tokens=(40, 41, 50)))
    first = first._replace(generation=first.generation._replace(allowed_tokens=(40, 41, 50)))
    (row,) = rows_of(rollout(first, later))
    assert row.allowed_tokens == (40, 41, 50)
    with pytest.raises(ValueError, match="its trained token 41 is not one of allowed_tokens"):
        replace(row, allowed_tokens=(40, 50))


def test_every_sampled_token_keeps_the_version_that_drew_it():
    earlier, later = CONTINUED
    earlier = earlier._replace(generation=earlier.generation.with_versions((4, 5)))
    later = later._replace(generation=later.generation._replace(version=6))
    (row,) = rows_of(rollout(earlier, later))
    assert numbers(row)["sampler_version"] == [0, 0, 4, 5, 0, 0, 6]
    assert rollout(earlier, later).versions == (4, 5, 6) and rollout(earlier, later).version == 4


def test_a_prompt_that_does_not_continue_it_starts_a_new_row_of_the_same_sequence():
    first, second = rows_of(rollout(*REWRITTEN))
    assert (first.tokens.tolist(), second.tokens.tolist()) == ([1, 2, 40, 41], [1, 9, 9, 50])
    assert (numbers(first)["reward"], numbers(second)["reward"]) == ([0, 0, 0, 0], [0, 0, 0, 1.5])
    assert first.sequence == second.sequence == "train.jsonl:7#3/2"
    assert first.id != second.id
    assert first.scalars == second.scalars == {"reward": 1.5, "ended": 1.0}


def test_the_first_token_of_a_later_turn_may_not_differ_either():
    """A prompt that is shorter than the row, or the row itself with another end, is no continuation."""
    for prompt in ([1, 2, 40], [1, 2, 40, 42, 9], [7, 2, 40, 41, 9]):
        assert len(rows_of(rollout(turn([1, 2], [40, 41]), turn(prompt, [50])))) == 2
    assert len(rows_of(rollout(turn([1, 2], [40, 41]), turn([1, 2, 40, 41], [50])))) == 1


@pytest.mark.parametrize("turns", [CONTINUED, REWRITTEN])
def test_rewards_are_on_the_tokens_that_earned_them(turns):
    per_turn = rows_of(rollout(*turns, score=Score(1.0, per_turn=(0.75, 0.25))))
    earned = np.concatenate([row.streams["reward"][row.mask] for row in per_turn])
    assert earned.tolist() == [0.0, 0.75, 0.25]
    per_token = rows_of(rollout(*turns, score=Score(1.0, per_token=(0.5, -0.5, 1.0))))
    earned = np.concatenate([row.streams["reward"][row.mask] for row in per_token])
    assert earned.tolist() == [0.5, -0.5, 1.0]
    assert all(row.streams["reward"][~row.mask].tolist() == [0.0] * int((~row.mask).sum()) for row in per_token)


def test_rounding_is_no_reason_to_refuse_a_score():
    assert rows_of(rollout(*CONTINUED, score=Score(0.3, per_turn=(0.1, 0.200001))))


@pytest.mark.parametrize(("reason", "ended"), [("stop", 1.0), ("length", 0.0), ("aborted", 0.0)])
def test_ended_is_that_of_the_last_generation_for_every_row(reason, ended):
    rows = rows_of(rollout(turn([1], [40], "length"), turn([2], [50], reason)))
    assert [row.scalars["ended"] for row in rows] == [ended, ended]


def test_rows_without_a_sampled_token_are_left_out_and_the_reward_goes_to_the_last_that_has_one():
    (row,) = rows_of(rollout(turn([1, 2], [40]), turn([5, 6], [])))
    assert row.tokens.tolist() == [1, 2, 40]
    assert numbers(row)["reward"] == [0, 0, 1.5]
    assert rows_of(rollout(turn([1, 2], []))) == []
    assert rows_of(rollout()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (rollout(turn([1], [2]), error="the grader timed out", score=None), "the grader timed out"),
        (rollout(turn([1], [2]), error="late", score=Score(1.0)), "late"),
        (rollout(turn([1], [2]), score=None), "no score"),
        (rollout(*CONTINUED, score=Score(1.0, per_turn=(1.0,))), "1 rewards for 2 turns"),
        (rollout(*CONTINUED, score=Score(1.0, per_token=(1.0, 0.0))), "2 rewards for 3 sampled tokens"),
        (rollout(*CONTINUED, score=Score(1.0, per_turn=(0.25, 0.25))), "adds up to 0.5"),
        (rollout(*CONTINUED, score=Score(1.0, per_turn=(0.5, 0.51))), "adds up to 1.01"),
        (rollout(*CONTINUED, score=Score(0.0, per_turn=(0.01, 0.0))), "adds up to 0.01"),
        (rollout(turn([1], [2]), turn([1, 2], []), score=Score(1.0, per_turn=(0.5, 0.5))), "turn 1 has a reward"),
        (rollout(Turn((1,), Generation((2, 3), (-0.5,), "stop"))), "1 log-probs for 2"),
        (rollout(turn([], [2])), "nothing comes before"),
    ],
)
def test_an_invalid_rollout_is_an_error_with_its_reason(wrong, message):
    with pytest.raises(ValueError, match=message):
        rows_of(wrong)


def test_ungraded_rows_need_no_score_but_an_error_is_still_raised():
    (row,) = ungraded_rows_of(rollout(turn([1], [2]), score=None))
    assert row.scalars["reward"] == 0.0
    with pytest.raises(ValueError, match="engine"):
        ungraded_rows_of(replace(rollout(turn([1], [2]), score=None), error="the engine died"))
