"""Inner products of a query's integer weights with codes, in integers, on tensor cores.

A code's weight has 16 bits. It is split in two of 8 bits each, `256 * high + low + 128`, and the 128 times the sum of a
page's codes is added to the products. Codes of 8 bits lose 128 to be signed. Sums may wrap, their total does not.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .codes import channel_of, from_bf16, place_of


@triton.jit
def lift_of(x):
    """What makes reciprocals of very small numbers finite."""
    return tl.where(x < 1e-30, 1267650600228229401496703205376.0, 1.0)  # 2^100


@triton.jit
def toward_and_against(slack):
    """The weights of the end of a range that a channel of the query points to, and of the other."""
    return (1 + slack) * 0.5, (1 - slack) * 0.5


@triton.jit
def weights_of(
    query,  # [HEADS], pointers
    exists,
    bounds,
    found,  # whether there is such a block
    slack,
    MOST: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    BITS: tl.constexpr,
    PAIRS: tl.constexpr,  # two codes per channel
    WORDS: tl.constexpr,
    WORD_TILE: tl.constexpr,
):
    """Weights of the codes of one block, int8 [codes, 2 * HEADS], and each head's base, unit and offset: a page's score
    is base + unit * (products + offset)."""
    CHANNELS: tl.constexpr = DIM // WORDS * WORD_TILE
    i = tl.arange(0, (32 // BITS) * WORD_TILE)
    channel = channel_of(i % CHANNELS, 0, WORDS, WORD_TILE)
    inside = i % WORD_TILE < WORDS
    q = tl.load(
        query[:, None] + channel[None, :], mask=exists[:, None] & (inside & (channel < HEAD_DIM))[None, :], other=0.0
    ).to(tl.float32)
    largest = tl.max(tl.abs(q), 1)
    lift = lift_of(largest)
    inverse = tl.where(largest > 0, tl.div_rn(tl.full(largest.shape, MOST, tl.float32), largest * lift), 0.0)

    known = i % WORD_TILE < tl.where(found, WORDS, 0)
    lo = from_bf16(tl.load(bounds + channel, mask=known, other=0))
    step = from_bf16(tl.load(bounds + DIM + channel, mask=known, other=0))
    top = tl.max(step)
    part = tl.where(top > 0, step * lift_of(top) * tl.div_rn(1.0, top * lift_of(top)), 0.0)

    toward, against = toward_and_against(slack)
    above = q * tl.where(q > 0, toward, against)
    below = q * tl.where(q > 0, against, toward)
    high = (lo + step)[None, :]  # an upper edge is one step above its cell's lower edge
    if PAIRS:
        first = (i < CHANNELS)[None, :]
        side = tl.where(first, above, below)
        base = tl.sum(side * tl.where(first, high, lo[None, :]), 1)
        weight = side * lift[:, None] * inverse[:, None]
    else:
        base = tl.sum(above * high + below * lo[None, :], 1)
        weight = above * lift[:, None] * inverse[:, None] + below * lift[:, None] * inverse[:, None]
    weight = tl.ceil(weight * part[None, :]).to(tl.int32)

    offset = tl.zeros(largest.shape, tl.int32)
    if BITS == 8:
        offset += 128 * (tl.sum(weight, 1) - 128 * i.shape[0])
    split = tl.join((weight >> 8).to(tl.int8), ((weight & 255) - 128).to(tl.int8))  # [HEADS, codes, 2]
    split = tl.reshape(tl.permute(split, (1, 0, 2)), (i.shape[0], 2 * largest.shape[0]))
    unit = tl.where(largest < float("inf"), largest * top * (1.0 / MOST), float("nan"))
    return split, base, unit, offset


@triton.jit
def sum_fields(word, BITS: tl.constexpr):
    """The sum of the numbers of `BITS` bits in each word."""
    x = word.to(tl.uint32, bitcast=True)
    if BITS == 2:
        x = (x & 0x33333333) + ((x >> 2) & 0x33333333)
    if BITS <= 4:
        x = (x & 0x0F0F0F0F) + ((x >> 4) & 0x0F0F0F0F)
    x = (x & 0x00FF00FF) + ((x >> 8) & 0x00FF00FF)
    return ((x & 0xFFFF) + (x >> 16)).to(tl.int32)


@triton.jit
def score_codes(
    codes,  # of a level
    page,  # [ROWS], in the block
    mask,
    weights,
    BITS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Scores [ROWS, HEADS] of pages by their codes, with what `weights_of` gives."""
    split, base, unit, offset = weights
    CODES: tl.constexpr = split.shape[0]
    word = tl.arange(0, WORD_TILE)
    here = mask[:, None] & (word < WORDS)[None, :]
    words = tl.load(codes + place_of(page[:, None], word[None, :], WORDS, LANES), mask=here, other=0)
    shift = tl.arange(0, 32 // BITS) * BITS
    code = tl.reshape((words[:, None, :] >> shift[None, :, None]) & ((1 << BITS) - 1), (page.shape[0], CODES))
    total = tl.sum(sum_fields(words, BITS), 1)
    if BITS == 8:
        code -= 128
    products = tl.dot(code.to(tl.int8), split, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(products, (page.shape[0], base.shape[0], 2)))
    products = 256 * high + low + 128 * total[:, None] + offset[None, :]
    return base[None, :] + products.to(tl.float32) * unit[None, :]
