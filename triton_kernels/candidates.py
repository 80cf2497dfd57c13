"""The candidates of a token and KV head: the pages of the groups that it keeps, in order, and then the pages after the
last whole group, which have no codes. `PackedScoreParams` in csrc/params.h has the same for the CPU."""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from quest.packing import CANDIDATES

from .primitives import span
from .select import budget_tokens, ceil_to_int

_CANDIDATES = tl.constexpr(CANDIDATES)


class Choice(NamedTuple):
    """How many groups are kept."""

    sink_pages: int
    recent_pages: int
    budget: int
    coarse_limit: int


class Kept(NamedTuple):
    groups: Tensor  # int32 [batch, q_len, num_kv_heads, max_kept], ascending
    counts: Tensor  # int32 [batch, q_len, num_kv_heads]
    max_kept: int


@triton.jit
def choosable(seq, b, t, choice, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr, GROUP_PAGES: tl.constexpr):
    """How many tokens a query token sees, the pages [first, last) that it may choose (those before and after are
    forced, or not visible), and how many pages have codes that say nothing of a later token."""
    length, seen, _, first_page, end_page = span(seq, b, t, PAGE_SIZE)
    first = tl.maximum(first_page, choice.sink_pages)
    last = end_page - choice.recent_pages
    coded = seen // (GROUP_PAGES * PAGE_SIZE) * GROUP_PAGES
    if seq.q_len > 1:  # codes of a block that later tokens of the same step fill, or go on filling, depend on them
        last = tl.minimum(last, tl.maximum(length - seq.q_len, 0) // PAGE_SIZE)
        coded = seen // (PAGES * PAGE_SIZE) * PAGES
    return seen, first, tl.maximum(last, 0), coded


@triton.jit
def groups_of(first, last, coded, GROUP_PAGES: tl.constexpr):
    """The groups that hold such pages, and codes: [begin, end)."""
    begin = first // GROUP_PAGES
    end = tl.minimum((last + GROUP_PAGES - 1) // GROUP_PAGES, coded // GROUP_PAGES)
    return begin, tl.maximum(end, begin)


@triton.jit
def kept_of(total, seen, choice, fraction, coarse_keep, GROUP_SIZE: tl.constexpr, COARSE: tl.constexpr):
    """How many of `total` groups are kept: a fraction (fp64), not too many, but room for a choice."""
    kept = total.to(tl.int64)
    if COARSE:
        tokens = budget_tokens(choice.budget, fraction, seen)
        least = (_CANDIDATES * tokens + GROUP_SIZE - 1) // GROUP_SIZE + 2
        most = (choice.coarse_limit.to(tl.int64) + GROUP_SIZE - 1) // GROUP_SIZE
        share = ceil_to_int(coarse_keep * total.to(tl.float64))
        kept = tl.minimum(kept, tl.maximum(tl.minimum(share, most), least))
    return kept.to(tl.int32)


@triton.jit
def page_at(place, args):
    """The page of a unit's candidate at a place."""
    groups, num_kept, coded, GROUP_PAGES = args
    group = tl.load(groups + place // GROUP_PAGES, mask=place < num_kept * GROUP_PAGES, other=0)
    in_groups = group * GROUP_PAGES + place % GROUP_PAGES
    return tl.where(place < num_kept * GROUP_PAGES, in_groups, coded + place - num_kept * GROUP_PAGES)


@triton.jit
def candidates_of(kept, unit, first, last, coded, GROUP_PAGES: tl.constexpr):
    """What `page_at` takes, and the places [begin, end) of the candidates in [first, last)."""
    groups = kept.groups + unit * kept.max_kept
    num_kept = tl.load(kept.counts + unit)
    args = (groups, num_kept, coded, GROUP_PAGES)
    end = num_kept * GROUP_PAGES + tl.maximum(last - coded, 0)
    begin = tl.zeros([], tl.int32)
    if end > 0:
        begin = tl.minimum(tl.maximum(first - page_at(begin, args), 0), end)
        end = tl.maximum(end - tl.maximum(page_at(end - 1, args) + 1 - last, 0), begin)
    return args, begin, end
