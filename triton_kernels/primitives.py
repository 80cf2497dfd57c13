"""What the kernels share: their arguments, what a token sees, and arithmetic with the precision of fp32.

Every kernel has a grid of one dimension, whose size depends on shapes only. Lengths and ids are bounded where they are
read, so that no value leads out of bounds: see `span` and `block_at`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

INTERPRETED = tl.constexpr(knobs.runtime.interpret)
MOST_TOKENS = 2**31 - 1
MOST_REGISTERS = 255  # as `maxnreg`: all there are, where ptxas would spill one so that one more block fits
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# What scripts/gpu_report.py compiles: dtype, head_dim, query heads of a group.
REPRESENTATIVE = [
    *((dtype, head_dim, 4) for dtype in DTYPES for head_dim in (64, 128, 256)),
    (torch.bfloat16, 128, 1),
    (torch.bfloat16, 128, 8),
]
TILE_HEADS = 16  # query heads of a group that one program works on: the least number of rows of a matrix product

# ---- arguments: as in csrc/params.h, the kernels take them as they are ----


class Pool(NamedTuple):
    """K or V (rows are tokens) or a summary (rows are pages): [num_blocks, num_kv_heads, rows_per_block, dim]."""

    data: Tensor
    stride_block: int
    stride_head: int
    stride_row: int


class Rows(NamedTuple):
    """New rows: [batch, q_len, num_heads, dim]."""

    data: Tensor
    stride_batch: int
    stride_token: int
    stride_head: int


class Sequences(NamedTuple):
    block_table: Tensor  # [batch, max_blocks], -1 = none
    seq_lens: Tensor  # [batch], length after the append
    table_stride: int
    num_blocks: int
    max_tokens: int  # of a row: what the block table has room for
    q_len: int
    window: int  # in tokens


def pool(x: Tensor) -> Pool:
    return Pool(x, *x.stride()[:3])


def rows(x: Tensor) -> Rows:
    return Rows(x, *x.stride()[:3])


def sequences(
    block_table: Tensor, seq_lens: Tensor, num_blocks: int, block_size: int, q_len: int, window: int = -1
) -> Sequences:
    if block_table.stride(1) != 1:
        block_table = block_table.contiguous()
    max_tokens = min(block_table.shape[1] * block_size, MOST_TOKENS)
    window = MOST_TOKENS if window < 0 else min(window, MOST_TOKENS)
    return Sequences(block_table, seq_lens.contiguous(), block_table.stride(0), num_blocks, max_tokens, q_len, window)


def without_table(seq_lens: Tensor, max_tokens: int, q_len: int, window: int) -> Sequences:
    return sequences(seq_lens[:, None], seq_lens, 0, max_tokens, q_len, window)


# ---- launches ----


class Launch:
    """A kernel and what it is started with; products and sums are fused unless the arguments say otherwise."""

    def __init__(self, kernel: Any, programs: int, **arguments: Any) -> None:
        self.kernel, self.programs, self.arguments = kernel, programs, {"enable_fp_fusion": True} | arguments

    def __call__(self) -> None:
        if self.programs > 0:
            self.kernel[(self.programs,)](**self.arguments)


def verb(plan: Callable[..., tuple[list[Launch], Any]]) -> Callable[..., Any]:
    """Make of a function that plans launches, and says what they leave, one that runs them too. The plan stays at
    hand as `.plan`: on meta tensors it says what scripts/gpu_report.py compiles."""

    @functools.wraps(plan)
    def run(*args: Any) -> Any:
        launches, result = plan(*args)
        for launch in launches:
            launch()
        return result

    run.plan = plan
    return run


def tile_dim(dim: int) -> int:
    """The size of a tile that holds `dim` channels."""
    return max(16, triton.next_power_of_2(dim))


# ---- what a token sees ----


@triton.jit
def length_of(seq, b):
    return tl.minimum(tl.maximum(tl.load(seq.seq_lens + b), 0), seq.max_tokens)


@triton.jit
def span(seq, b, t, PAGE_SIZE: tl.constexpr):
    """The row's length and what query token t of row b sees: tokens [first_token, seen), in pages [first_page,
    end_page). An inert token sees nothing."""
    length = length_of(seq, b)
    seen = tl.maximum(length - seq.q_len + t + 1, 0)
    first_token = tl.maximum(seen - seq.window, 0)
    return length, seen, first_token, first_token // PAGE_SIZE, (seen + PAGE_SIZE - 1) // PAGE_SIZE


@triton.jit
def block_at(seq, b, index, mask):
    """Physical blocks (int64) at places of row b's table; -1 where there is none or where `mask` is false."""
    block = tl.load(seq.block_table + b.to(tl.int64) * seq.table_stride + index, mask=mask, other=-1)
    return tl.where((block >= 0) & (block < seq.num_blocks), block, -1).to(tl.int64)


