"""Keys and values of many sequences in one buffer per layer, and the attention that reads them there.

Models write through transformers' cache interface and read through its attention interface, so this works with any
decoder that uses both. A buffer is `[rows, length, heads, dim]`, written in place and never concatenated. Scheduling is
left to `decoders`: a `Pass` defines what is written where.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, groupby, pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from oxrl.data.media_features import language_model_of

ATTENTION = "oxrl_slots"
STEP = 64  # cache lengths are multiples of it
ALIGNED = 16  # float32 numbers in a cache line


def padded_length(length: int) -> int:
    """Return the power of two up to which a sequence's cache is read; sequences of equal padded length run together."""
    return max(STEP, 1 << (length - 1).bit_length())


class SlotCache(Cache):  # type: ignore[misc]  # transformers comes without types
    """Keys and values of each row, layer by layer; `current` is the running pass, which writes and returns them."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.rows = self.length = 0
        self.current: Pass | None = None

    def reserve(self, rows: int, length: int) -> None:
        """Allocate `rows` sequences of `length` tokens, keeping the content."""
        if rows <= self.rows and length <= self.length:
            return
        self.rows, self.length = max(rows, self.rows), max(length, self.length)
        for buffers in (self.keys, self.values):
            for layer, old in enumerate(buffers):
                buffers[layer] = self._empty(old)
                buffers[layer][: old.shape[0], : old.shape[1]] = old

    def _empty(self, like: Tensor) -> Tensor:
        # Zeros, because masked values are still multiplied by 0, and 0 times NaN is not 0.
        return like.new_zeros(self.rows, self.length, *like.shape[-2:])

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by each layer with `[B, heads, T, dim]`."""
        keys, values = keys.transpose(1, 2), values.transpose(1, 2)
        if layer_idx == len(self.keys):
            self.keys.append(self._empty(keys))
            self.values.append(self._empty(values))
        assert self.current is not None, "the cache was used outside of a pass"
        own_keys = self.current.write(self.keys[layer_idx], keys)
        own_values = self.current.write(self.values[layer_idx], values)
        return own_keys.transpose(1, 2), own_values.transpose(1, 2)

    def copy(self, source: int, target: int, length: int) -> None:
        for buffer in (*self.keys, *self.values):
            buffer[target, :length] = buffer[source, :length]

    def clear(self) -> None:
        """Free the memory."""
        self.keys, self.values, self.rows, self.length = [], [], 0, 0

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the interface's
        return self.length


class Pass(Protocol):
    """One forward pass: where its keys and values go, and what its queries see."""

    windows: int  # layers that requested a sliding window

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        """Write `[B, T, heads, dim]` into the buffer; return what attention gets."""
        ...

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor: ...


class Prefill:
    """Whole prompts concatenated as `[1, T]`, each attending to itself; `rows` are the cache rows of each prompt."""

    def __init__(self, cache: SlotCache, lengths: Sequence[int], rows: Sequence[Sequence[int]], device: Any) -> None:
        self.windows = 0
        self.borders = [0, *accumulate(lengths)]
        sources, targets = [], []
        for (start, end), own in zip(pairwise(self.borders), rows, strict=True):
            for row in own:
                sources.append(torch.arange(start, end))
                targets.append(torch.arange(end - start) + row * cache.length)
        self.sources, self.targets = torch.cat(sources).to(device), torch.cat(targets).to(device)

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        buffer.flatten(0, 1).index_copy_(0, self.targets, new[0, self.sources])
        return new

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        self.windows += options.get("sliding_window") is not None
        return attend_prompts(self.borders, query, key, value, options)


def attend_prompts(
    borders: Sequence[int], query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]
) -> Tensor:
    """Causal attention inside of each prompt of `[1, heads, T, dim]`; prompts begin and end at `borders`."""
    window = options.get("sliding_window")
    parts, start = [], 0
    for length, group in groupby(end - start for start, end in pairwise(borders)):
        count = len(list(group))
        own = slice(start, start + count * length)
        # Prompts of one length as a batch: [1, heads, count * length, dim] to [count, heads, length, dim].
        q, k, v = (x[0, :, own].view(x.shape[1], count, length, -1).transpose(0, 1) for x in (query, key, value))
        mask = None
        if options.get("softcap") or (window is not None and length > window):
            mask = additive_mask(torch.arange(length, device=q.device)[None], length, window, q.dtype)
        parts.append(attention(q, k, v, mask, options).transpose(0, 1).flatten(1, 2))
        start += count * length
    return torch.cat(parts, dim=1)[None]


class Run(NamedTuple):
    """Neighbouring rows that read their caches up to the same length."""

    start: int
    end: int
    length: int
    full: bool  # nothing within that length is masked


