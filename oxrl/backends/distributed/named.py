"""How an algorithm travels to other processes: as a name and parameters, of which the same is built there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import FunctionType
from typing import Any, NamedTuple

from oxrl.algorithms import algorithm as named_algorithm
from oxrl.types import Algorithm


class NamedAlgorithm(NamedTuple):
    """`NamedAlgorithm("dpo", {"beta": 0.2})`."""

    source: str
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, algorithm: Algorithm) -> NamedAlgorithm:
        """Refused where the other ranks would train with another loss than the one that was asked for."""
        named = cls(algorithm.source or algorithm.name, dict(algorithm.parameters))
        there = named.rebuilt()
        for part in ("loss", "reads", "needs"):  # what a worker asks of it
            if not same_function(getattr(there, part), getattr(algorithm, part)):
                raise ValueError(
                    f"{part} of {algorithm.name} was made in this process, so other ranks cannot find it: write it "
                    "into a file and name it there, algorithm('my_file.py:my_loss')"
                )
        return named

    def rebuilt(self) -> Algorithm:
        return named_algorithm(self.source, **self.parameters)


def same_function(one: Any, other: Any) -> bool:
    """Whether two values do the same: functions by their code and all that they hold, else equality."""
    if one is other:
        return True
    if isinstance(one, partial) and isinstance(other, partial):
        return same_function((one.func, one.args, one.keywords), (other.func, other.args, other.keywords))
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__ == other.__code__ and same_function(_held(one), _held(other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same_function(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same_function, one, other))
    return bool(one == other)


def _held(function: FunctionType) -> tuple[Any, ...]:
    cells = tuple(cell.cell_contents for cell in function.__closure__ or ())
    return cells, function.__defaults__, function.__kwdefaults__
