"""A batch of flat rows through any transformers decoder: hidden states, then statistics of the tokens.

Linears see `[1, T]`; attention runs row by row through functions registered with transformers' attention interface, so
rows never see each other and nothing is padded. A model for which that cannot be shown to hold (layers with state, an
attention that ignores the registered function) runs length-sorted with right padding instead. `probe` decides, and
also proves that our projection gives the model's own logits. What a pass is worth is not known here.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from oxrl.data.pack import collate
from oxrl.tensors import Head, Other, Statistic, token_logprobs
from oxrl.types import Batch, Outputs, Row

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Layout = Literal["packed", "padded"]
HEADS = "heads.safetensors"
PACKED = {"sdpa": "oxrl_sdpa", "eager": "oxrl_eager"}

_rows_are_packed: ContextVar[bool] = ContextVar("_rows_are_packed", default=False)
_windows_seen: ContextVar[list[int | None] | None] = ContextVar("_windows_seen", default=None)


class LanguageModel(nn.Module):
    """ONE module that holds body, projection and heads, which is what a backend shards; all passes go through it."""

    def __init__(self, model: PreTrainedModel, heads: Sequence[str] = ()) -> None:
        super().__init__()
        self.model = model
        self.layout: Layout = "padded"  # always right; `prepare_layout` finds out whether packed is too
        width = self.inner.get_output_embeddings().weight.shape[1]
        # Zero is a fair first guess of a value or score, and the same one on every machine.
        self.heads = nn.ModuleDict({name: _zero_linear(width).to(model.device) for name in heads})

    @property
    def inner(self) -> PreTrainedModel:
        """The transformers model, below an adapter if there is one."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    def forward(
        self, batch: Batch, statistics: Mapping[str, Statistic] = MappingProxyType({}), other: Other | None = None
    ) -> Outputs:
        hidden = self.hidden(batch)
        values = token_logprobs(hidden, batch.tokens, batch.mask, head_of(self.inner), statistics, other)
        return Outputs(values.pop("logprob"), values, **self._read_heads(hidden, batch))

    def hidden(self, batch: Batch) -> Tensor:
        body = getattr(self.inner, self.inner.base_model_prefix)
        return _packed_hidden(body, batch) if self.layout == "packed" else _padded_hidden(body, batch)

    def _read_heads(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        """A value before each trained token and after each row; a score at the last token of each row."""
        last = torch.tensor(batch.borders[1:], device=hidden.device) - 1
        read: dict[str, Tensor] = {}
        if "value" in self.heads:
            values = self.heads["value"](hidden.float())[:, 0]
            read["value"] = values.roll(1) * batch.mask
            read["last_value"] = values[last]
        if "score" in self.heads:
            read["score"] = self.heads["score"](hidden[last].float())[:, 0]
        return read

    def save_heads(self, folder: Path) -> None:
        from safetensors.torch import save_file

        if len(self.heads):
            save_file(self.heads.state_dict(), folder / HEADS)

    def load_heads(self, folder: Path) -> None:
        from safetensors.torch import load_file

        if len(self.heads):
            self.heads.load_state_dict(load_file(folder / HEADS))

    def as_other(self, batch: Batch) -> Other:
        """This model as the one that another is compared with."""
        with torch.no_grad():
            return Other(self.hidden(batch), head_of(self.inner))


def _zero_linear(width: int) -> nn.Linear:
    layer = nn.Linear(width, 1, bias=False)
    nn.init.zeros_(layer.weight)
    return layer


def head_of(model: PreTrainedModel) -> Head:
    config, projection = model.config.get_text_config(), model.get_output_embeddings()
    # Granite divides its logits, Cohere multiplies them, Gemma caps them; `probe` catches what is not known here.
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    bias = getattr(projection, "bias", None)
    return Head(projection.weight, bias, float(scale), getattr(config, "final_logit_softcapping", None))


def _packed_hidden(body: nn.Module, batch: Batch) -> Tensor:
    borders = torch.tensor(batch.borders, dtype=torch.int32, device=batch.tokens.device)
    longest = max(end - start for start, end in pairwise(batch.borders))
    token = _rows_are_packed.set(True)
    try:
        output = body(
            input_ids=batch.tokens[None],
            position_ids=batch.positions[None],
            use_cache=False,  # with a cache, position ids are ignored and rows leak into each other
            cu_seq_lens_q=borders,
            cu_seq_lens_k=borders,
            max_length_q=longest,
            max_length_k=longest,
            row_borders=batch.borders,
        )
    finally:
        _rows_are_packed.reset(token)
    hidden: Tensor = output.last_hidden_state[0]
    return hidden


def _padded_hidden(body: nn.Module, batch: Batch) -> Tensor:
    rows = [batch.tokens[start:end] for start, end in pairwise(batch.borders)]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    lengths = torch.tensor([len(row) for row in rows], device=tokens.device)
    present = torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]
    output = body(input_ids=tokens, attention_mask=present.long(), use_cache=False)
    hidden: Tensor = output.last_hidden_state[present]
    return hidden


