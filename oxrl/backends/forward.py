"""Forward pass of a batch of flat rows through any transformers decoder: hidden states, then token statistics.

Linears see `[1, T]`; attention runs row by row through functions registered with transformers' attention interface, so
rows never attend to each other and nothing is padded. A prefix that several rows share (the prompt of a group) is
computed once. Models that fail the check (layers with state, an attention that ignores the registered function) run
length-sorted with right padding instead. `prepare_layout` chooses the layout and verifies that our projection
reproduces the model's logits. Losses are defined elsewhere.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import groupby, pairwise
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from oxrl.data.media_features import (
    Placed,
    body_inputs,
    body_of,
    language_model_of,
    media_towers,
    padding_token,
    place,
    rows_of,
)
from oxrl.data.pack import worth_sharing
from oxrl.tensors import (
    Borders,
    Head,
    Other,
    Statistic,
    token_logprobs,
    variable_length_attention,
)
from oxrl.types import Batch, IntArray, Layout, Media, Outputs

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEADS = "heads.safetensors"
PACKED = {"sdpa": "oxrl_sdpa", "eager": "oxrl_eager"}

_rows_are_packed: ContextVar[bool] = ContextVar("_rows_are_packed", default=False)
_windows_seen: list[list[int | None]] = []  # not a context variable: compiled layers cannot read one


class Probed(NamedTuple):
    """Result of `prepare_layout`: the layout of rows, and the reason for the log."""

    layout: Layout
    reason: str


class LanguageModel(nn.Module):
    """One module with body, projection and heads: the unit that a backend shards. Every forward pass goes through it.

    Log-probs and statistics are computed at `temperature`, so that they are comparable with the sampler's.
    """

    def __init__(self, model: PreTrainedModel, heads: Sequence[str] = (), *, temperature: float = 1.0) -> None:
        super().__init__()
        if not temperature > 0:
            raise ValueError(f"log-probs need a positive temperature, not {temperature}; for greedy completions use 1")
        self.model = model
        self.temperature = temperature
        self.compiled = False  # `compile_layers` compiles the layers and the statistics of the head
        self.layout: Layout = "padded"  # always correct; `prepare_layout` checks whether packed is too
        self.probed: Probed | None = None
        width = self.inner.get_output_embeddings().weight.shape[1]
        self.heads = nn.ModuleDict({name: _Readout(width).to(model.device) for name in heads})

    @property
    def inner(self) -> PreTrainedModel:
        """The transformers model, without the PEFT wrapper."""
        return self.model.get_base_model() if hasattr(self.model, "peft_config") else self.model

    def forward(
        self,
        batch: Batch,
        statistics: Mapping[str, Statistic] = MappingProxyType({}),
        other: Other | None = None,
        *,
        to_be_compared: bool = False,
    ) -> Outputs | Other:
        """Return log-probs, statistics and head outputs of a batch; with `to_be_compared`, hidden states and head.

        A sharded module has its full weights only inside this call, so everything that reads a weight happens here.
        """
        hidden = self.hidden(batch)
        if to_be_compared:
            # Detached from the parameter, not only from its gradient: a sharded one is emptied when this call ends.
            return Other(hidden, self.head._replace(weight=self.head.weight.detach()))
        values = _token_values(hidden, batch, self.head, statistics, other)
        return Outputs(values.pop("logprob"), values, **self._read_heads(hidden, batch))

    @property
    def head(self) -> Head:
        return head_of(self.inner, self.temperature)._replace(compiled=self.compiled)

    def hidden(self, batch: Batch) -> Tensor:
        _check_rotation(self.inner, batch)
        placed = place(self.inner, rows_of(batch)) if batch.media or media_towers(self.inner) is not None else None
        if self.layout == "padded":
            hidden = _padded_hidden(self.inner, batch, placed)
        else:
            positions = None if placed is None else placed.positions
            lay_out = _share if self.layout == "shared" else _one_by_one
            hidden = _packed_hidden(self.inner, lay_out(batch, positions), placed)
        return hidden if placed is None or placed.idle is None else hidden + placed.idle.to(hidden.dtype)

    def _read_heads(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        """Return a value before each trained token and after each row, and a score at the last token of each row."""
        last = torch.tensor(batch.borders[1:], device=hidden.device) - 1
        read: dict[str, Tensor] = {}
        if "value" in self.heads:
            values = self.heads["value"](hidden)[:, 0]
            read["value"] = values.roll(1) * batch.mask
            read["last_value"] = values[last]
        if "score" in self.heads:
            # The sum of one column instead of the column: a sharded module must not return a view.
            read["score"] = self.heads["score"](hidden[last]).sum(1)
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
        """Return this model's hidden states and head, for statistics of another model that compare with it."""
        with torch.no_grad():
            other: Other = self(batch, to_be_compared=True)
            return other


