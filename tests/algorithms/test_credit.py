"""Advantages against formulas written as loops, in float64; rewards must reach all trained tokens."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from oxrl.algorithms.credit import (
    against_mean,
    best_against_greedy,
    centre,
    discounted_returns,
    gae,
    global_normalise,
    leave_one_out,
    length_penalty,
    max_rl,
    reinforce_pp,
    reward_on_last_token,
    soft_overlong_penalty,
    zscore,
)

RNG = np.random.default_rng(5)


def np_zscore(r, eps):
    deviation = math.sqrt(sum((x - sum(r) / len(r)) ** 2 for x in r) / (len(r) - 1))
    return [(x - sum(r) / len(r)) / (deviation + eps) for x in r]


GROUP_FORMULAS = {
    "centre": (centre, lambda r: [x - sum(r) / len(r) for x in r]),
    "zscore": (zscore, lambda r: np_zscore(r, 1e-6)),
    "zscore-eps": (lambda r: zscore(r, eps=0.5), lambda r: np_zscore(r, 0.5)),
    "leave_one_out": (
        leave_one_out,
        lambda r: [x - (sum(r[:i]) + sum(r[i + 1 :])) / (len(r) - 1) for i, x in enumerate(r)],
    ),
    "max_rl": (max_rl, lambda r: [len(r) * x / sum(r) - 1 for x in r]),
    "global_normalise": (global_normalise, lambda r: np_zscore(r, 1e-8)),
}
every_group_function = pytest.mark.parametrize("name", GROUP_FORMULAS)


@every_group_function
def test_each_has_the_value_of_its_formula(name):
    function, formula = GROUP_FORMULAS[name]
    for rewards in ([1.0, 0.0, 0.0, 0.0], [0.2, 0.9], list(RNG.random(17)), [1e6, 1e6 + 1, 1e6 + 2]):
        advantages = function(torch.tensor(rewards, dtype=torch.float64))
        assert advantages.dtype == torch.float32
        np.testing.assert_allclose(advantages, formula(rewards), rtol=1e-6, atol=1e-7)


@every_group_function
def test_a_group_without_variance_or_of_one_has_advantages_of_exactly_zero(name):
    function, _ = GROUP_FORMULAS[name]
    for rewards in ([0.1] * 3, [0.7] * 6, [1.0] * 7, [0.0] * 4, [1.0], [0.3], []):
        for dtype in (torch.float64, torch.float32):
            assert function(torch.tensor(rewards, dtype=dtype)).tolist() == [0.0] * len(rewards)
    assert zscore(torch.full((3,), 0.1, dtype=torch.float64), eps=0.0).tolist() == [0.0] * 3


@every_group_function
def test_advantages_follow_the_order_of_rewards_and_sum_to_zero(name):
    function, _ = GROUP_FORMULAS[name]
    rewards = torch.tensor(RNG.random(9))
    advantages = function(rewards)
    assert torch.equal(advantages.argsort(), rewards.argsort())
    assert abs(advantages.sum()) < 1e-5
    assert function(torch.tensor([1, 0, 0, 1])).tolist() == function(torch.tensor([1.0, 0.0, 0.0, 1.0])).tolist()


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (centre, [0.75, -0.25, -0.25, -0.25]),
        (leave_one_out, [1.0, -1 / 3, -1 / 3, -1 / 3]),
        (max_rl, [3.0, -1.0, -1.0, -1.0]),
        (lambda r: zscore(r, eps=0.0), [1.5, -0.5, -0.5, -0.5]),  # the sample's std of 1, 0, 0, 0 is 1/2
        (lambda r: best_against_greedy(r, 0.25), [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_success_in_four_by_hand(function, expected):
    np.testing.assert_allclose(function(torch.tensor([1.0, 0.0, 0.0, 0.0])), expected, rtol=1e-6)


def test_a_baseline_is_the_mean_of_the_step_of_the_group_or_nothing():
    rewards = torch.tensor([1.0, 0.0, 0.5, 0.5])
    assert against_mean(rewards, 0.75).tolist() == [0.25, -0.75, -0.25, -0.25]
    assert against_mean(rewards, 0.75, baseline="group").tolist() == [0.5, -0.5, 0.0, 0.0]
    assert against_mean(rewards, 0.75, baseline="none").tolist() == rewards.tolist()
    assert against_mean(torch.tensor([1.0]), 0.75).tolist() == [0.25]  # one response is enough
    with pytest.raises(ValueError, match="step, group, none"):
        against_mean(rewards, 0.0, baseline="other")


def test_max_rl_averages_the_scores_of_successes_less_the_mean_score():
    rewards, scores = np.array([1.0, 0, 0, 1, 0, 1]), RNG.normal(size=6)
    gradient = (max_rl(torch.tensor(rewards)).numpy() * scores).mean()
    np.testing.assert_allclose(gradient, scores[rewards == 1].mean() - scores.mean(), rtol=1e-6)
    with pytest.raises(ValueError, match="negative"):
        max_rl(torch.tensor([-1.0, 1.0]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_reward_of_nan_or_inf_is_refused(bad):
    for function, _ in GROUP_FORMULAS.values():
        with pytest.raises(ValueError, match="nan or inf"):
            function(torch.tensor([0.0, bad]))
    good, spoiled = torch.zeros(2), torch.tensor([0.0, bad])
    for attempt in (
        lambda: gae(spoiled, good, ended=True),
        lambda: gae(good, spoiled, ended=True),
        lambda: discounted_returns(spoiled),
        lambda: best_against_greedy(spoiled, 0.0),
        lambda: against_mean(spoiled, 0.0),
        lambda: length_penalty(spoiled, good),
    ):
        with pytest.raises(ValueError, match="nan or inf"):
            attempt()
    with pytest.raises(ValueError, match="one dimension"):
        zscore(torch.zeros(2, 2))


def np_returns(rewards, gamma):
    total, returns = 0.0, []
    for reward in reversed(rewards):
        total = reward + gamma * total
        returns.insert(0, total)
    return np.array(returns)


def np_gae(rewards, values, gamma, lam, after, dones=None):
    """Backwards through time, the recursion of the paper."""
    advantage, advantages = 0.0, []
    going_on = np.ones(len(rewards)) if dones is None else 1.0 - dones
    for reward, value, factor in zip(reversed(rewards), reversed(values), reversed(going_on), strict=True):
        advantage = reward + gamma * factor * after - value + gamma * lam * factor * advantage
        after = value
        advantages.insert(0, advantage)
    return np.array(advantages)


FACTORS = [(1.0, 1.0), (1.0, 0.95), (0.99, 0.95), (0.9, 0.0), (0.0, 0.9), (0.5, 0.5)]


@pytest.mark.parametrize(("gamma", "lam"), FACTORS)
@pytest.mark.parametrize("length", [1, 2, 3, 8, 100, 1025])
@pytest.mark.parametrize("ended", [True, False])
def test_gae_is_the_recursion(gamma, lam, length, ended):
    rewards, values = RNG.normal(size=(2, length))
    ours = gae(torch.tensor(rewards), torch.tensor(values), ended=ended, last_value=0.7, gamma=gamma, lam=lam)
    expected = np_gae(rewards, values, gamma, lam, after=0.0 if ended else 0.7)
    assert ours.dtype == torch.float32
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-5)


def test_gae_by_hand_with_its_usual_parameters():
    rewards, values = torch.tensor([0.0, 1.0]), torch.tensor([0.5, 0.25])
    for ended in ({}, {"ended": True}):
        np.testing.assert_allclose(gae(rewards, values, **ended), [-0.25 + 0.95 * 0.75, 0.75], rtol=1e-6)
    cut = gae(rewards, values, ended=False, last_value=2.0)
    np.testing.assert_allclose(cut, [-0.25 + 0.95 * 2.75, 2.75], rtol=1e-6)


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (1.0, 0.95), (0.999, 0.999)])
def test_gae_of_ten_thousand_tokens_is_exact(gamma, lam):
    rewards, values = RNG.normal(size=(2, 10_000))
    ours = gae(torch.tensor(rewards), torch.tensor(values), ended=True, gamma=gamma, lam=lam)
    np.testing.assert_allclose(ours, np_gae(rewards, values, gamma, lam, 0.0), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize(("gamma", "lam"), FACTORS)
def test_gae_of_several_rows_is_the_recursion_of_each_and_stops_at_dones(gamma, lam):
    rewards, values = RNG.normal(size=(2, 4, 37))
    dones, last = (RNG.random(size=(4, 37)) < 0.2).astype(float), RNG.normal(size=4)
    dones[0], dones[1], dones[2, -1] = 0.0, 1.0, 1.0
    given = [torch.tensor(each) for each in (rewards, values, dones, last)]
    ours = gae(*given[:2], dones=given[2], last_value=given[3], gamma=gamma, lam=lam)
    rows = zip(rewards, values, last, dones, strict=True)
    expected = [np_gae(row, value, gamma, lam, after, done) for row, value, after, done in rows]
    np.testing.assert_allclose(ours, np.stack(expected), rtol=1e-5, atol=1e-5)


def test_rows_that_are_not_done_need_the_value_after_their_last_token():
    numbers, dones = torch.ones(2, 3), torch.tensor([[0, 0, 1], [0, 1, 0]])
    with pytest.raises(ValueError, match="needs last_value.*mark the padding"):
        gae(numbers, numbers, dones=dones)
    for others in ({"values": numbers[:, :2]}, {"dones": dones[:1]}):
        with pytest.raises(ValueError, match="per reward"):
            gae(numbers, **{"values": numbers, "dones": dones, **others})
    with pytest.raises(ValueError, match=r"\[T\], or several"):
        gae(numbers[None], numbers[None])


def test_gae_with_lambda_one_is_the_return_less_the_value():
    rewards, values = torch.tensor(RNG.normal(size=(2, 30)))
    expected = discounted_returns(rewards, gamma=0.9).double() - values
    torch.testing.assert_close(
        gae(rewards, values, ended=True, gamma=0.9, lam=1.0).double(), expected, atol=1e-5, rtol=0
    )


def test_everything_is_float32_without_gradient_and_does_not_change_its_inputs():
    numbers = torch.tensor([3.0, 3.0, 3.0], dtype=torch.float64, requires_grad=True)
    one = torch.tensor([False, True, True])
    results = [
        *(function(numbers) for function, _ in GROUP_FORMULAS.values()),
        best_against_greedy(numbers, 1.0),
        *(against_mean(numbers, 1.0, baseline=each) for each in ("step", "group", "none")),
        discounted_returns(numbers),
        *reinforce_pp([numbers]),
        gae(numbers, numbers, ended=True),
        reward_on_last_token(1.0, one),
        reward_on_last_token(numbers[:1], one),
        soft_overlong_penalty(numbers.detach(), max_length=4, buffer=2),
        length_penalty(numbers, one),
        length_penalty(numbers * torch.arange(3), one),
    ]
    assert {(each.dtype, each.requires_grad) for each in results} == {(torch.float32, False)}
    assert numbers.tolist() == [3.0, 3.0, 3.0] and one.tolist() == [False, True, True]


def test_a_truncated_response_needs_the_value_to_bootstrap_from():
    with pytest.raises(ValueError, match="last_value"):
        gae(torch.zeros(3), torch.zeros(3), ended=False)
    with pytest.raises(ValueError, match="one value per reward"):
        gae(torch.zeros(3), torch.zeros(4), ended=True)


@pytest.mark.parametrize("gamma", [1.0, 0.97, 0.0])
def test_returns_are_the_recursion(gamma):
    rewards = RNG.normal(size=777)
    ours = discounted_returns(torch.tensor(rewards), gamma=gamma)
    np.testing.assert_allclose(ours, np_returns(rewards, gamma), rtol=1e-5, atol=1e-5)


def test_reinforce_pp_normalises_returns_over_all_tokens_of_the_step():
    rows = [RNG.normal(size=length) for length in (3, 1, 6)]
    ours = reinforce_pp([torch.tensor(row) for row in rows], gamma=0.9)
    expected = np_zscore(list(np.concatenate([np_returns(row, 0.9) for row in rows])), 1e-8)
    assert [len(each) for each in ours] == [3, 1, 6]
    np.testing.assert_allclose(torch.cat(ours), expected, rtol=1e-5, atol=1e-6)
    plain = reinforce_pp([torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.0])])
    np.testing.assert_allclose(torch.cat(plain), np_zscore([1, 1, 0, 0], 0.0), rtol=1e-6)


TURNS = torch.tensor([False, True, True, False, False, True, False, True, True])


def test_a_reward_is_on_the_last_token_of_its_turn():
    for one in (2.0, torch.tensor(2.0)):
        assert reward_on_last_token(one, TURNS).tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 2]
    assert reward_on_last_token(torch.tensor([1.0, 2.0, 3.0]), TURNS).tolist() == [0, 0, 1, 0, 0, 2, 0, 0, 3]
    assert reward_on_last_token(1.0, torch.tensor([False, True, True, False])).tolist() == [0, 0, 1, 0]


def test_a_reward_on_the_last_token_reaches_all_trained_tokens():
    returns = discounted_returns(reward_on_last_token(1.0, TURNS)[TURNS])
    assert returns.tolist() == [1.0] * int(TURNS.sum())
    advantages = gae(reward_on_last_token(1.0, TURNS)[TURNS], torch.zeros(int(TURNS.sum())), ended=True)
    assert (advantages > 0).all()


def test_numbers_must_match_turns_and_a_reward_needs_a_trained_token():
    with pytest.raises(ValueError, match="3 trained turns"):
        reward_on_last_token(torch.tensor([1.0, 2.0]), TURNS)
    with pytest.raises(ValueError, match="no trained token"):
        reward_on_last_token(1.0, torch.tensor([False, False]))


def test_the_soft_penalty_for_length_is_dapos():
    lengths = torch.tensor([0, 15, 16, 17, 18, 20, 21, 1000])
    penalty = soft_overlong_penalty(lengths, max_length=20, buffer=4)
    assert penalty.tolist() == [0.0, 0.0, 0.0, -0.25, -0.5, -1.0, -1.0, -1.0]
    assert soft_overlong_penalty(lengths, max_length=20, buffer=1).tolist()[4:6] == [0.0, -1.0]
    for buffer in (0, 21):
        with pytest.raises(ValueError, match="buffer"):
            soft_overlong_penalty(lengths, max_length=20, buffer=buffer)


def test_the_length_penalty_is_kimis():
    lengths, correct = torch.tensor([10, 20, 30, 10, 20, 30]), torch.tensor([True, True, True, False, False, False])
    assert length_penalty(lengths, correct).tolist() == [0.5, 0.0, -0.5, 0.0, 0.0, -0.5]
    assert length_penalty(torch.tensor([7, 7]), torch.tensor([True, False])).tolist() == [0.0, 0.0]


class CountOperations(TorchDispatchMode):
    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("shape", [(100_000,), (64, 1000)])
def test_nothing_loops_over_time_or_rows(shape):
    with CountOperations() as operations:
        gae(torch.ones(shape), torch.ones(shape), dones=torch.ones(shape))
    assert operations.count < 300