@triton.jit
def row_at(rows, b, t, head):
    """Pointers to rows of `Rows`."""
    of_token = tl.cast(b, tl.int64) * rows.stride_batch + tl.cast(t, tl.int64) * rows.stride_token
    return rows.data + of_token + tl.cast(head, tl.int64) * rows.stride_head


@triton.jit
def row_in(pool, block, head, row):
    """Pointers to rows of a `Pool`; `block` is int64."""
    of_head = block * pool.stride_block + tl.cast(head, tl.int64) * pool.stride_head
    return pool.data + of_head + tl.cast(row, tl.int64) * pool.stride_row


# ---- arithmetic ----


@triton.jit
def dot(a, b):
    """a @ b in fp32, as exact as if both were: products of 16-bit numbers are, and the sum of three is fp32."""
    if b.dtype.primitive_bitwidth == 32:
        product = tl.dot(to_float(a), b, input_precision="ieee")
    elif a.dtype.primitive_bitwidth == 32:
        product = _dot_split(a, b)
    else:
        product = _dot_16_bits(a, b)
    return product


@triton.jit
def _dot_split(a, b):
    """fp32 x 16 bits, `a` as the sum of three bfloat16 numbers."""
    high = a.to(tl.bfloat16)
    rest = a - to_float(high)
    middle = rest.to(tl.bfloat16)
    low = (rest - to_float(middle)).to(tl.bfloat16)
    small = _dot_16_bits(middle, b) + _dot_16_bits(low, b)
    # Of an infinite number only the first part counts, the others would make it NaN.
    return _dot_16_bits(high, b) + tl.where(tl.abs(small) < float("inf"), small, 0.0)


@triton.jit
def _dot_16_bits(a, b):
    if INTERPRETED or a.dtype != b.dtype:  # the interpreter would multiply the bit patterns of bfloat16
        product = tl.dot(to_float(a), to_float(b), input_precision="tf32")  # which holds 16-bit numbers
    else:
        product = tl.dot(a, b)
    return product


@triton.jit
def exp(x):
    """e^x for x <= 0, 0 below the smallest normal number; a relative error below 3e-7 for every x, unlike tl.exp."""
    n = tl.maximum(tl.floor(x * 1.4426950408889634 + 0.5), -126.0)
    rest = (x - n * 0.693359375) + n * 2.12194440054690583e-4
    power = ((n.to(tl.int32) + 127) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.336544, 0.0, tl.exp2(rest * 1.4426950408889634) * power)


@triton.jit
def gap_to(best, x):
    """x - best, where equal infinities are no gap."""
    return tl.where(x == best, 0.0, x - best)


@triton.jit
def tanh(x):
    size = tl.abs(x)
    shrunk = exp(-2 * size)
    square = x * x
    series = size * (1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    size = tl.where(size < 0.1, series, (1 - shrunk) / (1 + shrunk))
    return tl.where(x < 0, -size, size)


# Casts of bfloat16 by its bits: the interpreter truncates where a device rounds to nearest, ties to even, and doesn't
# know its subnormal numbers.


@triton.jit
def to_float(x):
    """Any float to fp32."""
    if x.dtype == tl.bfloat16:
        result = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        result = x.to(tl.float32)
    return result


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """fp32 to `dtype`."""
    if dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        near = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        result = near.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(dtype)
    return result
