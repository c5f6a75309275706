"""Whether trained tensors move and frozen ones do not, by one sum over the bits of each tensor: no copy is kept."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from oxrl.weights.checkpoint_names import followed_name
from oxrl.weights.fingerprint import bit_sums

if TYPE_CHECKING:
    from torch import Tensor, nn

UPDATES = 3  # after which every trained tensor has moved: with LoRA, half of them not in the first one
LEAST_RATE = 1e-6  # a learning rate below it may not change a number of 1.0 in float32


class ParameterWatch:
    """`ParameterWatch(module, backend)` before the first update; `after(metrics)` after each."""

    def __init__(self, module: nn.Module, backend: Any) -> None:
        named = dict(module.named_parameters())
        optimizer = getattr(getattr(backend, "backend", backend), "optimizer", None)
        masters: Mapping[str, Tensor] = getattr(optimizer, "masters", {})  # float32 where the model has half precision
        optimised = {id(weight) for weight in getattr(optimizer, "parameters", {}).values()}
        others = {name: each for name, each in named.items() if each.requires_grad and id(each) not in optimised}
        self.trained: dict[str, Tensor] = {**masters, **others}
        frozen = {name: weight for name, weight in named.items() if not weight.requires_grad}
        self.frozen = {name: each for name, each in frozen.items() if followed_name(name) is None}  # a moving reference
        self.updates = 0
        self.rate = 0.0
        self._before = bit_sums(self.trained)
        self._frozen_before = bit_sums(self.frozen)
        self._moved: set[str] = set()

    def after(self, metrics: Mapping[str, float]) -> None:
        """Take over an update; one without a gradient moves nothing."""
        if not metrics.get("grad_norm"):
            return
        self.updates += 1
        self.rate = max(self.rate, metrics.get("lr", LEAST_RATE))
        now = bit_sums(self.trained)
        self._moved |= {name for name, total in now.items() if total != self._before[name]}

    @property
    def decided(self) -> bool:
        return (self.updates >= UPDATES and self.rate >= LEAST_RATE) or len(self._moved) == len(self.trained)

    def unmoved(self, *, all_trained: bool) -> str | None:
        """`all_trained`: every tensor should be, as without LoRA."""
        if still := sorted(self.trained.keys() - self._moved):
            return (
                f"{len(still)} of {len(self.trained)} trained tensors have not moved in {self.updates} updates: "
                f"{_names(still)}"
            )
        if all_trained and self.frozen:
            return (
                f"{len(self.frozen)} of {len(self.frozen) + len(self.trained)} tensors are frozen though all weights "
                f"are to be trained: {_names(sorted(self.frozen))}"
            )
        return None

    def moved_frozen(self) -> str | None:
        now = bit_sums(self.frozen)
        moved = sorted(name for name, total in now.items() if total != self._frozen_before[name])
        return f"{len(moved)} of {len(now)} frozen tensors have moved: {_names(moved)}" if moved else None


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
