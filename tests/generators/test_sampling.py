"""Draws against independent arithmetic: random numbers, cut-off rules, frequencies, and the far tail."""

import numpy as np
import pytest
import torch

from oxrl.generators.embedded.sampling import LIKELIEST, draw, likeliest, search, stream_key, uniforms
from oxrl.types import GenerationConfig

LOGITS = [0.0, 1.0, 2.0, -30.0, float("-inf"), 1.5]


def numbers_of(request_seeds, positions, seed=0):
    return uniforms([stream_key(seed, each) for each in request_seeds], positions)


def test_random_numbers_are_uniform_and_uncorrelated():
    seeds, positions = np.meshgrid(np.arange(300), np.arange(100), indexing="ij")
    numbers = numbers_of(seeds.ravel().tolist(), positions.ravel().tolist()).reshape(300, 100)
    assert numbers.min() >= 0.0 and numbers.max() < 1.0
    counts = np.histogram(numbers, bins=50, range=(0, 1))[0]
    chi_square = ((counts - 600) ** 2 / 600).sum()  # 49 degrees of freedom: above 94 once in ten thousand
    assert 15 < chi_square < 94
    for neighbours in (numbers[:, 1:] * numbers[:, :-1], numbers[1:] * numbers[:-1]):
        assert neighbours.mean() == pytest.approx(0.25, abs=0.006)


def test_every_seed_and_position_has_its_own_number():
    streams = [(seed, request) for seed in (0, 1, -1, 2**63, 2**70 + 5) for request in (0, 1, 7, -3, 2**64 - 9)]
    keys = [stream_key(*stream) for stream in streams for _ in range(200)]
    numbers = uniforms(keys, list(range(200)) * len(streams))
    assert len(set(numbers.tolist())) == 200 * len(streams)
    assert numbers_of([5], [3])[0] == numbers_of([9, 5], [8, 3])[1]


def test_random_numbers_never_change_between_releases():
    """Golden numbers by the published splitmix64, written out with Python's integers."""

    def mixed(z):
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        return z ^ (z >> 31)

    key = mixed(mixed(42) ^ (7 + 0x9E3779B97F4A7C15) % 2**64)
    expected = [(mixed((key + (n + 1) * 0x9E3779B97F4A7C15) % 2**64) >> 11) / 2**53 for n in range(5)]
    assert uniforms([stream_key(42, 7)] * 5, range(5)).tolist() == expected


def test_tokens_are_as_frequent_as_their_probabilities():
    n, rule = 40_000, GenerationConfig(temperature=0.8)
    numbers = numbers_of(range(n), [0] * n)
    drawn = draw(torch.tensor(LOGITS).expand(n, -1), [rule] * n, numbers)
    expected = (torch.tensor(LOGITS, dtype=torch.float64) / 0.8).softmax(-1)
    counts = np.bincount(drawn.tokens, minlength=6)
    likely = expected.numpy() > 1e-6
    chi_square = ((counts - n * expected.numpy()) ** 2 / (n * expected.numpy() + 1e-30))[likely].sum()
    assert chi_square < 21  # 3 degrees of freedom: above 21 once in ten thousand
    assert not counts[~likely].any()
    torch.testing.assert_close(drawn.logprobs.double(), expected.log()[drawn.tokens], atol=1e-6, rtol=0)


@pytest.mark.parametrize("size", [1, 5, 255, 256, 257, 1000, 50_000])
def test_a_number_finds_the_token_that_float64_sums_find(size):
    generator = np.random.default_rng(size)
    weights = torch.from_numpy(generator.exponential(size=(40, size)) ** 4).float()
    weights[:, generator.random(size) < 0.5] = 0.0
    weights[:, size // 2] = 1.0
    numbers = generator.random(40)
    found = search(weights, torch.from_numpy(numbers)).tolist()
    sums = weights.double().cumsum(-1).numpy()
    for row, index in enumerate(found):
        assert weights[row, index] > 0
        total, below = sums[row, -1], sums[row, index - 1] if index else 0.0
        assert below / total - 1e-6 <= numbers[row] <= sums[row, index] / total + 1e-6


def test_the_ends_of_the_unit_interval_find_kept_tokens_only():
    weights = torch.zeros(3, 700)
    weights[:, 300], weights[:, 511] = 0.3, 1e-12
    ends = torch.tensor([0.0, 1.0 - 2.0**-53, 1.0], dtype=torch.float64)
    assert search(weights, ends).tolist() == [300, 511, 511]


def test_a_tail_of_tiny_probabilities_is_drawn_as_often_as_it_weighs():
    """150,000 tokens of one ten-millionth each beside a single likely one: float32 sums would lose them."""
    weights = torch.full((1, 150_001), 1e-7)
    weights[0, 0] = 1.0 - 0.015
    numbers = torch.from_numpy(numbers_of(range(2_000), [0] * 2_000) * 0.015 + 0.985)
    found = search(weights.expand(2_000, -1), numbers).numpy()
    positions = np.sort(found) / 150_000
    assert (
        np.abs(positions - (np.arange(2_000) + 0.5) / 2_000).max() < 1.95 / 2_000**0.5
    )  # Kolmogorov: once in a thousand


def kept_by_reference(p, rule):
    """vLLM's order: min-p, then top-k, then top-p of what is left, one token at a time."""
    order = sorted(range(len(p)), key=lambda token: -p[token])
    order = [token for token in order if p[token] >= rule.min_p * max(p)]
    order = order[: rule.top_k or None]
    total, mass, kept = sum(p[token] for token in order), 0.0, set()
    for token in order:
        if mass >= rule.top_p * total:
            break
        kept.add(token)
        mass += p[token]
    return kept


RULES = [
    {"top_k": 1},
    {"top_k": 50},
    {"top_k": 1500},
    {"top_p": 0.5},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 40, "top_p": 0.7},
    {"top_p": 0.8, "min_p": 0.02},
    {"top_k": 20, "top_p": 0.9, "min_p": 0.01},
]


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("spread", [0.5, 3.0], ids=["flat", "peaked"])
def test_rules_keep_what_a_plain_reference_keeps(rule, spread):
    rule = GenerationConfig(**rule)
    logits = torch.from_numpy(np.random.default_rng(1).normal(size=(3, 2_000)) * spread).float()
    p = logits.softmax(-1)
    drawn = draw(logits.repeat(50, 1), [rule] * 150, numbers_of(range(150), [0] * 150))
    for row in range(3):
        expected = kept_by_reference(p[row].double().tolist(), rule)
        kept, order = likeliest(p[row : row + 1], rule, 2_000)
        assert set(order[0][kept[0] > 0].tolist()) == expected
        assert set(drawn.tokens[row::3].tolist()) <= expected
        cut = 1.0 - float(p[row, sorted(expected)].double().sum())
        torch.testing.assert_close(drawn.cut_mass[row::3], torch.full((50,), cut).double(), atol=1e-6, rtol=0)


