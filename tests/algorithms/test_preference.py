"""Each loss on pairs against its paper's equation, written out again in NumPy in float64: values and gradients."""

import inspect
from itertools import product
from math import e, exp, log, log1p, sqrt
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from oxrl.algorithms import preference
from oxrl.algorithms.preference import NLL_WEIGHT, Pairs, sample_tokens

LOSSES = {
    name: function
    for name, function in inspect.getmembers(preference, inspect.isfunction)
    if not name.startswith("_") and "pairs" in inspect.signature(function).parameters
}
COUPLED = {"aot", "betadpo", "drdpo"}
REFERENCE_FREE = {"orpo", "simpo", "cpo", "alphapo", "cposimpo", "spo"}
WITH_GRADIENT = ("chosen", "rejected", "kl_chosen", "kl_rejected")


def h(p):
    return p.chosen - p.ref_chosen, p.rejected - p.ref_rejected


def s(x):
    return 1 / (1 + np.exp(-x))


def dpo(p, _, beta=0.1):
    w, r = (np.exp(beta * each) for each in h(p))
    return -np.log(w / (w + r))


def swapped(p):
    return SimpleNamespace(chosen=p.rejected, rejected=p.chosen, ref_chosen=p.ref_rejected, ref_rejected=p.ref_chosen)


def ipo(p, _, beta=0.1):
    w, r = h(p)
    return (w - r) ** 2 - (w - r) / beta + 1 / (4 * beta**2)


def hinge(p, _, beta=0.1):
    w, r = h(p)
    return beta * np.maximum(0, 1 / beta - w + r)


def cdpo(p, _, beta=0.1, label_smoothing=0.1):
    return (1 - label_smoothing) * dpo(p, _, beta) + label_smoothing * dpo(swapped(p), _, beta)


def robust_dpo(p, _, beta=0.1, label_smoothing=0.1):
    e = label_smoothing
    return ((1 - e) * dpo(p, _, beta) - e * dpo(swapped(p), _, beta)) / (1 - 2 * e)


def exo(p, _, beta=0.1, label_smoothing=1e-3):
    policy = np.exp(-np.stack([dpo(p, _, beta), dpo(swapped(p), _, beta)]))
    label = np.array([[1 - label_smoothing], [label_smoothing]])
    return (policy * np.log(policy / label)).sum(0)


def nca(p, _, beta=0.01):
    w, r = h(p)
    return np.log1p(np.exp(-beta * w)) + 0.5 * np.log1p(np.exp(beta * w)) + 0.5 * np.log1p(np.exp(beta * r))


def sppo(p, _, beta=0.001):
    eta = 1 / beta
    return sum((each - eta * (wins - 0.5)) ** 2 for each, wins in zip(h(p), (1, 0), strict=True))


def apo_zero(p, _, beta=0.1):
    w, r = h(p)
    return -s(beta * w) + s(beta * r)


def apo_down(p, _, beta=0.1):
    w, r = h(p)
    return (np.tanh(beta * w / 2) - np.tanh(beta * (w - r) / 2)) / 2


def aot(p, _, beta=0.1, label_smoothing=0.0, paired=True):
    above, below = h(p)
    if paired:
        above, below = p.chosen - p.rejected, p.ref_chosen - p.ref_rejected
    z = beta * (np.array(sorted(above)) - np.array(sorted(below)))
    return -(1 - label_smoothing) * np.log(s(z)) - label_smoothing * np.log(1 - s(z))


def bco(p, _, beta=0.1, baseline=0.0):
    w, r = h(p)
    delta = beta * baseline
    return -np.log(s(beta * w - delta)) - np.log(1 - s(beta * r - delta))


def dpop(p, _, beta=0.3, lambda_=50.0):
    w, r = h(p)
    return np.log1p(np.exp(-beta * (w - r - lambda_ * np.maximum(0, p.ref_chosen - p.chosen))))


def rdpo(p, _, beta=0.1, alpha=0.05):
    w, r = h(p)
    return np.log1p(np.exp(-(beta * w - beta * r + (alpha * p.len_chosen - alpha * p.len_rejected))))


def odpo(p, _, beta=0.1, alpha=1.0):
    w, r = h(p)
    return np.log1p(np.exp(-beta * (w - r)) * (p.score_chosen - p.score_rejected) ** alpha)


