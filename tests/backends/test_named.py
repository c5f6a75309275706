"""What travels as a name is built there as it is here; what is not is refused before anything is trained with it."""

from dataclasses import replace
from functools import partial

import pytest

from oxrl.algorithms import ALGORITHMS, algorithm
from oxrl.backends.distributed.named import NamedAlgorithm, same_function
from oxrl.types import Losses, Read


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_travels_by_its_name(name):
    made = algorithm(name)
    assert NamedAlgorithm.of(made) == NamedAlgorithm(name, made.parameters)


SCALED = """
from oxrl.algorithms.preference import Pairs

def scaled(pairs: Pairs, *, by: float = 2.0):
    return -by * (pairs.chosen - pairs.rejected)
"""


def test_a_loss_in_a_file_travels_by_its_place(tmp_path):
    file = tmp_path / "own.py"
    file.write_text(SCALED)
    assert NamedAlgorithm.of(algorithm(f"{file}:scaled", by=3.0)).rebuilt().parameters["by"] == 3.0


def flat(outputs, batch, scale=1.0):
    return Losses({}, {})


DPO = algorithm("dpo")


@pytest.mark.parametrize(
    "changed",
    [
        {"loss": flat},
        {"loss": algorithm("dpo", beta=0.7).loss},
        {"loss": partial(DPO.loss)},
        {"loss": algorithm("ipo").loss},
        {"parameters": {**DPO.parameters, "beta": 0.7}},
        {"needs": ()},
        {"reads": {"kl": Read(flat)}},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_what_would_be_another_one_there_is_refused(changed):
    with pytest.raises(ValueError, match=r"dpo was made in this process.*my_file.py:my_loss"):
        NamedAlgorithm.of(replace(DPO, **changed))


def made(held, *, positional=1, named=1):
    def function(value, one=positional, *, two=named):
        return value, held, one, two

    return function


def test_functions_are_alike_by_their_code_and_all_that_they_hold():
    assert same_function(made(1), made(1))
    assert not any(same_function(made(1), other) for other in (made(2), made(1, positional=2), made(1, named=2), flat))
