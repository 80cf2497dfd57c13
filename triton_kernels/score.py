"""score: query x summaries, and the group rule that makes one score of a group's."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .agree import NEG_INF, agree_settings, agree_tile, share_of
from .primitives import (
    REPRESENTATIVE,
    TILE_HEADS,
    Launch,
    block_at,
    dot,
    exp,
    gap_to,
    pool,
    row_at,
    row_in,
    rows,
    sequences,
    span,
    tile_dim,
    to_float,
    verb,
)

TILE_DIM = {torch.bfloat16: 128, torch.float16: 64, torch.float32: 32}  # at most: more would not fit the registers
AGREE_PAGES = 1024  # of a program of `agree`, at least
AGREE_SPLITS = 16  # programs of `agree` for each row, at most


@triton.jit
def weights(q, slack):
    """What page_max and page_min are multiplied by. With slack 1 one of the two is zero."""
    slack = slack * tl.abs(q)
    return (q + slack) / 2, (q - slack) / 2


@triton.jit
def is_scored(page, token_span, PAGE_SIZE: tl.constexpr):
    """Whether a token may score a page: it sees some of it, and the summary holds no later token."""
    length, seen, _, first_page, end_page = token_span
    scored_end = tl.where(seen == length, end_page, seen // PAGE_SIZE)
    return (page >= first_page) & (page < scored_end)


@triton.jit(do_not_specialize=["seq", "slack", "softmax_scale", "max_pages", "num_chunks"])
def score_pages(
    query, page_min, page_max, seq,
    raw,  # [batch, q_len, num_heads, max_pages]
    parts,  # [batch, q_len, num_heads, num_chunks, 2]: best score and sum of exp(scale (score - best)) of each chunk
    slack, softmax_scale, max_pages, num_chunks, num_kv_heads,
    GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES_PER_BLOCK: tl.constexpr, DIM: tl.constexpr,
    TILE_DIM: tl.constexpr, HEADS: tl.constexpr, PAGES: tl.constexpr, SUMS: tl.constexpr,
):  # fmt: skip
    """One program for each token, KV head, tile of its query heads, and chunk of pages."""
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    chunk, unit = tl.program_id(0) % num_chunks, tl.program_id(0) // num_chunks
    tile, kv_head, token = unit % TILES, unit // TILES % num_kv_heads, unit // TILES // num_kv_heads
    b, t = token // seq.q_len, token % seq.q_len
    in_group = tile * HEADS + tl.arange(0, HEADS)
    head, exists = kv_head * GROUP + in_group, in_group < GROUP
    page = chunk * PAGES + tl.arange(0, PAGES)
    scored = is_scored(page, span(seq, b, t, PAGE_SIZE), PAGE_SIZE)
    score = tl.full([HEADS, PAGES], NEG_INF, tl.float32)
    if tl.max(scored.to(tl.int32)) > 0:
        block = block_at(seq, b, page // PAGES_PER_BLOCK, scored)
        bound = tl.zeros([HEADS, PAGES], tl.float32)
        for start in range(0, DIM, TILE_DIM):
            d = start + tl.arange(0, TILE_DIM)
            q = tl.load(row_at(query, b, t, head)[:, None] + d[None, :],
                        mask=exists[:, None] & (d < DIM)[None, :], other=0.0)  # fmt: skip
            above, below = weights(to_float(q), slack)
            mask = (block >= 0)[:, None] & (d < DIM)[None, :]
            row = page % PAGES_PER_BLOCK
            high = tl.load(row_in(page_max, block, kv_head, row)[:, None] + d[None, :], mask=mask, other=0.0)
            low = tl.load(row_in(page_min, block, kv_head, row)[:, None] + d[None, :], mask=mask, other=0.0)
            bound += dot(above, tl.trans(high)) + dot(below, tl.trans(low))
        score = tl.where((block >= 0)[None, :], bound, NEG_INF)

    row = (token.to(tl.int64) * num_kv_heads * GROUP + head)[:, None]
    tl.store(raw + row * max_pages + page[None, :], score, mask=exists[:, None] & (page < max_pages)[None, :])
    if SUMS:
        known = scored[None, :] & (score == score)
        best = tl.max(tl.where(known, score, NEG_INF), 1)
        total = tl.sum(tl.where(known, exp(gap_to(best[:, None], score) * softmax_scale), 0.0), 1)
        part = parts + (row * num_chunks + chunk) * 2
        tl.store(part, best[:, None], mask=exists[:, None])
        tl.store(part + 1, total[:, None], mask=exists[:, None])


@triton.jit
def _best_and_sum(parts, num_chunks, exists, softmax_scale, HEADS: tl.constexpr, CHUNKS: tl.constexpr):
    """Each head's best score over all pages and its sum of exponentials. `parts` [HEADS, 1] point to the first part."""
    best = tl.full([HEADS], NEG_INF, tl.float32)
    total = tl.zeros([HEADS], tl.float32)
    for start in range(0, num_chunks, CHUNKS):
        chunk = start + tl.arange(0, CHUNKS)[None, :]
        mask = exists[:, None] & (chunk < num_chunks)
        best_here = tl.load(parts + chunk * 2, mask=mask, other=NEG_INF)
        total_here = tl.load(parts + chunk * 2 + 1, mask=mask, other=0.0)
        top = tl.maximum(best, tl.max(best_here, 1))
        total *= exp(gap_to(top, best) * softmax_scale)
        total += tl.sum(total_here * exp(gap_to(top[:, None], best_here) * softmax_scale), 1)
        best = top
    return best, total


