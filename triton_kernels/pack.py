"""pack: the summary of a block as codes, the cells that hold its pages' minima and maxima.

`quest/packing.py` has the layout, `quest/reference_packed.py` the rule. One program for each row, KV head and block in
which the row's new tokens complete a group. It reads the keys twice: for the range of each channel, and for the codes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from quest.packing import MAX_KEY, Packing, padded

from .codes import (
    EXACT,
    bf16_above,
    bf16_below,
    bounds_at,
    cache_of,
    channel_of,
    compiled_packings,
    from_bf16,
    layout_of,
    packed_of,
    packing_of,
    pages_of,
    place_of,
    places_of,
    words_at,
)
from .primitives import Launch, block_at, length_of, pool, row_in, sequences, verb

TILE = 8192  # keys that a program holds at a time

_MAX_KEY = tl.constexpr(MAX_KEY)


@triton.jit
def new_tokens(new, row, q_len, FROM_SLOTS: tl.constexpr):
    """How many of a row's tokens are new: what `new` says, or q_len if it has a slot for any."""
    new += row.to(tl.int64) * q_len
    if not FROM_SLOTS:
        return tl.load(new)
    stores = 0
    for first in range(0, q_len, 32):
        token = first + tl.arange(0, 32)
        slot = tl.load(new + token, mask=token < q_len, other=-1)
        stores = tl.maximum(stores, tl.max((slot >= 0).to(tl.int32)))
    return stores * q_len


@triton.jit
def range_of(keys, first, end, channel, read, k_row, TILE: tl.constexpr):
    """Each channel's smallest and largest key of a block's tokens [first, end)."""
    low = tl.full((TILE, channel.shape[0]), float("inf"), tl.float32)
    high = -low
    for start in range(first, end, TILE):
        token = start + tl.arange(0, TILE)
        mask = (token < end)[:, None] & read[None, :]
        key = tl.load(keys + token.to(tl.int64)[:, None] * k_row + channel[None, :], mask=mask, other=0).to(tl.float32)
        low = tl.where(mask & (key < low), key, low)
        high = tl.where(mask & (key > high), key, high)
    return tl.maximum(tl.min(low, 0), -_MAX_KEY), tl.minimum(tl.max(high, 0), _MAX_KEY)


@triton.jit
def cells_of(low, high, known, BITS: tl.constexpr):
    """lo and step of each channel's cells, rounded outward, as bfloat16's bits; 0 where `known` is false."""
    low, high = tl.where(known, low, 0.0), tl.where(known, high, 0.0)
    lo = bf16_below(low)
    width = high.to(tl.float64) - from_bf16(lo).to(tl.float64)
    step = (width * (1.0 / (1 << BITS))).to(tl.float32)
    above = (step.to(tl.uint32, bitcast=True) + 1).to(tl.float32, bitcast=True)  # the next float
    return lo, tl.where(width > 0, bf16_above(above), 0).to(tl.uint16)


@triton.jit
def clip(cell, counted, step, BITS: tl.constexpr):
    """A cell as a code: 0 of pages that aren't counted, and of channels whose keys are all the same."""
    code = tl.minimum(tl.maximum(cell, 0.0), (1 << BITS) - 1.0)
    return tl.where(counted[:, None] & (step > 0), code, 0.0).to(tl.int32)


@triton.jit
def codes_of(low, high, counted, lo, step, BITS: tl.constexpr, SINGLE: tl.constexpr):
    """The cell of each minimum, whose lower edge is not above it, and of each maximum, whose upper edge is not below
    it; of pages of one token, twice the cell that holds the key."""
    lo, step = lo[None, :], step[None, :]
    safe = tl.where(step > 0, step, 1.0)
    lower = tl.floor(tl.div_rn(low - lo, safe))
    lower -= (lo + lower * step > low).to(tl.float32)  # the division rounds: a cell that doesn't hold its key moves
    if SINGLE:
        upper = lower
    else:
        upper = tl.ceil(tl.div_rn(high - lo, safe)) - 1
    upper += (lo + (upper + 1) * step < high).to(tl.float32)
    upper = clip(upper, counted, step, BITS)
    if SINGLE:
        return upper, upper
    return clip(lower, counted, step, BITS), upper


@triton.jit
def hull_of(lower, upper, counted, GROUP_PAGES: tl.constexpr, BITS: tl.constexpr):
    """The smallest and the largest code of each group's counted pages; 0 if there are none."""
    GROUPS: tl.constexpr = lower.shape[0] // GROUP_PAGES
    CHANNELS: tl.constexpr = lower.shape[1]
    lower = tl.where(counted[:, None], lower, (1 << BITS) - 1)
    lower = tl.min(tl.reshape(lower, (GROUP_PAGES, GROUPS, CHANNELS)), 0)
    upper = tl.max(tl.reshape(upper, (GROUP_PAGES, GROUPS, CHANNELS)), 0)
    known = tl.max(tl.reshape(counted.to(tl.int32), (GROUP_PAGES, GROUPS)), 0) > 0
    return tl.where(known[:, None], lower, 0), upper


