"""KL estimators by enumeration: an expectation is a sum over all tokens, weighted by the sampler's probabilities."""

import math

import numpy as np
import pytest
import torch

from oxrl.algorithms.kl import (
    ESTIMATORS,
    adapt_kl_coef,
    create_adaptive_kl,
    create_truncated_kl,
    forward_k3,
    full,
    k1,
    k2,
    k3,
    k3_weighted,
    kl_penalty,
    kl_penalty_loss,
    shape_rewards_with_kl,
)

RNG = np.random.default_rng(3)
LOGITS, REF_LOGITS = RNG.normal(size=(2, 7))


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum())


LOG_P, LOG_REF = log_softmax(LOGITS), log_softmax(REF_LOGITS)
P, REF = np.exp(LOG_P), np.exp(LOG_REF)
REVERSE = (P * (LOG_P - LOG_REF)).sum()
FORWARD = (REF * (LOG_REF - LOG_P)).sum()
HALF_SQUARE = (P * (LOG_P - LOG_REF) ** 2).sum() / 2


def kl_gradient(direction):
    """d KL / d logits, worked out by hand: p_i (log p_i/ref_i - KL) for the reverse, p_i - ref_i for the forward."""
    return {"reverse": P * (LOG_P - LOG_REF - REVERSE), "forward": P - REF}[direction]


def every_token():
    logits = torch.tensor(LOGITS, requires_grad=True)
    return logits, logits.log_softmax(0), torch.tensor(LOG_REF)


@pytest.mark.parametrize(
    ("estimator", "expected"), [(k1, REVERSE), (k3, REVERSE), (forward_k3, FORWARD), (k2, HALF_SQUARE)]
)
def test_expectation_under_the_policy(estimator, expected):
    _, logprob, ref_logprob = every_token()
    np.testing.assert_allclose((torch.tensor(P) * estimator(logprob, ref_logprob)).sum().item(), expected, rtol=1e-9)


def test_k3_weighted_by_the_ratio_has_the_value_and_gradient_of_the_reverse_kl_for_any_sampler():
    for sampler in (P, REF, np.exp(log_softmax(RNG.normal(size=7)))):
        logits, logprob, ref_logprob = every_token()
        drawn = torch.tensor(np.log(sampler), requires_grad=True)
        expected = (torch.tensor(sampler) * k3_weighted(logprob, ref_logprob, drawn)).sum()
        gradient, for_sampler = torch.autograd.grad(expected, (logits, drawn), allow_unused=True)
        np.testing.assert_allclose(expected.item(), REVERSE, rtol=1e-9)
        np.testing.assert_allclose(gradient, kl_gradient("reverse"), rtol=1e-9)
        assert for_sampler is None


def test_k3_weighted_by_hand_and_at_extremes():
    log_2, log_3 = math.log(2), math.log(3)
    logprob, ref, sampler = (torch.tensor([x], dtype=torch.float64) for x in (-1.0, -1.0 + log_2, -1.0 - log_3))
    assert k3_weighted(logprob, ref, sampler).item() == pytest.approx(3 * (1 - log_2))
    far = torch.tensor([-1e4, 0.0], requires_grad=True)
    values = k3_weighted(far, torch.tensor([0.0, -1e4]), torch.tensor([0.0, -1e4]))
    assert values.isfinite().all() and torch.autograd.grad(values.sum(), far)[0].isfinite().all()
    assert k3_weighted(*(torch.zeros(1).bfloat16(),) * 3).dtype == torch.float32


