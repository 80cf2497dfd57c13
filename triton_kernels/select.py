"""select: forced pages and the best others under the budget, ascending. Exact and linear in the pages."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .primitives import MOST_TOKENS, Launch, span, verb, without_table


@triton.jit
def order_of(score):
    """An integer that orders as the score does: NaN lowest, both zeros the same. fp32 -> uint32"""
    bits = tl.where(score == 0, 0.0, score).to(tl.uint32, bitcast=True)
    order = tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(score == score, order, 0)


@triton.jit
def _orders(scores, place, n):
    return order_of(tl.load(scores + place, mask=place < n, other=0.0))


@triton.jit
def kth_best(scores, n, k, CHUNK: tl.constexpr):
    """The order of the k-th best of scores[0:n], 0 < k <= n, and how many of those equal to it are among the k best.

    A radix select: each pass counts the scores that share the digits found so far by their next one.
    """
    found = tl.zeros([], tl.uint32)
    for shift in tl.static_range(24, -1, -8):
        counts = tl.zeros([256], tl.int32)
        for start in range(0, n, CHUNK):
            place = start + tl.arange(0, CHUNK)
            order = _orders(scores, place, n)
            shares = (order ^ found) >> shift < 256
            counts += tl.histogram(((order >> shift) & 255).to(tl.int32), 256, mask=shares & (place < n))
        reached = tl.cumsum(counts, reverse=True)  # how many have this digit or a larger one
        digit = tl.sum((reached >= k).to(tl.int32)) - 1
        k -= tl.sum(tl.where(tl.arange(0, 256) > digit, counts, 0))
        found |= digit.to(tl.uint32) << shift
    return found, k


@triton.jit
def take_best(scores, n, k, out, page_of: tl.constexpr, map_args, CHUNK: tl.constexpr):
    """Write the k best of n scores to out[0:k], 0 <= k <= n, in ascending order of their places.

    A score at place i is written as page_of(i, map_args): `page_of` is a Triton function of a tile of places (int32),
    `map_args` whatever it needs, a scalar or a tuple. Ties go to the lower place, NaN ranks below -inf.

    Args:
        scores: pointer to fp32 [n], contiguous.
        out: pointer to int32 [k].
        CHUNK: how many scores are looked at together.
    """
    least, ties = kth_best(scores, n, k, CHUNK)
    taken, tied = 0, 0
    for start in range(0, n, CHUNK):
        place = start + tl.arange(0, CHUNK)
        order = _orders(scores, place, n)
        ties_here = ((order == least) & (place < n)).to(tl.int32)
        fits = tied + tl.cumsum(ties_here) <= ties
        takes = ((order > least) | ((order == least) & fits)) & (place < n)
        takes_here = takes.to(tl.int32)
        tl.store(out + taken + tl.cumsum(takes_here) - 1, page_of(place, map_args), mask=takes)
        taken += tl.sum(takes_here)
        tied += tl.sum(ties_here)


@triton.jit
def ceil_to_int(x):
    """fp64 -> int64"""
    whole = x.to(tl.int64)
    return whole + (whole.to(tl.float64) < x).to(tl.int64)


@triton.jit
def budget_tokens(budget, fraction, visible):
    """A budget in tokens; as a fraction (fp64) of the `visible` ones where that is given. int64"""
    return tl.where(fraction > 0, ceil_to_int(visible.to(tl.float64) * fraction), budget)


@triton.jit
def offset(place, first):
    return first + place


@triton.jit
def forced_and_chosen(
    seq, b, t, budget, fraction, sink_pages, recent_pages, max_selected, PAGE_SIZE: tl.constexpr
):  # fmt: skip
    """The visible pages [first_page, end_page) of a query token, those between the forced ones, [begin, end), and how
    many of them it chooses. Where it reads all, they count as forced."""
    length, seen, first_token, first_page, end_page = span(seq, b, t, PAGE_SIZE)
    begin = tl.minimum(tl.maximum(sink_pages, first_page), end_page)
    end = end_page - recent_pages
    if seq.q_len > 1:
        end = tl.minimum(end, tl.maximum(length - seq.q_len, 0) // PAGE_SIZE)
    end = tl.maximum(end, begin)
    tokens = budget_tokens(budget, fraction, seen)
    forced = begin - first_page + end_page - end
    room = tl.minimum(tokens // PAGE_SIZE, max_selected).to(tl.int32) - forced
    if tokens >= seen - first_token or room >= end - begin:
        begin, end = end_page, end_page
    return first_page, end_page, begin, end, tl.minimum(tl.maximum(room, 0), end - begin)


@triton.jit
def put_forced(page_idx, first_page, end_page, begin, end, chosen, max_selected, CHUNK: tl.constexpr):
    """Write the forced pages around `chosen` others, and -1 behind them. Returns how many pages there are."""
    head = begin - first_page
    count = tl.minimum(head + chosen + end_page - end, max_selected)
    for start in range(0, max_selected, CHUNK):
        place = start + tl.arange(0, CHUNK)
        page = tl.where(place < head, first_page + place, end + place - head - chosen)
        others = (place < head) | (place >= head + chosen)
        tl.store(page_idx + place, tl.where(place < count, page, -1), mask=others & (place < max_selected))
    return count


@triton.jit(do_not_specialize=["seq", "heads", "max_pages", "max_selected", "budget", "sink_pages", "recent_pages"])
def select_pages(
    scores,  # [batch, q_len, heads, max_pages]
    seq,
    page_idx,  # [batch, q_len, heads, max_selected]
    counts,  # [batch, q_len, heads]
    heads,
    max_pages,
    max_selected,
    budget,
    fraction: tl.float64,
    sink_pages,
    recent_pages,
    PAGE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One program for each token and head."""
    row = tl.program_id(0).to(tl.int64)
    b, t = row // heads // seq.q_len, (row // heads % seq.q_len).to(tl.int32)
    first_page, end_page, begin, end, chosen = forced_and_chosen(
        seq, b, t, budget, fraction, sink_pages, recent_pages, max_selected, PAGE_SIZE
    )
    out = page_idx + row * max_selected
    if chosen > 0:
        to = out + begin - first_page
        take_best(scores + row * max_pages + begin, end - begin, chosen, to, offset, begin, CHUNK)
    tl.store(counts + row, put_forced(out, first_page, end_page, begin, end, chosen, max_selected, CHUNK))


