"""Choose how rows are run: packed, with common prompts computed once, or padded; verified on a few rows at load.

Packed rows must have the hidden states of single ones by the model's own forward, with media if it has towers, and our
projection must reproduce the model's logits. The passes themselves are in `forward`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch
from torch import Tensor

from oxrl.backends.forward import (
    PACKED,
    LanguageModel,
    Probed,
    _one_by_one,
    _packed_hidden,
    _Packing,
    _share,
    attention_of,
    head_of,
    register_attention,
    set_attention,
    watch_windows,
)
from oxrl.data.media_features import MediaRow, body_of, own_inputs, place, probe_rows, rows_of
from oxrl.data.pack import collate
from oxrl.tensors import count_windowed_layers, token_logprobs
from oxrl.types import Batch, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def prepare_layout(model: LanguageModel) -> Probed:
    """Check on a few tokens that packed rows equal single rows; fall back to padded rows if they do not."""
    inner, was_training = model.inner, model.training
    attention = _select_attention(inner)
    batch = probe_batch(inner)
    model.eval()
    with torch.no_grad():
        single = _single_hidden(inner, batch)
        _check_projection(inner, batch, single)
        reason = _why_not_packed(inner, batch, single, attention)
        if reason is not None:
            set_attention(inner, attention)
        unshared = reason or _why_not_shared(inner, batch, single, attention)
    model.train(was_training)
    packed = f"rows are packed without padding ({attention} attention); a prompt that rows share is computed"
    if reason is not None:
        probed = Probed("padded", f"rows run with padding: {reason}")
    elif unshared is not None:
        probed = Probed("packed", f"{packed} in each of them: {unshared}")
    else:
        probed = Probed("shared", f"{packed} once")
    model.layout, model.probed = probed.layout, probed
    return probed


LayOut: TypeAlias = Callable[[Batch, Tensor | None], _Packing]


def _select_attention(inner: PreTrainedModel) -> str:
    """Return the model's attention; eager where transformers' sdpa would ignore the soft cap on attention scores."""
    attention = attention_of(inner)
    if attention in PACKED.values():  # prepared before
        attention = attention.removeprefix("oxrl_")
        set_attention(inner, attention)
    if attention == "sdpa" and getattr(inner.config.get_text_config(), "attn_logit_softcapping", None):
        set_attention(inner, "eager")
        return "eager"
    return attention


def _why_not_packed(inner: PreTrainedModel, batch: Batch, single: Tensor, attention: str) -> str | None:
    register_attention()
    if attention not in PACKED and not attention.startswith("flash_attention"):
        return f"{attention} attention has no packed implementation"
    set_attention(inner, PACKED.get(attention, attention))
    with watch_windows() as seen:
        reason = _why_different(inner, _one_by_one, batch, single)
    expected = count_windowed_layers(inner.config.get_text_config())
    if reason is None and attention in PACKED and sum(window is not None for window in seen) != expected:
        return f"{expected} layers have a sliding or chunked window, but it is not passed to their attention"
    return reason


def _why_not_shared(inner: PreTrainedModel, batch: Batch, single: Tensor, attention: str) -> str | None:
    if attention not in PACKED:
        return f"{attention} attention has no implementation for shared prefixes"
    return _why_different(inner, _share, batch, single)


def _why_different(inner: PreTrainedModel, lay_out: LayOut, batch: Batch, single: Tensor) -> str | None:
    try:
        placed = place(inner, rows_of(batch))
        packed = _packed_hidden(inner, lay_out(batch, None if placed is None else placed.positions), placed)
    except (TypeError, RuntimeError, ValueError) as error:
        return f"the model does not accept packed rows ({str(error).splitlines()[0]})"
    gap = relative_gap(packed, single)
    if gap <= rounding(packed.dtype):
        return None
    of_text = torch.tensor([not media for media in batch.media or ((),) * batch.num_rows], device=packed.device)
    text = of_text[batch.segments]
    if not text.all() and relative_gap(packed[text], single[text]) <= rounding(packed.dtype):
        return (
            f"packed rows with media differ from single rows by {gap:.1e}, as if attention in a medium were not causal"
        )
    return f"packed rows differ from single rows by {gap:.1e}, as if layers carried state across rows"


def probe_batch(inner: PreTrainedModel) -> Batch:
    """Return rows of several lengths, of which the last three share a prefix; then rows with media, if it has towers.

    Of those with media, two share a prompt, and another one has the same tokens with a different medium.
    """
    vocabulary = inner.get_input_embeddings().weight.shape[0]
    numbers = np.random.default_rng(0)
    rows = [numbers.integers(0, vocabulary, n) for n in (7, 3, 12)]
    rows += [np.concatenate([rows[2][:9], numbers.integers(0, vocabulary, n)]) for n in (2, 5)]
    probes = probe_rows(inner, [MediaRow(f"probe {number}", row) for number, row in enumerate(rows)])
    return collate([(_as_row(probe),) for probe in probes], inner.device)


def _as_row(probe: MediaRow) -> Row:
    trained = 2 if probe.media else len(probe.tokens) - 1
    return Row(probe.id, probe.tokens, np.arange(len(probe.tokens)) >= len(probe.tokens) - trained, media=probe.media)


def _single_hidden(inner: PreTrainedModel, batch: Batch) -> Tensor:
    """Return hidden states of each row alone, by the model's own forward without a cache: the reference for packing."""
    body = body_of(inner)
    rows = [body(**own_inputs(inner, row), use_cache=False).last_hidden_state[0] for row in rows_of(batch)]
    return torch.cat(rows)


def _check_projection(inner: PreTrainedModel, batch: Batch, hidden: Tensor) -> None:
    """Compare our log-probs from hidden states with those of the model's logits; raise if they differ."""
    if not bool(hidden.isfinite().all()):
        raise ValueError(f"the hidden states of {type(inner).__name__} are not finite: check that its weights are")
    ours = token_logprobs(hidden, batch.tokens, batch.mask, head_of(inner))["logprob"]
    start, end = batch.borders[-2:]
    logits = inner(**own_inputs(inner, rows_of(batch)[-1]), use_cache=False).logits[0].float()
    theirs = logits[:-1].log_softmax(-1).gather(1, batch.tokens[start + 1 : end, None])[:, 0]
    gap = float((ours[start + 1 : end] - theirs)[batch.mask[start + 1 : end]].abs().max())
    allowed = 1e-3 if inner.dtype == torch.float32 else 0.25
    if not gap <= allowed:
        raise ValueError(
            f"{type(inner).__name__} computes logits from hidden states in an unsupported way "
            f"(log-probs differ by {gap:.2g}): add its scale or soft cap to head_of in oxrl/backends/forward.py"
        )


def relative_gap(one: Tensor, other: Tensor) -> float:
    """Return the relative L2 distance of two tensors that should be equal."""
    return float((one - other).float().norm() / other.float().norm().clamp_min(1e-12))


def rounding(dtype: torch.dtype) -> float:
    """Return the relative gap that rounding in this precision explains."""
    return 1e-4 if dtype == torch.float32 else 3e-2
