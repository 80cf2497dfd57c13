"""attend: exact attention over the selected pages, online softmax over tiles of tokens, split over the pages; combine:
the splits of one unit, that is of one token, selection and tile of its query heads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .primitives import (
    MOST_REGISTERS,
    REPRESENTATIVE,
    TILE_HEADS,
    Launch,
    block_at,
    dot,
    exp,
    gap_to,
    pool,
    rounded,
    row_at,
    row_in,
    rows,
    sequences,
    span,
    tanh,
    tile_dim,
    verb,
)

MAX_DIM = 1024
PROGRAMS = 512  # that fill a GPU: where there are fewer units, their pages are split
TOKENS_PER_SPLIT = 256  # at least
MAX_SPLITS = 64
NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def _unit(program, q_len, sel_heads, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Row, token, selection and query heads (with those that exist) of a unit."""
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    token, sel_head = program // TILES // sel_heads, program // TILES % sel_heads
    in_group = program % TILES * HEADS + tl.arange(0, HEADS)
    return token // q_len, token % q_len, sel_head, sel_head * GROUP + in_group, in_group < GROUP


@triton.jit
def _named(page_idx, max_selected, end_page):
    """How many pages a selection names that a token may see; they come first."""
    count = 0
    for start in range(0, max_selected, 1024):
        place = start + tl.arange(0, 1024)
        page = tl.load(page_idx + place, mask=place < max_selected, other=-1)
        count += tl.sum(((page >= 0) & (page < end_page)).to(tl.int32))
    return count


@triton.jit
def _logits(query, k_cache, b, t, head, exists, kv_head, block, row, DIM: tl.constexpr, TILE_DIM: tl.constexpr):
    """q.k of a tile of tokens, those without a block are not looked at. [HEADS, TOKENS]"""
    logits = tl.zeros([head.shape[0], row.shape[0]], tl.float32)
    for start in range(0, DIM, TILE_DIM):
        d = start + tl.arange(0, TILE_DIM)
        q_mask, k_mask = exists[:, None] & (d < DIM)[None, :], (block >= 0)[:, None] & (d < DIM)[None, :]
        q = tl.load(row_at(query, b, t, head)[:, None] + d[None, :], mask=q_mask, other=0.0)
        k = tl.load(row_in(k_cache, block, kv_head, row)[:, None] + d[None, :], mask=k_mask, other=0.0)
        logits += dot(q, tl.trans(k))
    return logits


@triton.jit
def _finish(best, total, acc, sinks, head, exists):
    """Results from best logit, sum of exp(logit - best), and sum of exp(logit - best) * v."""
    empty = (best == NEG_INF) & (total == 0)
    scale = tl.full(best.shape, 1.0, tl.float32)
    if sinks is not None:  # one more logit, without a value
        sink = tl.load(sinks + head, mask=exists, other=NEG_INF)
        top = tl.maximum(best, sink)
        scale = exp(gap_to(top, best))
        total = total * scale + exp(gap_to(top, sink))
        best = top
    acc = tl.where(empty[:, None], 0.0, acc * (scale / total)[:, None])
    return acc, tl.where(empty, NEG_INF, best + tl.log(total))


@triton.jit
def _write(acc, lse_of_heads, out, lse, b, t, token, num_heads, head, exists, d, V_DIM: tl.constexpr):
    to = row_at(out, b, t, head)[:, None] + d[None, :]
    tl.store(to, rounded(acc, out.data.dtype.element_ty), mask=exists[:, None] & (d < V_DIM)[None, :])
    tl.store(lse + token.to(tl.int64) * num_heads + head, lse_of_heads, mask=exists)


