"""Attention of one new token per sequence over keys and values in pages, as a Triton kernel.

Each program handles one sequence and one key head: the query heads that share it are the rows of one tile, and a loop
runs over the sequence's own pages. Lengths and page numbers are read from device memory, so that a captured graph is
valid for any lengths.
"""

# Triton evaluates annotations.
# ruff: noqa: N803
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oxrl.generators.embedded.pages import PAGE

FEW_PROGRAMS = 264  # two per processor of an H200: with fewer, each should load more at once


@triton.jit  # type: ignore[untyped-decorator]
def _attend_page_by_page(  # type: ignore[no-untyped-def]
    query, new_key, new_value, keys, values, out, tables, lengths, scale, softcap, window,
    query_row, query_head, key_row, key_head, value_row, value_head,
    page_stride, token_stride, head_stride, table_stride, out_row, out_head,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    heads = tl.arange(0, TILE)
    dims = tl.arange(0, WIDTH)
    inside = (heads[:, None] < GROUP) & (dims[None, :] < DIM)
    offsets = row * query_row + (head * GROUP + heads[:, None]) * query_head + dims[None, :]
    q = tl.load(query + offsets, mask=inside, other=0.0)
    last = length - 1
    page = tl.load(tables + row * table_stride + last // PAGE_SIZE).to(tl.int64)
    cell = page * page_stride + (last % PAGE_SIZE) * token_stride + head * head_stride + dims
    new = tl.load(new_key + row * key_row + head * key_head + dims, mask=dims < DIM)
    tl.store(keys + cell, new, mask=dims < DIM)
    new = tl.load(new_value + row * value_row + head * value_head + dims, mask=dims < DIM)
    tl.store(values + cell, new, mask=dims < DIM)
    tl.debug_barrier()  # the loop reads what was just written
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    summed = tl.zeros([TILE, WIDTH], tl.float32)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // TOKENS
    for block in range(first, tl.cdiv(length, TOKENS)):
        within = block * TOKENS + tl.arange(0, TOKENS)
        seen = within < length
        pages = tl.load(tables + row * table_stride + within // PAGE_SIZE, mask=seen, other=0).to(tl.int64)
        starts = pages * page_stride + (within % PAGE_SIZE) * token_stride
        cells = starts[:, None] + head * head_stride + dims[None, :]
        if WINDOW:
            seen = seen & (within >= length - window)
        loaded = seen[:, None] & (dims[None, :] < DIM)
        k = tl.load(keys + cells, mask=loaded, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
        if SOFTCAP:
            scaled = scores / softcap
            scores = softcap * (2.0 * tl.sigmoid(2.0 * scaled) - 1.0)  # tanh
        scores = tl.where(seen[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp(scores - new_largest[:, None])
        shrink = tl.exp(largest - new_largest)
        total = total * shrink + tl.sum(weights, 1)
        v = tl.load(values + cells, mask=loaded, other=0.0)
        summed = summed * shrink[:, None] + tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        largest = new_largest
    result = summed / total[:, None]
    offsets = row * out_row + (head * GROUP + heads[:, None]) * out_head + dims[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)


def write_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Write `key` and `value` `[B, key heads, dim]` of the last token, and attend to all tokens: `[B, heads, dim]`.

    `keys` and `values` are `[pages, PAGE, key heads, dim]`, `tables [B, n]` has the pages of each row, `lengths [B]`
    the number of its tokens with the new one.
    """
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    (rows, heads, dim), key_heads = query.shape, keys.shape[2]
    group, softcap, window = heads // key_heads, options["softcap"], options["sliding_window"]
    few = rows * key_heads <= FEW_PROGRAMS and query.dtype != torch.float32
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    _attend_page_by_page[(rows, key_heads)](
        query, key, value, keys, values, out, tables, lengths, options["scaling"], softcap or 1.0, window or 1,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), tables.stride(0), out.stride(0), out.stride(1),
        GROUP=group, TILE=max(16, triton.next_power_of_2(group)), DIM=dim, WIDTH=max(16, triton.next_power_of_2(dim)),
        PAGE_SIZE=PAGE, SOFTCAP=softcap is not None, WINDOW=window is not None,
        TOKENS=256 if few else 128, num_warps=8 if few and dim > 64 else 4,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return out
