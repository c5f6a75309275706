"""The replay buffer tracks the age of groups and drops those that are too old."""

import json
from dataclasses import replace

import pytest

from oxrl.rollouts.buffer import ReplayBuffer, age_of
from oxrl.rollouts.record import digest_of, rollout_from_json, rollout_to_json
from oxrl.rollouts.report import rollout_metrics
from oxrl.types import Generation, Message, Rollout, Sample, Score, Turn

SAMPLE = Sample("a:1", (Message("user", "2+2?"),), answer="4", tools=({"name": "f"},), metadata={"level": 3})


def group(number, version, answers=2):
    turn = Turn((1, 2), Generation((3, 4), (-0.25, -0.1), "stop", version, "x"), (Message("assistant", "x"),))
    return tuple(Rollout(SAMPLE, (turn,), number, index, Score(1.0, {"right": 1.0})) for index in range(answers))


def test_on_policy_is_the_default():
    buffer = ReplayBuffer()
    buffer.add([group(0, version=3), group(1, version=4)], version=4)
    assert [each[0].group for each in buffer.take(2, version=4)] == [1]
    assert buffer.expired == 1 and len(buffer) == 0


def test_age_counts_from_the_oldest_token_of_the_group():
    mixed = (group(0, version=5)[0], group(0, version=3)[1])
    assert age_of(mixed, version=6) == 3
    buffer = ReplayBuffer(max_age=3)
    buffer.add([mixed], version=6)
    assert buffer.take(1, version=6) == [mixed]


def test_one_old_token_makes_its_group_old():
    fresh = group(0, version=6)
    generation = fresh[1].turns[0].generation.with_versions((3, 6))
    mixed = (fresh[0], replace(fresh[1], turns=(fresh[1].turns[0]._replace(generation=generation),)))
    assert age_of(mixed, version=6) == 3
    metrics = rollout_metrics([mixed], version=6)
    assert (metrics["age"], metrics["age_mean"]) == (3, 0.75)


def test_equal_versions_are_stored_once_and_a_wrong_number_of_them_is_refused():
    generation = Generation((3, 4), (-0.25, -0.1), "stop", 9)
    assert generation.with_versions((7, 7)) == generation._replace(version=7) and generation.token_versions == (9, 9)
    with pytest.raises(ValueError, match="1 versions for 2 tokens"):
        generation.with_versions((7,))


def test_strict_refuses_old_groups_when_added_and_when_taken():
    buffer = ReplayBuffer(max_age=1, strict=True)
    with pytest.raises(ValueError, match="group 0 was sampled 2 versions ago and at most 1"):
        buffer.add([group(0, version=0)], version=2)
    buffer.add([group(1, version=1)], version=2)
    with pytest.raises(ValueError, match="sampled 2 versions ago"):
        buffer.take(1, version=3)


def test_it_is_bounded_and_first_in_first_out():
    buffer = ReplayBuffer(max_age=9, capacity=2)
    buffer.add([group(0, 0), group(1, 0)], version=0)
    with pytest.raises(ValueError, match="holds 2 groups"):
        buffer.add([group(2, 0)], version=0)
    assert [each[0].group for each in buffer.take(1, 0)] == [0]


def test_its_state_is_plain_json():
    buffer, other = ReplayBuffer(max_age=9), ReplayBuffer(max_age=9)
    buffer.add([group(0, 0), group(1, 2)], version=2)
    other.restore(json.loads(json.dumps(buffer.state())))
    assert other.take(2, 2) == [group(0, 0), group(1, 2)]


def test_a_rollout_survives_json_and_its_digest_depends_on_every_bit():
    (rollout, _) = group(7, 3)
    assert rollout_from_json(json.loads(json.dumps(rollout_to_json(rollout)))) == rollout
    turn = rollout.turns[0]
    nudged = turn._replace(generation=turn.generation._replace(logprobs=(-0.25, -0.10000000000000002)))
    assert digest_of([rollout]) != digest_of([replace(rollout, turns=(nudged,))])