@triton.jit
def join(codes, PLACES: tl.constexpr, BITS: tl.constexpr):
    """Codes of places [pages, PLACES * words] as words [pages, words]."""
    codes = tl.reshape(codes, (codes.shape[0], PLACES, codes.shape[1] // PLACES))
    return tl.sum(codes << (tl.arange(0, PLACES) * BITS)[None, :, None], 1)


@triton.jit
def join_pairs(lower, upper, BITS: tl.constexpr):
    return join(upper, 16 // BITS, BITS) | join(lower, 16 // BITS, BITS) << 16


@triton.jit
def put(to, words, page, num_pages, LANES: tl.constexpr, LEVEL_WORDS: tl.constexpr, first, WORDS: tl.constexpr,
        WORD_TILE: tl.constexpr):  # fmt: skip
    """Store words [pages, n * WORD_TILE] of a level."""
    i = tl.arange(0, words.shape[1])
    mask = (page < num_pages)[:, None] & (first + i % WORD_TILE < WORDS)[None, :]
    word = channel_of(i, first, WORDS, WORD_TILE)
    tl.store(to + place_of(page[:, None], word[None, :], LEVEL_WORDS, LANES), words, mask=mask)


@triton.jit(do_not_specialize=["seq", "num_kv_heads", "blocks", "sink_pages"])
def pack_block(
    k_cache,
    packed,
    seq,
    new,  # slots [batch, q_len], or how many tokens are new [batch, 1]
    num_kv_heads,
    blocks,  # of a row: how many have a program
    sink_pages,
    FROM_SLOTS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    PAGES: tl.constexpr,  # of a block
    GROUP_PAGES: tl.constexpr,
    LANES: tl.constexpr,
    COARSE_LANES: tl.constexpr,  # 0: one level
    WORD_TILE: tl.constexpr,  # words of a page that a program writes
    PAGE_TILE: tl.constexpr,
    TOKEN_TILE: tl.constexpr,
):
    """One program for each row, KV head, place among the row's blocks and part of the words."""
    SINGLE: tl.constexpr = PAGE_SIZE == 1
    PLACES: tl.constexpr = (32 if SINGLE else 16) // BITS  # channels of a word, or of half a word
    WORDS: tl.constexpr = DIM // PLACES
    PARTS: tl.constexpr = (WORDS + WORD_TILE - 1) // WORD_TILE
    GROUP_SIZE: tl.constexpr = GROUP_PAGES * PAGE_SIZE
    BLOCK_SIZE: tl.constexpr = PAGES * PAGE_SIZE
    program = tl.program_id(0)
    first_word = program % PARTS * WORD_TILE
    unit = program // PARTS // blocks
    row, head = unit // num_kv_heads, unit % num_kv_heads

    length = length_of(seq, row)
    then = tl.maximum(length - new_tokens(new, row, seq.q_len, FROM_SLOTS), 0) // GROUP_SIZE * GROUP_SIZE
    now = length // GROUP_SIZE * GROUP_SIZE
    index = then // BLOCK_SIZE + program // PARTS % blocks
    if now <= then or index >= tl.cdiv(now, BLOCK_SIZE):
        return
    block = block_at(seq, row, index, True)
    if block < 0:
        return
    sink = tl.maximum(sink_pages - index * PAGES, 0)  # pages that are left out, the block's first
    count = tl.minimum(now - index * BLOCK_SIZE, BLOCK_SIZE) // PAGE_SIZE  # pages that have tokens
    keys, words = row_in(k_cache, block, head, 0), words_at(packed, block, head)

    i = tl.arange(0, PLACES * WORD_TILE)
    channel = channel_of(i, first_word, WORDS, WORD_TILE)
    stored = first_word + i % WORD_TILE < WORDS
    read = stored & (channel < HEAD_DIM)
    low, high = range_of(keys, sink * PAGE_SIZE, count * PAGE_SIZE, channel, read, k_cache.stride_row, TOKEN_TILE)
    lo_bits, step_bits = cells_of(low, high, read & (sink < count), BITS)
    bounds = bounds_at(words)
    tl.store(bounds + channel, lo_bits, mask=stored)
    tl.store(bounds + DIM + channel, step_bits, mask=stored)
    lo, step = from_bf16(lo_bits), from_bf16(step_bits)

    GROUPS: tl.constexpr = PAGES // GROUP_PAGES
    TILE_GROUPS: tl.constexpr = PAGE_TILE // GROUP_PAGES
    COARSE_WORDS: tl.constexpr = DIM * BITS // 16
    coarse = words + DIM
    fine = coarse + (GROUPS * COARSE_WORDS if COARSE_LANES else 0)
    for first in range(0, PAGES, PAGE_TILE):
        place = tl.arange(0, PAGE_TILE)  # pages of a group lie apart, so that a thread holds some of them
        page = first + place % TILE_GROUPS * GROUP_PAGES + place // TILE_GROUPS
        counted = (page >= sink) & (page < count)
        page_low, page_high = pages_of(keys, page, counted, channel, read, k_cache.stride_row, PAGE_SIZE)
        lower, upper = codes_of(page_low, page_high, counted, lo, step, BITS, SINGLE)
        made = join(upper, PLACES, BITS) if SINGLE else join_pairs(lower, upper, BITS)
        put(fine, made, page, PAGES, LANES, WORDS, first_word, WORDS, WORD_TILE)
        if COARSE_LANES:
            group = first // GROUP_PAGES + tl.arange(0, TILE_GROUPS)
            lower, upper = hull_of(lower, upper, counted, GROUP_PAGES, BITS)
            put(coarse, join_pairs(lower, upper, BITS), group, GROUPS, COARSE_LANES, COARSE_WORDS, first_word, WORDS,
                WORD_TILE)  # fmt: skip


def tiles_of(packing: Packing, head_dim: int) -> dict[str, int]:
    """What a program holds at a time: as many words as leave room for a group of pages, and then as many groups as
    fit."""
    places = places_of(packing)
    word_tile = triton.next_power_of_2(padded(head_dim) // places)
    while word_tile > 1 and packing.group_pages * places * word_tile > 2 * TILE:
        word_tile //= 2
    page_tile = packing.group_pages
    while page_tile < packing.pages and 2 * page_tile * places * word_tile <= TILE:
        page_tile *= 2
    return dict(WORD_TILE=word_tile, PAGE_TILE=page_tile, TOKEN_TILE=max(1, TILE // (places * word_tile)))


def launch_of(
    k_cache: Tensor,
    packed: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    new: Tensor,
    packing: Packing,
    sink_pages: int,
    blocks: int,
    from_slots: bool,
) -> Launch:
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    tiles = tiles_of(packing, head_dim)
    parts = triton.cdiv(padded(head_dim) // places_of(packing), tiles["WORD_TILE"])
    return Launch(
        pack_block,
        len(block_table) * num_kv_heads * blocks * parts,
        k_cache=pool(k_cache),
        packed=packed_of(packed),
        seq=sequences(block_table, seq_lens, num_blocks, block_size, new.shape[1]),
        new=new.contiguous(),
        num_kv_heads=num_kv_heads,
        blocks=blocks,
        sink_pages=sink_pages,
        FROM_SLOTS=from_slots,
        **layout_of(packing, head_dim),
        **tiles,
        num_warps=8,
        **EXACT,
    )


@verb
def pack(
    k_cache: Tensor,
    packed: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_new: Tensor,
    page_size: int,
    coarse_size: int,
    bits: int,
    sink_pages: int,
    check: bool = True,
) -> tuple[list[Launch], None]:
    """Any number of tokens may be new, so that every block of the table has a program."""
    packing = packing_of(k_cache, page_size, coarse_size, bits)
    rows, blocks = (block_table, seq_lens, num_new[:, None]), block_table.shape[1]
    return [launch_of(k_cache, packed, *rows, packing, sink_pages, blocks, False)], None


@verb
def pack_new(
    k_cache: Tensor,
    packed: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    page_size: int,
    coarse_size: int,
    bits: int,
    sink_pages: int,
) -> tuple[list[Launch], None]:
    """What `decode` does: the last q_len tokens are new, none of a row whose slots [batch, q_len] are all -1."""
    packing = packing_of(k_cache, page_size, coarse_size, bits)
    slots = slot_mapping.reshape(len(seq_lens), -1)
    groups = triton.cdiv(slots.shape[1], packing.group_size)  # that the new tokens complete, at most
    blocks = triton.cdiv(groups - 1, packing.pages // packing.group_pages) + 1
    return [launch_of(k_cache, packed, block_table, seq_lens, slots, packing, sink_pages, blocks, True)], None


def configurations() -> Iterator[Launch]:
    for packing, head_dim in compiled_packings():
        k_cache, packed, block_table, seq_lens = cache_of(packing, head_dim)
        slots = torch.empty(8, 1, device="meta", dtype=torch.int64)
        layout = packing.page_size, packing.coarse_size or 0, packing.bits
        yield from pack_new.plan(k_cache, packed, block_table, seq_lens, slots, *layout, 4)[0]
