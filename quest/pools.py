"""The blocks behind paged caches: who holds them, and per layer the K, V and summaries that they hold."""

from __future__ import annotations

import contextlib
import copy
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from quest import _host
from quest.config import QuestConfig
from quest.offload import FileTier, HostTier, Offload
from quest.packing import packing_of
from quest.residency import Residency
from quest.slots import SlotResidency

__all__ = ["Pools", "Usage"]

MEMORY_PAGE, HUGE_PAGE = 4096, 2 << 20  # bytes
NOTHING = contextlib.nullcontext()


@dataclass(frozen=True)
class Usage:
    """Blocks of the pools, and what prefixes were found so far.

    Attributes:
        num_blocks: all.
        used: held by sequences; `shared` of them by several.
        free: can be taken, `idle` ones included, which keep their tokens until nothing else is free.
        cached: found by their tokens, used or idle.
        unused_slots: of the blocks that this cache's sequences hold, slots without a token.
        block_size: tokens.
        prefix_tokens: asked for by `reuse`; `prefix_hits` of them were there.
        evicted: blocks that lost their tokens to others.
    """

    num_blocks: int
    used: int
    shared: int
    free: int
    idle: int
    cached: int
    unused_slots: int
    block_size: int
    prefix_tokens: int
    prefix_hits: int
    evicted: int

    @property
    def waste(self) -> float:
        """Unused slots as a share of those of used blocks."""
        return self.unused_slots / (self.used * self.block_size) if self.used else 0.0

    @property
    def hit_rate(self) -> float:
        """Of the tokens that were looked for."""
        return self.prefix_hits / self.prefix_tokens if self.prefix_tokens else 0.0

    def __str__(self) -> str:
        return (
            f"{self.used} of {self.num_blocks} blocks of {self.block_size} tokens used ({self.shared} shared, "
            f"{self.waste:.1%} of their slots empty), {self.free} free ({self.idle} of them cached); prefixes: "
            f"{self.hit_rate:.1%} of {self.prefix_tokens:,} tokens found, {self.evicted} blocks evicted"
        )


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """An uninitialised tensor whose data starts with a page of memory: a page of keys then lies in as few as can be.

    Selected pages lie anywhere, so each page of memory they touch costs a walk through the page tables. A large tensor
    on the CPU gets huge pages, which spare most of these walks, if the system lends them to those who ask.
    """
    numel = math.prod(shape)
    large = numel * dtype.itemsize >= 4 * HUGE_PAGE
    page = HUGE_PAGE if large else MEMORY_PAGE
    flat = torch.empty(numel + page // dtype.itemsize, dtype=dtype, device=device)
    start = -flat.data_ptr() % page // dtype.itemsize
    tensor = flat[start : start + numel].view(*shape)
    if large and flat.is_cpu:
        _host.advise_huge_pages(tensor.data_ptr(), tensor.nbytes)
    return tensor


def side_by_side(
    shape: Sequence[int], dims: Sequence[int], dtype: torch.dtype, device: torch.device | None = None
) -> tuple[Tensor, ...]:
    """A tensor [*shape, dim] for each of `dims`, as `empty` makes them, the same row of all of them in one run.

    What is read together then lies together: a token's K and V, a page's minimum and maximum.
    """
    return empty((*shape, sum(dims)), dtype, device).split(list(dims), -1)


class Stored(NamedTuple):
    """Blocks in the second tier."""

    handle: Any  # of the tier
    layers: list[int]  # that had keys then


class Pools:
    """K, V and the summaries (page_min and page_max, or packed) of every layer, their blocks as first dimension.

    Layers may differ in heads, widths and dtype. Blocks nobody has written yet hold whatever the memory held. Several
    caches may lie on the same pools (`PagedKVCache.on`): they share blocks, and find each other's prefixes.

    Pools and all caches on them are for one thread at a time, whichever it is; other pools don't matter to them.

    Args:
        num_layers: layers with K and V of their own.
        config: page size, block size, and how a step reads.
        num_blocks: blocks to start with. Pools that grow are other tensors afterwards, so give enough where something
            holds on to them.
        max_blocks: blocks to grow to; None: as many as are needed.
        watermark: blocks that new sequences leave free (`PagedKVCache.admits`).
        device: where the pools live.
        offload: keep K and V within a budget, the rest in files, or for pools on a GPU in the host's memory. Sequences
            can be suspended there without it too.

    Attributes:
        k_cache, v_cache, summaries: as in `PagedKVCache`. With `offload` on a GPU K and V are elsewhere, these are NaN.
        blocks: which blocks are taken, shared, cached.
        residency: what of K and V is in memory, None without `offload`.
        tier: where suspended sequences are.
    """

    def __init__(
        self,
        num_layers: int,
        *,
        config: QuestConfig | None = None,
        num_blocks: int = 0,
        max_blocks: int | None = None,
        watermark: int = 0,
        device: torch.device | str = "cpu",
        offload: Offload | None = None,
    ) -> None:
        check_int("Pools", "num_layers", num_layers, 1)
        check_int("Pools", "num_blocks", num_blocks, 0)
        if max_blocks is not None:
            check_int("Pools", "max_blocks", max_blocks, num_blocks)
        check_int("Pools", "watermark", watermark, 0)
        if config is not None and not isinstance(config, QuestConfig):
            raise TypeError(f"Pools: config must be a QuestConfig, got {type(config).__name__}")
        self.config = QuestConfig() if config is None else config
        self.device = torch.empty(0, device=device).device
        self.max_blocks = max_blocks
        self.residency, self.tier = self._second_tier(num_layers, offload)
        self.blocks = _host.Blocks(num_blocks, block_size=self.config.block_size, watermark=watermark)
        self.stale: set[int] = set()  # blocks whose summaries are not those of their keys
        self.num_overwritten = 0  # calls of `overwritten`
        self.k_cache: list[Tensor | None] = [None] * num_layers
        self.v_cache: list[Tensor | None] = [None] * num_layers
        self.packing = packing_of(self.config)
        self.summaries: tuple[list[Tensor | None], ...] = tuple(
            [None] * num_layers for _ in range(2 if self.packing is None else 1)
        )
        self._prefix_tokens = self._prefix_hits = 0
        self._on_growth: list[weakref.WeakMethod[Callable[[], None]]] = []

    @property
    def num_layers(self) -> int:
        return len(self.k_cache)

    def usage(self, unused_slots: int = 0) -> Usage:
        num_blocks, free, idle, shared, cached, evicted = self.blocks.counts  # all at one moment
        return Usage(
            num_blocks=num_blocks,
            used=num_blocks - free,
            shared=shared,
            free=free,
            idle=idle,
            cached=cached,
            unused_slots=unused_slots,
            block_size=self.config.block_size,
            prefix_tokens=self._prefix_tokens,
            prefix_hits=self._prefix_hits,
            evicted=evicted,
        )

    # --- blocks ------------------------------------------------------------------------------------------------------

    def reserve(self, count: int) -> None:
        """See to it that `count` blocks are free, if the pools may grow: the only step of a change that may fail."""
        missing = count - self.blocks.num_free
        if missing <= 0:
            return
        total = self.blocks.num_blocks
        target = max(2 * total, total + missing + missing // 4)
        if self.max_blocks is not None:
            target = min(target, self.max_blocks)
        if target >= total + missing:
            for grown in self._on_growth:
                if (call := grown()) is not None:
                    call()
            self._grow(target)
            self.blocks.grow(target)

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> Pools:
        memo[id(self.config)] = self.config
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        state = self.__dict__ | {"_on_growth": []}  # caches that are copied too enter themselves
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in state.items()})
        return clone

    def on_growth(self, call: Callable[[], None]) -> None:
        """Call a method, while its object lives, before the pools become other tensors."""
        self._on_growth = [grown for grown in self._on_growth if grown() is not None] + [weakref.WeakMethod(call)]

    def changed(self, copies: Sequence[tuple[int, int]], fresh: Sequence[int], freed: Sequence[int]) -> None:
        """Copy blocks, (from, to); `fresh` ones were taken and `freed` ones given back: they hold nothing any more."""
        if self.stale:
            self.stale.difference_update(fresh, freed)
        if self.residency is not None:
            self.residency.forget(fresh)
        self._copy_blocks(copies)
        if self.residency is not None:
            self.residency.forget(freed)  # among which may be one that was copied

    def find(self, ids: np.ndarray, extra: str) -> list[int]:
        """Blocks of the longest known beginning of token ids, each with one more reference."""
        blocks = self.blocks.find(ids, extra)
        self._prefix_tokens += len(ids)
        self._prefix_hits += len(blocks) * self.config.block_size
        return blocks

    def overwritten(self, blocks: Iterable[int]) -> None:
        """Say that K and V of blocks were written past the cache, by a transfer or an engine's own kernel.

        Their summaries are made anew before they are scored. With `offload` all of a block counts as written.

        Raises:
            ValueError: with `offload` on a GPU, where K and V have no place that others could know.
        """
        if isinstance(self.residency, SlotResidency):
            raise ValueError(f"overwritten: K and V must lie in the pools, with offload on {self.device} they don't")
        named = list(blocks)
        for block in named:
            check_int("overwritten", "blocks", block, 0, self.blocks.num_blocks - 1)
        self.stale.update(named)
        self.num_overwritten += 1
        if self.residency is not None:
            with self.residency.step():  # nothing may be moved out before all of it counts as written
                for layer in range(self.num_layers):
                    self.residency.written(layer, named)

    # --- tensors -----------------------------------------------------------------------------------------------------

    @property
    def kinds(self) -> tuple[list[Tensor | None], ...]:
        return self.k_cache, self.v_cache, *self.summaries

    def stored(self, layer: int) -> tuple[Tensor, ...] | None:
        """The tensors of one layer, None before its first keys."""
        pools = tuple(pool for kind in self.kinds if (pool := kind[layer]) is not None)
        return pools or None

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
        """The tensors of one layer, made to fit `key` and `value` [batch, q_len, num_kv_heads, head_dim] if new."""
        if (pools := self.stored(layer)) is None:
            self._create(layer, key.shape[2], key.shape[3], value.shape[3], key.dtype)
            return self.layer(layer, key, value)
        return pools

    @torch.inference_mode(False)  # pools outlive the mode they are made in, and are written outside it
    def _create(self, layer: int, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype) -> None:
        sizes = self.blocks.num_blocks, num_kv_heads
        summaries = self._new_summaries(*sizes, head_dim, dtype)
        if self.residency is None:
            kv = self._new_kv(*sizes, head_dim, v_head_dim, dtype)
        else:
            kv = self.residency.create(layer, *sizes, (head_dim, v_head_dim), dtype)
        for pools, pool in zip(self.kinds, (*kv, *summaries), strict=True):
            pools[layer] = pool

    def _new_kv(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, v_head_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        rows = num_blocks, num_kv_heads, self.config.block_size
        return side_by_side(rows, (head_dim, v_head_dim), dtype, self.device)

    def _new_summaries(
        self, num_blocks: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        if self.packing is not None:
            return (empty((num_blocks, num_kv_heads, self.packing.num_bytes(head_dim)), torch.uint8, self.device),)
        pages = self.config.block_size // self.config.page_size
        return side_by_side((num_blocks, num_kv_heads, pages), (head_dim, head_dim), dtype, self.device)

    @torch.inference_mode(False)
    def _grow(self, num_blocks: int) -> None:
        """Room for `num_blocks`. Where memory runs out, layers are larger already or as before, all of them whole."""
        for layer in range(self.num_layers):
            if (stored := self.stored(layer)) is None or stored[0].shape[0] >= num_blocks:
                continue
            k_cache, v_cache, *_ = stored
            num_kv_heads, _, head_dim = k_cache.shape[1:]
            new = self._new_summaries(num_blocks, num_kv_heads, head_dim, k_cache.dtype)
            kinds = self.summaries
            if self.residency is None:
                new = *self._new_kv(num_blocks, num_kv_heads, head_dim, v_cache.shape[3], k_cache.dtype), *new
                kinds = self.kinds
            else:
                self.k_cache[layer], self.v_cache[layer] = self.residency.grow(layer, num_blocks)
            for pools, small, large in zip(kinds, stored[-len(new) :], new, strict=True):
                large[: small.shape[0]] = small
                pools[layer] = large

    def _copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to), in every layer: K, V and summaries."""
        if not pairs:
            return
        source, target = torch.tensor(pairs, device=self.device).T
        if self.residency is not None:
            self.residency.copy_blocks(pairs)
        for pools in self.kinds if self.residency is None else self.summaries:
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

    # --- the second tier ---------------------------------------------------------------------------------------------

    def _second_tier(
        self, num_layers: int, offload: Offload | None
    ) -> tuple[Residency | SlotResidency | None, FileTier | HostTier]:
        on_cpu = self.device.type == "cpu"
        if offload is None:
            return None, FileTier() if on_cpu else HostTier()
        if not isinstance(offload, Offload):
            raise TypeError(f"Pools: offload must be an Offload or None, got {type(offload).__name__}")
        if on_cpu:
            return Residency(num_layers, self.config, offload), FileTier(offload.directory)
        if self.device.type != "cuda":
            raise ValueError(f"Pools: offload must be None on {self.device}, it needs a CPU or a CUDA device")
        return SlotResidency(num_layers, self.config, offload, self.device), HostTier()

    def step(self) -> contextlib.AbstractContextManager[None]:
        """What `residency` fetches inside stays until the end."""
        return NOTHING if self.residency is None else self.residency.step()

    def store(self, blocks: Sequence[int]) -> Stored:
        """Copy what blocks hold to the second tier, K, V and summaries of every layer that has any."""
        layers = [layer for layer in range(self.num_layers) if self.k_cache[layer] is not None]
        return Stored(self.tier.store(self._rows(layers, blocks)), layers)

    def _rows(self, layers: Sequence[int], blocks: Sequence[int]) -> Iterator[Tensor]:
        places = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        for layer in layers:
            with self.step():
                k_cache, v_cache, *summaries = self.stored(layer) or ()
                if self.residency is None:
                    summaries = [k_cache, v_cache, *summaries]
                else:
                    yield from self.residency.take_out(layer, blocks)
                for pool in summaries:
                    yield pool.index_select(0, places)

    def load(self, stored: Stored, blocks: Sequence[int]) -> None:
        """Bring what was stored into other blocks."""
        places = torch.tensor(blocks, dtype=torch.int64, device=self.device)
        rows = self.tier.load(stored.handle)
        for layer in stored.layers:
            with self.step():
                k_cache, v_cache, *summaries = self.stored(layer) or ()
                if self.residency is None:
                    summaries = [k_cache, v_cache, *summaries]
                else:
                    self.residency.put_in(layer, blocks, [next(rows), next(rows)])
                for pool in summaries:
                    pool.index_copy_(0, places, next(rows).to(self.device, non_blocking=True))

    def drop(self, stored: Stored) -> None:
        """Forget what was stored."""
        self.tier.drop(stored.handle)


def check_int(op: str, name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{op}: {name} must be {allowed}, got {value}")
