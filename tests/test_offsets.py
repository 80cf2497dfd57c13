"""Addresses beyond 32 bits, on memory that is reserved but hardly touched."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import quest
from quest import QuestConfig, packing_of

BLOCKS, KV_HEADS, BLOCK, DIM = 65537, 8, 16, 128
LAST = BLOCKS - 1


def reserve(size: int, dtype: torch.dtype) -> Tensor:
    """Memory of the system that costs nothing before it is written."""
    try:
        return torch.empty(size, dtype=dtype)
    except RuntimeError:
        pytest.skip(f"cannot reserve {size * dtype.itemsize >> 20} MiB of address space")


def pools_of(room: Tensor, blocks: int) -> tuple[Tensor, ...]:
    """K, V and summaries of a block side by side in token-major memory, as [num_blocks, num_kv_heads, rows, dim]."""
    row = KV_HEADS * DIM
    stride = (2 * BLOCK + 2) * row
    starts = (0, BLOCK * row, 2 * BLOCK * row, (2 * BLOCK + 1) * row)
    sizes = (BLOCK, BLOCK, 1, 1)
    return tuple(
        room.as_strided((blocks, KV_HEADS, rows, DIM), (stride, DIM, row, 1), start)
        for start, rows in zip(starts, sizes)
    )


def test_c42_block_65536(isa):
    """A pool [65537, 2, 16, 8, 128] of bfloat16 with its summaries: data only in block 65536, beyond 2**31 elements."""
    size = BLOCKS * (2 * BLOCK + 2) * KV_HEADS * DIM
    large, small = pools_of(reserve(size, torch.bfloat16), BLOCKS), pools_of(torch.zeros(size // BLOCKS).bfloat16(), 1)
    assert large[0].stride(0) * LAST > 2**31
    for pool in large:
        pool[0], pool[LAST] = 0, 0
    rng = torch.Generator().manual_seed(0)
    key, value = (torch.randn(13, KV_HEADS, DIM, generator=rng).bfloat16() for _ in range(2))
    query = torch.randn(1, 16, DIM, generator=rng).bfloat16()
    lens, slots = torch.tensor([13], dtype=torch.int32), torch.arange(13)
    results = []
    for pools, block in ((small, 0), (large, LAST)):
        table = torch.tensor([[block]], dtype=torch.int32)
        quest.append(key[:12], value[:12], *pools[:2], slots[:12] + block * BLOCK)
        quest.summarise(pools[0], *pools[2:], table, lens - 1, lens - 1)
        scores = quest.score(query, *pools[2:], table, lens - 1, page_size=BLOCK, group_rule="per_head")
        out = quest.attend(query, *pools[:2], table, lens - 1)
        step = (query, key[12:], value[12:], *pools, table, lens, slots[12:] + block * BLOCK)
        decoded = quest.decode(*step, config=QuestConfig(page_size=BLOCK, budget=48))
        results.append([scores, *out, *decoded, *(pool[block].clone() for pool in pools)])
    assert all(map(torch.equal, *results))
    assert results[0][1].any()
    assert large[0][LAST, :, 12].equal(key[12])
    assert not large[0][0].any()  # where 32 bits would have wrapped to


def test_c42_packed_block_65536(isa):
    """Packed summaries, their blocks 65 KB apart: the newest of a row's eight blocks is 65536, filled by the step."""
    size, kv_heads, blocks = 64, 2, 8
    config = QuestConfig(page_size=1, summary_bits=2, coarse_size=16, block_size=size, budget=32, recent_tokens=4)
    packing, row = packing_of(config), kv_heads * DIM
    stride, apart = (2 * size + 2) * row, 65536 + 64
    assert min(LAST * stride, LAST * apart) > 2**31

    def pools_of(count: int) -> list[Tensor]:
        rows, codes = reserve(count * stride, torch.bfloat16), reserve(count * apart, torch.uint8)
        places = (count, kv_heads, size, DIM), (stride, DIM, row, 1)
        return [rows.as_strided(*places, start) for start in (0, size * row)] + [
            codes.as_strided((count, kv_heads, packing.num_bytes(DIM)), (apart, apart // 4, 1))
        ]

    small, large = pools_of(blocks), pools_of(BLOCKS)
    for pools in (small, large):
        for pool in pools:
            pool[0], pool[-blocks:] = 0, 0
    rng, length = torch.Generator().manual_seed(0), blocks * size
    key, value = (torch.randn(length, kv_heads, DIM, generator=rng).bfloat16() for _ in range(2))
    query = torch.randn(1, 8, DIM, generator=rng).bfloat16()
    lens = torch.tensor([length], dtype=torch.int32)
    settings = dict(packing=packing, sink_tokens=4, coarse_keep=0.1)
    results = []
    for pools, first in ((small, 0), (large, BLOCKS - blocks)):
        table = torch.arange(first, first + blocks, dtype=torch.int32)[None]
        slots = torch.arange(length) + first * size
        quest.append(key[:-1], value[:-1], *pools[:2], slots[:-1])
        quest.pack(pools[0], pools[2], table, lens - 1, lens - 1, packing=packing, sink_tokens=4)
        scores = quest.score_packed(query, pools[0], pools[2], table, lens - 1, budget=32, recent_tokens=4, **settings)
        decoded = quest.decode_packed(query, key[-1:], value[-1:], *pools, table, lens, slots[-1:], config=config)
        results.append([scores, *decoded, *(pool[-blocks:].clone() for pool in pools)])
    assert all(map(torch.equal, *results))
    assert results[0][0].isfinite().sum() < 2 * 160  # pages of 6 coarse ones and the open block, of each head
    assert results[0][1].any()
    assert large[2][LAST].any()
    assert not any(pool[0].any() for pool in large)


def test_c42_block_table_offsets(isa):
    """Rows of the block table that lie 2**31 elements apart."""
    table = reserve(2**31 + 100, torch.int32).as_strided((2, 3), (2**31 + 64, 1))
    table.copy_(torch.tensor([[0, 1, 2], [3, 4, 5]]))
    pools = [torch.randn(6, 1, 4, 8) for _ in range(2)]
    query, lens = torch.randn(2, 1, 8), torch.tensor([10, 12], dtype=torch.int32)
    got, expected = (quest.attend(query, *pools, places, lens) for places in (table, table.clone()))
    assert all(map(torch.equal, got, expected))
