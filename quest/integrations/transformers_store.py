"""What the paged layers of one `QuestCache` share: the paged cache, and which columns of the batch are tokens in it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor

from quest.cache import PagedKVCache
from quest.config import QuestConfig
from quest.integrations.transformers_lazy import LazyPair
from quest.offload import Offload
from quest.pools import Pools
from quest.sequences import Step
from quest.stats import Stats


class Store:
    """One paged cache, seen by columns: token positions of the batch as transformers counts them, padding included.

    Attributes:
        paged: the tokens; None before the first ones. Padding is never stored.
        stats: those of `paged`, and of its predecessors if the store was cleared.
        columns: columns handed out, padding included.
        left_padded: no row has padding after a token: the last columns of a row are its last tokens.
        epoch: counts the changes that reorder or remove columns.
    """

    def __init__(self, num_layers: int, config: QuestConfig, pools: Pools | None, offload: Offload | None) -> None:
        """`pools` are shared with other caches; None: `paged` has its own, with `offload`."""
        self.num_layers = num_layers
        self.config = config
        self.pools = pools
        self.offload = offload
        self.stats = Stats(config)
        self.lazy = LazyPair()
        self.epoch = 0
        self.paged: PagedKVCache | None = None
        self.clear()

    def clear(self) -> None:
        if self.paged is not None:
            self.paged.clear()
        self.paged = None
        self.columns = 0
        self._changed()
        self._real: Tensor | None = None  # [batch, at least columns] bool, False for padding; None while there is none
        self.left_padded = True

    def open(self, batch_size: int, device: torch.device) -> PagedKVCache:
        """`paged`, with so many rows if it is new."""
        if self.paged is None:
            if self.pools is None:
                options: dict[str, Any] = dict(config=self.config, device=device, offload=self.offload)
                self.paged = PagedKVCache(self.num_layers, batch_size, **options)
            else:
                self.paged = PagedKVCache.on(self.pools, batch_size, config=self.config)
            self.paged.stats = self.stats
            self._seen = self.paged.version
        return self.paged

    @torch.inference_mode(False)
    def align(self, columns: int | None = None) -> None:
        """Take the rows of `paged` as they are now, padded on the left up to `columns` (None: the longest row)."""
        paged = self.paged
        if paged is None or (columns is None and self.is_aligned()):
            return
        self.columns = max(paged.lengths, default=0) if columns is None else columns
        self._real, self.left_padded = None, True
        if any(length < self.columns for length in paged.lengths):
            column = torch.arange(2 * self.columns, device=paged.device)  # with room for more
            self._real = column >= self.columns - paged.seq_lens[:, None]
        self._changed()

    def is_aligned(self) -> bool:
        return self.paged is None or self.paged.version == self._seen

    def _changed(self) -> None:
        """Columns are others than before, or none any more."""
        self.epoch += 1
        self.forget_step()
        if self.paged is not None:
            self._seen = self.paged.version

    def forget_step(self) -> None:
        self.reserved: Step | None = None
        self.span = (-1, -1)  # the columns that are reserved
        self._mask: tuple[Any, int | None, int] = (lambda: None, None, -1)  # weak reference, window, first column

    @property
    def real(self) -> Tensor | None:
        return None if self._real is None else self._real[:, : self.columns]

    def knows(self, mask: Tensor, window: int | None, start: int) -> bool:
        """Whether a layer has looked at this mask already, for the columns from `start` on."""
        ref, *rest = self._mask
        return ref() is mask and rest == [window, start]

    def remember(self, mask: Tensor, window: int | None, start: int) -> None:
        self._mask = weakref.ref(mask), window, start

    def has_step(self, start: int, count: int) -> bool:
        """Whether another layer has reserved these columns already, in this step."""
        return self.span == (start, start + count)

    def step(self, start: int, key: Tensor, real: Tensor | None) -> Step:
        """Slots for a layer's columns from `start` on: reserved by the first layer that asks, the same for the others.

        `real` bool [batch, q_len] says which are tokens, None that all are.
        """
        batch, count = key.shape[0], key.shape[2]
        if self.reserved is not None and self.has_step(start, count):
            return self.reserved
        paged = self.open(batch, key.device)
        if start == self.columns:
            step = paged.extend(count if real is None else real)
            self._record(batch, count, real)
        else:  # a layer that comes later than the others, or in other portions
            known = min(count, self.columns - start)
            if known < count:
                rest = None if real is None else real[:, known:]
                paged.extend(count - known if rest is None else rest)
                self._record(batch, count - known, rest)
            if self._real is None:
                step = paged.extend(count, start=[start] * batch)
            else:
                begin = self._real[:, :start].sum(1).tolist()
                step = paged.extend(self._real[:, start : start + count], start=begin)
        self._seen = paged.version
        self.reserved, self.span = step, (start, start + count)
        return step

    def _record(self, batch: int, count: int, real: Tensor | None) -> None:
        start, self.columns = self.columns, self.columns + count
        if self._real is not None or real is not None:
            self._record_padding(batch, start, real)

    @torch.inference_mode(False)
    def _record_padding(self, batch: int, start: int, real: Tensor | None) -> None:
        if self._real is None or self._real.shape[1] < self.columns:
            device = self.paged.device if self.paged else None
            room = torch.ones(batch, 2 * self.columns, dtype=torch.bool, device=device)
            if self._real is not None:
                room[:, :start] = self._real[:, :start]
            self._real = room
        self._real[:, start : self.columns] = True if real is None else real
        if real is not None:
            from_before = self._real[:, max(0, start - 1) : self.columns]
            self.left_padded &= not bool((from_before[:, :-1] & ~from_before[:, 1:]).any())

    def crop(self, columns: int) -> None:
        if self.paged is not None and columns < self.columns:
            lengths = [columns] * self.paged.batch_size
            if self._real is not None:
                lengths = self._real[:, :columns].sum(1).tolist()
            self.paged.crop(lengths)
            self.columns = columns
            self._changed()

    @torch.inference_mode(False)
    def fork(self, indices: Tensor) -> None:
        if self.paged is not None:
            self.paged.fork(indices)
            if self._real is not None:
                self._real = self._real[indices.to(self._real.device)]
            self._changed()

    def dense(self, layer: int, columns: int) -> tuple[Tensor, Tensor]:
        """K and V of a layer's first `columns` columns, [batch, num_kv_heads, columns, head_dim], zero in padding."""
        k, v = self.paged.dense(layer)  # type: ignore[union-attr]
        return self._by_column(k, columns), self._by_column(v, columns)

    def _by_column(self, tokens: Tensor, columns: int) -> Tensor:
        if self._real is None:
            return tokens[:, :, :columns]
        real = self._real[:, None, :columns, None]
        place = (real.cumsum(2) - 1).clamp_min(0).expand(-1, tokens.shape[1], -1, tokens.shape[3])
        return tokens.gather(2, place).masked_fill_(~real, 0)

    @torch.inference_mode(False)
    def __deepcopy__(self, memo: dict[int, Any]) -> Store:
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        memo.update((id(x), x) for x in (self.config, self.pools))
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        clone._changed()
        return clone
