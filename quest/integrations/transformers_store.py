"""What the paged layers of one `QuestCache` share: the paged cache, and which columns of the batch are tokens in it."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import torch
from torch import Tensor

from quest.cache import PagedKVCache, Step
from quest.config import QuestConfig
from quest.integrations.transformers_lazy import LazyPairs
from quest.stats import Stats


class Store:
    """One paged cache, seen by columns: token positions of the batch as transformers counts them, padding included.

    Attributes:
        paged: the tokens; None before the first ones. Padding is never stored.
        stats: those of `paged`, and of its predecessors if the store was cleared.
        columns: columns handed out, padding included.
        epoch: counts the changes that reorder or remove columns.
    """

    def __init__(self, num_layers: int, config: QuestConfig) -> None:
        self.num_layers = num_layers
        self.config = config
        self.stats = Stats(config)
        self.lazies = LazyPairs()
        self.epoch = 0
        self.clear()

    def clear(self) -> None:
        self.paged: PagedKVCache | None = None
        self.columns = 0
        self.epoch += 1
        self.forget_step()
        self._real: Tensor | None = None  # [batch, at least columns] bool, False for padding; None while there is none

    def forget_step(self) -> None:
        self._step: Step | None = None
        self._span = (-1, -1)  # the columns of the step
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
        return self._span == (start, start + count)

    def step(self, start: int, key: Tensor, real: Tensor | None) -> Step:
        """Slots for a layer's columns from `start` on: reserved by the first layer that asks, the same for the others.

        `real` bool [batch, q_len] says which are tokens, None that all are.
        """
        batch, count = key.shape[0], key.shape[2]
        if self._step is not None and self.has_step(start, count):
            return self._step
        if self.paged is None:
            self.paged = PagedKVCache(self.num_layers, batch, config=self.config, device=key.device)
            self.paged.stats = self.stats
        if start == self.columns:
            step = self.paged.extend(count if real is None else real)
            self._record(batch, count, real)
        else:  # a layer that comes later than the others, or in other portions
            known = min(count, self.columns - start)
            if known < count:
                rest = None if real is None else real[:, known:]
                self.paged.extend(count - known if rest is None else rest)
                self._record(batch, count - known, rest)
            if self._real is None:
                step = self.paged.extend(count, start=[start] * batch)
            else:
                begin = self._real[:, :start].sum(1).tolist()
                step = self.paged.extend(self._real[:, start : start + count], start=begin)
        self._step, self._span = step, (start, start + count)
        return step

    @torch.inference_mode(False)
    def _record(self, batch: int, count: int, real: Tensor | None) -> None:
        start, self.columns = self.columns, self.columns + count
        if self._real is None and real is None:
            return
        if self._real is None or self._real.shape[1] < self.columns:
            device = self.paged.device if self.paged else None
            room = torch.ones(batch, 2 * self.columns, dtype=torch.bool, device=device)
            if self._real is not None:
                room[:, :start] = self._real[:, :start]
            self._real = room
        self._real[:, start : self.columns] = True if real is None else real

    def crop(self, columns: int) -> None:
        if self.paged is not None and columns < self.columns:
            lengths = [columns] * self.paged.batch_size
            if self._real is not None:
                lengths = self._real[:, :columns].sum(1).tolist()
            self.paged.crop(lengths)
            self.columns = columns
            self.epoch += 1
            self.forget_step()

    @torch.inference_mode(False)
    def fork(self, indices: Tensor) -> None:
        if self.paged is not None:
            self.paged.fork(indices)
            if self._real is not None:
                self._real = self._real[indices.to(self._real.device)]
            self.epoch += 1
            self.forget_step()

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
        memo[id(self.config)] = self.config
        clone = type(self).__new__(type(self))
        memo[id(self)] = clone
        clone.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        clone.forget_step()
        return clone
