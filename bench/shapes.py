"""What a benchmark works on: shapes, and layers of a cache filled with random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

import quest
from quest import QuestConfig
from quest.bytes import StepBytes, step_bytes
from quest.models import DTYPES
from quest.packing import packing_of
from quest.pools import empty, side_by_side

__all__ = ["PRESETS", "Paged", "Plain", "Shape", "decode", "memory", "paged_layers", "plain_layers"]

PRESETS: Mapping[str, QuestConfig] = {  # ways to read, each with a shape's budget
    "default": QuestConfig(),
    "long": QuestConfig.long(),
    "page4": QuestConfig(page_size=4, summary_bits=4, coarse_size=16, coarse_keep=0.25, coarse_slack=0.4),
    "pages16": QuestConfig(page_size=16),
    "paper": QuestConfig.paper(dense_layers=()),  # one of its sparse layers
}


@dataclass(frozen=True)
class Shape:
    """One decode step of one layer, a row of a table, read as a preset and a budget say.

    A ragged batch has lengths from a quarter of `context` to it. With packed summaries rows end half a group of pages
    earlier, as they do on average: at a whole group every repetition would pack a block, which a step does once in a
    while.
    """

    context: int
    batch: int
    budget: int
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ragged: bool = False
    preset: str = "default"

    @property
    def config(self) -> QuestConfig:
        return PRESETS[self.preset].replace(budget=self.budget)

    @property
    def dense_config(self) -> QuestConfig:
        """The same pools, read as a whole and once per group."""
        return self.config.replace(budget=self.context, group_rule="relative")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row, the longest last."""
        least, steps = self.context // 4, max(1, self.batch - 1)
        ragged = [least + (self.context - least) * row // steps for row in range(self.batch)]
        whole = ragged if self.ragged and self.batch > 1 else [self.context] * self.batch
        packing = packing_of(PRESETS[self.preset])
        if packing is None:
            return whole
        group = packing.group_size
        return [max(length // group * group - group // 2, min(length, group // 2)) for length in whole]

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

    def fmas(self, read: StepBytes, config: QuestConfig) -> int:
        """Multiply-adds that go with what is read: each number with every head of its group.

        Of packed summaries, one per code and head, products of small integers that take less time than those of floats;
        one per number of the cells; and for pages that have no codes, two per channel.
        """
        itemsize, group = self.torch_dtype.itemsize, self.num_heads // self.num_kv_heads
        kv = read.kv // itemsize * (1 if config.group_rule == "per_head" else group)  # which reads for each head anew
        if config.summary_bits is None:
            return kv + read.summaries // itemsize * group
        codes = (read.summaries - read.cells - read.open) * 8 // config.summary_bits
        return kv + (codes + read.cells // 2 + 2 * read.open // itemsize // config.page_size) * group


class Paged(NamedTuple):
    """A layer as the ops take it. The blocks of every row lie shuffled in the pool."""

    k_cache: Tensor
    v_cache: Tensor
    summaries: tuple[Tensor, ...]  # page_min and page_max, or packed ones
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
    order = torch.randperm(sum(needed), dtype=torch.int32)
    table = torch.full((shape.batch, max(needed)), -1, dtype=torch.int32)
    for row, blocks in enumerate(order.split(needed)):
        table[row, : len(blocks)] = blocks
    seq_lens = torch.tensor(lengths, dtype=torch.int32)
    last = seq_lens.long() - 1
    slots = (table.long().gather(1, last[:, None] // size) * size + last[:, None] % size).contiguous()

    made = []
    for _ in range(count):
        heads = (sum(needed), shape.num_kv_heads)
        k, v = random((*heads, size, 2 * shape.head_dim), shape.torch_dtype).chunk(2, -1)  # as in `quest.pools`
        places = table, seq_lens
        if (packing := packing_of(config)) is None:
            dims = shape.head_dim, shape.head_dim
            low, high = side_by_side((*heads, size // config.page_size), dims, shape.torch_dtype)
            quest.summarise(k, low, high, *places, seq_lens)
            made.append(Paged(k, v, (low, high), *places, slots))
        else:
            packed = empty((*heads, packing.num_bytes(shape.head_dim)), torch.uint8)
            quest.pack(k, packed, *places, seq_lens, packing=packing, sink_tokens=config.sink_tokens)
            made.append(Paged(k, v, (packed,), *places, slots))
    return made


def memory(layers: Sequence[Paged]) -> list[Tensor]:
    """K and V of the layers as they lie in memory, each layer's in one run."""
    return [layer.k_cache.as_strided((2 * layer.k_cache.numel(),), (1,)) for layer in layers]


def decode(query: Tensor, new: Sequence[Tensor], layer: Paged, config: QuestConfig) -> Tensor:
    """A step: `new` holds key and value."""
    op = quest.decode if config.summary_bits is None else quest.decode_packed
    pools, places = (layer.k_cache, layer.v_cache, *layer.summaries), layer[3:]
    return op(query, *new, *pools, *places, config=config, check=False)[0]


def plain_layers(shape: Shape, count: int) -> list[Plain]:
    longest = max(shape.lengths)
    size = (shape.batch, shape.num_kv_heads, longest, shape.head_dim)
    mask = None
    if len({*shape.lengths}) > 1:
        mask = (torch.arange(longest) < torch.tensor(shape.lengths)[:, None])[:, None, None]
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