def _row_by_row(name: str, attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An attention function for transformers: `attend` inside each row of `[1, heads, T, head_dim]`."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        row_borders: tuple[int, ...] | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if row_borders is None:  # a pass that is not ours, generation with a cache, say
            return _of_transformers(name, module)(module, query, key, value, attention_mask, **options)
        window = _note_window(options)
        if name == "sdpa" and query.is_cuda and query.dtype != torch.float32 and not options.get("dropout"):
            return _variable_length(query, key, value, window, options), None
        rows = [
            attend(*(x[:, :, start:end] for x in (query, key, value)), window, options)
            for start, end in pairwise(row_borders)
        ]
        return torch.cat(rows, dim=2).transpose(1, 2), None

    return attention


def _attend_sdpa(query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]) -> Tensor:
    length = query.shape[2]
    mask = None if window is None or length <= window else _causal_mask(length, window, query.device)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=options.get("dropout") or 0.0,
        is_causal=mask is None,
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_eager(query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]) -> Tensor:
    """Spelt out: softmax in float32, with the soft cap that some models put on attention scores."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (options.get("scaling") or query.shape[-1] ** -0.5)
    if (cap := options.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    allowed = _causal_mask(query.shape[2], window, query.device)
    weights = scores.float().masked_fill(~allowed, float("-inf")).softmax(-1).to(query.dtype)
    return nn.functional.dropout(weights, options.get("dropout") or 0.0) @ value


def _variable_length(query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]) -> Tensor:
    """All rows in one flash-attention kernel, which a GPU has for half precision."""
    from torch.nn.attention.varlen import varlen_attn

    borders, longest = options["cu_seq_lens_q"], options["max_length_q"]
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    shared_heads: dict[str, Any] = {"enable_gqa": True} if _takes_shared_heads() else {}
    if not shared_heads:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    attended = varlen_attn(
        q,
        k,
        v,
        borders,
        borders,
        longest,
        longest,
        scale=options.get("scaling"),
        window_size=(-1 if window is None else window - 1, 0),
        **shared_heads,
    )
    assert isinstance(attended, Tensor), "a tuple comes only when log-sum-exp is asked for"
    return attended[None]


@cache
def _takes_shared_heads() -> bool:
    """Whether torch's kernel takes fewer key heads than query heads; it learned to after torch 2.11."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


def _note_window(options: dict[str, Any]) -> int | None:
    window: int | None = options.get("sliding_window")
    seen = _windows_seen.get()
    if seen is not None:
        seen.append(window)
    return window


def _causal_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None]
    return (distance >= 0) & (distance < (window or length))


def _of_transformers(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Transformers' own attention."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
        name,
        # eager attention lives in each model's own file, under this name by convention
        getattr(sys.modules[type(module).__module__], "eager_attention_forward", None),
    )
    return function


