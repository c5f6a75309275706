"""Statistics of rewards against enumeration, textbook formulas and simulation."""

import itertools
import math

import numpy as np
import pytest

from oxrl.loops.statistics import (
    Comparison,
    Estimate,
    compare,
    confidence_interval,
    pass_at_k,
    sign_flip_test,
    sign_test,
)


def test_rewards_of_0_and_1_have_wilsons_interval():
    for right, count in ((8, 10), (0, 7), (64, 64), (1, 100)):
        share, z = right / count, 1.959964
        # Wilson: where (share - p)^2 = z^2 p (1 - p) / n
        ends = np.roots([1 + z * z / count, -(2 * share + z * z / count), share * share])
        assert confidence_interval([1.0] * right + [0.0] * (count - right)) == pytest.approx(
            sorted(ends.real), abs=1e-6
        )


def test_rewards_between_0_and_1_change_the_interval_continuously():
    low, high = confidence_interval([1.0] * 10 + [0.0] * 10)
    nearly_low, nearly_high = confidence_interval([1.0] * 10 + [0.0] * 9 + [0.01])
    assert (nearly_low, nearly_high) == (pytest.approx(low, abs=2e-3), pytest.approx(high, abs=2e-3))


def test_a_few_equal_rewards_have_a_wide_interval():
    for worth in (0.0, 0.5, 1.0, -2.0, 7.0):
        few, many = confidence_interval([worth] * 3), confidence_interval([worth] * 300)
        assert few[0] <= worth <= few[1]
        assert few[1] - few[0] > 0.3
        assert 0 < many[1] - many[0] < 0.1 * (few[1] - few[0])


def test_many_rewards_of_any_kind_have_the_normal_interval():
    rewards = np.random.default_rng(0).normal(3.0, 2.0, 20_000)
    half = 1.96 * rewards.std() / math.sqrt(len(rewards))
    assert confidence_interval(rewards) == pytest.approx((rewards.mean() - half, rewards.mean() + half), abs=2e-3)


@pytest.mark.parametrize("shares", [(0.9, 0.0, 0.1), (0.8, 0.15, 0.05), (0.1, 0.9, 0.0), (0.3, 0.3, 0.4)])
@pytest.mark.parametrize("rows", [10, 50])
def test_intervals_cover_the_mean_about_95_percent_of_the_time(shares, rows):
    rng = np.random.default_rng(1)
    truth = shares[1] / 2 + shares[2]
    hits = 0
    for _ in range(1000):
        low, high = confidence_interval(rng.choice([0.0, 0.5, 1.0], rows, p=shares))
        hits += low <= truth <= high
    assert hits >= 915


def test_pass_at_k_is_the_share_of_draws_with_a_correct_answer():
    for answers in range(1, 7):
        for right, k in itertools.product(range(answers + 1), range(1, answers + 1)):
            marks = [True] * right + [False] * (answers - right)
            draws = list(itertools.combinations(marks, k))
            assert pass_at_k(answers, right, k) == pytest.approx(sum(map(any, draws)) / len(draws))
    with pytest.raises(ValueError, match="pass@5"):
        pass_at_k(4, 1, 5)


def test_the_sign_test_counts_the_tosses_of_a_fair_coin():
    for better, worse in itertools.product(range(6), range(6)):
        tosses = better + worse
        if tosses:
            heads = [sum(each) for each in itertools.product((0, 1), repeat=tosses)]
            as_far = [abs(each - tosses / 2) >= abs(better - tosses / 2) for each in heads]
            assert sign_test(better, worse) == pytest.approx(sum(as_far) / len(as_far))
    assert sign_test(900, 1100) == pytest.approx(8.5e-6, rel=0.05)  # normal approximation, with continuity correction


def test_few_sign_flips_are_enumerated():
    gains = [0.5, -0.25, 1.0, 0.0, 0.75, 0.125]
    flipped = [float(np.dot(signs, gains)) for signs in itertools.product((-1, 1), repeat=6)]
    expected = sum(abs(each) >= abs(sum(gains)) for each in flipped) / len(flipped)
    assert sign_flip_test(gains) == pytest.approx(expected)


def test_many_sign_flips_are_sampled_with_the_same_result():
    gains = [0.4, -0.3, 0.2, 0.1, 0.35, -0.15, 0.05, 0.25, 0.3, -0.1, 0.12, 0.22, -0.17, 0.31, 0.09, -0.21]
    sums = np.zeros(1)
    for gain in gains:
        sums = np.concatenate([sums + gain, sums - gain])
    expected = float((np.abs(sums) >= abs(sum(gains)) - 1e-12).mean())
    assert sign_flip_test(gains, seed=1) == pytest.approx(expected, abs=0.01)
    assert sign_flip_test(gains, seed=1) == sign_flip_test(gains, seed=1)


