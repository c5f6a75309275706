"""How an algorithm is sent to other processes: as a name or import path and parameters, from which they rebuild it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from oxrl.algorithms import algorithm as named_algorithm
from oxrl.types import Algorithm


class NamedAlgorithm(NamedTuple):
    """`NamedAlgorithm("dpo", {"beta": 0.2})`."""

    source: str
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, algorithm: Algorithm) -> NamedAlgorithm:
        """Return the name and parameters; raise if other ranks would rebuild another algorithm from them."""
        parts = zip(algorithm.worker_parts, algorithm.built, strict=False)
        if not algorithm.built or any(now is not then for now, then in parts):
            raise ValueError(
                f"{algorithm.name} was changed in this process, so other ranks cannot rebuild it by name: put the "
                "loss into a file and use algorithm('my_file.py:my_loss')"
            )
        return cls(algorithm.source, dict(algorithm.parameters))

    def rebuilt(self) -> Algorithm:
        return named_algorithm(self.source, **self.parameters)
