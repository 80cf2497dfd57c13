"""K and V of a CPU cache that is larger than its memory: which of it is there, and what a step must fetch.

The pools are mappings of the whole size, of which only resident units take memory; block ids, the block table and all
kernels stay as they are. `csrc/host/residency.cpp` moves units; here is what the verbs read and write.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import torch
from torch import Tensor

from quest import _host, ops
from quest.config import QuestConfig
from quest.decode import decode_fetched, refresh
from quest.offload import Offload, OffloadStats, unnamed_file
from quest.packing import packing_of

__all__ = ["Residency", "first_key"]

PAGE = mmap.PAGESIZE  # bytes
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python 3.11 has no name for it


@dataclass
class _Layer:
    """What a layer's mappings and its file are like."""

    num_kv_heads: int
    dims: tuple[int, int]  # of K and of V
    dtype: torch.dtype
    unit_tokens: int  # 0: a unit is a whole block
    unit_bytes: tuple[int, int]  # of K and of V
    file: BinaryIO
    pools: tuple[Tensor, ...] = ()


class Residency:
    """K and V pools of which at most `offload.max_bytes` are in memory after a layer's step.

    What is read is told beforehand, inside `with step():`, at whose end what is too much is moved out. A unit is the
    fewest tokens of a block and KV head whose K and V are whole pages of memory each, 16 for head_dim 128 in bfloat16;
    where a block is too small for that, the block, all heads together.

    Raises:
        OSError: a file can't be made, written or read; nothing is lost, and the same call may be tried again.
    """

    def __init__(self, num_layers: int, config: QuestConfig, offload: Offload) -> None:
        if sys.platform != "linux":
            raise ValueError(f"Offload: offload must be None on {sys.platform}, it needs Linux")
        self.num_layers = num_layers
        self.config = config
        self.offload = offload
        self._units = _host.Residency(num_layers, offload.max_bytes)
        self._layers: dict[int, _Layer] = {}
        self._depth = 0

    @property
    def stats(self) -> OffloadStats:
        counts = self._units.counts
        return OffloadStats(
            hits=counts.hits,
            misses=counts.misses,
            bytes_in=counts.bytes_in,
            bytes_out=counts.bytes_out,
            resident_bytes=counts.resident,
            peak_resident_bytes=counts.peak,
            max_bytes=self.offload.max_bytes,
        )

    @property
    def files(self) -> list[BinaryIO]:
        """Of the layers that have keys."""
        return [made.file for made in self._layers.values()]

    # --- pools -------------------------------------------------------------------------------------------------------

    def create(
        self, layer: int, num_blocks: int, num_kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """K and V of a new layer, [num_blocks, num_kv_heads, block_size, head_dim]; dims: of K and of V."""
        size, page_size = self.config.block_size, self.config.page_size
        rows = [dim * dtype.itemsize for dim in dims]
        unit = math.lcm(page_size, *(PAGE // math.gcd(row, PAGE) for row in rows))
        if size % unit:
            unit = 0
        k_bytes, v_bytes = (unit * row if unit else -(-num_kv_heads * size * row // PAGE) * PAGE for row in rows)
        file = unnamed_file(self.offload.place)
        made = _Layer(num_kv_heads, dims, dtype, unit, (k_bytes, v_bytes), file)
        made.pools = self._map(layer, made, num_blocks)
        k, v = (pool.data_ptr() for pool in made.pools)
        self._units.set_layer(
            layer,
            k,
            v,
            made.unit_bytes,
            num_blocks=num_blocks,
            num_kv_heads=num_kv_heads,
            block_size=size,
            unit_tokens=unit,
            fd=file.fileno(),
            file=self._name(layer),
        )
        self._layers[layer] = made
        return made.pools

    def grow(self, layer: int, num_blocks: int) -> tuple[Tensor, ...]:
        """K and V of a layer with more blocks. What is in memory moves; the old tensors hold nothing afterwards."""
        made = self._layers[layer]
        pools = self._map(layer, made, num_blocks)
        k, v = (pool.data_ptr() for pool in pools)
        self._units.grow(layer, k, v, num_blocks)
        made.pools = pools
        return pools

    def _map(self, layer: int, made: _Layer, num_blocks: int) -> tuple[Tensor, ...]:
        """Address space for K and V, and room for them in the file: a full disk says so before anything moves."""
        size = self.config.block_size
        blocks = [count * self._units_per_block(made) for count in made.unit_bytes]
        try:
            os.posix_fallocate(made.file.fileno(), 0, max(1, num_blocks * sum(blocks)))
        except OSError as error:
            what = f"reserving {num_blocks * sum(blocks):,} bytes failed: {error.strerror}"
            raise OSError(error.errno, what, self._name(layer)) from None
        shape, pools = (num_blocks, made.num_kv_heads, size), []
        for dim, block in zip(made.dims, blocks, strict=True):
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
            memory = mmap.mmap(-1, max(PAGE, num_blocks * block), flags=flags)
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # one would bring units that nobody has asked for
            strides = block // made.dtype.itemsize, size * dim, dim, 1
            pools.append(torch.frombuffer(memory, dtype=made.dtype).as_strided((*shape, dim), strides))
        return tuple(pools)

    def _units_per_block(self, made: _Layer) -> int:
        return made.num_kv_heads * (self.config.block_size // made.unit_tokens) if made.unit_tokens else 1

    def _name(self, layer: int) -> str:
        return f"{self.offload.place} (K and V of layer {layer}, a file without a name)"

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> Residency:
        clone = Residency(self.num_layers, self.config, self.offload)
        for layer, made in self._layers.items():
            pools = clone.create(layer, len(made.pools[0]), made.num_kv_heads, made.dims, made.dtype)
            clone._units.copy_layer(layer, self._units)
            memo |= {id(old): new for old, new in zip(made.pools, pools, strict=True)}  # whoever else has them
        return clone

    # --- what a step touches -----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """What is used inside stays until the end; may be nested, the outermost counts."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._units.settle()

    def decode(self, layer: int, tensors: tuple[Tensor, ...], step: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """A step (`quest.sequences.Step`) of a layer; tensors and options are those of `decode_fetched`."""
        return decode_fetched(_Reader(self, layer, step, options["window"]), tensors, **options)

    def append(self, layer: int, key: Tensor, value: Tensor, step: Any, summaries: Sequence[Tensor]) -> None:
        """Store a step's new keys and values, and refresh the summaries."""
        self._write(layer, step)
        k_cache, v_cache = self._layers[layer].pools
        ops.append(key, value, k_cache, v_cache, step.slot_mapping, check=False)
        self.refresh(layer, summaries, step.block_table, step.seq_lens, step.num_new)

    def refresh(
        self, layer: int, summaries: Sequence[Tensor], block_table: Tensor, seq_lens: Tensor, num_new: Tensor
    ) -> None:
        """Make the summaries of the last `num_new[b]` tokens of each row anew."""
        self.before_refresh(layer, block_table, seq_lens.tolist(), num_new.tolist())
        k_cache, _ = self._layers[layer].pools
        refresh(k_cache, summaries, block_table, seq_lens, num_new, config=self.config, layer_idx=layer)

    def before_refresh(self, layer: int, block_table: Tensor, lengths: Sequence[int], num_new: Sequence[int]) -> None:
        """Do what may fail of a `refresh`, inside `step`."""
        first = [first_key(self.config, length, count) for length, count in zip(lengths, num_new, strict=True)]
        self._units.read(layer, _table(block_table), list(zip(first, lengths, strict=True)))

    def whole(
        self, layer: int, block_table: Tensor, first: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """K and V where positions `first[b]` to `lengths[b]` of each row can be read, and a block table for them."""
        self._units.scan(layer, _table(block_table), list(zip(first, lengths, strict=True)))
        return *self._layers[layer].pools, block_table  # type: ignore[return-value]

    def _write(self, layer: int, step: Any) -> None:
        """The step's new tokens are going to be written."""
        counts = step.num_new.tolist()
        rows = [(length - count, length) for length, count in zip(step.lengths, counts, strict=True)]
        self._units.write(layer, _table(step.block_table), rows)

    # --- whole blocks ------------------------------------------------------------------------------------------------

    def hold(self, blocks: Sequence[int]) -> None:
        """Bring blocks that are going to be copied, inside `step`; the copying can't fail then."""
        self._units.hold(blocks)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(from, to), of which the first are held and the second hold nothing."""
        self._units.copy_blocks(pairs)

    def written(self, layer: int, blocks: Sequence[int]) -> None:
        """All of these blocks was written."""
        self._units.written(layer, blocks)

    def take_out(self, layer: int, blocks: Sequence[int]) -> tuple[Tensor, ...]:
        """A copy of what blocks hold, K and V [blocks, num_kv_heads, block_size, head_dim]."""
        table = torch.tensor([blocks], dtype=torch.int32)
        k_cache, v_cache, _ = self.whole(layer, table, [0], [len(blocks) * self.config.block_size])
        return tuple(pool.index_select(0, table[0]) for pool in (k_cache, v_cache))

    def put_in(self, layer: int, blocks: Sequence[int], rows: Sequence[Tensor]) -> None:
        """Write whole blocks, K and V as `take_out` gives them."""
        for pool, part in zip(self._layers[layer].pools, rows, strict=True):
            pool.index_copy_(0, torch.tensor(blocks, dtype=torch.int64), part)
        self.written(layer, blocks)

    def forget(self, blocks: Sequence[int]) -> None:
        """These blocks hold nothing any more; their memory is given back, and nothing of them is moved."""
        self._units.forget(blocks)


@dataclass(frozen=True)
class _Reader:
    """Fetches what a decode step of a layer needs, when `quest.decode` comes to it."""

    residency: Residency
    layer: int
    step: Any
    window: int | None

    def before_append(self) -> None:
        step, q_len = self.step, self.step.slot_mapping.shape[1]
        self.residency._write(self.layer, step)
        # A row that stores anything is summarised from its last q_len places on.
        rows = [
            (first_key(self.residency.config, length, q_len if count else 0, q_len), length)
            for length, count in zip(step.lengths, step.num_new.tolist(), strict=True)
        ]
        self.residency._units.read(self.layer, _table(step.block_table), rows)

    def before_attend(self, page_idx: Tensor | None) -> None:
        step = self.step
        table = _table(step.block_table)
        if page_idx is None:
            q_len = step.slot_mapping.shape[1]
            seen = max(step.lengths) if self.window is None else self.window + q_len - 1
            first = [max(0, length - seen) for length in step.lengths]
            self.residency.whole(self.layer, step.block_table, first, step.lengths)
        else:
            page_idx = page_idx.contiguous()
            shape, page_size = tuple(page_idx.shape), self.residency.config.page_size
            self.residency._units.read_pages(self.layer, table, page_idx.data_ptr(), shape, page_size)


def first_key(config: QuestConfig, length: int, num_new: int, scored: int = 0) -> int:
    """The first position whose key is read when the last `num_new` tokens are summarised and the last `scored` ones
    scored (0: there is no scoring)."""
    packing, before = packing_of(config), max(0, length - num_new)
    if packing is None:  # the pages that they lie in
        return before // config.page_size * config.page_size if num_new else length
    group, block = packing.group_size, packing.block_size
    first = length
    if num_new and length // group > before // group:  # a group is full: its block is packed
        first = before // group * group // block * block
    if scored == 1:  # pages after the last full group have no codes
        first = min(first, length // group * group)
    elif scored:  # codes of a block that the step goes on filling are not used
        first = min(first, max(0, length - scored) // block * block)
    return first


def _table(block_table: Tensor) -> tuple[int, int, int]:
    """Address, stride and width of a block table, as `_host.Residency` takes it."""
    return block_table.data_ptr(), block_table.stride(0), block_table.shape[1]
