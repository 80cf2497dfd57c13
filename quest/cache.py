"""The paged KV cache: a pool of blocks per layer, and one block table for all of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quest import ops, ops_packed
from quest.blocks import BlockAllocator, BlockTable
from quest.config import QuestConfig
from quest.decode import decode, decode_packed, op_settings
from quest.packing import MAX_KEY
from quest.pools import Pools
from quest.stats import Call, Stats


class Step(NamedTuple):
    """Slots reserved for one step, the same for every layer. Valid until the cache is changed by another call."""

    slot_mapping: Tensor  # [batch, q_len] int64, -1 for a token that is not stored
    seq_lens: Tensor  # [batch] int32, lengths after the step
    block_table: Tensor  # [batch, max_blocks] int32, -1 where a row has no block
    num_new: Tensor  # [batch] int32, tokens that each row gains
    lengths: list[int]  # the numbers of seq_lens
    version: int


class PagedKVCache:
    """K, V and page summaries of `num_layers` layers for a ragged batch.

    One step of a model is one `extend` (slots for all layers), then per layer `append` (store and summarise) or
    `decode` (store, summarise, and attend sparsely). The pool of a layer is created by its first keys and grows when
    blocks run out. Rows share blocks after `fork`; a block that several rows refer to is never written: the row that
    would write gets a copy of its own first. Summaries always equal those of the tokens present.

    Args:
        num_layers: layers with K and V of their own.
        batch_size: rows; `fork` can change it.
        config: page size, block size, and how a step reads.
        num_blocks: blocks to start with, for all rows together. A pool that grows is another tensor afterwards, so give
            enough where something holds on to it.
        device: where the pools live.

    Attributes:
        k_cache, v_cache: per layer [num_blocks, num_kv_heads, block_size, head_dim], None before its first keys.
        summaries: per layer page_min, page_max [num_blocks, num_kv_heads, block_size / page_size, head_dim]; with
            `config.summary_bits` one list instead: packed, uint8 [num_blocks, num_kv_heads, num_bytes].
        block_table: [batch, max_blocks] int32, -1 where a row has no block.
        seq_lens: [batch] int32; `lengths` holds the same numbers as a list.
        stats: what `decode` and `attend` have read so far (`quest.stats`).
    """

    def __init__(
        self,
        num_layers: int,
        batch_size: int = 1,
        *,
        config: QuestConfig | None = None,
        num_blocks: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_int("PagedKVCache", "num_layers", num_layers, 1)
        _check_int("PagedKVCache", "batch_size", batch_size, 1)
        _check_int("PagedKVCache", "num_blocks", num_blocks, 0)
        if config is not None and not isinstance(config, QuestConfig):
            raise TypeError(f"PagedKVCache: config must be a QuestConfig, got {type(config).__name__}")
        self.config = QuestConfig() if config is None else config
        self.device = torch.empty(0, device=device).device
        self._pools = Pools(num_layers, self.config, self.device)
        self.k_cache, self.v_cache, self.summaries = self._pools.k_cache, self._pools.v_cache, self._pools.summaries
        self.lengths: list[int] = [0] * batch_size
        self._blocks = BlockAllocator(num_blocks)
        self._table = BlockTable(batch_size, self.config.block_size, self._blocks, self.device)
        self._op = (torch.ops.quest.decode if self._pools.packing is None else torch.ops.quest.decode_packed).default
        self._counts: tuple[list[int], Tensor] = [], self._int32([])  # what the last step added, to use it again
        self.stats = Stats(self.config)
        self._quick: dict[tuple[Any, ...], tuple[tuple[Tensor, ...], tuple[Any, ...], Call]] = {}  # see `decode`
        self._version = 0
        self.block_table = self._table.tensor
        self._refresh()

    @property
    def num_layers(self) -> int:
        return len(self.k_cache)

    @property
    def batch_size(self) -> int:
        return len(self.lengths)

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, free ones included."""
        return self._blocks.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return len(self._blocks.free)

    # --- one step ----------------------------------------------------------------------------------------------------

    def extend(self, num_new: int | Sequence[int] | Tensor, *, start: Sequence[int] | None = None) -> Step:
        """Reserve slots for new tokens of every row, in all layers.

        Args:
            num_new: tokens per row: one number for all, or one per row (a row's tokens are then the last ones of its
                q_len = max(num_new) places), or a bool tensor [batch, q_len] that says which tokens are real; the
                others get slot -1 and are never stored.
            start: where each row's tokens begin, if not at its end: the slots of tokens that are there already, for
                a layer that stores them later than the others.

        Raises:
            ValueError, TypeError: an argument is wrong. An error, also one of memory, changes nothing.
        """
        counts, real = self._new_tokens(num_new)
        begin = self.lengths if start is None else self._check_start(start)
        ends = [first + count for first, count in zip(begin, counts, strict=True)]
        table = self._table
        shared = table.shared(zip(begin, ends, strict=True))
        missing = [max(0, table.blocks(end) - len(blocks)) for end, blocks in zip(ends, table.rows, strict=True)]
        self._reserve(len(shared) + sum(missing))

        self._pools.copy_blocks([table.own(row, place) for row, place in shared])
        for row, count in enumerate(missing):
            if count:
                table.add(row, count)
        self.lengths = ends if start is None else [max(pair) for pair in zip(self.lengths, ends, strict=True)]
        self._refresh()
        seq_lens = self.seq_lens if start is None else self._int32(ends)
        if counts != self._counts[0]:
            self._counts = counts, self._int32(counts)
        return Step(table.slots(begin, counts, real), seq_lens, self.block_table, self._counts[1], ends, self._version)

    def append(self, layer: int, key: Tensor, value: Tensor, step: Step) -> None:
        """Store a layer's new keys and values [batch, q_len, num_kv_heads, head_dim] and summarise their pages."""
        self._check_step("append", layer, key, value, step)
        if self._pools.packing is not None and not _is_finite(key) and not _is_finite(key[step.slot_mapping >= 0]):
            raise ValueError(f"append: key must be finite and at most {MAX_KEY:g} where summaries are packed")
        k_cache, v_cache, *_ = self._pools.layer(layer, key, value, self.num_blocks)
        ops.append(key, value, k_cache, v_cache, step.slot_mapping, check=False)
        self._summarise(layer, step.block_table, step.seq_lens, step.num_new)

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
        # A step like an earlier one goes straight to the op. What doesn't fit it refuses too, and the checks say why.
        like = layer, query.shape, softmax_scale, softcap, window, heads_first
        done = None
        try:
            if sinks is None and backend == "auto" and step.version == self._version and not torch.is_grad_enabled():
                pools, settings, call = self._quick[like]
                rows = step.block_table, step.seq_lens, step.slot_mapping
                done = self._op(query, key, value, *pools, *rows, *settings, heads_first=heads_first)
        except Exception:
            pass
        if done is None:
            done, call = self._decode(like, query, key, value, step, sinks, backend)
        if self.stats.record(call, step.lengths):
            self._measure(like, query, step, sinks, done[1])
        return done

    def _decode(
        self,
        like: tuple[Any, ...],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        step: Step,
        sinks: Tensor | None,
        backend: str,
    ) -> tuple[tuple[Tensor, Tensor], Call]:
        """`decode` with every check, which leaves in `_quick` what a step like this one can do without."""
        layer, _, softmax_scale, softcap, window, heads_first = like
        if heads_first:
            query, key, value = (_tokens_first(x) for x in (query, key, value))
        self._check_step("decode", layer, key, value, step)
        pools = self._pools.layer(layer, key, value, self.num_blocks)
        whole: Callable[..., tuple[Tensor, Tensor]] = decode if self._pools.packing is None else decode_packed
        done = whole(
            query,
            key,
            value,
            *pools,
            step.block_table,
            step.seq_lens,
            step.slot_mapping,
            config=self.config,
            layer_idx=layer,
            softmax_scale=softmax_scale,
            softcap=softcap,
            sinks=sinks,
            window=window,
            check=False,
            backend=backend,
        )
        call = Call.of(layer, query, pools[0], pools[1], window)
        if sinks is None and backend == "auto" and self.device.type == "cpu" and query.dim() == 4:
            options = softmax_scale, softcap, None, window
            settings = op_settings(query, step.block_table, self.config, layer, *options, check=False)
            self._quick[like] = pools, settings, call
        return done, call

    def _measure(self, like: tuple[Any, ...], query: Tensor, step: Step, sinks: Tensor | None, lse: Tensor) -> None:
        """Tell `stats` how much of dense attention's mass a decode step has read, whose lse is given."""
        layer, _, softmax_scale, softcap, window, heads_first = like
        if heads_first:
            query = _tokens_first(query)
        k_cache, v_cache, *_ = self._stored("decode", layer)
        options: dict[str, Any] = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, window=window)
        _, dense = ops.attend(query, k_cache, v_cache, step.block_table, step.seq_lens, **options, check=False)
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
        k_cache, v_cache, *_ = self._stored("attend", layer)
        place = (*query.shape[:2], k_cache.shape[1])
        key, value = (pool.new_empty(*place, pool.shape[3]) for pool in (k_cache, v_cache))
        nothing = torch.full(query.shape[:2], -1, dtype=torch.int64, device=self.device)
        none = torch.zeros_like(self.seq_lens)
        step = Step(nothing, self.seq_lens, self.block_table, none, self.lengths, self._version)
        options = {"softmax_scale": softmax_scale, "softcap": softcap, "sinks": sinks, "window": window}
        return self.decode(layer, query, key, value, step, **options)  # type: ignore[arg-type]

    # --- rows --------------------------------------------------------------------------------------------------------

    def crop(self, lengths: int | Sequence[int]) -> None:
        """Keep the first `lengths` tokens of the rows (one number for all, or one per row): what follows leaves no
        trace, in no summary either. An error changes nothing."""
        ends = [lengths] * self.batch_size if isinstance(lengths, int) else list(lengths)
        if len(ends) != self.batch_size:
            raise ValueError(f"crop: lengths must be one per row ({self.batch_size}), got {len(ends)}")
        for row, end in enumerate(ends):
            _check_int("crop", f"lengths[{row}]", end, 0, self.lengths[row])
        # A page that loses some of its tokens is summarised again, so its block is written. With packed summaries the
        # whole block is.
        packing = self._pools.packing
        unit = self.config.page_size if packing is None else packing.block_size
        redo = [end % unit * (end < old) for end, old in zip(ends, self.lengths, strict=True)]
        if packing is None:
            redo = [min(again, 1) for again in redo]
        shared = self._table.shared((end - again, end) for end, again in zip(ends, redo, strict=True))
        self._reserve(len(shared))

        self._pools.copy_blocks([self._table.own(row, place) for row, place in shared])
        for row, end in enumerate(ends):
            self._table.drop(row, self._table.blocks(end))
        self.lengths = ends
        self._refresh()
        if any(redo):
            num_new = self._int32(redo)
            for layer in range(self.num_layers):
                if self.k_cache[layer] is not None:
                    self._summarise(layer, self.block_table, self.seq_lens, num_new)

    def fork(self, indices: Sequence[int] | Tensor) -> None:
        """Make row i a copy of the old row `indices[i]`: selects, reorders, repeats. Rows share their blocks until
        they write to them. `indices` may be of another length than the batch."""
        indices = indices.tolist() if isinstance(indices, Tensor) else list(indices)
        if not indices:
            raise ValueError("fork: indices must name at least one row, got none")
        for i, source in enumerate(indices):
            _check_int("fork", f"indices[{i}]", source, 0, self.batch_size - 1)
        self._table.fork(indices)
        self.lengths = [self.lengths[i] for i in indices]
        self._refresh()

    def free(self, row: int) -> None:
        """Empty one row: its blocks go back to the pool, and its place in the batch stays."""
        _check_int("free", "row", row, 0, self.batch_size - 1)
        self._table.drop(row, 0)
        self.lengths = [0 if i == row else length for i, length in enumerate(self.lengths)]
        self._refresh()

    def reset(self) -> None:
        """Empty every row; the pools stay."""
        for row in range(self.batch_size):
            self._table.drop(row, 0)
        self.lengths = [0] * self.batch_size
        self._refresh()

    def dense(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V of one layer as [batch, num_kv_heads, max(lengths), head_dim], zero beyond a row's length."""
        k_cache, v_cache, *_ = self._stored("dense", layer)
        return self._dense(k_cache), self._dense(v_cache)

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        memo[id(self.config)] = self.config
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        return clone

    # --- inside ------------------------------------------------------------------------------------------------------

    def _new_tokens(self, num_new: int | Sequence[int] | Tensor) -> tuple[list[int], Tensor | None]:
        """Tokens per row, and which of the q_len places hold them [batch, q_len] (None: all, for every row)."""
        batch = self.batch_size
        if isinstance(num_new, Tensor):
            if num_new.dtype != torch.bool or num_new.dim() != 2 or num_new.shape[0] != batch or not num_new.numel():
                raise ValueError(
                    f"extend: num_new as a tensor must be bool [{batch}, q_len], got {num_new.dtype} {[*num_new.shape]}"
                )
            counts = num_new.sum(1).tolist()
            return counts, None if sum(counts) == num_new.numel() else num_new.to(self.device)
        if isinstance(num_new, int):
            _check_int("extend", "num_new", num_new, 1)
            return [num_new] * batch, None
        counts = list(num_new)
        if len(counts) != batch:
            raise ValueError(f"extend: num_new must be one number per row ({batch}), got {len(counts)}")
        for row, count in enumerate(counts):
            _check_int("extend", f"num_new[{row}]", count, 0)
        q_len = max(counts)
        if not q_len:
            raise ValueError("extend: num_new must be above 0 for at least one row, got only zeros")
        if min(counts) == q_len:
            return counts, None
        place = torch.arange(q_len, device=self.device)
        return counts, place >= q_len - torch.tensor(counts, device=self.device)[:, None]

    def _check_start(self, start: Sequence[int]) -> list[int]:
        begin = list(start)
        if len(begin) != self.batch_size:
            raise ValueError(f"extend: start must be one position per row ({self.batch_size}), got {len(begin)}")
        for row, first in enumerate(begin):
            _check_int("extend", f"start[{row}]", first, 0, self.lengths[row])
        return begin

    def _reserve(self, count: int) -> None:
        """See to it that `count` blocks are free: once arguments are checked, the only step that may fail."""
        missing, total = count - self.num_free_blocks, self.num_blocks
        if missing > 0:
            target = max(2 * total, total + missing + missing // 4)
            self._quick.clear()
            self._pools.grow(target)
            self._blocks.grow(target)

    def _refresh(self) -> None:
        """The tensors that follow from the lists; what `extend` returned before is no longer valid."""
        if self._table.tensor.shape != self.block_table.shape:
            self._quick.clear()
        self.block_table = self._table.tensor
        self.seq_lens = self._int32(self.lengths)
        self._version += 1

    def _int32(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int32, device=self.device)

    def _summarise(self, layer: int, block_table: Tensor, seq_lens: Tensor, num_new: Tensor) -> None:
        k_cache, _, *summaries = self._stored("summarise", layer)
        rows = k_cache, *summaries, block_table, seq_lens, num_new
        if (packing := self._pools.packing) is None:
            ops.summarise(*rows, check=False)
        else:
            sink_tokens = self.config.layer(layer).sink_tokens
            ops_packed.pack(*rows, packing=packing, sink_tokens=sink_tokens, check=False)

    def _stored(self, op: str, layer: int) -> tuple[Tensor, ...]:
        _check_int(op, "layer", layer, 0, self.num_layers - 1)
        if (pools := self._pools.stored(layer)) is None:
            raise ValueError(f"{op}: layer must have stored keys, got layer {layer}, which has none yet")
        return pools

    def _dense(self, pool: Tensor) -> Tensor:
        return self._pools.gather(pool, self.block_table, self.seq_lens, max(self.lengths))

    def _check_step(self, op: str, layer: int, key: Tensor, value: Tensor, step: Step) -> None:
        _check_int(op, "layer", layer, 0, self.num_layers - 1)
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


def _is_finite(key: Tensor) -> bool:
    return bool((key.abs() <= MAX_KEY).all())


def _tokens_first(x: Tensor) -> Tensor:
    x = x.transpose(1, 2)
    return x if x.stride(-1) == 1 else x.contiguous()


def _check_int(op: str, name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name} must be an int, got {value!r}")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{op}: {name} must be {allowed}, got {value}")
