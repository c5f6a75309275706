"""A short digest of a module's trained weights, cheap enough for every step: where they are, without a copy."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor, nn

_WORDS = {1: "int8", 2: "int16", 4: "int32", 8: "int64"}


def bit_sums(weights: Mapping[str, Tensor]) -> dict[str, int]:
    """One number per tensor that changes with any of its bits."""
    import torch

    sums = [_words(weight.detach()).sum() for weight in weights.values()]
    return dict(zip(weights, torch.stack(sums).tolist() if sums else [], strict=True))


def fingerprint(module: nn.Module) -> str:
    """Equal for equal trained weights; another value, of whatever size, of any of them changes it.

    It is made of one sum per tensor, over its bits as integers: not proof against a forger.
    """
    trained = {name: weight for name, weight in module.named_parameters() if weight.requires_grad}
    text = ";".join(f"{name}:{total}" for name, total in bit_sums(trained).items())
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _words(weight: Tensor) -> Tensor:
    """The bits as integers: of 64 bits where they fit, of which sums are fast, else one per number."""
    import torch

    flat = weight.reshape(-1)
    fits = flat.numel() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if fits else getattr(torch, _WORDS[flat.element_size()]))
