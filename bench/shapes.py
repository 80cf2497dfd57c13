"""What a benchmark works on: shapes, and layers of a cache filled with random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import quest
from quest import QuestConfig
from quest.bytes import StepBytes, step_bytes
from quest.models import DTYPES
from quest.pools import empty

__all__ = ["Paged", "Plain", "Shape", "paged_layers", "plain_layers"]


@dataclass(frozen=True)
class Shape:
    """One decode step of one layer, a row of a table. A ragged batch has lengths from a quarter of `context` to it."""

    context: int
    batch: int
    budget: int
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ragged: bool = False

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, the longest last."""
        if not self.ragged or self.batch == 1:
            return [self.context] * self.batch
        least = self.context // 4
        return [least + (self.context - least) * row // (self.batch - 1) for row in range(self.batch)]

    def bytes(self, config: QuestConfig) -> StepBytes:
        """What a step reads, all rows together."""
        return sum(
            (
                step_bytes(
                    length,
                    config,
                    num_heads=self.num_heads,
                    num_kv_heads=self.num_kv_heads,
                    head_dim=self.head_dim,
                    itemsize=self.torch_dtype.itemsize,
                )
                for length in self.lengths
            ),
            StepBytes(),
        )

    def fmas(self, count: int) -> int:
        """Multiply-adds that go with so many bytes of K, V and summaries: each number with every head of its group."""
        return count // self.torch_dtype.itemsize * (self.num_heads // self.num_kv_heads)


class Paged(NamedTuple):
    """A layer as the ops take it. The blocks of every row lie shuffled in the pool."""

    k_cache: Tensor
    v_cache: Tensor
    page_min: Tensor
    page_max: Tensor
    block_table: Tensor
    seq_lens: Tensor
    slot_mapping: Tensor  # of the last token of each row


class Plain(NamedTuple):
    """A layer as PyTorch's attention takes it: K, V [batch, num_kv_heads, context, head_dim], and a mask if ragged."""

    key: Tensor
    value: Tensor
    mask: Tensor | None


def paged_layers(shape: Shape, config: QuestConfig, count: int) -> list[Paged]:
    size, lengths = config.block_size, shape.lengths
    needed = [-(-length // size) for length in lengths]
    places = torch.randperm(sum(needed), dtype=torch.int32)
    table = torch.full((shape.batch, max(needed)), -1, dtype=torch.int32)
    for row, blocks in enumerate(places.split(needed)):
        table[row, : len(blocks)] = blocks
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    last = seq_lens.long() - 1
    slots = (table.long().gather(1, last[:, None] // size) * size + last[:, None] % size).contiguous()

    made = []
    for _ in range(count):
        heads = (sum(needed), shape.num_kv_heads)
        k, v = (random((*heads, size, shape.head_dim), shape.torch_dtype) for _ in range(2))
        low, high = (empty((*heads, size // config.page_size, shape.head_dim), shape.torch_dtype) for _ in range(2))
        quest.summarise(k, low, high, table, seq_lens, seq_lens)
        made.append(Paged(k, v, low, high, table, seq_lens, slots))
    return made


def plain_layers(shape: Shape, count: int) -> list[Plain]:
    size = (shape.batch, shape.num_kv_heads, shape.context, shape.head_dim)
    mask = None
    if len({*shape.lengths}) > 1:
        mask = (torch.arange(shape.context) < torch.tensor(shape.lengths)[:, None])[:, None, None]
    return [Plain(random(size, shape.torch_dtype), random(size, shape.torch_dtype), mask) for _ in range(count)]


def random(size: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Normal numbers; a large tensor repeats 16 million of them, which takes seconds instead of minutes."""
    tensor = empty(size, dtype)
    flat, period = tensor.view(-1), 1 << 24
    flat[:period].normal_()
    for start in range(period, len(flat), period):
        part = flat[start : start + period]
        part.copy_(flat[: len(part)])
    return tensor