def test_expectation_under_the_reference_with_the_arguments_swapped():
    _, logprob, ref_logprob = every_token()
    for estimator in (k1, k3):
        value = (torch.tensor(REF) * estimator(ref_logprob, logprob)).sum().item()
        np.testing.assert_allclose(value, FORWARD, rtol=1e-9)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [(k1, np.zeros(7)), (k2, kl_gradient("reverse")), (k3, kl_gradient("forward"))],
    ids=["k1 has none", "k2 has the reverse KL's", "k3 has the forward KL's"],
)
def test_expected_gradient_on_policy(estimator, expected):
    logits, logprob, ref_logprob = every_token()
    (gradient,) = torch.autograd.grad((torch.tensor(P) * estimator(logprob, ref_logprob)).sum(), logits)
    np.testing.assert_allclose(gradient, expected, atol=1e-12)
    assert abs(kl_gradient("reverse") - kl_gradient("forward")).max() > 0.05  # so that the three cases differ


def test_the_gradient_of_forward_k3_is_not_the_forward_kls():
    logits, logprob, ref_logprob = every_token()
    (gradient,) = torch.autograd.grad((torch.tensor(P) * forward_k3(logprob, ref_logprob)).sum(), logits)
    assert abs(gradient.numpy() - kl_gradient("forward")).max() > 0.05


def test_k1_in_the_reward_has_the_reverse_kls_gradient():
    logits, logprob, ref_logprob = every_token()
    reward = shape_rewards_with_kl(torch.zeros(7), logprob, ref_logprob.requires_grad_(), kl_coef=1.0)
    assert not reward.requires_grad
    (gradient,) = torch.autograd.grad((torch.tensor(P) * -reward * logprob).sum(), logits)
    np.testing.assert_allclose(gradient, kl_gradient("reverse"), atol=1e-7)


GAPS = np.concatenate([np.linspace(-19, 19, 77), [1e-3, -1e-3, 1e-6]])
FORMULAS = {
    "k1": lambda gap: -gap,
    "k2": lambda gap: gap * gap * 0.5,
    "k3": lambda gap: np.exp(gap) - 1 - gap,
    "forward_k3": lambda gap: np.exp(gap) * gap - np.exp(gap) + 1,
}


@pytest.mark.parametrize("name", ESTIMATORS)
def test_each_estimator_has_the_value_and_gradient_of_its_formula(name):
    logprob = torch.full((len(GAPS),), -2.0, dtype=torch.float64, requires_grad=True)
    values = ESTIMATORS[name](logprob, torch.tensor(GAPS - 2.0))
    (gradient,) = torch.autograd.grad(values.sum(), logprob)
    step = 1e-5
    expected = -(FORMULAS[name](GAPS + step) - FORMULAS[name](GAPS - step)) / (2 * step)
    np.testing.assert_allclose(values.detach(), FORMULAS[name](GAPS), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [(k1, -math.log(2)), (k2, 0.2402265069591007), (k3, 0.3068528194400547), (forward_k3, 0.3862943611198906)],
)
def test_worked_by_hand_where_the_reference_is_twice_as_likely(estimator, expected):
    """With ref/p = 2: -log 2, (log 2)^2 / 2, 1 - log 2, 2 log 2 - 1."""
    value = estimator(torch.tensor(-1.0, dtype=torch.float64), torch.tensor(-1.0 + math.log(2), dtype=torch.float64))
    np.testing.assert_allclose(value, expected, rtol=1e-12)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_extremes_stay_finite_and_all_but_k1_are_never_negative(name):
    gaps = torch.tensor([0.0, 1e-4, -1e-4, 30.0, -30.0, 1e4, -1e4])
    logprob = torch.zeros(7, requires_grad=True)
    values = ESTIMATORS[name](logprob, gaps)
    (gradient,) = torch.autograd.grad(values.sum(), logprob)
    assert values.isfinite().all() and gradient.isfinite().all()
    assert name == "k1" or (values >= 0).all()
    assert values[0] == 0
    if "k3" in name:  # ref/p is capped at exp(20), where the gradient becomes 0
        np.testing.assert_allclose(values[[3, 5]].detach(), FORMULAS[name](20.0), rtol=1e-6)
        assert gradient[3] == gradient[5] == 0 and gradient[4] != 0