def register_attention() -> None:
    """Make the row-by-row functions known to transformers; harmless when done twice."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for name, attend in (("sdpa", _attend_sdpa), ("eager", _attend_eager)):
        AttentionInterface.register(PACKED[name], _row_by_row(name, attend))
        AttentionMaskInterface.register(PACKED[name], _mask_unless_packed(ALL_MASK_ATTENTION_FUNCTIONS[name]))


def _mask_unless_packed(mask_function: Any) -> Any:
    def mask(*args: Any, **kwargs: Any) -> Any:
        return None if _rows_are_packed.get() else mask_function(*args, **kwargs)

    return mask


class Probed(NamedTuple):
    """What `prepare_layout` found: how rows will run, and why in words for the log."""

    layout: Layout
    reason: str


def prepare_layout(model: LanguageModel) -> Probed:
    """Prove on a few tokens that packed rows equal single ones; where they do not, fall back to padded rows."""
    inner, was_training = model.inner, model.training
    attention = _honest_attention(inner)
    batch = _probe_batch(inner)
    model.eval()
    with torch.no_grad():
        single = _single_hidden(inner, batch)
        _check_projection(inner, batch, single)
        reason = _why_not_packed(model, batch, single, attention)
        if reason is not None:
            inner.set_attn_implementation(attention)
        model.layout = "packed" if reason is None else "padded"
    model.train(was_training)
    if reason is None:
        return Probed("packed", f"rows run packed ({attention} attention, row by row)")
    return Probed("padded", f"rows run with padding: {reason}")


def _honest_attention(inner: PreTrainedModel) -> str:
    """The model's attention; eager where transformers' sdpa would leave out the soft cap on attention scores."""
    attention: str = inner.config._attn_implementation
    if attention in PACKED.values():  # it was prepared before
        attention = attention.removeprefix("oxrl_")
        inner.set_attn_implementation(attention)
    if attention == "sdpa" and getattr(inner.config.get_text_config(), "attn_logit_softcapping", None):
        inner.set_attn_implementation("eager")
        return "eager"
    return attention


def _why_not_packed(model: LanguageModel, batch: Batch, single: Tensor, attention: str) -> str | None:
    register_attention()
    inner = model.inner
    if attention not in PACKED and not attention.startswith("flash_attention"):
        return f"{attention} attention has no packed form here"
    inner.set_attn_implementation(PACKED.get(attention, attention))
    body = getattr(inner, inner.base_model_prefix)
    with _watch_windows() as seen:
        try:
            packed = _packed_hidden(body, batch)
        except (TypeError, RuntimeError, ValueError) as error:
            return f"the model does not take packed rows ({str(error).splitlines()[0]})"
    expected = _windows_expected(inner)
    if attention in PACKED and sum(window is not None for window in seen) != expected:
        return f"{expected} layers have a sliding or chunked window, but it does not reach their attention"
    gap, allowed = _relative_gap(packed, single)
    if gap > allowed:
        return f"packed rows differ from single rows by {gap:.1e}, so its layers carry state across rows"
    return None


def _probe_batch(inner: PreTrainedModel) -> Batch:
    vocabulary = inner.get_input_embeddings().weight.shape[0]
    numbers = np.random.default_rng(0)
    rows = [Row(f"probe {n}", numbers.integers(0, vocabulary, n), np.arange(n) > 0) for n in (7, 3, 12)]
    return collate([(row,) for row in rows], inner.device)


def _single_hidden(inner: PreTrainedModel, batch: Batch) -> Tensor:
    """Each row alone, by the model's own attention, cache off: the truth that packing must meet."""
    body = getattr(inner, inner.base_model_prefix)
    rows = [
        body(input_ids=batch.tokens[None, start:end], use_cache=False).last_hidden_state[0]
        for start, end in pairwise(batch.borders)
    ]
    return torch.cat(rows)


def _check_projection(inner: PreTrainedModel, batch: Batch, hidden: Tensor) -> None:
    """Our log-probs from hidden states against the model's own logits."""
    ours = token_logprobs(hidden, batch.tokens, batch.mask, head_of(inner))["logprob"]
    start, end = batch.borders[-2:]
    logits = inner(input_ids=batch.tokens[None, start:end], use_cache=False).logits[0].float()
    theirs = logits[:-1].log_softmax(-1).gather(1, batch.tokens[start + 1 : end, None])[:, 0]
    gap = float((ours[start + 1 : end] - theirs).abs().max())
    allowed = 1e-3 if inner.dtype == torch.float32 else 0.25
    if not gap <= allowed:
        raise ValueError(
            f"{type(inner).__name__} turns hidden states into logits in a way that is not known here "
            f"(log-probs differ by {gap:.2g}); its scale or soft cap must be added to head_of"
        )


@contextmanager
def _watch_windows() -> Iterator[list[int | None]]:
    seen: list[int | None] = []
    token = _windows_seen.set(seen)
    try:
        yield seen
    finally:
        _windows_seen.reset(token)


def _windows_expected(inner: PreTrainedModel) -> int:
    config = inner.config.get_text_config()
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        return sum(kind in ("sliding_attention", "chunked_attention") for kind in kinds)
    return config.num_hidden_layers if getattr(config, "sliding_window", None) else 0


def _relative_gap(one: Tensor, other: Tensor) -> tuple[float, float]:
    gap = float((one - other).float().norm() / other.float().norm().clamp_min(1e-12))
    return gap, (1e-4 if one.dtype == torch.float32 else 3e-2)