class _Readout(nn.Linear):
    """One number per position, computed in float32 even if an engine keeps every weight in half precision."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, bias=False)
        # Zero is a neutral initial value or score, and deterministic.
        nn.init.zeros_(self.weight)

    def forward(self, hidden: Tensor) -> Tensor:
        return nn.functional.linear(hidden.float(), self.weight.float())


def _check_rotation(inner: PreTrainedModel, batch: Batch) -> None:
    """Raise if a longrope batch mixes short and long rows: one long row would change the angles of all of them."""
    config = inner.config.get_text_config()
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return
    limit = rope.get("original_max_position_embeddings") or config.original_max_position_embeddings
    if len({end - start > limit for start, end in pairwise(batch.borders)}) > 1:
        raise ValueError(
            f"{type(inner).__name__} (longrope) uses different rotary angles for rows of more than {limit} tokens, and "
            f"rows of both kinds cannot run together: set data.max_seq_len to {limit}, or train.micro_batch_tokens to 1"
        )


def _token_values(
    hidden: Tensor, batch: Batch, head: Head, statistics: Mapping[str, Statistic], other: Other | None
) -> dict[str, Tensor]:
    """`token_logprobs` of a batch, each row over its `allowed_tokens`: one projection for each distinct set."""
    if not batch.allowed_tokens:
        return token_logprobs(hidden, batch.tokens, batch.mask, head, statistics, other)
    rows_of: dict[tuple[int, ...], list[int]] = {}
    for row, tokens in enumerate(batch.allowed_tokens):
        rows_of.setdefault(tuple(sorted(set(tokens))), []).append(row)
    parts = []
    for tokens, rows in rows_of.items():
        mask = batch.mask & torch.isin(batch.segments, torch.tensor(rows, device=batch.segments.device))
        allowed = torch.tensor(tokens, device=hidden.device) if tokens else None
        parts.append(token_logprobs(hidden, batch.tokens, mask, head, statistics, other, allowed=allowed))
    return {name: torch.stack([part[name] for part in parts]).sum(0) for name in parts[0]}


def head_of(model: PreTrainedModel, temperature: float = 1.0) -> Head:
    config, projection = model.config.get_text_config(), model.get_output_embeddings()
    # Granite divides its logits, Cohere multiplies them, Gemma caps them; `prepare_layout` detects any other formula.
    scale = getattr(config, "logit_scale", None) or 1.0 / (getattr(config, "logits_scaling", None) or 1.0)
    cap = getattr(config, "final_logit_softcapping", None)
    # The sampler divides the capped logits by the temperature, so scale and cap are both divided.
    return Head(
        projection.weight, getattr(projection, "bias", None), float(scale) / temperature, cap and cap / temperature
    )


class _Packing(NamedTuple):
    """Input of a packed pass: N computed tokens, and T keys that they attend to.

    Of rows with a common prefix, one computes it and the others reuse its keys.
    """

    tokens: Tensor  # [N]
    positions: Tensor  # [N], or [3, N] for models that rotate by time, height and width
    lengths: tuple[tuple[int, int], ...]  # per row: computed tokens, keys
    keys: Tensor | None = None  # [T] index of each row's keys among the N; None: nothing is shared
    back: Tensor | None = None  # [T] index of each token of the batch among the N
    computed: Tensor | None = None  # [N] index of each token among the T

    def runs(self) -> list[tuple[int, int, int]]:
        """Return runs of adjacent rows with equal lengths as (rows, computed tokens per row, keys per row)."""
        return [(len(list(rows)), *shape) for shape, rows in groupby(self.lengths)]

    def borders(self, side: int) -> Tensor:
        lengths = torch.tensor([0, *(both[side] for both in self.lengths)])
        return lengths.cumsum(0).to(self.tokens.device, torch.int32)


def _one_by_one(batch: Batch, positions: Tensor | None = None) -> _Packing:
    positions = batch.positions if positions is None else positions
    lengths = tuple((end - start, end - start) for start, end in pairwise(batch.borders))
    return _Packing(batch.tokens, positions, lengths)


def _share(batch: Batch, positions: Tensor | None = None) -> _Packing:
    """Compute each common prefix once. In lexicographic order, a row's longest one is with its predecessor."""
    positions = batch.positions if positions is None else positions
    tokens = batch.tokens.cpu().numpy()
    rows = [tokens[start:end] for start, end in pairwise(batch.borders)]
    media = _media_numbers(batch)
    lexicographic = sorted(range(len(rows)), key=lambda row: (media[row], rows[row].astype(">i8").tobytes()))
    shared = [0] * len(rows)
    for before, row in pairwise(lexicographic):
        if media[before] == media[row]:
            shared[row] = _common_prefix(rows[before], rows[row])
    if not any(shared):
        return _one_by_one(batch, positions)
    lengths = [(len(row) - common, len(row)) for row, common in zip(rows, shared, strict=True)]
    laid_out = sorted(range(len(rows)), key=lambda row: lengths[row])  # adjacent rows of one shape attend in one call
    own = np.concatenate([np.arange(batch.borders[row] + shared[row], batch.borders[row + 1]) for row in laid_out])
    back = np.empty_like(tokens)
    back[own] = np.arange(len(own))
    indices = [back[start:end] for start, end in pairwise(batch.borders)]
    for before, row in pairwise(lexicographic):
        indices[row][: shared[row]] = indices[before][: shared[row]]
    keys = np.concatenate([indices[row] for row in laid_out])
    computed, keys_on_device, back_on_device = (
        torch.from_numpy(index).to(batch.tokens.device) for index in (own, keys, back)
    )
    return _Packing(
        batch.tokens[computed],
        positions[..., computed],
        tuple(lengths[row] for row in laid_out),
        keys_on_device,
        back_on_device,
        computed,
    )


