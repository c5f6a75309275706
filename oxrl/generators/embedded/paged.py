"""Keys and values of many sequences in pages, and the attention over them.

`PagedCache` holds the buffers; `PagedPrefill` writes whole prompts into pages, `PagedStep` one token per sequence, at
positions that are read on the device. `captured` runs them.

Layers reach the running pass through one operator, which is opaque to the compiler and counts the layers itself: so
that one compiled layer serves all layers, any pages and any lengths.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor
from transformers.cache_utils import Cache

from oxrl.generators.embedded.cache import additive_mask, attend_prompts, attention
from oxrl.generators.embedded.pages import PAGE, pages_for
from oxrl.tensors import Borders, variable_length_attention


class PagedCache(Cache):  # type: ignore[misc]  # transformers comes without types
    """`[pages, PAGE, key heads, dim]` per layer, allocated by the first prefill."""

    def __init__(self, pages: int) -> None:
        super().__init__(layers=[])
        self.pages = pages
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._finished: Tensor | None = None

    def update(self, keys: Tensor, values: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Called by each layer; the operator writes, when it attends."""
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - the interface's
        return self.pages * PAGE

    def layer(self, index: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer whose new keys and values are `[B, heads, T, dim]`."""
        if index == len(self.keys):
            for buffers, new in ((self.keys, keys), (self.values, values)):
                buffers.append(new.new_zeros(self.pages, PAGE, new.shape[1], new.shape[3]))
        return self.keys[index], self.values[index]

    def finished_parts(self, device: torch.device) -> Tensor:
        """Counters of the attention kernel, 0 between layers. Passes over one cache follow each other."""
        if self._finished is None:
            from oxrl.generators.embedded.kernels import PROGRAMS

            self._finished = torch.zeros(PROGRAMS, dtype=torch.int32, device=device)
        return self._finished


class PagedPass:
    """A forward pass over a `PagedCache`; layers run inside of `running`."""

    current: ClassVar[PagedPass | None] = None

    def __init__(self, cache: PagedCache) -> None:
        self.cache, self.index = cache, 0

    @contextmanager
    def running(self) -> Iterator[None]:
        PagedPass.current = self
        try:
            yield
            if self.index != len(self.cache.keys):
                raise RuntimeError(f"{self.index} of {len(self.cache.keys)} layers used the cache in this pass")
        finally:
            PagedPass.current = None

    @staticmethod
    def attend(query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        """What each layer calls: `[B, heads, T, dim]`."""
        scale = options.get("scaling") or query.shape[-1] ** -0.5
        attended: Tensor = paged_attention(
            query, key, value, scale, options.get("softcap"), options.get("sliding_window")
        )
        return attended.transpose(1, 2)

    def next_layer(self, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any]) -> Tensor:
        keys, values = self.cache.layer(self.index, key, value)
        self.index += 1
        return self.write_and_attend(query, key, value, (keys, values), options)

    def write_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, buffers: tuple[Tensor, Tensor], options: dict[str, Any]
    ) -> Tensor:
        """Write the new keys and values to the buffers of a layer; return `[B, T, heads, dim]`."""
        raise NotImplementedError


class PagedPrefill(PagedPass):
    """Prompts concatenated as `[1, T]`, each attending to itself; `tables` has the pages of each prompt's rows."""

    def __init__(
        self, cache: PagedCache, lengths: Sequence[int], tables: Sequence[Sequence[Sequence[int]]], device: Any
    ) -> None:
        super().__init__(cache)
        self.borders = [0, *accumulate(lengths)]
        self.starts = torch.tensor(self.borders, dtype=torch.int32).to(device)
        sources, targets = [], []
        for (start, end), rows in zip(pairwise(self.borders), tables, strict=True):
            length = end - start
            for index, pages in enumerate(rows):  # full pages are shared by all rows of a prompt
                at = torch.arange(0 if index == 0 else length - length % PAGE, length)
                sources.append(at + start)
                targets.append(torch.tensor(pages)[at // PAGE] * PAGE + at % PAGE)
        self.targets = torch.cat(targets).to(device)
        in_order = all(len(rows) == 1 for rows in tables)
        self.sources = None if in_order else torch.cat(sources).to(device)

    def write_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, buffers: tuple[Tensor, Tensor], options: dict[str, Any]
    ) -> Tensor:
        for buffer, new in zip(buffers, (key, value), strict=True):
            lines = new[0].transpose(0, 1)
            lines = lines if self.sources is None else lines[self.sources]
            buffer.flatten(0, 1).index_copy_(0, self.targets, lines)
        if not query.is_cuda or query.dtype == torch.float32 or options.get("softcap"):
            return attend_prompts(self.borders, query, key, value, options).transpose(1, 2).contiguous()
        borders = Borders(self.starts, max(end - start for start, end in pairwise(self.borders)))
        window, scale = options["sliding_window"], options["scaling"]
        return variable_length_attention(query, key, value, borders, borders, window=window, scale=scale)


class PagedStep(PagedPass):
    """One token per row, at `positions [B]`; pages of the rows in `tables [B, n]`. All are read on the device."""

    def __init__(self, cache: PagedCache, tables: Tensor, positions: Tensor) -> None:
        super().__init__(cache)
        self.tables, self.lengths = tables, (positions + 1).int()

    def write_and_attend(
        self, query: Tensor, key: Tensor, value: Tensor, buffers: tuple[Tensor, Tensor], options: dict[str, Any]
    ) -> Tensor:
        if query.is_cuda:
            from oxrl.generators.embedded.kernels import write_and_attend

            query, key, value = (each[:, :, 0] for each in (query, key, value))
            tables, lengths, finished = self.tables, self.lengths, self.cache.finished_parts(query.device)
            return write_and_attend(query, key, value, *buffers, tables, lengths, finished, options)[:, None]
        at = (self.lengths - 1).long()
        targets = self.tables.gather(1, (at // PAGE)[:, None])[:, 0].long() * PAGE + at % PAGE
        for buffer, new in zip(buffers, (key, value), strict=True):
            buffer.flatten(0, 1).index_copy_(0, targets, new[:, :, 0])
        used = self.tables[:, : pages_for(int(self.lengths.max()))].long()
        k, v = (each[used].flatten(1, 2).transpose(1, 2) for each in buffers)
        mask = additive_mask(at[:, None], k.shape[2], options["sliding_window"], query.dtype)
        return attention(query, k, v, mask, options).transpose(1, 2).contiguous()


def _paged_attention(
    query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None, window: int | None
) -> Tensor:
    assert PagedPass.current is not None, "layers ran outside of a pass"
    options = {"scaling": scale, "softcap": softcap, "sliding_window": window}
    return PagedPass.current.next_layer(query, key, value, options)


paged_attention = torch.library.custom_op(
    "oxrl::paged_attention",
    _paged_attention,
    mutates_args=(),  # the buffers are not among its arguments
    schema="(Tensor query, Tensor key, Tensor value, float scale, float? softcap, int? window) -> Tensor",
    tags=(torch.Tag.flexible_layout,),  # slices of one product are read where they are
)


@paged_attention.register_fake
def _(query: Tensor, *_: Any) -> Tensor:
    rows, heads, length, dim = query.shape
    return query.new_empty(rows, length, heads, dim)
