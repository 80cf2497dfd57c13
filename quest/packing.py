"""The packed summary: pages of a full block as small codes, one run of bytes per block and KV head.

    lo, step      2 x bfloat16 [dim]: a value is `lo + code * step`; the block's pages share them, channel by channel
    coarse codes  uint32 [coarse pages / lanes, words, lanes]   (not without coarse pages)
    fine codes    uint32 [groups, words, pages of a group]      (a group: the pages of a coarse page)

A word holds minimum and maximum of `16 / bits` channels of one page: bits 0..15 the codes of the maximum, bits 16..31
those of the minimum, place j of word w being channel `j * words + w`. Words of `lanes` pages lie side by side, so that
a vector of words serves as many pages, and the pages of a coarse page are one run of bytes. `dim` is head_dim rounded
up to 32.

Codes are rounded outward: `lo + step * code` is never above a page's minimum, never below its maximum. A coarse page's
codes are the smallest and the largest of its pages'. Pages of the sink are left out of the bounds, which the first
token's key would spoil for its neighbours: they have no codes and no score, because they are always read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

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
    def levels(self) -> int:
        """The largest code."""
        return (1 << self.bits) - 1

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
    def coarse_lanes(self) -> int:
        return _lanes(self.coarse_pages) if self.coarse_size else 1

    def bounds_bytes(self, head_dim: int) -> int:
        return 4 * padded(head_dim)

    def code_bytes(self, head_dim: int) -> int:
        """Of one page, coarse or fine."""
        return padded(head_dim) * self.bits // 4

    def num_bytes(self, head_dim: int) -> int:
        """Of one block and KV head."""
        return self.bounds_bytes(head_dim) + (self.coarse_pages + self.pages) * self.code_bytes(head_dim)

    def max_weight(self, head_dim: int) -> int:
        """The largest integer weight of a query: the sum over channels of weight x code fits an int32."""
        return int(min(WEIGHT_MAX, (2**31 - 1) // (2 * padded(head_dim) * self.levels)))


@lru_cache
def packing_of(config: QuestConfig) -> Packing | None:
    """The packing that a config asks for; None where summaries are in K's dtype."""
    if config.summary_bits is None:
        return None
    return Packing(config.page_size, config.block_size, config.coarse_size, config.summary_bits)


def padded(head_dim: int) -> int:
    return -(-head_dim // 32) * 32


def _lanes(pages: int) -> int:
    """The largest power of two that divides a number of pages, at most 16."""
    return min(16, pages & -pages)