def chunk_settings(max_scores: int) -> dict[str, int]:
    """How rows of up to `max_scores` are walked through."""
    return dict(CHUNK=1024, num_warps=4) if max_scores <= 1024 else dict(CHUNK=4096, num_warps=8)


@verb
def select(
    scores: Tensor,
    seq_lens: Tensor,
    page_size: int,
    budget: int,
    budget_fraction: float,
    sink_pages: int,
    recent_pages: int,
    window: int,
    max_selected: int,
    check: bool = True,
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    batch, q_len, heads, max_pages = scores.shape
    page_idx = scores.new_empty(batch, q_len, heads, max_selected, dtype=torch.int32)
    counts = scores.new_empty(batch, q_len, heads, dtype=torch.int32)
    launch = Launch(
        select_pages,
        batch * q_len * heads,
        scores=scores.contiguous(),
        seq=without_table(seq_lens, max_pages * page_size, q_len, window),
        page_idx=page_idx,
        counts=counts,
        heads=heads,
        max_pages=max_pages,
        max_selected=max_selected,
        budget=min(budget, MOST_TOKENS),
        fraction=budget_fraction,
        sink_pages=sink_pages,
        recent_pages=recent_pages,
        PAGE_SIZE=page_size,
        **chunk_settings(max_pages),
    )
    return [launch], (page_idx, counts)


def configurations() -> Iterator[Launch]:
    for max_pages in (512, 8192):
        meta = dict(device="meta", dtype=torch.float32)
        scores, seq_lens = torch.empty(8, 1, 8, max_pages, **meta), torch.empty(8, device="meta", dtype=torch.int32)
        yield from select.plan(scores, seq_lens, 16, 2048, 0.0, 1, 4, -1, 128)[0]
