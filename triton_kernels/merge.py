"""merge: two attention results over disjoint tokens into one."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .primitives import REPRESENTATIVE, Launch, exp, gap_to, rounded, tile_dim, to_float, verb

ELEMENTS = 2048  # of a tile


@triton.jit
def _share(lse, top):
    return tl.where(lse == float("-inf"), 0.0, exp(gap_to(top, lse)))


@triton.jit
def _part(out, at, mask, weight):
    """A part of weight zero takes no part, whatever it holds."""
    x = to_float(tl.load(out + at, mask=mask, other=0.0))
    return tl.where(weight[:, None] == 0, 0.0, weight[:, None] * x)


@triton.jit(do_not_specialize=["num_rows"])
def merge_rows(
    out_a, lse_a, out_b, lse_b, out, lse, num_rows, DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr
):
    """One program for ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    a = tl.load(lse_a + row, mask=row < num_rows, other=0.0)
    b = tl.load(lse_b + row, mask=row < num_rows, other=0.0)
    top = tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)
    # Weights relative to the larger part, not to the sum: that one may round to the part itself.
    weight_a, weight_b = _share(a, top), _share(b, top)
    total = weight_a + weight_b
    tl.store(lse + row, top + tl.log(total), mask=row < num_rows)
    norm = tl.where(total == 0, 0.0, 1 / total)
    for start in range(0, DIM, TILE):
        d = start + tl.arange(0, TILE)
        at = row[:, None] * DIM + d[None, :]
        mask = (row < num_rows)[:, None] & (d < DIM)[None, :]
        mixed = _part(out_a, at, mask, weight_a * norm) + _part(out_b, at, mask, weight_b * norm)
        tl.store(out + at, rounded(mixed, out.dtype.element_ty), mask=mask)


@verb
def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[list[Launch], tuple[Tensor, Tensor]]:
    out, lse = torch.empty_like(out_a), torch.empty_like(lse_a)
    tile = min(tile_dim(out_a.shape[-1]), 1024)
    tile_rows = ELEMENTS // tile
    launch = Launch(
        merge_rows,
        triton.cdiv(lse_a.numel(), tile_rows),
        out_a=out_a.contiguous(),
        lse_a=lse_a.contiguous(),
        out_b=out_b.contiguous(),
        lse_b=lse_b.contiguous(),
        out=out,
        lse=lse,
        num_rows=lse_a.numel(),
        DIM=out_a.shape[-1],
        ROWS=tile_rows,
        TILE=tile,
        num_warps=4,
    )
    return [launch], (out, lse)


def configurations() -> Iterator[Launch]:
    lse = torch.empty(8, 1, 32, device="meta")
    for dtype, head_dim, _ in REPRESENTATIVE:
        out = torch.empty(8, 1, 32, head_dim, dtype=dtype, device="meta")
        yield from merge.plan(out, lse, out, lse)[0]
