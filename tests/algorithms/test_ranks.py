"""The gradient does not depend on the number of ranks or on their micro-batches: in float64, for every algorithm."""

from itertools import pairwise

import pytest

from oxrl.algorithms import ALGORITHMS, algorithm
from oxrl.data.pack import collate, count_units, pack
from oxrl.loops.step import credit_step
from tests.algorithms.bigram import BigramBackend, relative_difference

pytestmark = pytest.mark.anyio
EXTRAS = {"kl_coef": 0.3, "entropy_coef": 0.2}


@pytest.fixture
def anyio_backend():
    return "asyncio"


def parameters_for(name):
    known = ALGORITHMS[name].schema()
    return {key: value for key, value in EXTRAS.items() if key in known}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", ALGORITHMS)
async def test_the_gradient_does_not_depend_on_the_number_of_ranks(name, ranks, rows_of):
    backend, built = BigramBackend(260), algorithm(name, **parameters_for(name))
    credited = await credit_step(backend, built, rows_of(name, 9, 0), 1_000_000, {})
    counts = count_units(credited)
    whole = backend.gradient([collate(credited)], built, counts)
    total = dict.fromkeys(whole, 0.0)
    ends = [len(credited) * rank**2 // ranks**2 for rank in range(ranks + 1)]  # the last rank has the most items
    for rank, (start, end) in enumerate(pairwise(ends)):
        assert start < end
        batches = [collate(part) for part in pack(credited[start:end], 60 + 40 * rank)]
        part = backend.gradient(batches, built, counts)
        total = {key: total[key] + part[key] for key in total}
    assert relative_difference(whole, total) < 1e-12


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3", "k3_weighted", "full"])
@pytest.mark.parametrize("correction", ["none", "truncated", "masked", "sequence"])
async def test_nor_on_micro_batches_with_any_estimator_or_correction(estimator, correction, rows_of):
    backend = BigramBackend(260)
    built = algorithm("gspo", kl_coef=0.3, kl_estimator=estimator, correction=correction)
    items = rows_of("gspo", 5, 3)
    whole = await backend.step_gradient(items, built)
    assert relative_difference(whole, await backend.step_gradient(items, built, budget=60)) < 1e-12