def discopop(p, _, beta=0.05, tau=0.05):
    w, r = h(p)
    z = beta * (w - r)
    return (1 - s(z / tau)) * np.log1p(np.exp(-z)) + s(z / tau) * np.exp(-z)


def caldpo(p, _, beta=0.1):
    w, r = h(p)
    return np.log1p(np.exp(r - w)) + (w - 0.5 / beta) ** 2 + (r + 0.5 / beta) ** 2


def wpo(p, stop, beta=0.01):
    return stop.weight_chosen * stop.weight_rejected * dpo(p, stop, beta)


def sampo(p, _, beta=0.1):
    return dpo(p, _, beta)


def betadpo(p, stop, beta=0.1, alpha=0.6, baseline=0.0):
    (w, r), (stop_w, stop_l) = h(p), h(stop)
    step_beta = max(beta + beta * alpha * (np.mean(stop_w - stop_l) - baseline), 0.001)
    return np.log1p(np.exp(step_beta * (r - w)))


def drdpo(p, _, beta=0.1, beta_prime=1.0):
    right = np.exp(-dpo(p, _, beta))
    return np.full(len(right), -beta_prime * np.log(np.mean(right ** (1 / beta_prime))))


def chipo(p, _, beta=0.05, r_max=10.0):
    w, r = (np.exp(each) + each for each in h(p))
    return np.log1p(np.exp(-np.clip(beta * (w - r), -2 * r_max, 2 * r_max)))


def focalpo(p, _, beta=0.1, gamma=0.05):
    return np.exp(-dpo(p, _, beta)) ** gamma * dpo(p, _, beta)


def gpo(p, _, beta=0.1, function="truncated_quadratic"):
    w, r = h(p)
    x = beta * (w - r)
    return {
        "logistic": np.log(1 + np.exp(-x)),
        "hinge": np.maximum(0, 1 - x),
        "squared": (x - 1) ** 2,
        "exponential": np.exp(-x),
        "truncated_quadratic": np.maximum(0, 1 - x) ** 2,
        "savage": 1 / (1 + np.exp(x)) ** 2,
    }[function]


def hdpo(p, _, beta=0.1, alpha=0.9):
    return np.log1p(np.exp(alpha * beta * (p.rejected - p.chosen) + beta * (p.ref_chosen - p.ref_rejected)))


def fdpo(p, _, beta=0.1, divergence="reverse_kl", alpha=0.5):
    slope = {
        "reverse_kl": lambda u: np.log(u) + 1,
        "forward_kl": lambda u: -1 / u,
        "js": lambda u: np.log(2 * u / (1 + u)),
        "alpha": lambda u: (1 - u**-alpha) / alpha,
    }[divergence]
    w, r = (slope(np.exp(each)) for each in h(p))
    return np.log1p(np.exp(-beta * (w - r)))


def dposhift(p, _, beta=0.1, lambda_=0.95):
    w, r = h(p)
    return np.log1p(np.exp(-beta * w + lambda_ * beta * r))


def minordpo(p, _, beta=0.1):
    w, r = h(p)
    return np.where(r > 0, np.log1p(np.exp(-beta * (w - r))), np.log1p(np.exp(-beta * w)))


def bpo(p, _, beta=0.1, alpha=0.3):
    w, r = h(p)
    return np.maximum(np.log1p(np.exp(-beta * w)), np.log1p(np.exp(beta * alpha * r)))


def c2dpo(p, _, beta=0.1, lambda_=2e-4):
    moved = (p.chosen + p.rejected) - (p.ref_chosen + p.ref_rejected)
    return dpo(p, _, beta) + lambda_ * moved**2


def tdpo(p, stop, beta=0.1, alpha=0.5, version=2):
    w, r = h(p)
    delta = beta * p.kl_rejected - beta * p.kl_chosen
    if version == 2:
        delta = alpha * (beta * p.kl_rejected - beta * stop.kl_chosen)
    return -np.log(s(beta * w - beta * r - delta))


def cpo(p, _, beta=0.1):
    return np.log1p(np.exp(beta * p.rejected - beta * p.chosen))


def simpo(p, _, beta=2.0, gamma=1.0):
    return np.log1p(np.exp(gamma + beta / p.len_rejected * p.rejected - beta / p.len_chosen * p.chosen))