@pytest.mark.parametrize("name", ESTIMATORS)
def test_half_precision_is_widened_before_any_arithmetic(name):
    logprob, ref_logprob = torch.tensor(LOG_P).bfloat16(), torch.tensor(LOG_REF).bfloat16()
    values = ESTIMATORS[name](logprob, ref_logprob)
    assert values.dtype == torch.float32
    assert torch.equal(values, ESTIMATORS[name](logprob.float(), ref_logprob.float()))


def test_full_passes_through_with_its_gradient():
    kl = torch.tensor([0.5, 0.25], dtype=torch.bfloat16, requires_grad=True)
    assert full(kl).dtype == torch.float32
    assert torch.equal(torch.autograd.grad(full(kl).sum(), kl)[0], torch.ones_like(kl))


def test_truncated_kl_clips_each_token_to_its_threshold():
    logprob = torch.tensor([0.0, 0.0, 0.0, 0.0], requires_grad=True)
    ref_logprob = torch.tensor([-3.0, 3.0, -0.5, 0.5])
    values = create_truncated_kl(1.0)(logprob, ref_logprob)
    assert values.tolist() == [1.0, -1.0, 0.5, -0.5]
    assert torch.autograd.grad(values.sum(), logprob)[0].tolist() == [0.0, 0.0, 1.0, 1.0]
    assert create_truncated_kl(2.0, k2)(logprob, ref_logprob).tolist() == [2.0, 2.0, 0.125, 0.125]
    assert create_truncated_kl()(logprob, ref_logprob).tolist() == [1.0, -1.0, 0.5, -0.5]
    assert create_truncated_kl(0.0625)(logprob, ref_logprob).tolist() == [0.0625, -0.0625, 0.0625, -0.0625]


def test_adaptive_kl_has_less_weight_where_the_reference_probability_is_low():
    ref = torch.tensor([0.5, 0.1, 0.05, 0.01], dtype=torch.float64)
    logprob = torch.full((4,), math.log(0.2), dtype=torch.float64, requires_grad=True)
    ref_logprob = ref.log().requires_grad_()
    values = create_adaptive_kl(confidence_threshold=0.1)(logprob, ref_logprob)
    weight = torch.tensor([1.0, 1.0, 0.5, 0.1], dtype=torch.float64)
    torch.testing.assert_close(values, weight * (math.log(0.2) - ref.log()))
    for_policy, for_ref = torch.autograd.grad(values.sum(), (logprob, ref_logprob))
    torch.testing.assert_close(for_policy, weight)
    torch.testing.assert_close(for_ref, -weight)  # the estimator's; the weight has no gradient
    torch.testing.assert_close(create_adaptive_kl()(logprob, ref_logprob), values)
    torch.testing.assert_close(create_adaptive_kl(0.1, k2)(logprob, ref_logprob), weight * k2(logprob, ref_logprob))
    assert create_adaptive_kl(1e-3)(logprob, torch.full((4,), -1e4)).isfinite().all()
    half = [each.detach().bfloat16() for each in (logprob, ref_logprob)]
    assert torch.equal(create_adaptive_kl()(*half), create_adaptive_kl()(*(each.float() for each in half)))


@pytest.mark.parametrize(
    "make", [lambda: create_truncated_kl(0.0), lambda: create_adaptive_kl(0.0), lambda: create_adaptive_kl(1.5)]
)
def test_thresholds_out_of_range_are_refused(make):
    with pytest.raises(ValueError, match="threshold"):
        make()


@pytest.mark.parametrize(
    ("observed", "expected"), [(6.0, 0.2), (6.6, 0.202), (5.4, 0.198), (60.0, 0.204), (0.0, 0.196), (-6.0, 0.196)]
)
def test_the_coefficient_follows_the_kl_in_proportion_and_within_bounds(observed, expected):
    np.testing.assert_allclose(adapt_kl_coef(0.2, observed), expected, rtol=1e-12)
    np.testing.assert_allclose(adapt_kl_coef(0.2, observed / 12, target=0.5), expected, rtol=1e-12)
    np.testing.assert_allclose(adapt_kl_coef(0.2, observed / 120, target=0.05), expected, rtol=1e-12)