def _media_numbers(batch: Batch) -> list[int]:
    """Number the distinct media of the rows: only rows with equal media may share tokens."""
    numbers: dict[tuple[Media, ...], int] = {}
    return [numbers.setdefault(media, len(numbers)) for media in batch.media or ((),) * batch.num_rows]


def _common_prefix(one: IntArray, row: IntArray) -> int:
    """Return how many tokens of `one` `row` reuses; the last token is always computed, so that no row is empty."""
    most = min(len(one), len(row) - 1)
    differs = one[:most] != row[:most]
    common = int(differs.argmax()) if differs.any() else most
    return common if worth_sharing(common, len(row)) else 0


def _packed_hidden(inner: PreTrainedModel, packing: _Packing, placed: Placed | None = None) -> Tensor:
    inputs = body_inputs(inner, packing.tokens[None], placed, packing.computed)
    token = _rows_are_packed.set(True)
    try:
        output = body_of(inner)(
            **inputs,
            position_ids=packing.positions.unsqueeze(-2),
            use_cache=False,  # with a cache, position ids are ignored and rows leak into each other
            cu_seq_lens_q=packing.borders(0),
            cu_seq_lens_k=packing.borders(1),
            max_length_q=max(own for own, _ in packing.lengths),
            max_length_k=max(keys for _, keys in packing.lengths),
            packing=packing,
        )
    finally:
        _rows_are_packed.reset(token)
    hidden: Tensor = output.last_hidden_state[0]
    # An embedding is a gather whose gradient is summed in a fixed order, on a GPU too.
    return hidden if packing.back is None else nn.functional.embedding(packing.back, hidden)


def _padded_hidden(inner: PreTrainedModel, batch: Batch, placed: Placed | None = None) -> Tensor:
    rows = [batch.tokens[start:end] for start, end in pairwise(batch.borders)]
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=padding_token(inner))
    lengths = torch.tensor([len(row) for row in rows], device=tokens.device)
    present = torch.arange(tokens.shape[1], device=tokens.device)[None] < lengths[:, None]
    inputs = body_inputs(inner, tokens, placed)
    if placed is not None and placed.positions is not None:
        own = [placed.positions[:, start:end].T for start, end in pairwise(batch.borders)]
        inputs["position_ids"] = nn.utils.rnn.pad_sequence(own, batch_first=True).permute(2, 0, 1)
    output = body_of(inner)(**inputs, attention_mask=present.long(), use_cache=False)
    hidden: Tensor = output.last_hidden_state[present]
    return hidden


