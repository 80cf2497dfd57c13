"""The group rule over a row of scores that one program walks through."""

from __future__ import annotations

import triton
import triton.language as tl

from .primitives import exp, gap_to

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def best_and_sum(raw, stride, begin, end, softmax_scale, GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr):
    """Each head's best score, and its sum of exp(scale (score - best)). NaN takes no part."""
    head = tl.arange(0, HEADS)[:, None]
    best, total = tl.full([HEADS], NEG_INF, tl.float32), tl.zeros([HEADS], tl.float32)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)[None, :]
        score = tl.load(raw + head * stride + place, mask=(head < GROUP) & (place < end), other=NEG_INF)
        known = (score == score) & (place < end)
        top = tl.maximum(best, tl.max(tl.where(known, score, NEG_INF), 1))
        total *= exp(gap_to(top, best) * softmax_scale)
        total += tl.sum(tl.where(known, exp(gap_to(top[:, None], score) * softmax_scale), 0.0), 1)
        best = top
    return best, total


@triton.jit
def share_of(total, GROUP: tl.constexpr, HEADS: tl.constexpr):
    """What a head's exponential counts in the mean over the group's softmaxes; 0 for heads beyond it."""
    return tl.where(tl.arange(0, HEADS) < GROUP, 1.0 / (GROUP * tl.maximum(total, 1e-38)), 0.0)


@triton.jit
def agree_tile(score, best, share, softmax_scale, SOFTMAX: tl.constexpr):
    """[HEADS, n] -> [n]; NaN where any head's is."""
    gap = gap_to(best[:, None], score)
    if SOFTMAX:
        agreed = tl.sum(exp(gap * softmax_scale) * share[:, None], 0)
    else:
        agreed = tl.max(tl.where((share > 0)[:, None], gap, NEG_INF), 0)
    return tl.where(tl.max((score != score).to(tl.int32), 0) > 0, float("nan"), agreed)


@triton.jit
def agree_heads(
    raw,  # [GROUP, stride]
    stride,
    begin,
    end,
    to,
    page_of: tl.constexpr,
    map_args,
    softmax_scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    TILE: tl.constexpr,
    SOFTMAX: tl.constexpr,
):
    """One score for a group's heads at each place of [begin, end), NaN where any head's is, to[page_of(place)]."""
    best, total = best_and_sum(raw, stride, begin, end, softmax_scale, GROUP, HEADS, TILE)
    head, share = tl.arange(0, HEADS)[:, None], share_of(total, GROUP, HEADS)
    for start in range(begin, end, TILE):
        place = start + tl.arange(0, TILE)
        inside = place < end
        score = tl.load(raw + head * stride + place[None, :], mask=(head < GROUP) & inside[None, :], other=NEG_INF)
        agreed = agree_tile(score, best, share, softmax_scale, SOFTMAX)
        tl.store(to + page_of(place, map_args), agreed, mask=inside)


def agree_settings(group: int) -> dict[str, int]:
    heads = triton.next_power_of_2(group)
    return dict(GROUP=group, HEADS=heads, TILE=max(16, 2048 // heads))
