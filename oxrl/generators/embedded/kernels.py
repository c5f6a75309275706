"""Triton kernels of a decoding step: attention to keys and values in pages, and sums over blocks of the vocabulary.

Each program of the attention handles one key head and one sequence, or a part of one if there are few: the query
heads that share the key head are the rows of one tile, and a loop runs over the sequence's own pages. Lengths and page
numbers are read from device memory, so that a captured graph is valid for any lengths.
"""

# Triton evaluates annotations.
# ruff: noqa: N803
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from oxrl.generators.embedded.pages import PAGE

PROGRAMS = 512  # of the attention; about four per processor of an H200
PARTS = 8  # of a sequence, at most
TOKENS = 128  # that a program loads at once


@triton.jit  # type: ignore[untyped-decorator]
def _attend_page_by_page(  # type: ignore[no-untyped-def]
    query, new_key, new_value, keys, values, out, tables, lengths, scale, softcap, window,
    partial, largest_of, total_of, finished,
    query_row, query_head, key_row, key_head, value_row, value_head,
    page_stride, token_stride, head_stride, table_stride, out_row, out_head,
    GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr,
    TOKENS: tl.constexpr, PARTS: tl.constexpr, SOFTCAP: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    length = tl.load(lengths + row)
    heads = tl.arange(0, TILE)
    dims = tl.arange(0, WIDTH)
    inside = (heads[:, None] < GROUP) & (dims[None, :] < DIM)
    offsets = row * query_row + (head * GROUP + heads[:, None]) * query_head + dims[None, :]
    q = tl.load(query + offsets, mask=inside, other=0.0)
    first = 0
    if WINDOW:
        first = tl.maximum(length - window, 0) // TOKENS
    blocks = tl.cdiv(length, TOKENS)
    per_part = tl.cdiv(blocks - first, PARTS)
    first += part * per_part
    end = tl.minimum(first + per_part, blocks)
    last = length - 1
    page = tl.load(tables + row * table_stride + last // PAGE_SIZE).to(tl.int64)
    cell = page * page_stride + (last % PAGE_SIZE) * token_stride + head * head_stride + dims
    writes = (dims < DIM) & (first < end) & (end == blocks)  # the part that reads the last token
    new = tl.load(new_key + row * key_row + head * key_head + dims, mask=writes)
    tl.store(keys + cell, new, mask=writes)
    new = tl.load(new_value + row * value_row + head * value_head + dims, mask=writes)
    tl.store(values + cell, new, mask=writes)
    tl.debug_barrier()  # the loop reads what was just written
    largest = tl.full([TILE], float("-inf"), tl.float32)
    total = tl.zeros([TILE], tl.float32)
    summed = tl.zeros([TILE, WIDTH], tl.float32)
    for block in range(first, end):
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
    if PARTS > 1:
        # Every part writes its sums; the one that finishes last adds them up.
        sequence = row * tl.num_programs(1) + head
        slots = (sequence * PARTS + part) * TILE + heads
        tl.store(largest_of + slots, largest)
        tl.store(total_of + slots, total)
        tl.store(partial + slots[:, None] * WIDTH + dims[None, :], summed)
        tl.debug_barrier()
        finishes = tl.atomic_add(finished + sequence, 1, sem="acq_rel") == PARTS - 1
        tl.store(finished + sequence, 0, mask=finishes)  # for the next layer
        largest = tl.full([TILE], float("-inf"), tl.float32)
        total = tl.zeros([TILE], tl.float32)
        summed = tl.zeros([TILE, WIDTH], tl.float32)
        inside = inside & finishes
        for other in range(PARTS):
            slots = (sequence * PARTS + other) * TILE + heads
            its_largest = tl.load(largest_of + slots, mask=(heads < TILE) & finishes, other=0.0, cache_modifier=".cg")
            its_total = tl.load(total_of + slots, mask=(heads < TILE) & finishes, other=0.0, cache_modifier=".cg")
            cells = slots[:, None] * WIDTH + dims[None, :]
            its_summed = tl.load(partial + cells, mask=inside, other=0.0, cache_modifier=".cg")
            new_largest = tl.maximum(largest, its_largest)  # finite: the first part is never empty
            shrink = tl.exp(largest - new_largest)
            weight = tl.exp(its_largest - new_largest)
            total = total * shrink + its_total * weight
            summed = summed * shrink[:, None] + its_summed * weight[:, None]
            largest = new_largest
    result = summed / total[:, None]
    offsets = row * out_row + (head * GROUP + heads[:, None]) * out_head + dims[None, :]
    tl.store(out + offsets, result.to(out.dtype.element_ty), mask=inside)


def parts_for(sequences: int) -> int:
    """Into how many parts each of so many sequences and key heads is split; few of them leave processors idle."""
    return max(1, min(PARTS, PROGRAMS // sequences))


def write_and_attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keys: Tensor,
    values: Tensor,
    tables: Tensor,
    lengths: Tensor,
    finished: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """Write `key` and `value` `[B, key heads, dim]` of the last token, and attend to all tokens: `[B, heads, dim]`.

    `keys` and `values` are `[pages, PAGE, key heads, dim]`, `tables [B, n]` has the pages of each row, `lengths [B]`
    the number of its tokens with the new one. `finished [PROGRAMS]` is 0 before and after.
    """
    query, key, value = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key, value))
    (rows, heads, dim), key_heads = query.shape, keys.shape[2]
    group, softcap, window = heads // key_heads, options["softcap"], options["sliding_window"]
    tile, width = max(16, triton.next_power_of_2(group)), max(16, triton.next_power_of_2(dim))
    parts = parts_for(rows * key_heads)
    out = torch.empty((rows, heads, dim), dtype=query.dtype, device=query.device)
    sums = [
        torch.empty((rows * key_heads * parts * tile, size), dtype=torch.float32, device=query.device)
        for size in ((width, 1, 1) if parts > 1 else (0, 0, 0))
    ]
    _attend_page_by_page[(rows, key_heads, parts)](
        query, key, value, keys, values, out, tables, lengths, options["scaling"], softcap or 1.0, window or 1,
        *sums, finished,
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        keys.stride(0), keys.stride(1), keys.stride(2), tables.stride(0), out.stride(0), out.stride(1),
        GROUP=group, TILE=tile, DIM=dim, WIDTH=width, PAGE_SIZE=PAGE, TOKENS=TOKENS, PARTS=parts,
        SOFTCAP=softcap is not None, WINDOW=window is not None, num_warps=4,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
    )  # fmt: skip
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _exponentials_of_blocks(  # type: ignore[no-untyped-def]
    logits, temperatures, largest_of, sum_of, size, row_stride, blocks,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    block = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = block[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    loaded = tl.load(logits + row.to(tl.int64) * row_stride + at, mask=at < size, other=float("-inf"))
    scaled = loaded.to(tl.float32) / tl.load(temperatures + row)
    largest = tl.maximum(tl.max(scaled, 1), -3.4028234663852886e38)  # a block may consist of -inf
    sums = tl.sum(tl.exp(scaled - largest[:, None]), 1)
    tl.store(largest_of + row * blocks + block, largest, mask=block < blocks)
    tl.store(sum_of + row * blocks + block, sums, mask=block < blocks)


def block_exponentials(logits: Tensor, temperature: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Per block of `logits [B, V] / temperature [B]`: its maximum, and the sum of `exp` of what is below it."""
    rows, size = logits.shape
    blocks, together = triton.cdiv(size, block), 16
    largest, sums = (torch.empty(rows, blocks, dtype=torch.float32, device=logits.device) for _ in range(2))
    _exponentials_of_blocks[(rows, triton.cdiv(blocks, together))](
        logits, temperature, largest, sums, size, logits.stride(0), blocks, BLOCK=block, BLOCKS=together, num_warps=4
    )
    return largest, sums
