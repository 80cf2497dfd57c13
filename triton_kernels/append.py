"""append: K and V rows into their slots; summarise: minimum and maximum of the pages touched; both in one launch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .primitives import (
    MOST_REGISTERS,
    REPRESENTATIVE,
    Launch,
    block_at,
    length_of,
    pool,
    rounded,
    row_at,
    row_in,
    rows,
    sequences,
    tile_dim,
    to_float,
    verb,
)

PROGRAMS_PER_HEAD = 32  # of summarise, at most: the pages of a row and KV head are dealt out to them


@triton.jit
def _copy(new, cache, b, t, head, slot, stores, block_size, DIM: tl.constexpr, TILE_DIM: tl.constexpr):
    """Write the rows of tokens `t` (a tile) of row b and one head to their slots, where `stores`."""
    d = tl.arange(0, TILE_DIM)
    mask = stores[:, None] & (d < DIM)[None, :]
    x = tl.load(row_at(new, b, t, head)[:, None] + d[None, :], mask=mask)
    tl.store(row_in(cache, slot // block_size, head, slot % block_size)[:, None] + d[None, :], x, mask=mask)


@triton.jit
def _store_rows(
    key, value, k_cache, v_cache, slots, b, t, stores, head, num_slots, block_size,
    DIM: tl.constexpr, V_DIM: tl.constexpr, TILE_DIM: tl.constexpr, TILE_V_DIM: tl.constexpr,
):  # fmt: skip
    slot = tl.load(slots + t, mask=stores, other=-1)
    stores = (slot >= 0) & (slot < num_slots)
    _copy(key, k_cache, b, t, head, slot, stores, block_size, DIM, TILE_DIM)
    _copy(value, v_cache, b, t, head, slot, stores, block_size, V_DIM, TILE_V_DIM)


@triton.jit
def _extremes(x, present):
    """Channel-wise minimum and maximum over the rows present; NaN stays. fp32 [rows, dim] -> [dim]"""
    low = tl.min(tl.where(present, x, float("inf")), 0)
    high = tl.max(tl.where(present, x, float("-inf")), 0)
    nan = tl.where(tl.max((present & (x != x)).to(tl.int32), 0) > 0, float("nan"), 0.0)
    return low + nan, high + nan


@triton.jit
def _summarise_page(
    k_cache, page_min, page_max, seq, b, head, page, length,
    PAGE_SIZE: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, DIM: tl.constexpr, TILE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    block = block_at(seq, b, page // PAGES_PER_BLOCK, page * PAGE_SIZE < length)
    offset = page % PAGES_PER_BLOCK
    count = tl.where(block < 0, 0, tl.minimum(length - page * PAGE_SIZE, PAGE_SIZE))
    d = tl.arange(0, TILE_DIM)
    low = tl.full([TILE_DIM], float("inf"), tl.float32)
    high = tl.full([TILE_DIM], float("-inf"), tl.float32)
    for start in range(0, PAGE_SIZE, TOKENS):
        i = start + tl.arange(0, TOKENS)
        present = (i < count)[:, None] & (d < DIM)[None, :]
        keys = row_in(k_cache, block, head, offset * PAGE_SIZE + i)[:, None] + d[None, :]
        low_here, high_here = _extremes(to_float(tl.load(keys, mask=present, other=0.0)), present)
        low = tl.minimum(low, low_here, propagate_nan=tl.PropagateNan.ALL)
        high = tl.maximum(high, high_here, propagate_nan=tl.PropagateNan.ALL)
    mask = d < tl.where(block < 0, 0, DIM)
    tl.store(row_in(page_min, block, head, offset) + d, rounded(low, page_min.data.dtype.element_ty), mask=mask)
    tl.store(row_in(page_max, block, head, offset) + d, rounded(high, page_max.data.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["q_len", "num_slots"])
def append_rows(
    key, value, k_cache, v_cache, slots, q_len, num_kv_heads, num_slots, block_size,
    DIM: tl.constexpr, V_DIM: tl.constexpr, TILE_DIM: tl.constexpr, TILE_V_DIM: tl.constexpr,
):  # fmt: skip
    """One program for each token and KV head."""
    token, head = (tl.program_id(0) // num_kv_heads).to(tl.int64), tl.program_id(0) % num_kv_heads
    b, t = token // q_len, token % q_len + tl.arange(0, 1)
    _store_rows(
        key, value, k_cache, v_cache, slots + b * q_len, b, t, t < q_len, head, num_slots, block_size,
        DIM, V_DIM, TILE_DIM, TILE_V_DIM,
    )  # fmt: skip


@triton.jit(do_not_specialize=["seq", "programs_per_head"])
def summarise_pages(
    k_cache, page_min, page_max, seq, num_new, num_kv_heads, programs_per_head,
    PAGE_SIZE: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, DIM: tl.constexpr, TILE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """A few programs for each row and KV head: each takes every so manieth page that holds a new token."""
    unit, place = tl.program_id(0) // programs_per_head, tl.program_id(0) % programs_per_head
    b, head = unit // num_kv_heads, unit % num_kv_heads
    length, new = length_of(seq, b), tl.load(num_new + b)
    if new > 0:
        first = tl.maximum(length - new, 0) // PAGE_SIZE
        for page in range(first + place, (length + PAGE_SIZE - 1) // PAGE_SIZE, programs_per_head):
            _summarise_page(
                k_cache, page_min, page_max, seq, b, head, page, length,
                PAGE_SIZE, PAGES_PER_BLOCK, DIM, TILE_DIM, TOKENS,
            )  # fmt: skip


@triton.jit(do_not_specialize=["seq", "num_slots", "pages_per_row"])
def append_summarise_pages(
    key, value, k_cache, v_cache, page_min, page_max, seq, slots, num_kv_heads, num_slots, block_size, pages_per_row,
    PAGE_SIZE: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, DIM: tl.constexpr, V_DIM: tl.constexpr,
    TILE_DIM: tl.constexpr, TILE_V_DIM: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One program for each row, KV head and page that the row's new tokens may lie in: it stores those of its page,
    then looks at the whole page. Tokens before the row's begin (inert ones) go with the first page."""
    unit, place = tl.program_id(0) // pages_per_row, tl.program_id(0) % pages_per_row
    b, head = (unit // num_kv_heads).to(tl.int64), unit % num_kv_heads
    length, slots = length_of(seq, b), slots + b * seq.q_len
    page = tl.maximum(length - seq.q_len, 0) // PAGE_SIZE + place
    stored = 0
    for start in range(0, seq.q_len, TOKENS):
        t = start + tl.arange(0, TOKENS)
        slot = tl.load(slots + t, mask=t < seq.q_len, other=-1)
        stored = tl.maximum(stored, tl.max((slot >= 0).to(tl.int32)))
        pos = tl.maximum(length - seq.q_len + t, 0)
        _store_rows(
            key, value, k_cache, v_cache, slots, b, t, (t < seq.q_len) & (pos // PAGE_SIZE == page), head, num_slots,
            block_size, DIM, V_DIM, TILE_DIM, TILE_V_DIM,
        )  # fmt: skip
    if (stored > 0) & (page * PAGE_SIZE < length):
        tl.debug_barrier()  # all threads see the rows
        _summarise_page(
            k_cache, page_min, page_max, seq, b, head, page, length,
            PAGE_SIZE, PAGES_PER_BLOCK, DIM, TILE_DIM, TOKENS,
        )  # fmt: skip


def _dims(key_dim: int, value_dim: int) -> dict[str, int]:
    return dict(DIM=key_dim, V_DIM=value_dim, TILE_DIM=tile_dim(key_dim), TILE_V_DIM=tile_dim(value_dim))


def _page_tile(page_size: int, dim: int) -> dict[str, int]:
    """How many tokens of a page are looked at together."""
    return dict(
        TOKENS=min(triton.next_power_of_2(page_size), max(1, 4096 // tile_dim(dim))),
        num_warps=4,
        maxnreg=MOST_REGISTERS,
    )


@verb
def append(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, check: bool = True
) -> tuple[list[Launch], None]:
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    batch, q_len = key.shape[:2]
    launch = Launch(
        append_rows,
        batch * q_len * num_kv_heads,
        key=rows(key),
        value=rows(value),
        k_cache=pool(k_cache),
        v_cache=pool(v_cache),
        slots=slot_mapping.contiguous(),
        q_len=q_len,
        num_kv_heads=num_kv_heads,
        num_slots=num_blocks * block_size,
        block_size=block_size,
        **_dims(head_dim, v_cache.shape[3]),
        num_warps=1,
    )
    return [launch], None


@verb
def summarise(
    k_cache: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_new: Tensor,
    check: bool = True,
) -> tuple[list[Launch], None]:
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    pages_per_block = page_min.shape[2]
    programs_per_head = min(PROGRAMS_PER_HEAD, block_table.shape[1] * pages_per_block)
    launch = Launch(
        summarise_pages,
        len(seq_lens) * num_kv_heads * programs_per_head,
        k_cache=pool(k_cache),
        page_min=pool(page_min),
        page_max=pool(page_max),
        seq=sequences(block_table, seq_lens, num_blocks, block_size, 1),
        num_new=num_new.contiguous(),
        num_kv_heads=num_kv_heads,
        programs_per_head=programs_per_head,
        PAGE_SIZE=block_size // pages_per_block,
        PAGES_PER_BLOCK=pages_per_block,
        DIM=head_dim,
        TILE_DIM=tile_dim(head_dim),
        **_page_tile(block_size // pages_per_block, head_dim),
    )
    return [launch], None


@verb
def append_summarise(
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
) -> tuple[list[Launch], None]:
    """What `decode` does before it scores: a row's last q_len tokens are new, unless it stores none of them."""
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    batch, q_len = key.shape[:2]
    pages_per_block = page_min.shape[2]
    page_size = block_size // pages_per_block
    pages_per_row = (q_len - 2) // page_size + 2  # that q_len tokens may lie in
    launch = Launch(
        append_summarise_pages,
        batch * num_kv_heads * pages_per_row,
        key=rows(key),
        value=rows(value),
        k_cache=pool(k_cache),
        v_cache=pool(v_cache),
        page_min=pool(page_min),
        page_max=pool(page_max),
        seq=sequences(block_table, seq_lens, num_blocks, block_size, q_len),
        slots=slot_mapping.contiguous(),
        num_kv_heads=num_kv_heads,
        num_slots=num_blocks * block_size,
        block_size=block_size,
        pages_per_row=pages_per_row,
        PAGE_SIZE=page_size,
        PAGES_PER_BLOCK=pages_per_block,
        **_dims(head_dim, v_cache.shape[3]),
        **_page_tile(page_size, max(head_dim, v_cache.shape[3])),
    )
    return [launch], None


def configurations() -> Iterator[Launch]:
    ints = torch.empty(8, 8, dtype=torch.int32, device="meta")
    slots, lens = torch.empty(8, 1, dtype=torch.int64, device="meta"), ints[:, 0]
    for dtype, head_dim, _ in REPRESENTATIVE:
        new = torch.empty(8, 1, 8, head_dim, dtype=dtype, device="meta")
        cache = torch.empty(64, 8, 16, head_dim, dtype=dtype, device="meta")
        summary = cache[:, :, :1]
        yield from append.plan(new, new, cache, cache, slots)[0]
        yield from summarise.plan(cache, summary, summary, ints, lens, lens)[0]
        yield from append_summarise.plan(new, new, cache, cache, summary, summary, ints, lens, slots)[0]
