"""Sequence-level rejection against float64 formulas, and its effect on loss and metrics."""

import numpy as np
import pytest
import torch

from oxrl.algorithms.policy import geometric_rejection, k3_rejection

LENGTHS = (3, 5, 2)
RNG = np.random.default_rng(0)
TRAINER = RNG.normal(-1.0, 0.2, sum(LENGTHS))
SAMPLER = TRAINER + np.repeat([0.002, 0.3, -0.3], LENGTHS)
MASK = np.array([0, 1, 1, 0, 1, 1, 1, 1, 0, 1], bool)
SEGMENT = np.repeat(np.arange(3), LENGTHS)


def by_formula(kind, bound):
    kept = np.zeros(len(MASK))
    for number in range(3):
        own = MASK & (number == SEGMENT)
        gap = (TRAINER - SAMPLER)[own]
        if kind == "geometric":
            keeps = 1 / (1 + bound) <= np.exp(gap).prod() ** (1 / len(gap)) <= 1 + bound
        else:
            keeps = np.mean(np.exp(gap) - 1 - gap) <= bound
        kept[own] = keeps
    return kept


@pytest.mark.parametrize("bound", [0.001, 0.01, 0.045, 0.05, 0.3, 0.4])
@pytest.mark.parametrize(("kind", "reject"), [("geometric", geometric_rejection), ("k3", k3_rejection)])
def test_a_sequence_outside_of_the_bounds_is_left_out_with_all_its_tokens(kind, reject, bound):
    tensors = [torch.from_numpy(each) for each in (TRAINER, SAMPLER, MASK, SEGMENT)]
    found = reject(*tensors, bound=bound).double().numpy()
    assert found.tolist() == by_formula(kind, bound).tolist()


def test_the_bounds_of_the_test_separate_the_sequences():
    assert {by_formula("geometric", bound).sum() for bound in (0.001, 0.01, 0.4)} == {0, 2, 7}
    assert {by_formula("k3", bound).sum() for bound in (0.01, 0.045, 0.05)} == {2, 6, 7}
