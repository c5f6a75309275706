"""Likelihood, distillation and ranking losses against formulas written out in NumPy, in float64."""

import numpy as np
import pytest
import torch

from oxrl.algorithms.supervised import Scores, bradley_terry, distilled, negative_log_likelihood, teacher_divergence
from oxrl.data.pack import collate
from oxrl.types import Outputs, Row

RNG = np.random.default_rng(0)
ROWS = [Row("a", [1, 2, 3], [False, True, True]), Row("b", [4, 5], [False, True])]
BATCH = collate([(row,) for row in ROWS])
LOGPROB = [9.0, -1.0, -2.0, 9.0, -4.0]  # 9 on untrained tokens, which must be ignored


def outputs(**statistics):
    values = {name: torch.tensor(value) for name, value in statistics.items()}
    return Outputs(torch.tensor(LOGPROB, requires_grad=True), values)


def test_likelihood_is_a_sum_over_trained_tokens_with_the_unit_token():
    seen = outputs(correct=[0.0, 1.0, 0.0, 0.0, 1.0])
    losses = negative_log_likelihood(seen, BATCH)
    assert losses.terms["nll"].unit == "token"
    assert float(losses.terms["nll"].total.detach()) == 7.0
    losses.terms["nll"].total.backward()
    assert seen.logprob.grad.tolist() == [0, -1, -1, 0, -1]
    assert float(losses.metrics["token_accuracy"].total) == 2.0
    assert negative_log_likelihood(outputs(), BATCH).metrics == {}


@pytest.mark.parametrize("weight", [0.0, 0.5, 1.0])
def test_distillation_mixes_likelihood_and_divergence(weight):
    seen = outputs(teacher_kl=[0.0, 0.5, 0.25, 0.0, 1.25])
    seen.statistics["teacher_kl"].requires_grad_()
    losses = distilled(seen, BATCH, kd_weight=weight)
    assert {term.unit for term in losses.terms.values()} == {"token"}
    assert float(losses.terms["data"].total.detach()) == pytest.approx((1 - weight) * 7)
    assert float(losses.terms["kd"].total.detach()) == pytest.approx(weight * 2)
    assert not any(metric.total.requires_grad for metric in losses.metrics.values())
    assert float(losses.metrics["nll"].total) == 7.0, "whatever its weight in the loss is"
    assert float(losses.metrics["teacher_kl"].total) == pytest.approx(2)


def test_distillation_weights_both_terms_equally_by_default():
    losses = distilled(outputs(teacher_kl=[0.0, 2.0, 0.0, 0.0, 0.0]), BATCH)
    assert float(losses.terms["kd"].total) == 1.0
    assert float(losses.terms["data"].total.detach()) == 3.5


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


DIVERGENCES = {
    "forward": lambda p, q: (q * np.log(q / p)).sum(-1),
    "reverse": lambda p, q: (p * np.log(p / q)).sum(-1),
    "jensen_shannon": lambda p, q: (
        0.3 * (q * np.log(q / (0.3 * q + 0.7 * p))).sum(-1) + 0.7 * (p * np.log(p / (0.3 * q + 0.7 * p))).sum(-1)
    ),
}


@pytest.mark.parametrize("temperature", [0.1, 1.0, 3.0])
@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_is_softened_and_scaled_back_by_the_square_of_the_temperature(name, temperature):
    student, teacher = RNG.normal(size=(2, 4, 7)) * 3
    expected = temperature**2 * DIVERGENCES[name](softmax(student / temperature), softmax(teacher / temperature))
    measure = teacher_divergence(divergence=name, temperature=temperature, gjs_beta=0.3)
    found = measure(torch.tensor(student), torch.zeros(4, dtype=torch.int64), torch.tensor(teacher))
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-15)  # sums of terms that cancel


def test_the_default_divergence_is_the_forward_kl_at_temperature_one():
    student, teacher = RNG.normal(size=(2, 3, 5))
    measure = teacher_divergence()
    found = measure(torch.tensor(student), torch.zeros(3, dtype=torch.int64), torch.tensor(teacher))
    np.testing.assert_allclose(found, DIVERGENCES["forward"](softmax(student), softmax(teacher)), rtol=1e-6)
    halves = teacher_divergence(divergence="jensen_shannon")
    mirrored = [
        halves(torch.tensor(a), torch.zeros(3).long(), torch.tensor(b))
        for a, b in ((student, teacher), (teacher, student))
    ]
    np.testing.assert_allclose(*mirrored, rtol=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"), [({"divergence": "up"}, "forward, reverse"), ({"temperature": 0.0}, "above 0")]
)
def test_an_invalid_divergence_or_temperature_is_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        teacher_divergence(**wrong)


def test_bradley_terry_has_the_value_and_gradient_of_its_formula():
    chosen, rejected, margin = RNG.normal(size=(3, 6))
    scores = Scores(*(torch.tensor(x, requires_grad=True) for x in (chosen, rejected, margin)))
    losses = bradley_terry(scores, centre=0.01)
    z = chosen - rejected - margin
    np.testing.assert_allclose(losses.detach(), np.log1p(np.exp(-z)) + 0.01 * (chosen + rejected) ** 2, rtol=1e-9)
    losses.sum().backward()
    slope = -1 / (1 + np.exp(z))
    np.testing.assert_allclose(scores.chosen.grad, slope + 0.02 * (chosen + rejected), rtol=1e-9)
    np.testing.assert_allclose(scores.rejected.grad, -slope + 0.02 * (chosen + rejected), rtol=1e-9)


def test_bradley_terry_by_hand():
    zero = torch.zeros(1)
    assert float(bradley_terry(Scores(zero, zero, zero))) == pytest.approx(0.693147, abs=1e-6)
    assert float(bradley_terry(Scores(zero + 3, zero + 1, zero + 2))) == pytest.approx(0.693147, abs=1e-6)
    assert float(bradley_terry(Scores(zero + 1e4, zero - 1e4, zero))) == 0.0
    assert float(bradley_terry(Scores(zero - 1e4, zero + 1e4, zero))) == pytest.approx(2e4)
