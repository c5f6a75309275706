"""KTO and BCO on labelled responses against their equations in NumPy, in float64: values and gradients."""

from math import log

import numpy as np
import pytest
import torch

from oxrl.algorithms.unpaired import Labelled, bco_unpaired, kl_baseline, kto

RNG = np.random.default_rng(0)
LOGRATIO, GOOD = RNG.normal(0, 3, 11), RNG.random(11) < 0.5
LN3 = log(3)  # s(ln 3) = 3/4


def s(x):
    return 1 / (1 + np.exp(-x))


def np_kto(r, good, z, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0):
    value = np.where(good, desirable_weight * s(beta * (r - z)), undesirable_weight * s(beta * (z - r)))
    return np.where(good, desirable_weight, undesirable_weight) - value


def np_bco(r, good, b, beta=0.1):
    is_good = s(beta * r - beta * b)
    return -np.where(good, np.log(is_good), np.log(1 - is_good))


CASES = [
    (kto, np_kto, {}),
    (kto, np_kto, {"beta": 0.7, "desirable_weight": 1.3, "undesirable_weight": 0.6}),
    (bco_unpaired, np_bco, {}),
    (bco_unpaired, np_bco, {"beta": 0.7}),
]
each_case = pytest.mark.parametrize(("loss", "formula", "given"), CASES)


def labelled(logratio, good, baseline, dtype=torch.float64):
    tensor = torch.tensor(logratio, dtype=dtype, requires_grad=True)
    return Labelled(tensor, torch.tensor(good), torch.tensor(baseline, dtype=dtype, requires_grad=True))


@each_case
@pytest.mark.parametrize("baseline", [0.0, 1.7])
def test_values_and_gradients_are_those_of_the_papers_equation(loss, formula, given, baseline):
    view = labelled(LOGRATIO, GOOD, baseline)
    losses = loss(view, **given)
    np.testing.assert_allclose(losses.detach(), formula(LOGRATIO, GOOD, baseline, **given), rtol=1e-9)
    ahead, behind = (formula(LOGRATIO + step, GOOD, baseline, **given) for step in (1e-5, -1e-5))
    (gradient,) = torch.autograd.grad(losses.sum(), [view.logratio])
    np.testing.assert_allclose(gradient, (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-9)


@each_case
def test_a_baseline_may_differ_from_response_to_response_and_gets_no_gradient(loss, formula, given):
    baseline = RNG.normal(size=11)
    view = labelled(LOGRATIO, GOOD, baseline)
    losses = loss(view, **given)
    np.testing.assert_allclose(losses.detach(), formula(LOGRATIO, GOOD, baseline, **given), rtol=1e-9)
    assert torch.autograd.grad(losses.sum(), [view.baseline], allow_unused=True) == (None,)


def test_two_responses_worked_out_by_hand():
    view = labelled([2.0, 2.0], [True, False], 1.0, torch.float32)
    assert kto(view, beta=LN3).tolist() == pytest.approx([1 / 4, 3 / 4])
    weights = {"desirable_weight": 2.0, "undesirable_weight": 4.0}
    assert kto(view, beta=LN3, **weights).tolist() == pytest.approx([1 / 2, 3])
    assert bco_unpaired(view, beta=LN3).tolist() == pytest.approx([log(4 / 3), log(4)])


@each_case
def test_good_rises_and_bad_falls_from_the_start(loss, formula, given):
    view = labelled(np.zeros(11), GOOD, 0.0)
    (gradient,) = torch.autograd.grad(loss(view, **given).sum(), [view.logratio])
    assert (gradient.sign() == np.where(GOOD, -1, 1)).all()


@each_case
def test_extreme_log_ratios_stay_finite_and_bf16_is_computed_in_float32(loss, formula, given):
    far = labelled([-2e4, 2e4, -2e4, 2e4], [True, True, False, False], 30.0, torch.float32)
    losses = loss(far, **given)
    assert losses.isfinite().all() and torch.autograd.grad(losses.sum(), [far.logratio])[0].isfinite().all()
    half = labelled(LOGRATIO, GOOD, 1.7, torch.bfloat16)
    exact = formula(half.logratio.detach().double().numpy(), GOOD, half.baseline.detach().double().numpy(), **given)
    losses = loss(half, **given)
    assert losses.dtype == torch.float32
    np.testing.assert_allclose(losses.detach(), exact, rtol=1e-4)


def test_the_kl_baseline_is_a_mean_that_is_never_negative_and_has_no_gradient():
    mismatched = torch.tensor([3.0, -1.0, 2.0, 4.0], requires_grad=True)
    assert kl_baseline(mismatched).item() == 2.0 and kl_baseline(-mismatched).item() == 0.0
    assert not kl_baseline(mismatched).requires_grad
    assert kl_baseline(mismatched.bfloat16()).dtype == torch.float32