def spo(p, _, beta=2.5, gamma=0.8):
    x = gamma + beta / p.len_rejected * p.rejected - beta / p.len_chosen * p.chosen
    return x / (1 + np.exp(-x))


def alpha_dpo(p, stop, beta=2.5, alpha=0.2, gamma=1.5, baseline=0.0, spread=1.0):
    def margin(chosen, rejected):
        return chosen / p.len_chosen - rejected / p.len_rejected

    policy, reference = margin(stop.chosen, stop.rejected), margin(stop.ref_chosen, stop.ref_rejected)
    target = gamma / beta + alpha * (policy - reference - baseline) / spread
    return np.log1p(np.exp(-beta * (margin(p.chosen, p.rejected) - target)))


def cposimpo(p, _, beta=10.0, gamma=5.4):
    return simpo(p, _, beta, gamma)


def alphapo(p, _, beta=2.5, alpha=0.25, gamma=0.25):
    def reward(logprob, length):
        return beta * (1 - np.exp(logprob) ** (-alpha / length)) / alpha

    return np.logaddexp(0, reward(p.rejected, p.len_rejected) - reward(p.chosen, p.len_chosen) + gamma)


def orpo(p, _, lambda_=0.1):
    q_w, q_l = np.exp(p.chosen / p.len_chosen), np.exp(p.rejected / p.len_rejected)
    odds_ratio = q_w / (1 - q_w) * (1 - q_l) / q_l
    return lambda_ * -np.log(s(np.log(odds_ratio)))


def dapo_pairs(p, _, beta=0.1):
    return dpo(p, _, beta)


OTHER_PARAMETERS = {
    "hinge": [{"beta": 1.0}],
    "aot": [{"paired": False}, {"beta": 1.0, "label_smoothing": 0.2}],
    "bco": [{"beta": 1.0, "baseline": 0.7}],
    "dpop": [{"lambda_": 1.5}],
    "betadpo": [{"alpha": 0.9, "baseline": 0.4}, {"baseline": 100.0}],
    "chipo": [{"beta": 1.0, "r_max": 0.5}],
    "focalpo": [{"beta": 1.0, "gamma": 1.4}],
    "gpo": [{"beta": 0.8, "function": function} for function in preference.MARGIN_LOSSES],
    "fdpo": [{"divergence": divergence} for divergence in preference.DIVERGENCES]
    + [{"divergence": "alpha", "alpha": 0.9}],
    "tdpo": [{"version": 1}, {"alpha": 1.7}],
    "alphapo": [{"alpha": -0.5}, {"alpha": 1.0}],
    "discopop": [{"tau": 3.0}],
    "bpo": [{"beta": 1.0, "alpha": 1.0}],
    "c2dpo": [{"lambda_": 0.5}],
    "alpha_dpo": [{"alpha": 1.5, "baseline": 0.4, "spread": 0.3}],
}
CASES = [(name, given) for name in LOSSES for given in [{}, *OTHER_PARAMETERS.get(name, [])]]
each_case = pytest.mark.parametrize(("name", "given"), CASES, ids=[f"{name}-{given}" for name, given in CASES])


def numbers(seed=0, n=9):
    """Sums over few tokens, log-ratios of a nat or two in both directions, different lengths."""
    rng = np.random.default_rng(seed)
    ref_chosen, ref_rejected = rng.uniform(-25, -15, (2, n))
    return SimpleNamespace(
        chosen=ref_chosen + rng.normal(0, 1.5, n),
        rejected=ref_rejected + rng.normal(0, 1.5, n),
        ref_chosen=ref_chosen,
        ref_rejected=ref_rejected,
        len_chosen=rng.integers(4, 20, n),
        len_rejected=rng.integers(4, 20, n),
        score_chosen=rng.uniform(1, 3, n),
        score_rejected=rng.uniform(-3, 0, n),
        kl_chosen=rng.uniform(0, 3, n),
        kl_rejected=rng.uniform(0, 3, n),
        weight_chosen=rng.uniform(0, 1, n),
        weight_rejected=rng.uniform(0, 1, n),
    )


def as_pairs(p, dtype=torch.float64, requires_grad=False):
    tensors = {name: torch.as_tensor(value) for name, value in vars(p).items()}
    pairs = Pairs(**{name: x.to(dtype) if x.is_floating_point() else x for name, x in tensors.items()})
    for name in WITH_GRADIENT:
        getattr(pairs, name).requires_grad_(requires_grad)
    return pairs


