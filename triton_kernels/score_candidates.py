"""The scores of candidates: all groups by their codes, the best of them kept, and the pages of those by theirs; the
pages after the last whole group from K.

Sizes follow from shapes alone: as many groups are provided for as a row that fills its block table keeps.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quest.packing import Packing, kept_pages

from .agree import NEG_INF, agree_heads, agree_settings
from .candidates import Choice, Kept, choosable, groups_of, kept_of
from .codes import EXACT, bounds_at, layout_of, packed_of, pages_of, words_at
from .primitives import MOST_REGISTERS, MOST_TOKENS, Launch, block_at, pool, row_at, row_in, rows, sequences, tile_dim
from .score_codes import score_codes, toward_and_against, weights_of
from .select import chunk_settings, offset, take_best


@triton.jit
def head_tile(unit, num_kv_heads, q_len, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Of a program for a token, KV head and tile of its query heads: row, token, KV head, the tile's first head in the
    group, and which of its heads exist."""
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    first = unit % TILES * HEADS
    kv_head, token = unit // TILES % num_kv_heads, unit // TILES // num_kv_heads
    return token // q_len, token % q_len, kv_head, first, first + tl.arange(0, HEADS) < GROUP


@triton.jit(do_not_specialize=["seq", "choice", "slack", "num_kv_heads", "max_blocks"])
def score_groups(
    query, packed, seq, choice,
    raw,  # [batch, q_len, num_heads, max_blocks * groups]
    slack, num_kv_heads, max_blocks, fraction: tl.float64, coarse_keep: tl.float64,
    GROUP: tl.constexpr, HEADS: tl.constexpr, MOST: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr, GROUP_PAGES: tl.constexpr, LANES: tl.constexpr,
    COARSE_LANES: tl.constexpr, WORD_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The groups of one block, if there is a choice: a program for each token, tile of heads, and block."""
    GROUPS: tl.constexpr = PAGES // GROUP_PAGES
    WORDS: tl.constexpr = DIM * BITS // 16
    index, unit = tl.program_id(0) % max_blocks, tl.program_id(0) // max_blocks
    b, t, kv_head, first_head, exists = head_tile(unit, num_kv_heads, seq.q_len, GROUP, HEADS)
    seen, first, last, coded = choosable(seq, b, t, choice, PAGE_SIZE, PAGES, GROUP_PAGES)
    begin, end = groups_of(first, last, coded, GROUP_PAGES)
    kept = kept_of(end - begin, seen, choice, fraction, coarse_keep, GROUP_PAGES * PAGE_SIZE, True)
    if kept == end - begin or (index + 1) * GROUPS <= begin or index * GROUPS >= end:
        return
    head = kv_head * GROUP + first_head + tl.arange(0, HEADS)
    token = (b * seq.q_len + t).to(tl.int64)
    to = raw + (token * num_kv_heads * GROUP + head) * max_blocks * GROUPS + index * GROUPS
    block = block_at(seq, b, index, True)
    words = words_at(packed, tl.maximum(block, 0), kv_head)
    weights = weights_of(row_at(query, b, t, head), exists, bounds_at(words), block >= 0, slack, MOST, HEAD_DIM, DIM,
                         BITS, True, WORDS, WORD_TILE)  # fmt: skip
    for start in range(0, GROUPS, ROWS):
        group = start + tl.arange(0, ROWS)
        mask = group < tl.where(block >= 0, GROUPS, 0)
        score = score_codes(words + DIM, group, mask, weights, BITS, WORDS, WORD_TILE, COARSE_LANES)
        score = tl.where(mask[:, None], score, NEG_INF)
        tl.store(to[None, :] + group[:, None], score, mask=(group < GROUPS)[:, None] & exists[None, :])


@triton.jit(do_not_specialize=["seq", "choice", "kept", "softmax_scale", "num_kv_heads", "max_groups"])
def keep_groups(
    raw,  # [batch, q_len, num_heads, max_groups]
    scores,  # [batch, q_len, num_kv_heads, max_groups]
    seq, choice, kept, softmax_scale, num_kv_heads, max_groups, fraction: tl.float64, coarse_keep: tl.float64,
    COARSE: tl.constexpr, SOFTMAX: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr,
    GROUP_PAGES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Which groups have their pages scored: a program for each token and KV head."""
    unit = tl.program_id(0).to(tl.int64)
    token = (unit // num_kv_heads).to(tl.int32)
    b, t = token // seq.q_len, token % seq.q_len
    seen, first, last, coded = choosable(seq, b, t, choice, PAGE_SIZE, PAGES, GROUP_PAGES)
    begin, end = groups_of(first, last, coded, GROUP_PAGES)
    count = kept_of(end - begin, seen, choice, fraction, coarse_keep, GROUP_PAGES * PAGE_SIZE, COARSE)
    to = kept.groups + unit * kept.max_kept
    tl.store(kept.counts + unit, count)
    if count == end - begin:
        for start in range(0, count, CHUNK):
            place = start + tl.arange(0, CHUNK)
            tl.store(to + place, begin + place, mask=place < count)
    elif COARSE:
        scores += unit * max_groups
        agree_heads(raw + unit * GROUP * max_groups + begin, max_groups, 0, end - begin, scores, offset, 0,
                    softmax_scale, GROUP, HEADS, TILE, SOFTMAX)  # fmt: skip
        tl.debug_barrier()  # what some threads wrote, others read
        take_best(scores, end - begin, count, to, offset, begin, CHUNK)


@triton.jit
def score_kept(
    query, exists, packed, seq, b, kv_head, group, first, last, to, slack,
    MOST: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BITS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    PAGES: tl.constexpr, GROUP_PAGES: tl.constexpr, LANES: tl.constexpr, COARSE_LANES: tl.constexpr,
    WORD_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scores of a group's pages by their codes. `query` and `to` point to rows of the heads that `exists` says."""
    GROUPS: tl.constexpr = PAGES // GROUP_PAGES
    WORDS: tl.constexpr = DIM * BITS // (32 if PAGE_SIZE == 1 else 16)
    block = block_at(seq, b, group // GROUPS, True)
    words = words_at(packed, tl.maximum(block, 0), kv_head)
    weights = weights_of(query, exists, bounds_at(words), block >= 0, slack, MOST, HEAD_DIM, DIM, BITS, PAGE_SIZE > 1,
                         WORDS, WORD_TILE)  # fmt: skip
    fine = words + DIM + (GROUPS * (DIM * BITS // 16) if COARSE_LANES else 0)
    for start in range(0, GROUP_PAGES, ROWS):
        place = start + tl.arange(0, ROWS)
        page = group * GROUP_PAGES + place
        inside = place < GROUP_PAGES
        mask = inside & (page >= first) & (page < tl.where(block >= 0, last, 0))
        in_block = group % GROUPS * GROUP_PAGES + place
        score = score_codes(fine, in_block, mask, weights, BITS, WORDS, WORD_TILE, LANES)
        score = tl.where(mask[:, None], score, NEG_INF)
        tl.store(to[None, :] + place[:, None], score, mask=inside[:, None] & exists[None, :])


@triton.jit
def score_open(
    query, stride_head, heads, k_cache, seq, b, kv_head, open_page, first, last, to, stride_to, slack,
    HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr, GROUP_PAGES: tl.constexpr,
    DIM_TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Scores of pages without codes, from `open_page` on, by their keys. `query` and `to` point to the first head's."""
    block = block_at(seq, b, open_page // PAGES, True)
    keys = row_in(k_cache, tl.maximum(block, 0), kv_head, 0)
    channel = tl.arange(0, DIM_TILE)
    read = channel < HEAD_DIM
    toward, against = toward_and_against(slack)
    for start in range(0, GROUP_PAGES, ROWS):
        place = start + tl.arange(0, ROWS)
        page = open_page + place
        mask = (page >= first) & (page < tl.where(block >= 0, last, 0))
        low, high = pages_of(keys, page % PAGES, mask, channel, read, k_cache.stride_row, PAGE_SIZE)
        for head in range(heads):
            q = tl.load(query + tl.cast(head, tl.int64) * stride_head + channel, mask=read, other=0.0).to(tl.float32)
            above, below = q * tl.where(q > 0, toward, against), q * tl.where(q > 0, against, toward)
            score = tl.sum(high * above[None, :] + low * below[None, :], 1)
            tl.store(to + head * stride_to + place, tl.where(mask, score, NEG_INF), mask=place < GROUP_PAGES)


@triton.jit(do_not_specialize=["seq", "choice", "kept", "slack", "num_kv_heads", "parts"])
def score_candidates(
    query, k_cache, packed, seq, choice, kept,
    raw,  # [batch, q_len, num_heads, parts, GROUP_PAGES]
    slack, num_kv_heads, parts,
    GROUP: tl.constexpr, HEADS: tl.constexpr, MOST: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr, GROUP_PAGES: tl.constexpr, LANES: tl.constexpr,
    COARSE_LANES: tl.constexpr, WORD_TILE: tl.constexpr, ROWS: tl.constexpr, DIM_TILE: tl.constexpr,
    OPEN_ROWS: tl.constexpr,
):  # fmt: skip
    """A kept group's pages, or as many without codes: a program for each token, tile of heads, and such part."""
    part, unit = tl.program_id(0) % parts, tl.program_id(0) // parts
    b, t, kv_head, first_head, exists = head_tile(unit, num_kv_heads, seq.q_len, GROUP, HEADS)
    _, first, last, coded = choosable(seq, b, t, choice, PAGE_SIZE, PAGES, GROUP_PAGES)
    kept_unit = (b * seq.q_len + t).to(tl.int64) * num_kv_heads + kv_head
    num_kept = tl.load(kept.counts + kept_unit)
    query_row = row_at(query, b, t, kv_head * GROUP + first_head)
    stride_to = parts.to(tl.int64) * GROUP_PAGES
    to = raw + (kept_unit * GROUP + first_head) * stride_to + part * GROUP_PAGES
    open_page = coded + (part - num_kept) * GROUP_PAGES
    if part < num_kept:
        group = tl.load(kept.groups + kept_unit * kept.max_kept + part)
        in_tile = tl.arange(0, HEADS).to(tl.int64)
        score_kept(query_row + in_tile * query.stride_head, exists, packed, seq, b, kv_head, group, first, last,
                   to + in_tile * stride_to, slack, MOST, HEAD_DIM, DIM, BITS, PAGE_SIZE, PAGES, GROUP_PAGES, LANES,
                   COARSE_LANES, WORD_TILE, ROWS)  # fmt: skip
    elif open_page < last:
        score_open(query_row, query.stride_head, tl.minimum(GROUP - first_head, HEADS), k_cache, seq, b, kv_head,
                   open_page, first, last, to, stride_to, slack, HEAD_DIM, PAGE_SIZE, PAGES, GROUP_PAGES, DIM_TILE,
                   OPEN_ROWS)  # fmt: skip


# ---- launches ----


class Scored(NamedTuple):
    """Launches that leave the scores of each query head's candidates, and what goes on from there."""

    launches: list[Launch]
    raw: Tensor  # [batch, q_len, num_heads, max_candidates]
    arguments: dict[str, Any]


def tiles_of(group: int, words: int, pages: int, bits: int) -> dict[str, int]:
    """What a program holds at a time: words of a page, query heads whose weights fit, pages whose codes do. Fewer than
    64 pages, which are multiplied by instructions that all architectures have, and with as few columns as there are."""
    word_tile = triton.next_power_of_2(words)
    codes = word_tile * 32 // bits
    rows = 32 if pages > 16 and codes <= 256 else 16
    heads = min(triton.next_power_of_2(group), 16, max(1, 8192 // codes))
    return dict(WORD_TILE=word_tile, HEADS=heads, ROWS=rows)


def plan_candidates(
    query: Tensor, k_cache: Tensor, packed: Tensor, block_table: Tensor, seq_lens: Tensor, packing: Packing,
    coarse_keep: float, coarse_limit: int, budget: int, budget_fraction: float, sink_pages: int, recent_pages: int,
    softmax_scale: float, slack: float, coarse_slack: float, group_rule: str, window: int,
) -> Scored:  # fmt: skip
    batch, q_len, num_heads, head_dim = query.shape
    num_blocks, num_kv_heads, block_size, _ = k_cache.shape
    max_blocks, group = block_table.shape[1], num_heads // num_kv_heads
    groups = packing.pages // packing.group_pages
    max_groups = max_kept = max_blocks * groups
    if packing.coarse_size:
        tokens = math.ceil(budget_fraction * max_blocks * block_size) if budget_fraction > 0 else budget
        max_kept = kept_pages(max_groups, coarse_keep, coarse_limit, tokens, packing)
    parts = max_kept + (1 if q_len == 1 else groups)  # of candidates; the last ones have no codes
    units, heads_of_units = (batch, q_len, num_kv_heads), (batch, q_len, num_heads)

    def scratch(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return query.new_empty(sizes, dtype=dtype)

    raw = scratch(*heads_of_units, parts * packing.group_pages)
    coarse = scratch(*heads_of_units, max_groups if packing.coarse_size else 0)
    kept = Kept(scratch(*units, max_kept, dtype=torch.int32), scratch(*units, dtype=torch.int32), max_kept)
    unit = dict(
        seq=sequences(block_table, seq_lens, num_blocks, block_size, q_len, window),
        choice=Choice(sink_pages, recent_pages, min(budget, MOST_TOKENS), min(coarse_limit, MOST_TOKENS)),
        num_kv_heads=num_kv_heads,
        PAGE_SIZE=packing.page_size,
        PAGES=packing.pages,
        GROUP_PAGES=packing.group_pages,
    )
    rule = agree_settings(group) | dict(softmax_scale=softmax_scale, SOFTMAX=group_rule == "softmax")
    keeping = dict(fraction=budget_fraction, coarse_keep=coarse_keep)

    def by_codes(kernel: Any, programs: int, words: int, pages: int, **arguments: Any) -> Launch:
        """One program for each token, tile of a group's heads, and what `programs` counts; a page has so many words."""
        common = (
            unit
            | layout_of(packing, head_dim)
            | tiles_of(group, words, pages, packing.bits)
            | EXACT
            | dict(maxnreg=MOST_REGISTERS)
        )
        common |= dict(query=rows(query), packed=packed_of(packed), GROUP=group)
        programs *= math.prod(units) * triton.cdiv(group, common["HEADS"])
        return Launch(kernel, programs, MOST=float(packing.max_weight(head_dim)), **common, **arguments)

    by_groups = by_codes(
        score_groups,
        max_blocks,
        packing.coarse_bytes(head_dim) // 4,
        groups,
        raw=coarse,
        slack=coarse_slack,
        max_blocks=max_blocks,
        **keeping,
    )
    keep = Launch(
        keep_groups,
        math.prod(units),
        raw=coarse,
        scores=scratch(*units, coarse.shape[3]),
        kept=kept,
        max_groups=max_groups,
        COARSE=packing.coarse_size is not None,
        **(unit | rule | keeping),
        **chunk_settings(max_groups),
    )
    by_pages = by_codes(
        score_candidates,
        parts,
        packing.page_bytes(head_dim) // 4,
        packing.group_pages,
        k_cache=pool(k_cache),
        kept=kept,
        raw=raw,
        slack=slack,
        parts=parts,
        DIM_TILE=tile_dim(head_dim),
        OPEN_ROWS=min(packing.group_pages, max(1, 4096 // tile_dim(head_dim))),
    )
    launches = [by_groups, keep, by_pages] if packing.coarse_size else [keep, by_pages]
    return Scored(launches, raw, unit | rule | dict(kept=kept, raw=raw, max_candidates=raw.shape[3]))
