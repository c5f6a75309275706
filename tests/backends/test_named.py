"""Algorithms are sent to other processes by name and rebuilt there; others are refused before training."""

from dataclasses import replace
from functools import partial

import pytest

from oxrl.algorithms import ALGORITHMS, algorithm
from oxrl.backends.distributed.named import NamedAlgorithm
from oxrl.types import Losses, Read


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_is_sent_by_name(name):
    built = algorithm(name)
    assert NamedAlgorithm.of(built) == NamedAlgorithm(name, built.parameters)


SCALED = """
from oxrl.algorithms.preference import Pairs

def scaled(pairs: Pairs, *, by: float = 2.0):
    return -by * (pairs.chosen - pairs.rejected)
"""


def test_a_loss_in_a_file_is_sent_by_its_path(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(SCALED)
    assert NamedAlgorithm.of(algorithm(f"{file}:scaled", by=3.0)).rebuilt().parameters["by"] == 3.0


def flat(outputs, batch, scale=1.0):
    return Losses({}, {})


DPO = algorithm("dpo")


@pytest.mark.parametrize(
    "changed",
    [
        {"name": "my_dpo"},
        {"loss": flat},
        {"loss": algorithm("ipo").loss},
        {"loss": algorithm("dpo", beta=0.7).loss},
        {"loss": partial(DPO.loss)},
        {"parameters": {**DPO.parameters, "beta": 0.7}},
        {"needs": ()},
        {"reads": {"kl": Read(flat)}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_an_algorithm_that_other_ranks_would_rebuild_differently_is_refused(changed):
    with pytest.raises(ValueError, match=r"dpo was changed in this process.*my_file.py:my_loss"):
        NamedAlgorithm.of(replace(DPO, **changed))


def test_a_changed_credit_is_no_obstacle_because_workers_do_not_use_it():
    assert NamedAlgorithm.of(replace(DPO, credit=flat)) == NamedAlgorithm("dpo", DPO.parameters)