@triton.jit(do_not_specialize=["seq", "softmax_scale", "max_pages", "num_chunks", "splits", "pages_per_split"])
def agree(
    raw, parts, seq,
    scores,  # [batch, q_len, num_kv_heads, max_pages]
    softmax_scale, max_pages, num_chunks, num_kv_heads, splits, pages_per_split,
    PAGE_SIZE: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, SOFTMAX: tl.constexpr,
):  # fmt: skip
    """One score per page for a group's heads; NaN where any head's is. One program for each token, KV head and split of
    the pages."""
    split, row = tl.program_id(0) % splits, (tl.program_id(0) // splits).to(tl.int64)
    token = (row // num_kv_heads).to(tl.int32)
    token_span = span(seq, token // seq.q_len, token % seq.q_len, PAGE_SIZE)
    in_group = tl.arange(0, HEADS)
    exists = in_group < GROUP
    head = (row * GROUP + in_group)[:, None]
    best, total = _best_and_sum(parts + head * num_chunks * 2, num_chunks, exists, softmax_scale, HEADS, TILE)
    share = share_of(total, GROUP, HEADS)
    end = tl.minimum((split + 1) * pages_per_split, max_pages)
    for start in range(split * pages_per_split, end, TILE):
        page = start + tl.arange(0, TILE)
        inside, scored = page < end, is_scored(page, token_span, PAGE_SIZE)
        score = tl.load(raw + head * max_pages + page[None, :], mask=exists[:, None] & inside[None, :], other=NEG_INF)
        agreed = agree_tile(score, best, share, softmax_scale, SOFTMAX)
        tl.store(scores + row * max_pages + page, tl.where(scored, agreed, NEG_INF), mask=inside)


@verb
def score(
    query: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    page_size: int,
    softmax_scale: float,
    slack: float,
    group_rule: str,
    window: int = -1,
    check: bool = True,
) -> tuple[list[Launch], Tensor]:
    batch, q_len, num_heads, head_dim = query.shape
    num_blocks, num_kv_heads, pages_per_block, _ = page_min.shape
    group, max_pages = num_heads // num_kv_heads, block_table.shape[1] * pages_per_block
    dim = min(tile_dim(head_dim), TILE_DIM[page_min.dtype])
    pages = min(64, 4096 // dim)
    num_chunks = triton.cdiv(max_pages, pages)
    raw = query.new_empty(batch, q_len, num_heads, max_pages, dtype=torch.float32)
    parts = query.new_empty(batch, q_len, num_heads, num_chunks, 2, dtype=torch.float32)
    common = dict(
        raw=raw,
        parts=parts,
        seq=sequences(block_table, seq_lens, num_blocks, pages_per_block * page_size, q_len, window),
        softmax_scale=softmax_scale,
        max_pages=max_pages,
        num_chunks=num_chunks,
        num_kv_heads=num_kv_heads,
        PAGE_SIZE=page_size,
        num_warps=4,
    )
    bounds = Launch(
        score_pages,
        batch * q_len * num_kv_heads * triton.cdiv(group, TILE_HEADS) * num_chunks,
        query=rows(query),
        page_min=pool(page_min),
        page_max=pool(page_max),
        slack=slack,
        GROUP=group,
        PAGES_PER_BLOCK=pages_per_block,
        DIM=head_dim,
        TILE_DIM=dim,
        HEADS=TILE_HEADS,
        PAGES=pages,
        SUMS=group_rule != "per_head",
        **common,
    )
    if group_rule == "per_head":
        return [bounds], raw
    scores = raw.new_empty(batch, q_len, num_kv_heads, max_pages)
    splits = min(AGREE_SPLITS, triton.cdiv(max_pages, AGREE_PAGES))
    agreement = Launch(
        agree,
        batch * q_len * num_kv_heads * splits,
        scores=scores,
        splits=splits,
        pages_per_split=triton.cdiv(max_pages, max(1, splits)),
        SOFTMAX=group_rule == "softmax",
        **agree_settings(group),
        **common,
    )
    return [bounds, agreement], scores


def configurations() -> Iterator[Launch]:
    table = torch.empty(8, 512, dtype=torch.int32, device="meta")
    for dtype, head_dim, group in REPRESENTATIVE:
        query = torch.empty(8, 1, 8 * group, head_dim, dtype=dtype, device="meta")
        summary = torch.empty(4096, 8, 1, head_dim, dtype=dtype, device="meta")
        for rule in ("softmax", "relative", "per_head"):
            yield from score.plan(query, summary, summary, table, table[:, 0], 16, 0.1, 1.0, rule)[0]