def test_a_nucleus_wider_than_what_is_sorted_first_is_kept_whole():
    logits = torch.zeros(1, 4 * LIKELIEST).repeat(500, 1)
    rule = GenerationConfig(top_p=0.9)
    drawn = draw(logits, [rule] * 500, numbers_of(range(500), [0] * 500))
    assert drawn.cut_mass.mean() == pytest.approx(0.1, abs=1e-3)
    assert len(set(drawn.tokens.tolist())) > 400


def test_log_probs_are_of_the_full_softmax_whatever_is_cut():
    logits = torch.tensor([LOGITS] * 20)
    drawn = draw(logits, [GenerationConfig(top_k=1, temperature=0.5)] * 20, numbers_of(range(20), [0] * 20))
    assert set(drawn.tokens.tolist()) == {2}
    torch.testing.assert_close(drawn.logprobs, (logits / 0.5).log_softmax(-1)[:, 2])


def test_rows_with_different_rules_are_drawn_as_if_alone():
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(5, 3_000))).float() * 4
    rules = [
        GenerationConfig(temperature=0),
        GenerationConfig(),
        GenerationConfig(top_k=3),
        GenerationConfig(temperature=0.3, top_p=0.9),
        GenerationConfig(),
    ]
    numbers = numbers_of(range(5), [4] * 5)
    together = draw(logits, rules, numbers)
    alone = [draw(logits[i : i + 1], rules[i : i + 1], numbers[i : i + 1]) for i in range(5)]
    assert together.tokens.tolist() == [int(one.tokens) for one in alone]
    assert together.tokens[0] == logits[0].argmax()
    torch.testing.assert_close(together.logprobs[0], logits[0].log_softmax(-1).max())


ALLOWED = (3, 40, 41, 700, 1999)


@pytest.mark.parametrize("rule", [{}, {"temperature": 0.6}, {"top_k": 3}, {"top_p": 0.7}, {"temperature": 0}], ids=str)
def test_with_allowed_tokens_the_distribution_is_over_these_alone(rule):
    rule = GenerationConfig(**rule, allowed_tokens=ALLOWED)
    logits = torch.from_numpy(np.random.default_rng(2).normal(size=(1, 2_000))).float()
    exact = logits[0, list(ALLOWED)].double().numpy() / (rule.temperature or 1.0)
    p = dict(zip(ALLOWED, np.exp(exact) / np.exp(exact).sum(), strict=True))
    drawn = draw(logits.repeat(3_000, 1), [rule] * 3_000, numbers_of(range(3_000), [0] * 3_000))
    kept = kept_by_reference(list(p.values()), rule) if rule.temperature else {int(exact.argmax())}
    kept = {ALLOWED[index] for index in kept}
    for token in kept:
        share, own = drawn.tokens == token, p[token] / sum(p[each] for each in kept)
        assert abs(float(share.double().mean()) - own) < 0.03
        torch.testing.assert_close(drawn.logprobs[share].double(), torch.tensor(np.log(p[token])).expand(share.sum()))
    assert set(drawn.tokens.tolist()) == kept
    cut = 0.0 if rule.temperature == 0 else 1.0 - sum(p[each] for each in kept)
    torch.testing.assert_close(drawn.cut_mass, torch.full((3_000,), cut).double(), atol=1e-6, rtol=0)


def test_rows_with_other_allowed_tokens_are_drawn_as_if_alone():
    logits = torch.from_numpy(np.random.default_rng(4).normal(size=(6, 900))).float()
    sets = [(), (1, 2, 3), (5, 880), (), (1, 2, 3), (7,)]
    rules = [GenerationConfig(allowed_tokens=tokens) for tokens in sets]
    numbers, never = numbers_of(range(6), [0] * 6), torch.tensor([8, 9])
    drawn = draw(logits, rules, numbers, never)
    for row in range(6):
        alone = draw(logits[row : row + 1], rules[row : row + 1], numbers[row : row + 1], never)
        assert [each[row] for each in drawn] == [each[0] for each in alone]
        assert not sets[row] or int(drawn.tokens[row]) in sets[row]
