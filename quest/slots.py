"""K and V of a cache on a GPU that are more than its memory: all in the host's, and some in slots on the device.

A unit is a few tokens of one block and KV head, a slot holds one. Each layer has as many as its share of
`Offload.max_bytes` allows; `csrc/host/slots.cpp` says which unit gets which, here the copies are made. What a decode
step selects is brought into slots and attended to there, every KV head as a row of its own with a block table of units.
Whatever reads everything, or more than there are slots, reads a copy that lives as long as it does.

Copies run on the current stream, after all that was queued for the cache before, on whichever stream that was.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quest import _host, gpu, ops
from quest.config import QuestConfig, forced_pages
from quest.decode import Options, check_decode, choose_pages, refresh
from quest.offload import Offload, OffloadStats
from quest.packing import Packing, packing_of
from quest.residency import first_key

__all__ = ["SlotResidency"]

UNIT_TOKENS = 16  # at least, where a block is made of as many
Pair = tuple[Tensor, Tensor]  # of K and of V
Numbers = NDArray[np.int64]


@dataclass
class _Layer:
    num_kv_heads: int
    slots: _host.Slots
    on_device: Pair  # [slots, unit_tokens, head_dim]
    on_host: Pair  # [units, unit_tokens, head_dim], pinned
    slot_of: Tensor  # int32 [units] on the device: right for units that have a slot
    bytes_in: int = 0
    bytes_out: int = 0

    @property
    def unit_bytes(self) -> int:
        return sum(pool.stride(0) * pool.itemsize for pool in self.on_host)


class _Tail(NamedTuple):
    """Copies of the blocks that a step writes to: which, and what of them is copied from and to where."""

    blocks: Numbers
    table: NDArray[np.int32]  # block table of the copies, -1 elsewhere
    kept: tuple[Numbers, Numbers]  # units that are read again or filled on, and their places in the copies
    written: tuple[Numbers, Numbers]  # units that the step writes, the oldest first, and their places
    slot_mapping: Numbers  # into the copies


class SlotResidency:
    """K and V of which at most `offload.max_bytes` are on the device between the steps, and all in the host's memory.

    What stands in for the pools has their shape and is NaN: blocks lie in no single place.

    Raises:
        RuntimeError: there is no memory for a layer's slots or for its units on the host; nothing has changed.
    """

    def __init__(self, num_layers: int, config: QuestConfig, offload: Offload, device: torch.device) -> None:
        if offload.directory is not None:
            raise ValueError(
                f"Offload: directory must be None on {device}, whose second tier is the host's memory, "
                f"got {offload.place!r}"
            )
        self.num_layers = num_layers
        self.config = config
        self.offload = offload
        self.device = device
        unit = math.lcm(config.page_size, UNIT_TOKENS)
        self.unit_tokens = config.block_size if config.block_size % unit else unit
        self._layers: dict[int, _Layer] = {}
        self._ready: torch.cuda.Event | None = None  # after the last step's work
        self._depth = 0
        self._step: dict[Any, tuple[Any, ...]] = {}  # what the layers of a step share, by what it was made from

    @property
    def stats(self) -> OffloadStats:
        hits = misses = used = peak = bytes_in = bytes_out = 0
        for x in self._layers.values():
            counts = x.slots.counts
            hits, misses = hits + counts[0], misses + counts[1]
            used, peak = used + counts[2] * x.unit_bytes, peak + counts[3] * x.unit_bytes
            bytes_in, bytes_out = bytes_in + x.bytes_in, bytes_out + x.bytes_out
        return OffloadStats(hits, misses, bytes_in, bytes_out, used, peak, self.offload.max_bytes)

    # --- pools -------------------------------------------------------------------------------------------------------

    def create(
        self, layer: int, num_blocks: int, num_kv_heads: int, dims: tuple[int, int], dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        """Stand-ins for K and V of a new layer, [num_blocks, num_kv_heads, block_size, head_dim]."""
        size = sum(dims) * self.unit_tokens * dtype.itemsize
        capacity = self.offload.max_bytes // self.num_layers // size
        per_head = self.config.block_size // self.unit_tokens
        layout = dict(num_kv_heads=num_kv_heads, units_per_head=per_head, unit_tokens=self.unit_tokens)
        slots = _host.Slots(num_blocks, **layout, capacity=capacity)
        num_units = num_blocks * num_kv_heads * per_head
        k, v = (torch.empty(capacity, self.unit_tokens, dim, dtype=dtype, device=self.device) for dim in dims)
        hosts = (self._host_memory(num_units, dim, dtype) for dim in dims)
        slot_of = torch.zeros(num_units, dtype=torch.int32, device=self.device)
        self._layers[layer] = _Layer(num_kv_heads, slots, (k, v), (next(hosts), next(hosts)), slot_of)
        return self._stand_ins(layer, num_blocks)

    def grow(self, layer: int, num_blocks: int) -> tuple[Tensor, ...]:
        """Room for more blocks on the host. Where there is no memory for it, the layer is as before."""
        x = self._layers[layer]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the host reads what the device has written
        num_units = self._num_units(x, num_blocks)
        k, v = (self._host_memory(num_units, pool.shape[2], pool.dtype) for pool in x.on_host)
        slot_of = torch.zeros(num_units, dtype=torch.int32, device=self.device)
        for large, small in zip((k, v, slot_of), (*x.on_host, x.slot_of), strict=True):
            large[: len(small)] = small
        x.slots.grow(num_blocks)
        x.on_host, x.slot_of = (k, v), slot_of
        return self._stand_ins(layer, num_blocks)

    def _host_memory(self, num_units: int, dim: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_units, self.unit_tokens, dim, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _stand_ins(self, layer: int, num_blocks: int) -> tuple[Tensor, ...]:
        x = self._layers[layer]
        shape = num_blocks, x.num_kv_heads, self.config.block_size
        return tuple(pool.new_full((pool.shape[2],), math.nan).expand(*shape, -1) for pool in x.on_device)

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> SlotResidency:
        clone = SlotResidency(self.num_layers, self.config, self.offload, self.device)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        for layer, x in self._layers.items():
            (k, v), (k_host, v_host) = ([pool.clone() for pool in pools] for pools in (x.on_device, x.on_host))
            if self.device.type == "cuda":
                k_host, v_host = k_host.pin_memory(), v_host.pin_memory()
            clone._layers[layer] = replace(
                x, slots=_host.Slots(x.slots), on_device=(k, v), on_host=(k_host, v_host), slot_of=x.slot_of.clone()
            )
        return clone

    # --- a step ------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Copies and kernels inside come after those of earlier steps, on whichever streams they were."""
        on_gpu = self.device.type == "cuda" and not self._depth
        if on_gpu and self._ready is not None:
            torch.cuda.current_stream(self.device).wait_event(self._ready)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if on_gpu:
                self._ready = torch.cuda.current_stream(self.device).record_event(self._ready)

    def decode(
        self,
        layer: int,
        tensors: tuple[Tensor, ...],
        step: Any,
        *,
        config: QuestConfig,
        layer_idx: int,
        check: bool,
        backend: str,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """A step (`quest.sequences.Step`) of a layer, the verbs one by one; arguments are those of `decode`."""
        if backend not in ("auto", "verbs"):
            raise ValueError(f"decode: backend must be auto or verbs with offload on {self.device}, got {backend!r}")
        check_decode(tensors, config, layer_idx, Options(**options))
        query, key, value, k_cache, _, *summaries, block_table, seq_lens, _ = tensors
        if flat := query.dim() == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        self.append(layer, key, value, step, summaries)

        window, first, page_idx, whole = options["window"], [0] * len(step.lengths), None, None
        settings, packing = config.layer(layer_idx), packing_of(config)
        scored: dict[str, Any] = dict(softmax_scale=options["softmax_scale"], window=window)
        scored |= dict(config=config, layer_idx=layer_idx)
        if settings.dense:
            if window is not None:
                first = [max(0, length - window - query.shape[1] + 1) for length in step.lengths]
            whole = self.whole(layer, block_table, first, step.lengths)
        elif packing is not None and _scores_keys(packing, query.shape[1], settings.recent_tokens):
            whole, blocks = self._copy_of(layer, block_table, first, step.lengths)
            copied = [pool.index_select(0, blocks) for pool in summaries]
            page_idx = choose_pages(query, whole[0], copied, whole[2], seq_lens, **scored)
        else:
            page_idx = choose_pages(query, k_cache, summaries, block_table, seq_lens, **scored)
            out, lse = self._attend_to(layer, query, page_idx, block_table, seq_lens, **options)
        if whole is not None:
            options |= dict(page_size=config.page_size, check=False)
            out, lse = ops.attend(query, *whole, seq_lens, page_idx, **options)
        return (out.squeeze(1), lse.squeeze(1)) if flat else (out, lse)

    def _attend_to(
        self,
        layer: int,
        query: Tensor,
        page_idx: Tensor,
        block_table: Tensor,
        seq_lens: Tensor,
        *,
        sinks: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        """`ops.attend` to selected pages, whose units are brought into slots, or are copied where those are too few."""
        x, page_size = self._layers[layer], self.config.page_size
        chosen, ids = page_idx.cpu().contiguous(), self._numbers(block_table)
        rows = ids.ctypes.data, ids.strides[0] // ids.itemsize, ids.shape[1]
        units = x.slots.units(rows, chosen.data_ptr(), tuple(chosen.shape), page_size)
        moves = x.slots.read(units)
        if moves is None:
            pools, place_of = self._gather(x, units), torch.zeros_like(x.slot_of)
            (copied,) = self._uploaded(units)
            place_of[copied] = torch.arange(len(units), dtype=torch.int32, device=self.device)
        else:
            self._carry_out(x, moves, load=True)
            pools, place_of = x.on_device, x.slot_of

        batch, heads = len(query), x.num_kv_heads
        by_head = [y.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 1) for y in (query, page_idx)]
        k, v = (pool.unsqueeze(1) for pool in pools)
        table, lengths = place_of[self._unit_table(block_table, heads)], seq_lens.repeat_interleave(heads)
        options |= dict(page_size=page_size, check=False)
        done = ops.attend(by_head[0], k, v, table, lengths, by_head[1], **options)
        out, lse = (y.unflatten(0, (batch, heads)).transpose(1, 2).flatten(2, 3) for y in done)
        if sinks is None:
            return out, lse
        nothing = lse == -math.inf  # a sink alone is nothing too
        out, with_sink = ops.merge(out, lse, torch.zeros_like(out), sinks.float().expand_as(lse).contiguous())
        return out, torch.where(nothing, lse, with_sink)

    def append(self, layer: int, key: Tensor, value: Tensor, step: Any, summaries: Sequence[Tensor]) -> None:
        """Store a step's new keys and values, and refresh the summaries: in a copy of the blocks that are written."""
        x = self._layers[layer]
        tail = self._shared(("tail", x.num_kv_heads), step.slot_mapping, lambda: self._tail_of(x, step))
        if not len(tail.blocks):
            return
        units, places = tail.kept
        k, v = self._gather(x, units, places, self._num_units(x, len(tail.blocks)))
        blocks, slot_mapping, table = self._uploaded(tail.blocks, tail.slot_mapping, tail.table)
        slot_mapping, table = slot_mapping.view_as(step.slot_mapping), table.view(tail.table.shape).int()
        keys, values = self._as_blocks(x, k), self._as_blocks(x, v)
        ops.append(key, value, keys, values, slot_mapping, check=False)
        self._refresh(layer, keys, summaries, blocks, table, step.seq_lens, step.num_new)
        self._store(x, (k, v), *tail.written)

    def refresh(
        self, layer: int, summaries: Sequence[Tensor], block_table: Tensor, seq_lens: Tensor, num_new: Tensor
    ) -> None:
        """Make the summaries of the last `num_new[b]` tokens of each row anew."""
        lengths, counts = seq_lens.tolist(), num_new.tolist()
        first = [first_key(self.config, length, count) for length, count in zip(lengths, counts, strict=True)]
        (k, _, table), blocks = self._copy_of(layer, block_table, first, lengths)
        self._refresh(layer, k, summaries, blocks, table, seq_lens, num_new)

    def before_refresh(self, layer: int, block_table: Tensor, lengths: Sequence[int], num_new: Sequence[int]) -> None:
        """Nothing: all of K and V is on the host already."""

    def _refresh(
        self,
        layer: int,
        keys: Tensor,
        summaries: Sequence[Tensor],
        blocks: Tensor,
        table: Tensor,
        seq_lens: Tensor,
        num_new: Tensor,
    ) -> None:
        """Refresh the summaries of `blocks`, whose keys are copies that `table` names."""
        copies = [pool.index_select(0, blocks) for pool in summaries]
        refresh(keys, copies, table, seq_lens, num_new, config=self.config, layer_idx=layer)
        for pool, made in zip(summaries, copies, strict=True):
            pool.index_copy_(0, blocks, made)

    def whole(
        self, layer: int, block_table: Tensor, first: Sequence[int], lengths: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """A copy of K and V at positions `first[b]` to `lengths[b]` of each row, and a block table for it."""
        return self._copy_of(layer, block_table, first, lengths)[0]

    # --- whole blocks ------------------------------------------------------------------------------------------------

    def hold(self, blocks: Sequence[int]) -> None:
        """Nothing, as in `before_refresh`."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """(from, to), of which the second hold nothing."""
        if pairs:
            source, target = np.array(pairs, np.int64).T
            for layer in self._layers:
                self.put_in(layer, target, self.take_out(layer, source))

    def forget(self, blocks: Sequence[int]) -> None:
        """These blocks hold nothing any more; their slots are free, and nothing of them is moved."""
        for x in self._layers.values():
            x.slots.forget(blocks)

    def take_out(self, layer: int, blocks: Sequence[int] | Numbers) -> tuple[Tensor, ...]:
        """A copy of what blocks hold, K and V [blocks, num_kv_heads, block_size, head_dim]."""
        x = self._layers[layer]
        units = self._units_of(x, np.asarray(blocks, np.int64))
        return tuple(self._as_blocks(x, pool) for pool in self._gather(x, units))

    def put_in(self, layer: int, blocks: Sequence[int] | Numbers, rows: Sequence[Tensor]) -> None:
        """Write whole blocks, K and V as `take_out` gives them."""
        x = self._layers[layer]
        k, v = (part.to(self.device, non_blocking=True).view(-1, self.unit_tokens, part.shape[3]) for part in rows)
        units = self._units_of(x, np.asarray(blocks, np.int64))
        self._store(x, (k, v), units, np.arange(len(units)))

    # --- units -------------------------------------------------------------------------------------------------------

    def _units_of(self, x: _Layer, blocks: Numbers) -> Numbers:
        per_block = self._num_units(x, 1)
        return (blocks[:, None] * per_block + np.arange(per_block)).ravel()

    def _num_units(self, x: _Layer, num_blocks: int) -> int:
        return num_blocks * x.num_kv_heads * (self.config.block_size // self.unit_tokens)

    def _as_blocks(self, x: _Layer, units: Tensor) -> Tensor:
        """Units of whole blocks as [blocks, num_kv_heads, block_size, head_dim]."""
        return units.view(-1, x.num_kv_heads, self.config.block_size, units.shape[2])

    def _copy_of(
        self, layer: int, block_table: Tensor, first: Sequence[int], lengths: Sequence[int]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor]:
        """K and V of the rows' blocks that hold positions `first[b]` to `lengths[b]`, a block table for them, and which
        blocks they are."""
        x, table = self._layers[layer], self._numbers(block_table)
        blocks, places = self._blocks_of(table, first, lengths)
        units = self._units_of(x, blocks)
        k, v = self._gather(x, units)
        named, copied = self._uploaded(blocks, places)
        return (self._as_blocks(x, k), self._as_blocks(x, v), copied.view(places.shape).int()), named

    def _blocks_of(
        self, table: NDArray[np.int32], first: Sequence[int], ends: Sequence[int]
    ) -> tuple[Numbers, NDArray[np.int32]]:
        """The rows' blocks with positions `first[b]` to `ends[b]`, and a block table that numbers them as they come."""
        size, blocks = self.config.block_size, list[int]()
        places = np.full(table.shape, -1, np.int32)
        for row, (begin, end) in enumerate(zip(first, ends, strict=True)):
            if begin < end:
                span = slice(begin // size, -(-end // size))
                found = table[row, span]
                places[row, span] = np.arange(len(found)) + len(blocks)
                blocks.extend(found.tolist())
        return np.array(blocks, np.int64), places

    def _tail_of(self, x: _Layer, step: Any) -> _Tail:
        counts, size, unit = self._numbers(step.num_new).tolist(), self.config.block_size, self.unit_tokens
        table = self._numbers(step.block_table)
        starts = [length - count for length, count in zip(step.lengths, counts, strict=True)]
        blocks, places = self._blocks_of(table, starts, step.lengths)
        per_head, heads = size // unit, np.arange(x.num_kv_heads)

        def units_of(spans: list[tuple[int, int]]) -> tuple[Numbers, Numbers]:
            """Units with positions [begin, end) of the rows, of all heads, and their places in the copy."""
            found = [np.zeros((2, 0), np.int64)]
            for row, (begin, end) in enumerate(spans):
                at = np.arange(begin // unit, -(-end // unit)) if begin < end else np.arange(0)
                for_table = np.stack([table[row, at // per_head], places[row, at // per_head]]).astype(np.int64)
                numbers = (for_table[:, :, None] * x.num_kv_heads + heads) * per_head + (at % per_head)[:, None]
                found.append(numbers.reshape(2, -1))
            units, copies = np.concatenate(found, 1)
            return units, copies

        kept = []
        for start, end, count in zip(starts, step.lengths, counts, strict=True):
            kept.append((min(first_key(self.config, end, count), start // unit * unit) if count else start, start))
        slots = self._numbers(step.slot_mapping).ravel()
        renamed = np.full(int(table.max(initial=0)) + 1, -1, np.int64)
        renamed[blocks] = np.arange(len(blocks))
        mapping = np.where(slots < 0, -1, renamed[slots // size] * size + slots % size)
        return _Tail(blocks, places, units_of(kept), units_of(list(zip(starts, step.lengths, strict=True))), mapping)

    def _gather(self, x: _Layer, units: Numbers, places: Numbers | None = None, num_places: int = 0) -> Pair:
        """A copy of K and V of units, one after another, or at some places of so many: there the others are left as
        the memory was."""
        if places is None:
            places, num_places = np.arange(len(units)), len(units)
        k, v = (pool.new_empty(num_places, *pool.shape[1:]) for pool in x.on_device)
        slots = x.slots.where(units)
        there = slots >= 0
        x.bytes_in += int(np.count_nonzero(~there)) * x.unit_bytes
        from_slots, from_host = np.stack([slots, places])[:, there], np.stack([units, places])[:, ~there]
        slotted, hosted = self._uploaded(from_slots, from_host)
        for device, host, copy in zip(x.on_device, x.on_host, (k, v), strict=True):
            move(device, copy, slotted)
            move(host, copy, hosted)
        return k, v

    def _store(self, x: _Layer, copies: Pair, units: Numbers, places: Numbers) -> None:
        """Write units from their places in a copy: to slots, and where those run out to the host."""
        slots, moves = x.slots.write(units)
        there = slots >= 0
        x.bytes_out += int(np.count_nonzero(~there)) * x.unit_bytes
        to_slots, to_host = np.stack([places, slots])[:, there], np.stack([places, units])[:, ~there]
        slotted, hosted = self._carry_out(x, moves, to_slots, to_host, load=False)
        for copy, device, host in zip(copies, x.on_device, x.on_host, strict=True):
            move(copy, device, slotted)
            move(copy, host, hosted)

    def _carry_out(self, x: _Layer, moves: _host.Moves, *more: Numbers, load: bool) -> list[Tensor]:
        """Copy what has lost its slot to the host, and with `load` what has got one from there; uploads `more`."""
        gone, left, dirty, come, slots = moves
        if not len(come) and not more:
            return []
        out, into = np.stack([left, gone])[:, dirty], np.stack([come, slots])
        try:
            outward, inward, *uploaded = self._uploaded(out, into, *more)
        except BaseException:
            x.slots.undo()
            raise
        for device, host in zip(x.on_device, x.on_host, strict=True):
            move(device, host, outward)
            if load:
                move(host, device, inward)
        x.slot_of.index_copy_(0, inward[0], inward[1].int())
        x.bytes_out += out.shape[1] * x.unit_bytes
        x.bytes_in += into.shape[1] * x.unit_bytes * load
        return uploaded

    def _unit_table(self, block_table: Tensor, num_kv_heads: int) -> Tensor:
        """Units [batch * num_kv_heads, units of a row] of a block table; where it has no block, any."""

        def make() -> Tensor:
            per_head = self.config.block_size // self.unit_tokens
            heads, places = (torch.arange(n, device=self.device) for n in (num_kv_heads, per_head))
            first = (block_table.clamp_min(0).long()[:, None] * num_kv_heads + heads[:, None]) * per_head
            return (first[..., None] + places).flatten(2).flatten(0, 1)

        return self._shared(("units", num_kv_heads), block_table, make)

    # --- between host and device -------------------------------------------------------------------------------------

    def _numbers(self, x: Tensor) -> Any:
        """A tensor's numbers on the host."""
        if x.is_cpu:
            return x.numpy()
        return self._shared(("host", x.dim(), x.dtype), x, lambda: x.cpu().numpy())

    def _shared(self, name: Any, source: Tensor, make: Any) -> Any:
        """What is made from a step's tensor, once for all layers."""
        held = self._step.get(name)
        if held is None or held[0] is not source:
            held = self._step[name] = source, make()
        return held[1]

    def _uploaded(self, *arrays: NDArray[Any]) -> list[Tensor]:
        """Integers as int64 tensors on the device, in one copy."""
        flat = torch.from_numpy(np.concatenate([x.ravel().astype(np.int64) for x in arrays])).to(self.device)
        return [y.view(x.shape) for x, y in zip(arrays, flat.split([x.size for x in arrays]), strict=True)]


def move(source: Tensor, target: Tensor, places: Tensor) -> None:
    """`target[places[1]] = source[places[0]]`, between or within the device and the host's pinned memory."""
    if not places.shape[1]:
        return
    if source.is_cuda or target.is_cuda:
        with torch.cuda.device_of(source if source.is_cuda else target):
            gpu.triton_kernels().move(source, target, places)
    else:
        target.index_copy_(0, places[1], source.index_select(0, places[0]))


def _scores_keys(packing: Packing, q_len: int, recent_tokens: int) -> bool:
    """Whether `score_packed` looks at keys: pages without codes that are not forced, the new ones of longer steps."""
    return q_len > 1 or forced_pages(0, recent_tokens, packing.page_size)[1] < packing.group_pages