def gradients(name, pairs, **given):
    leaves = [getattr(pairs, each) for each in WITH_GRADIENT]
    total = LOSSES[name](pairs, **given).sum()
    return torch.autograd.grad(total, leaves, allow_unused=True, materialize_grads=True)


def central_differences(formula, p, field, step=1e-5):
    total = []
    for i in range(len(p.chosen)):
        moved = []
        for sign in (1, -1):
            values = getattr(p, field).copy()
            values[i] += sign * step
            moved.append(formula(SimpleNamespace(**{**vars(p), field: values}), p).sum())
        total.append((moved[0] - moved[1]) / (2 * step))
    return np.array(total)


@each_case
def test_the_value_is_that_of_the_papers_equation(name, given):
    p = numbers()
    expected = globals()[name](p, p, **given)
    np.testing.assert_allclose(LOSSES[name](as_pairs(p), **given), expected, rtol=1e-9, atol=1e-12)


@each_case
def test_the_gradient_is_that_of_the_papers_equation(name, given):
    p = numbers(1)
    for field, gradient in zip(WITH_GRADIENT, gradients(name, as_pairs(p, requires_grad=True), **given), strict=True):
        expected = central_differences(lambda moved, stop: globals()[name](moved, stop, **given), p, field)
        np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7, err_msg=field)


@each_case
def test_values_and_gradients_stay_finite_at_extreme_log_probs(name, given):
    grid = torch.tensor(list(product((-1e4, -80.0, -1e-3, 0.0), repeat=4))).T.contiguous()
    n = grid.shape[1]
    for length, other in ((1, 1), (1, 4096), (300, 20)):
        lengths = torch.full((n,), length), torch.full((n,), other)
        scores = torch.full((n,), 1e4), torch.linspace(-1e4, 2e4, n)
        kls = torch.linspace(0, 1e4, n), torch.linspace(1e4, 0, n)
        pairs = Pairs(*grid, *lengths, *scores, *kls, torch.zeros(n), torch.ones(n))
        for field in WITH_GRADIENT:
            getattr(pairs, field).requires_grad_()
        assert LOSSES[name](pairs, **given).isfinite().all()
        assert all(gradient.isfinite().all() for gradient in gradients(name, pairs, **given))


@each_case
def test_bf16_sums_are_computed_in_float32(name, given):
    p = numbers(2)
    p.rejected, p.ref_rejected = p.rejected + 12.3, p.ref_rejected + 12.3  # so that bf16 could not hold the differences
    pairs = as_pairs(p, torch.bfloat16, requires_grad=True)
    rounded = SimpleNamespace(**{field: x.detach().double().numpy() for field, x in pairs._asdict().items()})
    losses = LOSSES[name](pairs, **given)
    assert losses.dtype == torch.float32
    expected = globals()[name](rounded, rounded, **given)
    np.testing.assert_allclose(losses.detach(), expected, rtol=1e-4, atol=1e-5)
    assert all(gradient.isfinite().all() for gradient in gradients(name, pairs, **given))


def one_pair(**changes):
    """h_w = 1, h_l = -2; mean log-probs -1 and -2; margins 4 of the policy and 1 of the reference."""
    fields = {
        "chosen": -2.0, "rejected": -6.0, "ref_chosen": -3.0, "ref_rejected": -4.0, "len_chosen": 2, "len_rejected": 3,
        "score_chosen": 5.0, "score_rejected": 1.0, "kl_chosen": 2.0, "kl_rejected": 1.0,
        "weight_chosen": 0.5, "weight_rejected": 0.25,
    }  # fmt: skip
    return Pairs(**{name: torch.tensor([value]) for name, value in {**fields, **changes}.items()})


