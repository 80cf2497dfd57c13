"""What `pack` and `score_packed` share: where codes lie, as `quest/packing.py` says, and the ranges of pages.

Channels are handled in the order of the words that hold them: place by place, and within a place word by word.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from quest.packing import Packing, padded

# Launch options: as in the reference, products are rounded before they are added, and small numbers stay what they are.
EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}


class Packed(NamedTuple):
    """Packed summaries, whose bytes lie at multiples of 4: [num_blocks, num_kv_heads, words]."""

    words: Tensor  # int32
    stride_block: int
    stride_head: int


def packed_of(packed: Tensor) -> Packed:
    words = packed.view(torch.int32)
    return Packed(words, *words.stride()[:2])


def packing_of(k_cache: Tensor, page_size: int, coarse_size: int, bits: int) -> Packing:
    return Packing(page_size, k_cache.shape[2], coarse_size or None, bits)


def places_of(packing: Packing) -> int:
    """Channels of a word of one code per channel; of half a word of two codes."""
    return (32 if packing.single else 16) // packing.bits


def layout_of(packing: Packing, head_dim: int) -> dict[str, int]:
    """A packing as the kernels are told."""
    return dict(
        HEAD_DIM=head_dim,
        DIM=padded(head_dim),
        BITS=packing.bits,
        PAGE_SIZE=packing.page_size,
        PAGES=packing.pages,
        GROUP_PAGES=packing.group_pages,
        LANES=packing.lanes,
        COARSE_LANES=packing.coarse_lanes if packing.coarse_pages else 0,
    )


@triton.jit
def words_at(packed, block, head):
    """Pointer to the words of a block (int64) and KV head."""
    return packed.words + block * packed.stride_block + head.to(tl.int64) * packed.stride_head


@triton.jit
def bounds_at(words):
    """Pointer to a block's lo [dim] and step [dim], at the beginning of its words: bfloat16's bits."""
    return words.to(tl.pointer_type(tl.uint16), bitcast=True)


@triton.jit
def channel_of(i, first, WORDS: tl.constexpr, WORD_TILE: tl.constexpr):
    """The i-th channel of those in words [first, first + WORD_TILE)."""
    if WORDS == WORD_TILE:
        return i
    return i // WORD_TILE * WORDS + first + i % WORD_TILE


@triton.jit
def place_of(page, word, WORDS: tl.constexpr, LANES: tl.constexpr):
    """Where a page's word lies in a level's codes: the words of `LANES` pages lie side by side."""
    return (page // LANES * WORDS + word) * LANES + page % LANES


@triton.jit
def pages_of(keys, page, counted, channel, read, k_row, PAGE_SIZE: tl.constexpr):
    """Each page's and channel's smallest and largest key."""
    mask = counted[:, None] & read[None, :]
    at = keys + (page * PAGE_SIZE).to(tl.int64)[:, None] * k_row + channel[None, :]
    low = tl.load(at, mask=mask, other=0).to(tl.float32)
    high = low
    for _ in range(1, PAGE_SIZE):
        at += k_row
        key = tl.load(at, mask=mask, other=0).to(tl.float32)
        low, high = tl.where(key < low, key, low), tl.where(key > high, key, high)
    return low, high


@triton.jit
def from_bf16(bits):
    return (bits.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def bf16_above(x):
    """The bits of the bfloat16 at or above x."""
    bits = x.to(tl.uint32, bitcast=True)
    return (tl.where(bits >> 31 == 1, bits, bits + 0xFFFF) >> 16).to(tl.uint16)


@triton.jit
def bf16_below(x):
    """The bits of the bfloat16 at or below x."""
    bits = x.to(tl.uint32, bitcast=True)
    return (tl.where(bits >> 31 == 1, bits + 0xFFFF, bits) >> 16).to(tl.uint16)


# ---- what scripts/gpu_report.py compiles ----


def compiled_packings() -> Iterator[tuple[Packing, int]]:
    """Packings and head_dims: the presets of `QuestConfig`, and codes of 4 and 8 bits."""
    default = Packing(1, 256, 16, 2)
    for head_dim in (64, 128, 256):
        yield default, head_dim
    for packing in (Packing(1, 512, 32, 2), Packing(4, 64, 16, 4), Packing(4, 64, 16, 8), Packing(1, 256, 16, 8)):
        yield packing, 128


def cache_of(packing: Packing, head_dim: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """k_cache, packed, block_table and seq_lens of 8 rows, without memory."""
    shape, meta = (64, 8, packing.block_size, head_dim), dict(device="meta")
    k_cache = torch.empty(shape, dtype=torch.bfloat16, **meta)
    packed = torch.empty(*shape[:2], packing.num_bytes(head_dim), dtype=torch.uint8, **meta)
    return k_cache, packed, *(torch.empty(size, dtype=torch.int32, **meta) for size in ((8, 64), (8,)))
