"""The tensors behind a paged cache: per layer K, V and the summaries of their pages, block by block."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from quest.config import QuestConfig
from quest.packing import packing_of

MEMORY_PAGE = 4096  # bytes


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor whose data starts with a page of memory: a page of keys then lies in as few as can be.

    Selected pages lie anywhere, so each page of memory they touch costs a walk through the page tables.
    """
    room = MEMORY_PAGE // dtype.itemsize
    numel = math.prod(shape)
    flat = torch.empty(numel + room, dtype=dtype, device=device)
    start = -flat.data_ptr() % MEMORY_PAGE // dtype.itemsize
    return flat[start : start + numel].view(*shape)


class Pools:
    """K, V and the summaries (page_min and page_max, or packed) of every layer, their blocks as first dimension.

    Layers may differ in heads, widths and dtype. Blocks nobody has written yet hold whatever the memory held.
    """

    def __init__(self, num_layers: int, config: QuestConfig, device: torch.device) -> None:
        self.config = config
        self.device = device
        self.k_cache: list[Tensor | None] = [None] * num_layers
        self.v_cache: list[Tensor | None] = [None] * num_layers
        self.packing = packing_of(config)
        self.summaries: tuple[list[Tensor | None], ...] = tuple(
            [None] * num_layers for _ in range(2 if self.packing is None else 1)
        )

    @property
    def kinds(self) -> tuple[list[Tensor | None], ...]:
        return self.k_cache, self.v_cache, *self.summaries

    def stored(self, layer: int) -> tuple[Tensor, ...] | None:
        """The tensors of one layer, None before its first keys."""
        pools = tuple(pool for kind in self.kinds if (pool := kind[layer]) is not None)
        return pools or None

    def layer(self, layer: int, key: Tensor, value: Tensor, num_blocks: int) -> tuple[Tensor, ...]:
        """The tensors of one layer, made to fit `key` and `value` [batch, q_len, num_kv_heads, head_dim] if new."""
        if (pools := self.stored(layer)) is None:
            self.create(layer, key.shape[2], key.shape[3], value.shape[3], key.dtype, num_blocks)
            return self.layer(layer, key, value, num_blocks)
        return pools

    @torch.inference_mode(False)  # pools outlive the mode they are made in, and are written outside it
    def create(
        self, layer: int, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype, num_blocks: int
    ) -> None:
        block_size, pages = self.config.block_size, self.config.block_size // self.config.page_size
        shapes = [(block_size, head_dim), (block_size, v_head_dim)]
        if self.packing is None:
            shapes += [(pages, head_dim), (pages, head_dim)]
        made = [empty((num_blocks, num_kv_heads, *shape), dtype, self.device) for shape in shapes]
        if self.packing is not None:
            made.append(empty((num_blocks, num_kv_heads, self.packing.num_bytes(head_dim)), torch.uint8, self.device))
        for pools, pool in zip(self.kinds, made, strict=True):
            pools[layer] = pool

    @torch.inference_mode(False)
    def grow(self, num_blocks: int) -> None:
        """Room for `num_blocks`. Where memory runs out, layers are larger already or as before, all of them whole."""
        for layer, k_cache in enumerate(self.k_cache):
            if k_cache is None or k_cache.shape[0] >= num_blocks:
                continue
            old = [pool for pools in self.kinds if (pool := pools[layer]) is not None]
            new = [empty((num_blocks, *pool.shape[1:]), pool.dtype, self.device) for pool in old]
            for pools, small, large in zip(self.kinds, old, new, strict=True):
                large[: small.shape[0]] = small
                pools[layer] = large

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer: K, V and summaries."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.device).T
        for pools in self.kinds:
            for pool in pools:
                if pool is not None:
                    pool.index_copy_(0, target, pool.index_select(0, source))

    def gather(self, pool: Tensor, block_table: Tensor, seq_lens: Tensor, length: int) -> Tensor:
        """Rows as dense tensors [batch, num_kv_heads, length, head_dim], zero beyond each row's length."""
        places = block_table[:, : -(-length // self.config.block_size)].clamp_min(0).long()
        dense = pool.transpose(0, 1)[:, places].transpose(0, 1)  # [batch, num_kv_heads, blocks, block_size, head_dim]
        dense = dense.flatten(2, 3)[:, :, :length]
        beyond = torch.arange(length, device=self.device) >= seq_lens[:, None]
        return dense.masked_fill_(beyond[:, None, :, None], 0) if bool(beyond.any()) else dense