def test_the_controller_settles_where_the_kl_reaches_its_target():
    coef = 1.0
    for _ in range(2000):
        coef = adapt_kl_coef(coef, 3.0 / coef, target=6.0)  # a KL that falls as the penalty grows
    np.testing.assert_allclose(coef, 0.5, rtol=1e-6)
    with pytest.raises(ValueError, match="target"):
        adapt_kl_coef(0.1, 1.0, target=0.0)


def test_kl_in_the_reward_is_subtracted_at_each_token():
    logprob, ref_logprob = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([-1.5, -1.0, -3.0])
    shaped = shape_rewards_with_kl(torch.tensor([0.0, 0.0, 1.0]), logprob, ref_logprob, kl_coef=0.1)
    torch.testing.assert_close(shaped, torch.tensor([-0.05, 0.1, 1.0]))
    shaped = shape_rewards_with_kl(torch.zeros(3), logprob, ref_logprob, estimator=k2)
    torch.testing.assert_close(shaped, torch.tensor([-0.00625, -0.025, 0.0]))


def test_kl_in_the_loss_is_a_penalty_on_trained_tokens_only():
    mask = torch.tensor([True, False, True])
    logprob = torch.tensor([-1.0, math.nan, -3.0], requires_grad=True)
    ref_logprob = torch.tensor([-1.0 + math.log(2), math.nan, -3.0])
    losses = kl_penalty_loss(logprob, ref_logprob, mask)
    torch.testing.assert_close(losses, torch.tensor([0.04 * (1 - math.log(2)), 0.0, 0.0]))
    (gradient,) = torch.autograd.grad(losses.sum(), logprob)
    torch.testing.assert_close(gradient, torch.tensor([-0.04, 0.0, 0.0]))  # k3's gradient is 1 - ref/p
    losses = kl_penalty_loss(logprob, ref_logprob, mask, kl_coef=1.0, estimator=k2)
    torch.testing.assert_close(losses[0], torch.tensor(math.log(2) ** 2 / 2))
    torch.testing.assert_close(kl_penalty(torch.tensor([0.5, math.nan, 1.0]), mask), torch.tensor([0.02, 0.0, 0.04]))
    half = kl_penalty_loss(logprob.bfloat16(), ref_logprob.bfloat16(), mask)
    assert half.dtype == torch.float32 and half.isfinite().all()
    assert kl_penalty(torch.ones(3).bfloat16(), mask).dtype == torch.float32


def test_kl_in_the_loss_ignores_untrained_tokens_and_has_no_gradient_for_the_reference():
    mask = torch.tensor([True, False])
    for spoiled in ([math.nan, 0.0], [0.0, math.nan]):
        logprob = torch.tensor([-1.0, spoiled[0]], requires_grad=True)
        ref_logprob = torch.tensor([-2.0, spoiled[1]], requires_grad=True)
        losses = kl_penalty_loss(logprob, ref_logprob, mask, kl_coef=1.0, estimator=k2)
        gradients = torch.autograd.grad(losses.sum(), (logprob, ref_logprob), allow_unused=True)
        assert losses.tolist() == [0.5, 0.0] and gradients[0].tolist() == [1.0, 0.0] and gradients[1] is None


def test_the_reference_of_untrained_tokens_is_ignored():
    logprob = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    mask = torch.tensor([True, False, True])
    ref_logprob = torch.tensor([-1.5, float("nan"), -2.5])
    penalty = kl_penalty_loss(logprob, ref_logprob, mask, kl_coef=1.0)
    penalty.sum().backward()
    assert penalty.isfinite().all() and logprob.grad.isfinite().all()
    assert penalty[1] == 0 and logprob.grad[1] == 0