def test_rewards_of_0_and_1_are_compared_by_mcnemars_exact_test():
    # 12 rows won, 3 lost, 25 tied: 2 * P(at most 3 heads of 15)
    first, second = [1.0] * 12 + [0.0] * 3 + [1.0] * 25, [0.0] * 12 + [1.0] * 3 + [1.0] * 25
    result = compare(first, second)
    assert result.p == pytest.approx(2 * sum(math.comb(15, i) for i in range(4)) / 2**15)
    assert (result.better, result.worse, result.rows, result.gain.mean) == (12, 3, 40, pytest.approx(0.225))
    assert not result.is_noise


def test_equal_models_are_rarely_reported_as_different():
    rng = np.random.default_rng(2)
    false_alarms = 0
    for _ in range(1000):
        result = compare(*(rng.random((2, 60)) < 0.3).astype(float))
        false_alarms += not result.is_noise
    assert false_alarms <= 60


def test_the_rows_needed_give_a_power_of_80_percent():
    def signs(count, rng):
        return rng.choice([1.0, -1.0, 0.0], count, p=[0.15, 0.05, 0.8])

    gains = np.array([1.0] * 15 + [-1.0] * 5 + [0.0] * 80)
    needed = compare(np.maximum(gains, 0).tolist(), np.maximum(-gains, 0).tolist()).rows_needed
    rng, found = np.random.default_rng(3), 0
    for _ in range(400):
        seen = signs(needed, rng)
        found += sign_test(int((seen > 0).sum()), int((seen < 0).sum())) < 0.05
    assert 0.7 <= found / 400 <= 0.9


def test_the_summary_reports_gain_loss_or_noise():
    better, worse = [1.0] * 30 + [0.0] * 10, [0.0] * 40
    assert str(compare(better, worse)).startswith("gain 75.0 points (95%: ")
    assert str(compare(better, worse)).endswith("p < 0.001, better on 30 rows and worse on 0: not noise")
    assert str(compare(worse, better)).startswith("loss 75.0 points (95%: ")
    slight = compare([1.0, 1.0, 0.0] + [0.0] * 97, [0.0, 0.0, 1.0] + [0.0] * 97)
    assert "noise with 100 rows; about" in str(slight)
    assert "rows would be needed to detect a gain of this size" in str(slight)
    assert "the same reward on all 40 rows" in str(compare(better, better))
    assert str(Comparison(Estimate(0.2, -0.1, 0.5), 0.3, 9, 3, 2, 90, in_points=False)).startswith(
        "gain 0.2 (95%: -0.1 to 0.5)"
    )


def test_swapping_the_models_negates_the_gain():
    first, second = [1.0, 0.5, 0.0, 1.0, 0.25], [0.0, 0.5, 0.5, 0.0, 0.0]
    one, other = compare(first, second), compare(second, first)
    assert one.p == other.p
    assert one.gain == pytest.approx([-other.gain.mean, -other.gain.high, -other.gain.low])


def test_a_gain_has_the_interval_of_agresti_and_min():
    # half a row more in each of the four cells of (first right, second right)
    for won, lost, rows in ((12, 3, 40), (0, 0, 25), (1, 0, 3)):
        tied = rows - won - lost
        result = compare([1.0] * won + [0.0] * (lost + tied), [0.0] * won + [1.0] * lost + [0.0] * tied)
        b, c, n = won + 0.5, lost + 0.5, rows + 2
        half = 1.959964 * math.sqrt(b + c - (b - c) ** 2 / n) / n
        assert result.gain[1:] == pytest.approx(((b - c) / n - half, (b - c) / n + half))


def test_rewards_that_are_never_positive_have_no_positive_interval():
    rng = np.random.default_rng(0)
    penalties = -0.1 * rng.random(10)
    low, high = confidence_interval(penalties)
    assert low < penalties.mean() < high <= 0
    low, high = confidence_interval([-0.08] * 10)
    assert low == pytest.approx(-0.08) and -0.08 < high <= 0, "a few equal rewards do not prove that all are equal"
    result = compare((penalties + 0.05).tolist(), penalties.tolist())
    assert result.p < 0.05 and result.gain.low > 0, "interval and test agree"
    gain = compare((rng.normal(size=30) - 4).tolist(), [-5.0] * 30).gain
    assert gain.mean == pytest.approx((gain.low + gain.high) / 2), "log-probs: nothing is added to the rows"
