"""The packed summary: pages as small codes, one run of bytes per block and KV head.

    lo, step      2 x bfloat16 [dim]: channel by channel, the block's keys lie in `2 ** bits` cells of width `step`, the
                  first of which starts at `lo`
    coarse codes  uint32 [coarse pages / lanes, words, lanes]             (not without coarse pages)
    fine codes    uint32 [groups, pages of a group / lanes, words, lanes]   (a group: the pages of a coarse page)

A page's codes are, per channel, the cell of its minimum and that of its maximum; its range is taken to run from the
one's lower to the other's upper edge, so it is never narrower than the true one. A page of one token has one code per
channel. A coarse page's codes are the smallest and the largest of its pages'. Pages of the sink are left out of the
cells, which the first token's key would spoil for its neighbours: they have no codes and no score, because they are
always read.

Only whole groups have codes. Each time one is complete its block is packed anew, so that cells always are those of all
keys that have codes: what a block says depends on its keys alone, not on how they came.

A word holds minimum and maximum of `16 / bits` channels of one page: bits 0..15 the codes of the maximum, bits 16..31
those of the minimum, place j of word w being channel `j * words + w`. Of a page of one token bits 16..31 hold channels
of the second half of `dim` instead. Words of `lanes` pages lie side by side, so that a vector of words serves as many
pages, and the pages of a coarse page are one run of bytes. `dim` is head_dim rounded up to 32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from quest.config import QuestConfig

MAX_KEY = 1e38  # of |K|: sums and differences of two stay finite
WEIGHT_MAX = 32766  # of a query's integer weights: 16 bits with the sign, and room for rounding up
CANDIDATES = 2  # fine pages are scored in coarse pages that hold at least so many times the budget


@dataclass(frozen=True)
class Packing:
    """How K is summarised in codes: `QuestConfig`'s part of it, and what follows from a head_dim."""

    page_size: int
    block_size: int
    coarse_size: int | None
    bits: int

    @property
    def cells(self) -> int:
        return 1 << self.bits

    @property
    def single(self) -> bool:
        """Pages of one token, which have one code per channel."""
        return self.page_size == 1

    @property
    def pages(self) -> int:
        """Pages of a block."""
        return self.block_size // self.page_size

    @property
    def coarse_pages(self) -> int:
        """Coarse pages of a block, 0 with one level."""
        return self.block_size // self.coarse_size if self.coarse_size else 0

    @property
    def group_pages(self) -> int:
        """Pages whose codes are one run: those of a coarse page; with one level, what a vector holds."""
        return self.coarse_size // self.page_size if self.coarse_size else _lanes(self.pages)

    @property
    def lanes(self) -> int:
        return _lanes(self.group_pages)

    @property
    def group_size(self) -> int:
        """Tokens of a group."""
        return self.group_pages * self.page_size

    @property
    def coarse_lanes(self) -> int:
        return _lanes(self.coarse_pages) if self.coarse_size else 1

    def bounds_bytes(self, head_dim: int) -> int:
        return 4 * padded(head_dim)

    def coarse_bytes(self, head_dim: int) -> int:
        """Of a coarse page's codes."""
        return padded(head_dim) * self.bits // 4

    def page_bytes(self, head_dim: int) -> int:
        """Of a page's codes."""
        return padded(head_dim) * self.bits // (8 if self.single else 4)

    def num_bytes(self, head_dim: int) -> int:
        """Of one block and KV head."""
        codes = self.coarse_pages * self.coarse_bytes(head_dim) + self.pages * self.page_bytes(head_dim)
        return self.bounds_bytes(head_dim) + codes

    def max_weight(self, head_dim: int) -> int:
        """The largest integer weight of a query: the sum over channels of weight x code fits an int32."""
        return int(min(WEIGHT_MAX, (2**31 - 1) // (2 * padded(head_dim) * (self.cells - 1))))


def packing_of(config: QuestConfig) -> Packing | None:
    """The packing that a config asks for; None where summaries are in K's dtype."""
    if config.summary_bits is None:
        return None
    return Packing(config.page_size, config.block_size, config.coarse_size, config.summary_bits)


def kept_pages(total: int, coarse_keep: float, coarse_limit: int, budget: int, packing: Packing) -> int:
    """How many of `total` coarse pages have their pages scored: a fraction, not too many, but room for a choice."""
    size = packing.coarse_size or 1
    least = -(-CANDIDATES * budget // size) + 2
    return min(total, max(min(math.ceil(coarse_keep * total), -(-coarse_limit // size)), least))


def padded(head_dim: int) -> int:
    return -(-head_dim // 32) * 32


def _lanes(pages: int) -> int:
    """The largest power of two that divides a number of pages, at most 16."""
    return min(16, pages & -pages)
