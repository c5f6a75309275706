"""Filters decide from the graded rollouts of one prompt whether to train on them."""

import pytest

from oxrl.rollouts import filters
from oxrl.types import Generation, Rollout, Score, Turn
from tests.rollouts.scripted import question


def group(*rewards, texts=None, lengths=None):
    rollouts = []
    for index, reward in enumerate(rewards):
        text = texts[index] if texts else str(index)
        ids = (1,) * (lengths[index] if lengths else 3)
        turn = Turn((0,), Generation(ids, (-1.0,) * len(ids), "stop", text=text))
        score = None if reward is None else Score(reward)
        rollouts.append(Rollout(question(1), (turn,), index=index, score=score))
    return rollouts


def test_rewards_that_are_all_equal_have_no_variance():
    assert not filters.check_reward_nonzero_std(group(1.0, 1.0, 1.0))
    assert filters.check_reward_nonzero_std(group(1.0, 0.0, 1.0))
    assert not filters.check_reward_nonzero_std(group(1.0, None, 1.0)), "ungraded is not another reward"
    assert not filters.check_reward_nonzero_std([])


def test_the_mean_reward_must_reach_the_threshold():
    assert filters.check_min_reward(group(1.0, 0.0), min_reward=0.5)
    assert not filters.check_min_reward(group(1.0, 0.0, 0.0), min_reward=0.5)
    assert not filters.check_min_reward(group(None))


def test_answers_must_differ():
    assert not filters.check_response_diversity(group(0, 0, 0, texts=["a", "a ", "a"]))
    assert filters.check_response_diversity(group(0, 0, texts=["a", "b"]), min_distinct=1.0)


def test_lengths_count_sampled_tokens():
    assert filters.check_reasonable_length(group(0, 0, lengths=[2, 5]), min_length=2, max_length=5)
    assert not filters.check_reasonable_length(group(0, 0, lengths=[2, 6]), max_length=5)
    assert not filters.check_reasonable_length(group(0, lengths=[0]))


def test_quality_and_diversity_requires_all_three():
    good = group(1.0, 0.0, texts=["a", "b"])
    assert filters.check_quality_and_diversity(good, min_reward=0.5)
    assert not filters.check_quality_and_diversity(good, min_reward=0.6)
    assert not filters.check_quality_and_diversity(group(1.0, 1.0, texts=["a", "b"]))
    assert not filters.check_quality_and_diversity(group(1.0, 0.0, 0.0, texts=["a"] * 3))


def test_a_filter_has_a_name_and_parameters():
    assert filters.named_filter("check_min_reward", min_reward=0.9)(group(1.0))
    with pytest.raises(ValueError, match="did you mean check_min_reward"):
        filters.named_filter("check_min_rewards")
    with pytest.raises(ValueError, match="no parameter min; it takes: min_reward"):
        filters.named_filter("check_min_reward", min=1)