LN3 = log(3)  # s(ln 3) = 3/4, s(2 ln 3) = 9/10, s(3 ln 3) = 27/28
DOUBLED = {"chosen": -3 + log(2), "rejected": -4.0}  # u_w = 2, u_l = 1
BY_HAND = [
    ("dpo", {"beta": LN3 / 3}, {}, log(4 / 3)),
    ("ipo", {"beta": 0.25}, {}, 1.0),
    ("hinge", {"beta": 0.25}, {}, 0.25),
    ("cdpo", {"beta": LN3 / 3, "label_smoothing": 0.25}, {}, 0.5623351446188083),
    ("robust_dpo", {"beta": LN3 / 3, "label_smoothing": 0.25}, {}, -0.2616240718),
    ("exo", {"beta": LN3 / 3, "label_smoothing": 0.25}, {}, 0.0),
    ("exo", {"beta": LN3 / 3, "label_smoothing": 1 / 3}, {}, 0.75 * log(9 / 8) + 0.25 * log(3 / 4)),
    ("nca", {"beta": LN3}, {}, log(4 / 3) + log(4) / 2 + log(10 / 9) / 2),
    ("sppo", {"beta": 0.5}, {}, 1.0),
    ("apo_zero", {"beta": LN3}, {}, -0.65),
    ("apo_down", {"beta": LN3}, {}, 3 / 4 - 27 / 28),
    ("aot", {"beta": LN3 / 3}, {}, log(4 / 3)),
    ("bco", {"beta": LN3, "baseline": 1.0}, {}, log(2) + log(28 / 27)),
    ("dpop", {"beta": LN3, "lambda_": 2.0}, {"chosen": -4.0}, log(4)),
    ("rdpo", {"beta": LN3 / 3, "alpha": LN3}, {}, log(2)),
    ("odpo", {"beta": LN3 / 3, "alpha": 0.5}, {}, log(5 / 3)),
    ("discopop", {"beta": LN3 / 3, "tau": 1.0}, {}, log(4 / 3) / 4 + 1 / 4),
    ("caldpo", {"beta": 0.5}, {}, 1 + log1p(exp(-3))),
    ("wpo", {"beta": LN3 / 3}, {}, log(4 / 3) / 8),
    ("sampo", {"beta": LN3 / 3}, {}, log(4 / 3)),
    ("betadpo", {"beta": LN3 / 3, "alpha": 1.0, "baseline": 2.0}, {}, log(10 / 9)),
    ("drdpo", {"beta": LN3 / 3, "beta_prime": 0.3}, {}, log(4 / 3)),
    ("chipo", {"beta": 1.0}, DOUBLED, log1p(1 / (2 * e))),
    ("chipo", {"beta": 1.0, "r_max": 0.25}, DOUBLED, log1p(exp(-0.5))),
    ("focalpo", {"beta": LN3 / 3, "gamma": 2.0}, {}, 9 / 16 * log(4 / 3)),
    ("gpo", {"beta": 0.25, "function": "truncated_quadratic"}, {}, 1 / 16),
    ("gpo", {"beta": LN3 / 3, "function": "exponential"}, {}, 1 / 3),
    ("gpo", {"beta": LN3 / 3, "function": "savage"}, {}, 1 / 16),
    ("hdpo", {"beta": LN3, "alpha": 0.5}, {}, log(4 / 3)),
    ("fdpo", {"beta": 2 * LN3, "divergence": "forward_kl"}, DOUBLED, log(4 / 3)),
    ("fdpo", {"beta": 1.0, "divergence": "js"}, DOUBLED, log(7 / 4)),
    ("fdpo", {"beta": 1.0, "divergence": "alpha"}, DOUBLED, log1p(exp(-2 + sqrt(2)))),
    ("dposhift", {"beta": LN3 / 2, "lambda_": 0.5}, {}, log(4 / 3)),
    ("minordpo", {"beta": LN3}, {}, log(4 / 3)),  # h_l < 0: of chosen alone
    ("minordpo", {"beta": LN3}, {"rejected": -2.0}, log(4)),  # h_l = 2
    ("bpo", {"beta": LN3, "alpha": 1.0}, {}, log(4 / 3)),  # the smaller of 1 and 2
    ("bpo", {"beta": 2 * LN3, "alpha": 0.25}, {}, log(4 / 3)),  # of 1 and 0.5
    ("c2dpo", {"beta": LN3 / 3, "lambda_": 2.0}, {"chosen": -1.0, "rejected": -5.0}, log(4 / 3) + 2),
    ("tdpo", {"beta": LN3 / 4, "version": 1}, {}, log(4 / 3)),
    ("tdpo", {"beta": LN3 / 3.5}, {}, log(4 / 3)),
    ("cpo", {"beta": LN3 / 4}, {}, log(4 / 3)),
    ("simpo", {"beta": 2 * LN3, "gamma": LN3}, {}, log(4 / 3)),
    ("spo", {"beta": 2 * LN3, "gamma": LN3}, {}, -LN3 / 4),
    # means -1 and -2, of the reference -1.5 and -4/3: a gap of 7/6, one spread above 2/3
    ("alpha_dpo", {"beta": 4 * LN3, "alpha": 0.5, "gamma": LN3, "baseline": 2 / 3, "spread": 0.5}, {}, log(4 / 3)),
    ("alpha_dpo", {"beta": LN3, "gamma": LN3, "baseline": 1.5, "spread": 0.0}, {"len_rejected": 2}, log(4 / 3)),
    # a gap of 1.5, two spreads above the mean
    (
        "alpha_dpo",
        {"beta": LN3, "alpha": 0.5, "gamma": 0.0, "baseline": 1.5 - 1 / 64, "spread": 1 / 128},
        {"len_rejected": 2},
        log(4 / 3),
    ),
    ("cposimpo", {"beta": 2 * LN3, "gamma": LN3}, {}, log(4 / 3)),
    ("alphapo", {"beta": LN3 / (e**2 - e), "alpha": 1.0, "gamma": 0.0}, {}, log(4 / 3)),
    ("orpo", {"lambda_": 1.0}, {}, log((e + 2) / (e + 1))),
    ("dapo_pairs", {"beta": LN3 / 3}, {}, log(4 / 3)),
]