@triton.jit(do_not_specialize=["seq", "softmax_scale", "softcap", "max_selected", "num_splits"])
def attend_pages(
    query, k_cache, v_cache, seq,
    page_idx,  # [batch, q_len, sel_heads, max_selected], or None: every page
    sinks,  # [num_heads] or None
    out, lse,
    sums,  # [units, num_splits, HEADS, V_DIM], None where num_splits is 1
    stats,  # [units, num_splits, HEADS, 2]: best logit and sum of exp(logit - best)
    softmax_scale, softcap, max_selected, num_splits, num_kv_heads, sel_heads,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, DIM: tl.constexpr,
    V_DIM: tl.constexpr, TILE_DIM: tl.constexpr, TILE_V_DIM: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    SOFTCAP: tl.constexpr,
):  # fmt: skip
    """One program for each unit and split."""
    unit, split = tl.program_id(0) // num_splits, tl.program_id(0) % num_splits
    b, t, sel_head, head, exists = _unit(unit, seq.q_len, sel_heads, GROUP, HEADS)
    kv_head = sel_head * num_kv_heads // sel_heads
    _, seen, first_token, begin, end = span(seq, b, t, PAGE_SIZE)
    first_page, end_page = begin, end
    if page_idx is not None:
        named = row_at(page_idx, b, t, sel_head)
        begin, end = 0, _named(named, max_selected, end_page)
    pages = (end - begin).to(tl.int64)
    end = begin + (pages * (split + 1) // num_splits).to(tl.int32)
    begin += (pages * split // num_splits).to(tl.int32)

    d = tl.arange(0, TILE_V_DIM)
    best = tl.full([HEADS], NEG_INF, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    acc = tl.zeros([HEADS, TILE_V_DIM], tl.float32)
    for start in range(begin * PAGE_SIZE, end * PAGE_SIZE, TOKENS):
        place = start + tl.arange(0, TOKENS)
        page = place // PAGE_SIZE
        inside = page < end
        if page_idx is not None:
            page = tl.load(named + page, mask=inside, other=-1)
        inside &= (page >= first_page) & (page < end_page)
        page = tl.where(inside, page, 0)
        token = page * PAGE_SIZE + place % PAGE_SIZE
        inside &= (token >= first_token) & (token < seen)
        block = block_at(seq, b, page // PAGES_PER_BLOCK, inside)
        row = page % PAGES_PER_BLOCK * PAGE_SIZE + place % PAGE_SIZE
        logits = _logits(query, k_cache, b, t, head, exists, kv_head, block, row, DIM, TILE_DIM) * softmax_scale
        if SOFTCAP:
            logits = softcap * tanh(logits / softcap)
        logits = tl.where((block >= 0)[None, :], logits, NEG_INF)

        top = tl.maximum(best, tl.max(logits, 1))
        base = tl.where(top == NEG_INF, 0.0, top)  # every logit so far is -inf (or NaN, which stays)
        weight = exp(logits - base[:, None])
        shrink = exp(best - base)
        total = total * shrink + tl.sum(weight, 1)
        v_mask = (block >= 0)[:, None] & (d < V_DIM)[None, :]
        v = tl.load(row_in(v_cache, block, kv_head, row)[:, None] + d[None, :], mask=v_mask, other=0.0)
        if query.data.dtype.element_ty.primitive_bitwidth == 16:
            weight = rounded(weight, v.dtype)
        acc = acc * shrink[:, None] + dot(weight, v)
        best = top

    if sums is None:
        acc, lse_of_heads = _finish(best, total, acc, sinks, head, exists)
        _write(acc, lse_of_heads, out, lse, b, t, b * seq.q_len + t, sel_heads * GROUP, head, exists, d, V_DIM)
    else:
        at = tl.program_id(0).to(tl.int64) * HEADS + tl.arange(0, HEADS)
        tl.store(sums + at[:, None] * V_DIM + d[None, :], acc, mask=exists[:, None] & (d < V_DIM)[None, :])
        tl.store(stats + at * 2, best, mask=exists)
        tl.store(stats + at * 2 + 1, total, mask=exists)


@triton.jit(do_not_specialize=["q_len", "num_splits"])
def combine_splits(
    sums, stats, sinks, out, lse, q_len, num_splits, sel_heads,
    GROUP: tl.constexpr, V_DIM: tl.constexpr, TILE_V_DIM: tl.constexpr, HEADS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """One program for each unit and query head of a full tile."""
    LANES: tl.constexpr = GROUP if GROUP < HEADS else HEADS
    unit, lane = tl.program_id(0) // LANES, tl.program_id(0) % LANES
    b, t, _, heads, exist = _unit(unit, q_len, sel_heads, GROUP, HEADS)
    own = tl.arange(0, HEADS) == lane
    head = tl.sum(tl.where(own, heads, 0)) + tl.arange(0, 1)
    exists = tl.sum((own & exist).to(tl.int32)) + tl.arange(0, 1) > 0
    if tl.max(exists.to(tl.int32)) > 0:
        split = tl.arange(0, SPLITS)
        at = (unit.to(tl.int64) * num_splits + split) * HEADS + lane
        bests = tl.load(stats + at * 2, mask=split < num_splits, other=NEG_INF)
        totals = tl.load(stats + at * 2 + 1, mask=split < num_splits, other=0.0)
        best = tl.max(bests, 0)
        # A part of only -inf (or NaN) logits was summed against 0, not against its best.
        weight = tl.where(bests == NEG_INF, 1.0, exp(gap_to(best, bests)))
        d = tl.arange(0, TILE_V_DIM)
        acc = tl.zeros([1, TILE_V_DIM], tl.float32)
        for i in range(num_splits):
            part = (unit.to(tl.int64) * num_splits + i) * HEADS + lane
            share = tl.sum(tl.where(split == i, weight, 0.0))
            acc += share * tl.load(sums + part * V_DIM + d, mask=d < V_DIM, other=0.0)[None, :]
        one = tl.zeros([1], tl.float32)
        acc, lse_of_head = _finish(best + one, tl.sum(totals * weight) + one, acc, sinks, head, exists)
        _write(acc, lse_of_head, out, lse, b, t, b * q_len + t, sel_heads * GROUP, head, exists, d, V_DIM)


def _tile(query: Tensor, k_cache: Tensor, v_head_dim: int) -> dict[str, int]:
    """How many channels and tokens are multiplied together: what fits the registers."""
    if k_cache.dtype == torch.float32:
        dim, tokens = 32, 2048
    elif query.dtype == torch.float32:
        dim, tokens = 32, 4096
    else:
        dim, tokens = 128, 8192
    tile_v = tile_dim(v_head_dim)
    return dict(
        TILE_DIM=min(tile_dim(query.shape[3]), dim),
        TILE_V_DIM=tile_v,
        TOKENS=max(16, min(64, tokens // tile_v)),
        num_warps=4 if tile_v <= 256 else 8,
        num_stages=2,
        maxnreg=MOST_REGISTERS,
    )


@verb
def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    page_idx: Tensor | None,
    page_size: int,
    softmax_scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    window: int = -1,
    check: bool = True,
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    batch, q_len, num_heads, head_dim = query.shape
    num_blocks, num_kv_heads, block_size, v_head_dim = v_cache.shape
    if v_head_dim > MAX_DIM:
        raise ValueError(f"attend: v_cache: Triton's kernel takes up to {MAX_DIM} channels, got {v_head_dim}")
    sel_heads = num_kv_heads if page_idx is None else page_idx.shape[2]
    max_selected = block_table.shape[1] * (block_size // page_size) if page_idx is None else page_idx.shape[3]
    group = num_heads // sel_heads
    units = batch * q_len * sel_heads * triton.cdiv(group, TILE_HEADS)
    splits = min(PROGRAMS // max(1, units), max_selected * page_size // TOKENS_PER_SPLIT, MAX_SPLITS)
    num_splits = max(1, splits)

    out = query.new_empty(batch, q_len, num_heads, v_head_dim)
    lse = query.new_empty(batch, q_len, num_heads, dtype=torch.float32)
    sums = stats = None
    if num_splits > 1:
        sums = lse.new_empty(units, num_splits, TILE_HEADS, v_head_dim)
        stats = lse.new_empty(units, num_splits, TILE_HEADS, 2)
    tile = _tile(query, k_cache, v_head_dim)
    common = dict(
        sums=sums,
        stats=stats,
        sinks=sinks,
        out=rows(out),
        lse=lse,
        num_splits=num_splits,
        sel_heads=sel_heads,
        GROUP=group,
        V_DIM=v_head_dim,
        HEADS=TILE_HEADS,
    )
    attention = Launch(
        attend_pages,
        units * num_splits,
        query=rows(query),
        k_cache=pool(k_cache),
        v_cache=pool(v_cache),
        seq=sequences(block_table, seq_lens, num_blocks, block_size, q_len, window),
        page_idx=None if page_idx is None else rows(page_idx if page_idx.stride(3) == 1 else page_idx.contiguous()),
        softmax_scale=softmax_scale,
        softcap=softcap,
        max_selected=max_selected,
        num_kv_heads=num_kv_heads,
        PAGE_SIZE=page_size,
        PAGES_PER_BLOCK=block_size // page_size,
        DIM=head_dim,
        SOFTCAP=softcap > 0,
        **common,
        **tile,
    )
    if num_splits == 1:
        return [attention], (out, lse)
    combination = Launch(
        combine_splits,
        units * min(group, TILE_HEADS),
        q_len=q_len,
        TILE_V_DIM=tile["TILE_V_DIM"],
        SPLITS=triton.next_power_of_2(num_splits),
        num_warps=1 if v_head_dim <= 256 else 4,
        **common,
    )
    return [attention, combination], (out, lse)


def configurations() -> Iterator[Launch]:
    for dtype, head_dim, group in REPRESENTATIVE:
        yield from _configurations(dtype, dtype, head_dim, head_dim, group)
    yield from _configurations(torch.bfloat16, torch.bfloat16, 576, 512, 16)  # absorbed MLA
    yield from _configurations(torch.float32, torch.bfloat16, 1024, 1024, 4)
    yield from _configurations(torch.float32, torch.float32, 1024, 1024, 4)


def _configurations(
    query_dtype: torch.dtype, dtype: torch.dtype, head_dim: int, v_head_dim: int, group: int
) -> Iterator[Launch]:
    k_cache, v_cache = (torch.empty(64, 8, 16, dim, dtype=dtype, device="meta") for dim in (head_dim, v_head_dim))
    table = torch.empty(64, 512, dtype=torch.int32, device="meta")
    sinks = torch.empty(8 * group, device="meta")
    for batch, softcap in ((8, 0.0), (64, 30.0)):  # split, and not
        query = torch.empty(batch, 1, 8 * group, head_dim, dtype=query_dtype, device="meta")
        page_idx = torch.empty(batch, 1, 8, 128, dtype=torch.int32, device="meta")
        row = k_cache, v_cache, table[:batch], table[:batch, 0]
        for chosen in (None, page_idx):
            yield from attend.plan(query, *row, chosen, 16, 0.1, softcap, sinks if softcap else None)[0]
