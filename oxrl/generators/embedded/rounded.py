"""Sampling from a copy of the trainer's module in another precision.

Processors with bfloat16 instructions sample faster with it than in float32. The log-probs are those of the copy, so
that losses can correct for the difference (`correction`).
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

from oxrl.generators.embedded.generator import EmbeddedGenerator
from oxrl.types import Weights

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class RoundedGenerator(EmbeddedGenerator):
    """`RoundedGenerator(model, tokenizer, torch.bfloat16)`: `update_weights` copies the module's weights again."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any, dtype: torch.dtype, **options: Any) -> None:
        rounded: PreTrainedModel = copy.deepcopy(model).to(dtype).requires_grad_(False)
        super().__init__(rounded, tokenizer, **options)
        self.source = model

    async def update_weights(self, weights: Weights) -> None:
        """Round the weights of the module that this generator was built with."""
        if weights.module is not self.source:
            raise ValueError("a rounded generator copies the module it was built with; build another one for this one")
        with torch.no_grad():
            originals = self.source.state_dict()
            for name, tensor in self.model.state_dict().items():
                tensor.copy_(originals[name])
        await super().update_weights(weights._replace(module=self.model))