def test_every_loss_has_a_formula_and_a_literal():
    assert set(LOSSES) == {name for name, *_ in BY_HAND}
    assert all(callable(globals().get(name)) for name in LOSSES)


@pytest.mark.parametrize(("name", "given", "changes", "expected"), BY_HAND)
def test_one_pair_worked_out_by_hand(name, given, changes, expected):
    assert LOSSES[name](one_pair(**changes), **given).item() == pytest.approx(expected, abs=2e-6)


def test_drdpo_is_minus_the_log_of_the_mean_probability_when_its_temperature_is_1():
    both = Pairs(*map(torch.cat, zip(one_pair(), one_pair(chosen=-8.0), strict=True)))  # probabilities 3/4 and 1/4
    assert LOSSES["drdpo"](both, beta=LN3 / 3).tolist() == pytest.approx([log(2), log(2)])


def test_at_the_start_chosen_rises_and_rejected_falls():
    p = numbers(3)
    p.chosen, p.rejected = p.ref_chosen, p.ref_rejected
    exceptions = {"apo_down": (0, 1), "discopop": (1, -1)}  # as in the papers
    for name, given in CASES:
        down, up, *_ = gradients(name, as_pairs(p, requires_grad=True), **given)
        signs = exceptions.get(name, (-1, 1)) if given != {"tau": 3.0} else (-1, 1)
        if name == "spo":  # draws back what is far enough apart, see the next test
            continue
        assert (down.sign() == signs[0]).all() and (up.sign() == signs[1]).all(), (name, given)


def test_spo_raises_chosen_below_its_target_and_lowers_it_above():
    """The minimum of x s(x) is where s(x) + x s(x) (1 - s(x)) = 0: x = -1.278."""
    means = torch.tensor([0.0, 1.27, 1.29, 5.0])
    pairs = one_pair()._replace(chosen=means.requires_grad_(), rejected=torch.zeros(4))
    losses = LOSSES["spo"](pairs._replace(len_chosen=1, len_rejected=1), beta=1.0, gamma=0.0)
    assert torch.autograd.grad(losses.sum(), means)[0].sign().tolist() == [-1, -1, 1, 1]


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("cdpo", {"label_smoothing": 0.0}),
        ("robust_dpo", {"label_smoothing": 0.0}),
        ("odpo", {"alpha": 0.0}),
        ("rdpo", {"alpha": 0.0}),
        ("hdpo", {"alpha": 1.0}),
        ("focalpo", {"gamma": 0.0}),
        ("dposhift", {"lambda_": 1.0}),
        ("c2dpo", {"lambda_": 0.0}),
        ("dpop", {"lambda_": 0.0}),
        ("fdpo", {"divergence": "reverse_kl"}),
        ("fdpo", {"divergence": "alpha", "alpha": 1e-7}),
        ("gpo", {"function": "logistic"}),
        ("betadpo", {"alpha": 0.0}),
        ("tdpo", {"alpha": 0.0}),
        ("sampo", {}),
        ("dapo_pairs", {}),
    ],
)
def test_without_its_own_term_it_is_dpo(name, given):
    pairs = as_pairs(numbers(4))
    torch.testing.assert_close(LOSSES[name](pairs, beta=0.2, **given), LOSSES["dpo"](pairs, beta=0.2))


