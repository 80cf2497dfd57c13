"""score_packed: query x packed summaries. All groups by their codes, the best of them kept, and the pages of those by
theirs; the pages after the last whole group from K. `select_packed` goes on to the pages that are read.

Sizes follow from shapes alone: as many groups are provided for as a row that fills its block table keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from quest.packing import Packing, kept_pages, padded

from .agree import agree_heads, agree_settings
from .candidates import Choice, Kept, candidates_of, choosable, groups_of, kept_of, page_at
from .codes import EXACT, bounds_at, cache_of, compiled_packings, layout_of, packed_of, packing_of, pages_of, words_at
from .primitives import MOST_TOKENS, Launch, block_at, pool, row_at, row_in, rows, sequences, verb
from .score_codes import score_codes, toward_and_against, weights_of
from .select import chunk_settings, forced_and_chosen, offset, put_forced, take_best

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def head_tile(unit, num_kv_heads, q_len, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """Of a program for a token, KV head and tile of its query heads: row, token, KV head, and query heads, of which
    those exist that the last says."""
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    in_group = unit % TILES * HEADS + tl.arange(0, HEADS)
    kv_head, token = unit // TILES % num_kv_heads, unit // TILES // num_kv_heads
    return token // q_len, token % q_len, kv_head, kv_head * GROUP + in_group, in_group < GROUP


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
    b, t, kv_head, head, exists = head_tile(unit, num_kv_heads, seq.q_len, GROUP, HEADS)
    seen, first, last, coded = choosable(seq, b, t, choice, PAGE_SIZE, PAGES, GROUP_PAGES)
    begin, end = groups_of(first, last, coded, GROUP_PAGES)
    kept = kept_of(end - begin, seen, choice, fraction, coarse_keep, GROUP_PAGES * PAGE_SIZE, True)
    if kept == end - begin or (index + 1) * GROUPS <= begin or index * GROUPS >= end:
        return
    token = (b * seq.q_len + t).to(tl.int64)
    to = raw + (token * num_kv_heads * GROUP + head) * max_blocks * GROUPS + index * GROUPS
    block = block_at(seq, b, index, True)
    words = words_at(packed, tl.maximum(block, 0), kv_head)
    weights = weights_of(row_at(query, b, t, head), exists, bounds_at(words), slack, MOST, HEAD_DIM, DIM, BITS, True,
                         WORDS, WORD_TILE)  # fmt: skip
    for start in tl.static_range(0, GROUPS, ROWS):
        group = start + tl.arange(0, ROWS)
        mask = (group < GROUPS) & (block >= 0)
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
def score_open(keys, page, mask, query, exists, b, t, head, kv, to, k_row, slack):
    pass


@triton.jit(do_not_specialize=["seq", "choice", "kept", "slack", "num_kv_heads", "parts"])
def score_candidates(
    query, k_cache, packed, seq, choice, kept,
    raw,  # [batch, q_len, num_heads, parts * GROUP_PAGES]
    slack, num_kv_heads, parts,
    GROUP: tl.constexpr, HEADS: tl.constexpr, MOST: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BITS: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr, GROUP_PAGES: tl.constexpr, LANES: tl.constexpr,
    COARSE_LANES: tl.constexpr, WORD_TILE: tl.constexpr, ROWS: tl.constexpr,
    DIM_TILE: tl.constexpr, OPEN_ROWS: tl.constexpr,
):  # fmt: skip
    """The pages of one kept group, or as many without codes: a program for each token, tile of heads, and such part."""
    GROUPS: tl.constexpr = PAGES // GROUP_PAGES
    PLACES: tl.constexpr = (32 if PAGE_SIZE == 1 else 16) // BITS
    WORDS: tl.constexpr = DIM // PLACES
    part, unit = tl.program_id(0) % parts, tl.program_id(0) // parts
    b, t, kv_head, head, exists = head_tile(unit, num_kv_heads, seq.q_len, GROUP, HEADS)
    seen, first, last, coded = choosable(seq, b, t, choice, PAGE_SIZE, PAGES, GROUP_PAGES)
    token = b * seq.q_len + t
    kept_unit = token * num_kv_heads + kv_head
    num_kept = tl.load(kept.counts + kept_unit)
    row = token.to(tl.int64) * num_kv_heads * GROUP + head
    to = raw + row * parts * GROUP_PAGES + part * GROUP_PAGES
    if part < num_kept:
        group = tl.load(kept.groups + kept_unit.to(tl.int64) * kept.max_kept + part)
        block = block_at(seq, b, group // GROUPS, True)
        words = words_at(packed, tl.maximum(block, 0), kv_head)
        weights = weights_of(row_at(query, b, t, head), exists, bounds_at(words), slack, MOST, HEAD_DIM, DIM, BITS,
                             PAGE_SIZE > 1, WORDS, WORD_TILE)  # fmt: skip
        fine = words + DIM + (GROUPS * (DIM * BITS // 16) if COARSE_LANES else 0)
        place = tl.arange(0, ROWS)
        page = group * GROUP_PAGES + place
        mask = (place < GROUP_PAGES) & (page >= first) & (page < last) & (block >= 0)
        score = score_codes(fine, group % GROUPS * GROUP_PAGES + place, mask, weights, BITS, WORDS, WORD_TILE, LANES)
        score = tl.where(mask[:, None], score, NEG_INF)
        tl.store(to[None, :] + place[:, None], score, mask=(place < GROUP_PAGES)[:, None] & exists[None, :])
        return
    open_page = coded + (part - num_kept) * GROUP_PAGES
    if open_page >= last:
        return
    block = block_at(seq, b, open_page // PAGES, True)
    keys = row_in(k_cache, tl.maximum(block, 0), kv_head, 0)
    channel = tl.arange(0, DIM_TILE)
    read = channel < HEAD_DIM
    toward, against = toward_and_against(slack)
    for start in range(0, GROUP_PAGES, OPEN_ROWS):
        place = start + tl.arange(0, OPEN_ROWS)
        page = open_page + place
        mask = (place < GROUP_PAGES) & (page >= first) & (page < last) & (block >= 0)
        low, high = pages_of(keys, page % PAGES, mask, channel, read, k_cache.stride_row, PAGE_SIZE)
        for h in range(0, HEADS):
            in_tile = unit % ((GROUP + HEADS - 1) // HEADS) * HEADS + h
            if in_tile < GROUP:
                q = tl.load(row_at(query, b, t, kv_head * GROUP + in_tile) + channel, mask=read, other=0.0)
                q = q.to(tl.float32)
                above = q * tl.where(q > 0, toward, against)
                below = q * tl.where(q > 0, against, toward)
                score = tl.where(mask, tl.sum(high * above[None, :] + low * below[None, :], 1), NEG_INF)