class Continue:
    """The next tokens `[B, T]` of the rows from `first` on, each attending to its own cache up to itself.

    `exact` reads up to a length that depends on the row alone, so that its result does, too; else as far as needed.
    """

    def __init__(self, cache: SlotCache, first: int, positions: Tensor, ends: Sequence[int], *, exact: bool) -> None:
        self.windows = 0
        self.first, self.positions, self.runs, self.exact = first, positions, length_buckets(ends, exact=exact), exact
        rows = torch.arange(first, first + len(positions), device=positions.device)
        self.targets = (rows[:, None] * cache.length + positions).flatten()
        self.masks: dict[tuple[int, int | None], Tensor | None] = {}

    def write(self, buffer: Tensor, new: Tensor) -> Tensor:
        buffer.flatten(0, 1).index_copy_(0, self.targets, new.flatten(0, 1))
        return buffer[self.first : self.first + len(self.positions)]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        window = options.get("sliding_window")
        self.windows += window is not None
        parts = []
        for index, run in enumerate(self.runs):
            own = slice(run.start, run.end)
            k, v = (each[own, :, : run.length] for each in (key, value))
            mask = self._mask(index, window, query)
            parts.append(attention(query[own], k, v, mask, options, exact=self.exact))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _mask(self, index: int, window: int | None, query: Tensor) -> Tensor | None:
        if (index, window) not in self.masks:  # the same for all layers
            run = self.runs[index]
            plain = run.full and query.shape[2] == 1 and (window is None or run.length <= window)
            at = self.positions[run.start : run.end]
            self.masks[index, window] = None if plain else additive_mask(at, run.length, window, query.dtype)
        return self.masks[index, window]


def length_buckets(ends: Sequence[int], *, exact: bool) -> list[Run]:
    """Split rows of `ends` tokens each where the padded length changes: at most twice a row's length is read."""
    runs, start = [], 0
    for padded, group in groupby(ends, key=padded_length):
        lengths = list(group)
        length = padded if exact else max(lengths)
        runs.append(Run(start, start + len(lengths), length, full=not exact and min(lengths) == length))
        start += len(lengths)
    return runs


def additive_mask(at: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """`[B, 1, T, length]`: 0 where a query at position `at [B, T]` may attend, minus infinity elsewhere."""
    distance = at[:, :, None] - torch.arange(length, device=at.device)
    seen = (distance >= 0) & (distance < (window or length + 1))
    return torch.zeros(seen.shape, dtype=dtype, device=at.device).masked_fill(~seen, float("-inf"))[:, None]


def attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any], *, exact: bool = False
) -> Tensor:
    """Return `[B, heads, T, dim]`; without a mask several queries are causal, and a single one attends to all keys."""
    if options.get("softcap"):
        return _capped_attention(query, key, value, mask, options)
    shape, groups = query.shape, query.shape[1] // key.shape[1]
    single = shape[2] == 1
    # Heads that share a key become queries of one head: masked CUDA kernels do not support shared heads.
    folded = single and (exact or (query.is_cuda and groups > 1))
    if folded:
        query = query.reshape(shape[0], key.shape[1], groups, shape[3])
    if exact:  # so that all threads use equally aligned memory, else the CPU's products differ in their last bits
        query = nn.functional.pad(query, (0, 0, 0, -query.shape[2] % ALIGNED))
    attended = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        is_causal=mask is None and not single,
        scale=options.get("scaling"),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return attended[:, :, :groups].reshape(*shape[:3], -1) if folded else attended


def _capped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, options: dict[str, Any]
) -> Tensor:
    """Attention with a soft cap on the scores, which some models use; the mask must include causality."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], dim=1) for each in (key, value))
    scores = query @ key.transpose(2, 3) * (options.get("scaling") or query.shape[-1] ** -0.5)
    scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    weights = (scores if mask is None else scores + mask).float().softmax(-1).to(query.dtype)
    return torch.matmul(weights, value)


def _attend(
    module: nn.Module,  # noqa: ARG001 - the interface's
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the interface's; a pass has its own
    *,
    slot_pass: Pass,
    **options: Any,
) -> tuple[Tensor, None]:
    return slot_pass.attend(query, key, value, options).transpose(1, 2), None


def next_logits(
    model: PreTrainedModel,
    cache: Cache,
    inputs: Mapping[str, Any],
    positions: Tensor,
    how: Any,
    keep: int | Tensor,
) -> Tensor:
    """Run the model once over its inputs, `[B, T]`; logits of the last `keep` positions, or of those in `keep`."""
    output = model(
        **inputs,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        logits_to_keep=keep,
        slot_pass=how,
    )
    logits: Tensor = output.logits
    if logits.shape[1] != (keep if isinstance(keep, int) else len(keep)):  # the model computes all of them
        logits = logits[:, -keep:] if isinstance(keep, int) else logits[:, keep]
    return logits


def attention_configs(model: PreTrainedModel) -> list[Any]:
    """Return the configs from which the layers of the language model read their attention implementation."""
    layers = language_model_of(model).modules()
    configs = {id(module.config): module.config for module in layers if hasattr(module, "config")}
    return list(configs.values())


@contextmanager
def own_attention(configs: Sequence[Any]) -> Iterator[None]:
    """Inside, layers call `_attend`; their own attention is restored afterwards."""
    AttentionInterface.register(ATTENTION, _attend)
    before = [config._attn_implementation for config in configs]
    for config in configs:
        config._attn_implementation_internal = ATTENTION
    try:
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation_internal = name