def test_each_special_case_is_the_loss_named_in_its_paper():
    pairs = as_pairs(numbers(5))
    ones = torch.ones(9, dtype=torch.float64)
    single = Pairs(*(each[:1] for each in pairs))
    losses = SimpleNamespace(**LOSSES)
    for left, right in [
        (losses.wpo(pairs._replace(weight_chosen=ones, weight_rejected=ones)), losses.dpo(pairs, beta=0.01)),
        (losses.aot(single), losses.dpo(single)),
        (losses.aot(single, paired=False), losses.dpo(single)),
        (losses.drdpo(single), losses.dpo(single)),
        (losses.drdpo(pairs, beta_prime=1e7), losses.dpo(pairs).mean().expand(9)),
        (losses.gpo(pairs, function="hinge"), losses.hinge(pairs)),
        (losses.gpo(pairs, beta=0.2, function="squared"), 0.04 * losses.ipo(pairs, beta=0.1)),
        (losses.fdpo(pairs, divergence="alpha", alpha=1.0), losses.fdpo(pairs, divergence="forward_kl")),
        (losses.alphapo(pairs, alpha=0.0), losses.simpo(pairs, beta=2.5, gamma=0.25)),
        (losses.alphapo(pairs, alpha=1e-7), losses.simpo(pairs, beta=2.5, gamma=0.25)),
        (losses.alpha_dpo(pairs, alpha=0.0), losses.simpo(pairs, beta=2.5, gamma=1.5)),
        (losses.cposimpo(pairs), losses.simpo(pairs, beta=10.0, gamma=5.4)),
        (losses.simpo(pairs._replace(len_chosen=ones, len_rejected=ones), beta=0.1, gamma=0.0), losses.cpo(pairs)),
        (losses.caldpo(pairs), losses.dpo(pairs, beta=1.0) + losses.sppo(pairs, beta=0.1)),
        (losses.tdpo(pairs, alpha=1.0), losses.tdpo(pairs, version=1)),
    ]:
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


def test_beyond_e_to_the_30_an_exponential_is_its_tangent():
    pairs = one_pair(chosen=-40.0, rejected=-4.0)  # a margin of -37
    chosen = pairs.chosen.requires_grad_()
    losses = LOSSES["gpo"](pairs, beta=1.0, function="exponential")
    assert losses.item() == pytest.approx(exp(30) * (1 + 7), rel=1e-6)
    assert torch.autograd.grad(losses, chosen)[0].item() == pytest.approx(-exp(30), rel=1e-6)


def test_chipo_clips_at_twice_the_largest_reward():
    assert LOSSES["chipo"](one_pair(rejected=50.0)).item() == pytest.approx(20, abs=1e-6)


def test_robust_dpo_is_dpo_on_the_average_over_flipped_labels():
    p, noise = numbers(6), 0.3
    straight, flipped = (LOSSES["robust_dpo"](as_pairs(x), label_smoothing=noise) for x in (p, swapped_all(p)))
    torch.testing.assert_close((1 - noise) * straight + noise * flipped, LOSSES["dpo"](as_pairs(p)))


def swapped_all(p):
    return SimpleNamespace(**{**vars(p), **vars(swapped(p))})


def test_losses_are_bounded_below_as_in_their_papers_and_robust_dpo_is_not():
    far = torch.linspace(-1e4, 1e4, 2001)
    zeros = torch.zeros_like(far)
    pairs = one_pair()._replace(chosen=far, rejected=-far, ref_chosen=zeros, ref_rejected=zeros)
    floors = {
        "dpo": 0,
        "ipo": 0,
        "hinge": 0,
        "exo": 0,
        "nca": 0,
        "sppo": 0,
        "caldpo": 0,
        "apo_zero": -1,
        "apo_down": -1,
    }
    for name, floor in floors.items():
        assert LOSSES[name](pairs).min() >= floor - 1e-6, name
    assert LOSSES["robust_dpo"](pairs).min() < -100