def _row_by_row(name: str, attend: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """An attention function for transformers: `attend` inside each row of `[1, heads, N, head_dim]`."""

    def attention(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packing: _Packing | None = None,
        **options: Any,
    ) -> tuple[Tensor, Tensor | None]:
        if packing is None:  # a pass from outside this module, e.g. generation with a cache
            return _transformers_attention(name, module)(module, query, key, value, attention_mask, **options)
        window = _note_window(options)
        if packing.keys is not None:
            key, value = _select(key, packing.keys), _select(value, packing.keys)
        if name == "sdpa" and query.is_cuda and query.dtype != torch.float32 and not options.get("dropout"):
            return _variable_length(query, key, value, window, options), None
        return _by_shape(attend, packing, query, key, value, window, options), None

    return attention


def _by_shape(
    attend: Callable[..., Tensor],
    packing: _Packing,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    options: dict[str, Any],
) -> Tensor:
    """Call `attend` once per run of rows with one shape, as a batch. Returns `[1, N, heads, head_dim]`."""
    runs = packing.runs()
    # The gradient of a split is one concatenation; that of each slice would have the size of the full tensor.
    queries = torch.split(query[0], [count * own for count, own, _ in runs], dim=1)
    keys, values = (torch.split(x[0], [count * length for count, _, length in runs], dim=1) for x in (key, value))
    attended = [
        attend(*(x.view(len(x), count, -1, x.shape[-1]).transpose(0, 1) for x in rows), window, options)
        for (count, _, _), *rows in zip(runs, queries, keys, values, strict=True)
    ]
    return torch.cat([rows.transpose(1, 2).flatten(0, 1) for rows in attended])[None]


def _select(states: Tensor, indices: Tensor) -> Tensor:
    """Select `indices [T]` of `[1, heads, N, head_dim]`: `[1, heads, T, head_dim]`."""
    flat = states[0].transpose(0, 1)
    return nn.functional.embedding(indices, flat.flatten(1)).view(-1, *flat.shape[1:]).transpose(0, 1)[None]


def _attend_sdpa(query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]) -> Tensor:
    queries, keys = query.shape[2], key.shape[2]
    plain = queries == keys and (window is None or keys <= window)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if plain else _causal_mask(queries, keys, window, query.device),
        dropout_p=options.get("dropout") or 0.0,
        is_causal=plain,
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )


def _attend_eager(query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]) -> Tensor:
    """Explicit attention: softmax in float32, with the soft cap that some models apply to attention scores."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (options.get("scaling") or query.shape[-1] ** -0.5)
    if (cap := options.get("softcap")) is not None:
        scores = cap * torch.tanh(scores / cap)
    allowed = _causal_mask(query.shape[2], key.shape[2], window, query.device)
    weights = scores.float().masked_fill(~allowed, float("-inf")).softmax(-1).to(query.dtype)
    return nn.functional.dropout(weights, options.get("dropout") or 0.0) @ value


def _variable_length(query: Tensor, key: Tensor, value: Tensor, window: int | None, options: dict[str, Any]) -> Tensor:
    """All rows in one kernel (GPU, half precision)."""
    queries = Borders(options["cu_seq_lens_q"], options["max_length_q"])
    keys = Borders(options["cu_seq_lens_k"], options["max_length_k"])
    return variable_length_attention(query, key, value, queries, keys, window=window, scale=options.get("scaling"))


def _note_window(options: dict[str, Any]) -> int | None:
    window: int | None = options.get("sliding_window")
    for seen in _windows_seen:
        seen.append(window)
    return window


def _causal_mask(queries: int, keys: int, window: int | None, device: torch.device) -> Tensor:
    """Return which keys the last `queries` tokens of a row attend to: `[queries, keys]`."""
    distance = torch.arange(keys - queries, keys, device=device)[:, None] - torch.arange(keys, device=device)[None]
    return (distance >= 0) & (distance < (window or keys))


def _transformers_attention(name: str, module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """Return transformers' built-in attention function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    function: Callable[..., tuple[Tensor, Tensor | None]] = ALL_ATTENTION_FUNCTIONS.get_interface(
        name,
        # eager attention is defined in each model's file, under this name by convention
        getattr(sys.modules[type(module).__module__], "eager_attention_forward", None),
    )
    return function


def register_attention() -> None:
    """Register the row-by-row functions with transformers; idempotent."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    for name, attend in (("sdpa", _attend_sdpa), ("eager", _attend_eager)):
        AttentionInterface.register(PACKED[name], _row_by_row(name, attend))
        AttentionMaskInterface.register(PACKED[name], _mask_unless_packed(ALL_MASK_ATTENTION_FUNCTIONS[name]))


def attention_of(inner: PreTrainedModel) -> str:
    """Return the attention of the language model; towers keep their own."""
    name: str = language_model_of(inner).config._attn_implementation
    return name


def set_attention(inner: PreTrainedModel, name: str) -> None:
    language_model_of(inner).set_attn_implementation(name)


def _mask_unless_packed(mask_function: Any) -> Any:
    def mask(*args: Any, **kwargs: Any) -> Any:
        return None if _rows_are_packed.get() else mask_function(*args, **kwargs)

    return mask


@contextmanager
def watch_windows() -> Iterator[list[int | None]]:
    seen: list[int | None] = []
    _windows_seen.append(seen)
    try:
        yield seen
    finally:
        _windows_seen.pop()
