"""The paged KV cache: a pool of blocks per layer, and one block table for all of them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from quest import ops
from quest.config import QuestConfig
from quest.decode import decode, decode_packed, op_settings, refresh
from quest.offload import Offload, OffloadStats
from quest.packing import MAX_KEY
from quest.pools import Pools, check_int
from quest.sequences import PagedSequences, Step
from quest.stats import Call, Stats


class PagedKVCache(PagedSequences):
    """K, V and page summaries of `num_layers` layers for a ragged batch.

    One step of a model is one `extend` (slots for all layers), then per layer `append` (store and summarise) or
    `decode` (store, summarise, and attend sparsely). The pool of a layer is created by its first keys and grows when
    blocks run out. Rows share blocks after `fork`; a block that several rows refer to is never written: the row that
    would write gets a copy of its own first. Summaries always equal those of the tokens present.

    A cache and all others on the same pools are for one thread at a time, whichever it is; `usage()` and `stats` may be
    read by others meanwhile. Caches on different pools are independent.

    Args:
        num_layers: layers with K and V of their own.
        batch_size: rows to start with; `add`, `select`, `remove` and `fork` change them.
        config, num_blocks, max_blocks, watermark, device, offload: as in `Pools`.

    Attributes:
        k_cache, v_cache: per layer [num_blocks, num_kv_heads, block_size, head_dim], None before its first keys.
        summaries: per layer page_min, page_max [num_blocks, num_kv_heads, block_size / page_size, head_dim]; with
            `config.summary_bits` one list instead: packed, uint8 [num_blocks, num_kv_heads, num_bytes].
        stats: what `decode` and `attend` have read so far (`quest.stats`).
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int = 1,
        *,
        config: QuestConfig | None = None,
        num_blocks: int = 0,
        max_blocks: int | None = None,
        watermark: int = 0,
        device: torch.device | str = "cpu",
        offload: Offload | None = None,
    ) -> None:
        sizes: dict[str, Any] = dict(num_blocks=num_blocks, max_blocks=max_blocks, watermark=watermark)
        self._lie_on(Pools(num_layers, config=config, device=device, offload=offload, **sizes), batch_size)
        self._own_pools = True

    @classmethod
    def on(cls, pools: Pools, batch_size: int = 1, *, config: QuestConfig | None = None) -> Self:
        """A cache on pools that others may use too.

        Args:
            config: how this one reads, if not as `pools.config` says; its summaries must be the same.

        Raises:
            ValueError: they are not.
        """
        if config is not None:
            _check_same_summaries(config, pools)
        cache = cls.__new__(cls)
        cache._lie_on(pools, batch_size, config)
        return cache

    def _lie_on(self, pools: Pools, batch_size: int, config: QuestConfig | None = None) -> None:
        self._own_pools = False
        check_int("PagedKVCache", "batch_size", batch_size, 0)
        self._quick: dict[int, tuple[tuple[Any, ...], tuple[Tensor, ...], tuple[Any, ...], Call]] = {}  # see `decode`
        super().__init__(pools, batch_size)
        self.config = pools.config if config is None else config
        self.k_cache, self.v_cache, self.summaries = pools.k_cache, pools.v_cache, pools.summaries
        self._op = (torch.ops.quest.decode if pools.packing is None else torch.ops.quest.decode_packed).default
        self._mended = 0, 0  # calls of `overwritten`, and version, of the last time that summaries were made for them
        self._stored_step = self._gaps.stored_step
        self.stats = Stats(self.config)
        pools.on_growth(self._forget_quick)

    @property
    def num_layers(self) -> int:
        return len(self.k_cache)

    @property
    def offload_stats(self) -> OffloadStats | None:
        """What was moved between memory and files, and what of it is in memory; None without `offload`."""
        return None if self.pools.residency is None else self.pools.residency.stats

    # --- layers ------------------------------------------------------------------------------------------------------

    def append(self, layer: int, key: Tensor, value: Tensor, step: Step) -> None:
        """Store a layer's new keys and values [batch, q_len, num_kv_heads, head_dim] and summarise their pages."""
        self._check_step("append", layer, key, value, step)
        if self.pools.packing is not None:
            _check_finite("append", key, step)
        k_cache, v_cache, *summaries = self.pools.layer(layer, key, value)
        if (residency := self.pools.residency) is not None:
            with residency.step():
                residency.append(layer, key, value, step, summaries)
        else:
            ops.append(key, value, k_cache, v_cache, step.slot_mapping, check=False)
            self._summarise(layer, step.block_table, step.seq_lens, step.num_new)
        self._stored_step[layer] = step.version

    def decode(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: Step,
        *,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        window: int | None = None,
        backend: str = "auto",
        heads_first: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """`append`, then the attention of the new tokens' queries [batch, q_len, num_heads, head_dim]: (out, lse).

        As `quest.decode` with the cache's config. With q_len above 1 every token selects its own pages, and sees only
        what precedes it; the tokens of a row that has fewer must be the last ones.

        Args:
            heads_first: query, key and value are [batch, heads, q_len, head_dim], at any strides; the result is not.
        """
        if self.pools.stale:
            self._mend()
        # A step like an earlier one goes straight to the op. What doesn't fit it refuses too, and the checks say why.
        like = query.shape, softmax_scale, softcap, window, heads_first
        done = None
        try:
            quick = self._quick.get(layer)
            usual = sinks is None and backend == "auto" and not torch.is_grad_enabled()
            if usual and quick is not None and quick[0] == like and step.version == self._version:
                _, pools, settings, call = quick
                rows = step.block_table, step.seq_lens, step.slot_mapping
                done = self._op(query, key, value, *pools, *rows, *settings, heads_first=heads_first)
        except Exception:
            pass
        if done is None:
            done, call = self._decode(layer, like, query, key, value, step, sinks, backend)
        self._stored_step[layer] = step.version
        stats = self.stats
        stats.pending.append((call, step.lengths))
        if len(stats.pending) >= stats.due_from and stats.due(call):
            self._measure(layer, like, query, step, sinks, done[1])
        return done

    def _decode(
        self,
        layer: int,
        like: tuple[Any, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: Step,
        sinks: Tensor | None,
        backend: str,
    ) -> tuple[tuple[Tensor, Tensor], Call]:
        """`decode` with every check, which leaves in `_quick` what a step like this one can do without."""
        _, softmax_scale, softcap, window, heads_first = like
        if heads_first:
            query, key, value = (_tokens_first(x) for x in (query, key, value))
        self._check_step("decode", layer, key, value, step)
        pools = self.pools.layer(layer, key, value)
        tensors = query, key, value, *pools, step.block_table, step.seq_lens, step.slot_mapping
        options: dict[str, Any] = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, window=window)
        options |= dict(config=self.config, layer_idx=layer, check=False, backend=backend)
        if (residency := self.pools.residency) is not None:
            if self.pools.packing is not None:
                _check_finite("decode", key, step)
            with residency.step():
                done = residency.decode(layer, tensors, step, **options)
            return done, Call.of(layer, query, pools[0], pools[1], window)
        whole: Callable[..., tuple[Tensor, Tensor]] = decode if self.pools.packing is None else decode_packed
        done = whole(*tensors, **options)
        call = Call.of(layer, query, pools[0], pools[1], window)
        if sinks is None and backend == "auto" and self.device.type == "cpu" and query.dim() == 4:
            usual = softmax_scale, softcap, None, window
            settings = op_settings(query, step.block_table, self.config, layer, *usual, check=False)
            self._quick[layer] = like, pools, settings, call
        return done, call

    def _measure(
        self, layer: int, like: tuple[Any, ...], query: Tensor, step: Step, sinks: Tensor | None, lse: Tensor
    ) -> None:
        """Tell `stats` how much of dense attention's mass a decode step has read, whose lse is given."""
        _, softmax_scale, softcap, window, heads_first = like
        if heads_first:
            query = _tokens_first(query)
        options: dict[str, Any] = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, window=window)
        with self.pools.step():
            whole = self._whole("decode", layer)
            _, dense = ops.attend(query, *whole, step.seq_lens, **options, check=False)
        self.stats.record_mass(layer, lse, dense)

    def attend(
        self,
        layer: int,
        query: Tensor,
        *,
        softmax_scale: float | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        window: int | None = None,
    ) -> tuple[Tensor, Tensor]:
        """What `decode` does after its append: queries of the last q_len tokens, which the layer has stored already."""
        self._mend()
        k_cache, v_cache, *_ = self._stored("attend", layer)
        place = (*query.shape[:2], k_cache.shape[1])
        key, value = (pool.new_empty(*place, pool.shape[3]) for pool in (k_cache, v_cache))
        nothing = torch.full(query.shape[:2], -1, dtype=torch.int64, device=self.device)
        none = torch.zeros_like(self.seq_lens)
        step = Step(nothing, self.seq_lens, self.block_table, none, self.lengths, self._version)
        options = {"softmax_scale": softmax_scale, "softcap": softcap, "sinks": sinks, "window": window}
        stored = self._stored_step[layer]
        try:
            return self.decode(layer, query, key, value, step, **options)  # type: ignore[arg-type]
        finally:
            self._stored_step[layer] = stored

    # --- rows --------------------------------------------------------------------------------------------------------

    def crop(self, lengths: int | Sequence[int]) -> None:
        """Keep the first `lengths` tokens of the rows (one number for all, or one per row): what follows leaves no
        trace, in no summary either. An error changes nothing."""
        ends = [lengths] * self.batch_size if isinstance(lengths, int) else list(lengths)
        if len(ends) != self.batch_size:
            raise ValueError(f"crop: lengths must be one per row ({self.batch_size}), got {len(ends)}")
        for row, end in enumerate(ends):
            check_int("crop", f"lengths[{row}]", end, 0, self.lengths[row])
        # A page that loses some of its tokens is summarised again, so its block is written. With packed summaries the
        # whole block is.
        packing = self.pools.packing
        unit = self.config.page_size if packing is None else packing.block_size
        redo = [end % unit * (end < old) for end, old in zip(ends, self.lengths, strict=True)]
        if packing is None:
            redo = [min(again, 1) for again in redo]
        self._mend()
        self.pools.reserve(self._sequences.needed_to_crop(ends, redo))
        with self.pools.step():
            if (residency := self.pools.residency) is not None:  # what may fail comes before what changes
                first = [end - again for end, again in zip(ends, redo, strict=True)]
                residency.hold(self._sequences.to_copy(first, redo))
                for layer in self._layers():
                    residency.before_refresh(layer, self.block_table, ends, redo)
            self._gaps.end()
            self._gaps.crop(self.ids, ends)
            self._changed(*self._sequences.crop(ends, redo))
            self._refresh()
            if any(redo):
                self._summarise_all(self.block_table, self.seq_lens, self._int32(redo))

    def dense(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer as [batch, num_kv_heads, max(lengths), head_dim], zero beyond a row's length."""
        with self.pools.step():
            k_cache, v_cache, table = self._whole("dense", layer)
            rows = table, self.seq_lens, max(self.lengths)
            return self.pools.gather(k_cache, *rows), self.pools.gather(v_cache, *rows)

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """A cache with pools of its own; on pools that others use too, one that shares blocks until one of them writes.

        Raises:
            ValueError: a sequence is suspended.
        """
        if self._suspended:
            raise ValueError(f"deepcopy: no sequence may be suspended, but {self.suspended} are: resume them first")
        kept: list[Any] = [self.config]
        if not self._own_pools:
            kept += [self.pools, self.pools.blocks, self.k_cache, self.v_cache, self.summaries]
        memo.update((id(x), x) for x in kept)
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        clone._room = clone._int32([])  # not a copy of the table, but a view of the copy's
        clone._refresh()
        clone._forget_quick()
        clone.pools.on_growth(clone._forget_quick)
        return clone

    # --- inside ------------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        seen = self.pools.num_overwritten, self._version
        if not (stale := self.pools.stale) or seen == self._mended:
            return
        size, held, done = self.config.block_size, Counter[int](), set[int]()
        for sequence in self._sequences.ids:
            blocks, length = self._sequences.blocks_of(sequence), self._sequences.length(sequence)
            places = [place for place, block in enumerate(blocks) if block in stale]
            if places:
                for place in places:
                    self._gaps.written(self._layers(), sequence, range(place * size, (place + 1) * size))
                num_new = length - places[0] * size
                self._summarise_all(self._int32(blocks)[None], self._int32([length]), self._int32([num_new]))
            held.update(blocks[place] for place in places)
            done.update(blocks[place] for place in places if (place + 1) * size <= length)
        # Of a block that isn't full, a sequence of another cache may have more pages.
        done.update(block for block, count in held.items() if count == self.pools.blocks.refs(block))
        stale -= done
        self._mended = seen  # marks that are left are of blocks that no sequence here has, or of others' pages

    def _refresh(self) -> None:
        shape = self.block_table.shape
        super()._refresh()
        if self.block_table.shape != shape:
            self._forget_quick()

    def _forget_quick(self) -> None:
        self._quick.clear()

    def _summarise_all(self, block_table: Tensor, seq_lens: Tensor, num_new: Tensor) -> None:
        for layer in self._layers():
            self._summarise(layer, block_table, seq_lens, num_new)

    def _layers(self) -> list[int]:
        """Layers that have stored keys."""
        return [layer for layer, k_cache in enumerate(self.k_cache) if k_cache is not None]

    def _whole(self, op: str, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """K and V of a layer, and the block table, where all of the rows can be read; inside `step`."""
        k_cache, v_cache, *_ = self._stored(op, layer)
        if (residency := self.pools.residency) is None:
            return k_cache, v_cache, self.block_table
        return residency.whole(layer, self.block_table, [0] * self.batch_size, self.lengths)

    def _summarise(self, layer: int, block_table: Tensor, seq_lens: Tensor, num_new: Tensor) -> None:
        k_cache, _, *summaries = self._stored("summarise", layer)
        if (residency := self.pools.residency) is None:
            refresh(k_cache, summaries, block_table, seq_lens, num_new, config=self.config, layer_idx=layer)
        else:
            with residency.step():
                residency.refresh(layer, summaries, block_table, seq_lens, num_new)

    def _stored(self, op: str, layer: int) -> tuple[Tensor, ...]:
        check_int(op, "layer", layer, 0, self.num_layers - 1)
        if (pools := self.pools.stored(layer)) is None:
            raise ValueError(f"{op}: layer must have stored keys, got layer {layer}, which has none yet")
        return pools

    def _check_step(self, op: str, layer: int, key: Tensor, value: Tensor, step: Step) -> None:
        check_int(op, "layer", layer, 0, self.num_layers - 1)
        if not isinstance(step, Step):
            raise TypeError(f"{op}: step must be what extend returned, got {type(step).__name__}")
        if step.version != self._version:
            raise ValueError(f"{op}: step must be from the cache's last extend, got one from before a later change")
        if self.k_cache[layer] is not None:
            return  # the ops hold key and value against the pool
        for name, x in (("key", key), ("value", value)):
            if x.dim() != 4 or x.shape[:2] != step.slot_mapping.shape:
                raise ValueError(
                    f"{op}: {name} must be [batch, q_len, num_kv_heads, head_dim] with batch and q_len "
                    f"{[*step.slot_mapping.shape]} of the step, got {[*x.shape]}"
                )
        if key.shape[2] != value.shape[2] or key.dtype != value.dtype or key.device != self.device:
            raise ValueError(
                f"{op}: key and value must agree in heads and dtype and be on the cache's device {self.device}, got "
                f"{[*key.shape]} {key.dtype} on {key.device} and {[*value.shape]} {value.dtype} on {value.device}"
            )


def _check_same_summaries(config: QuestConfig, pools: Pools) -> None:
    for name in ("page_size", "block_size", "summary_bits", "coarse_size"):
        if (ours := getattr(config, name)) != (theirs := getattr(pools.config, name)):
            raise ValueError(f"PagedKVCache: config must have the {name} of the pools, {theirs}, got {ours}")
    for layer in range(pools.num_layers if pools.packing is not None else 0):  # codes leave the sink out
        ours, theirs = (x.layer(layer).sink_tokens for x in (config, pools.config))
        if ours != theirs:
            raise ValueError(
                f"PagedKVCache: config must have the sink_tokens of the pools, {theirs} in layer {layer}, got {ours}"
            )


def _check_finite(op: str, key: Tensor, step: Step) -> None:
    if not _is_finite(key) and not _is_finite(key[step.slot_mapping >= 0]):
        raise ValueError(f"{op}: key must be finite and at most {MAX_KEY:g} where summaries are packed")


def _is_finite(key: Tensor) -> bool:
    return bool((key.abs() <= MAX_KEY).all())


def _tokens_first(x: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()
