"""Compile the decoder layers of a packed forward pass, one by one, with lengths that may vary.

Only passes with packed rows on a GPU in half precision are compiled: their attention is one kernel for all rows. Other
passes of the same module, such as sampling, run the layers as they are.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from oxrl.backends.forward import LanguageModel
from oxrl.backends.layout import probe_batch, relative_gap, rounding
from oxrl.tensors import decoder_layers
from oxrl.types import Batch

logger = logging.getLogger(__name__)

WORTH_FLOPS = 5e16  # of training: some minutes on a large GPU, of which compiling saves a fifth and costs half a minute


def compile_layers(module: LanguageModel, wanted: bool | None = None, expected_tokens: float = 0.0) -> bool:
    """Compile the layers of `module`; return whether they are. `wanted` None: if the run is long enough to gain by it.

    The compiled pass is compared with the plain one on a few rows. If it differs or fails, the layers stay as they are.
    """
    parameters = sum(parameter.numel() for parameter in module.inner.parameters())
    if wanted is False or (wanted is None and 6 * parameters * expected_tokens < WORTH_FLOPS):
        return False
    reason = _why_not_compiled(module)
    if reason is None:
        logger.info("the decoder layers are compiled")
        module.compiled = True
        return True
    if wanted:
        raise ValueError(f"model.compile is true, but {reason}: set auto or false")
    logger.info("the decoder layers are not compiled: %s", reason)
    return False


def _why_not_compiled(module: LanguageModel) -> str | None:
    if module.layout == "padded":
        return "its rows are padded"
    batch, layers = probe_batch(module.inner), decoder_layers(module.inner)
    if not layers:
        return "transformers does not name its decoder layers"
    plain = _probe(module, batch)
    if not plain.is_cuda or plain.dtype == torch.float32:
        return f"that needs a GPU and half precision, and the model computes on {plain.device.type} in {plain.dtype}"
    for layer in layers:
        layer.forward = _when_packed(layer)
    try:
        gap = relative_gap(_probe(module, batch), plain)
        reason = None if gap <= 4 * rounding(plain.dtype) else f"the results of its compiled layers differ by {gap:.1e}"
    except (RuntimeError, TypeError) as error:  # of the compiler
        logger.debug("compiling failed", exc_info=True)
        reason = f"the compiler failed ({str(error).strip().splitlines()[0]})"
    if reason is not None:
        for layer in layers:
            del layer.forward
    return reason


def _when_packed(layer: nn.Module) -> Callable[..., Any]:
    plain = MethodType(type(layer).forward, layer)
    compiled = torch.compile(plain, dynamic=True)

    def forward(*arguments: Any, packing: Any = None, **options: Any) -> Any:
        if packing is None:
            return plain(*arguments, **options)
        return compiled(*arguments, packing=packing, **options)

    return forward


def _probe(module: LanguageModel, batch: Batch) -> Tensor:
    """Return a gradient that depends on the forward and the backward pass of all layers.

    It is that of a weighted sum of the hidden states with respect to the rows' input embeddings. For a sharded module,
    whose gradients are reduced over ranks, return the hidden states.
    """
    embedding = module.inner.get_input_embeddings()
    if hasattr(embedding.weight, "full_tensor"):
        return module.as_other(batch).hidden
    kept: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        kept.append(output.detach().requires_grad_())
        return kept[0]

    hook = embedding.register_forward_hook(keep)
    try:
        hidden = module.hidden(batch)
        weights = torch.linspace(-1.0, 1.0, hidden.numel(), device=hidden.device).view_as(hidden)
        (gradient,) = torch.autograd.grad((hidden.float() * weights).sum(), kept)
    finally:
        hook.remove()
    return gradient.detach()