@pytest.mark.parametrize("name", LOSSES)
def test_pairs_are_independent_unless_the_loss_couples_the_step_and_order_never_matters(name):
    pairs = as_pairs(numbers(7))
    whole = LOSSES[name](pairs)
    alone = torch.cat([LOSSES[name](Pairs(*(each[i : i + 1] for each in pairs))) for i in range(9)])
    assert torch.allclose(whole, alone) == (name not in COUPLED)
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    shuffled = LOSSES[name](Pairs(*(each[order] for each in pairs)))
    torch.testing.assert_close(shuffled.mean(), whole.mean())


@pytest.mark.parametrize("name", LOSSES)
def test_only_losses_without_a_reference_do_not_read_it(name):
    pairs = as_pairs(numbers(8))
    nothing = torch.full_like(pairs.chosen, torch.nan)
    finite = LOSSES[name](pairs._replace(ref_chosen=nothing, ref_rejected=nothing)).isfinite().all().item()
    assert finite == (name in REFERENCE_FREE)


def test_the_weights_of_the_added_nll():
    assert NLL_WEIGHT == {"orpo": 1.0, "cpo": 1.0, "cposimpo": 0.05, "dpnll": 1.0}


def test_the_weights_of_wpo_get_no_gradient():
    pairs = as_pairs(numbers(9), requires_grad=True)
    weight = pairs.weight_chosen.requires_grad_()
    (gradient,) = torch.autograd.grad(LOSSES["wpo"](pairs).sum(), [weight], allow_unused=True)
    assert gradient is None


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        ("robust_dpo", {"label_smoothing": 0.5}, r"label_smoothing is 0.5.*\[0, 0.5\)"),
        ("robust_dpo", {"label_smoothing": -0.1}, r"label_smoothing is -0.1"),
        ("exo", {"label_smoothing": 0.0}, r"label_smoothing is 0.0.*\(0, 0.5\)"),
        ("exo", {"label_smoothing": 0.5}, r"label_smoothing is 0.5"),
        ("gpo", {"function": "cubic"}, "function is 'cubic'.*logistic, hinge"),
        ("fdpo", {"divergence": "kl"}, "divergence is 'kl'.*reverse_kl"),
        ("fdpo", {"divergence": "alpha", "alpha": 0.0}, r"alpha is 0.0; give one in \(0, 1\]"),
        ("fdpo", {"divergence": "alpha", "alpha": 1.1}, r"alpha is 1.1"),
        ("tdpo", {"version": 3}, "version is 3.*1 and 2"),
    ],
)
def test_a_parameter_out_of_range_is_an_error_with_the_range(name, given, message):
    with pytest.raises(ValueError, match=message):
        LOSSES[name](one_pair(), **given)


@pytest.mark.parametrize("side", ["chosen", "rejected"])
@pytest.mark.parametrize(("name", "kind"), [("odpo", "score"), ("tdpo", "kl"), ("wpo", "weight")])
def test_a_missing_field_is_named(name, kind, side):
    field = f"{kind}_{side}"
    with pytest.raises(ValueError, match=field):
        LOSSES[name](one_pair()._replace(**{field: None}))


def test_a_pair_whose_scores_contradict_its_order_is_not_trained():
    pairs = one_pair(score_rejected=6.0)
    assert LOSSES["odpo"](pairs).item() == pytest.approx(0, abs=1e-20)


def test_sampled_tokens_are_a_function_of_the_row_id():
    assert sample_tokens(10, 4, "train.jsonl:12").tolist() == [0, 3, 4, 6]
    picks = [tuple(sample_tokens(40, 15, f"row-{i}")) for i in range(400)]
    assert all(len(set(pick)) == 15 and list(pick) == sorted(pick) and pick[-1] < 40 for pick in picks)
    assert len(set(picks)) == 400
    share = np.bincount(np.concatenate(picks), minlength=40) / 400
    assert share.min() > 0.25 and share.max() < 0.5, "15 of 40 are 0.375 for each position, give or take 0.024"
    assert sample_tokens(7, 7, "x").tolist() == list(range(7)) and not len(sample_tokens(7, 0, "x"))
    with pytest.raises(ValueError, match="row x: 8 of 7 tokens"):
        sample_tokens(7, 8, "x")
