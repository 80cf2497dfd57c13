"""One decode step of one layer: `quest.decode` against PyTorch's attention and the machine's read bandwidth.

Every repetition works on memory that no cache holds: K, V and summaries of several layers take turns, as in a model.
The methods take turns too, so that all of them meet the machine in the same state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import quest
from quest import QuestConfig
from quest.bench.machine import last_level_cache, median_ms, read_bandwidth
from quest.bytes import StepBytes, step_bytes
from quest.models import DTYPES

__all__ = ["Shape", "run", "show"]

DEFAULT_EVERY = 8  # SDPA as transformers calls it is slow: it takes part in every 8th round


@dataclass(frozen=True)
class Shape:
    """A row of the table."""

    context: int
    batch: int
    budget: int
    dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def bytes(self, config: QuestConfig) -> StepBytes:
        one = step_bytes(
            self.context,
            config.layer(0),
            page_size=config.page_size,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            itemsize=DTYPES[self.dtype].itemsize,
        )
        return sum([one] * self.batch, StepBytes())


def run(shapes: Sequence[Shape], *, rounds: int = 40, console: Console | None = None) -> list[dict[str, Any]]:
    """Measure every shape.

    Returns:
        One dict per shape: the shape's fields, `bytes` (counted), `ms` (median; `ms_min`, `ms_max`), `gb_per_s`,
        `limit_fraction` (time the bytes take at the read bandwidth, over `ms`), `sdpa_best_ms`, `sdpa_default_ms` and
        the speed-ups over them.
    """
    rows = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("read bandwidth", total=len(shapes) * rounds)
        for shape in shapes:
            progress.update(bar, description=f"{shape.context} tokens, budget {shape.budget}, {shape.dtype}")
            rows.append(measure(shape, rounds, lambda: progress.advance(bar)))
    return rows


def measure(shape: Shape, rounds: int, advance: Callable[[], None] = lambda: None) -> dict[str, Any]:
    config = QuestConfig(budget=shape.budget)
    counted = shape.bytes(config)
    bandwidth = read_bandwidth(0.5)
    layers = itertools.cycle(paged_layers(shape, config, copies(counted.total)))
    dense_layers = itertools.cycle(plain_layers(shape, copies(counted.dense)))
    queries = itertools.cycle(torch.randn(16, shape.batch, shape.num_heads, shape.head_dim).to(DTYPES[shape.dtype]))

    ours: list[float] = []
    best: list[float] = []
    default: list[float] = []
    for turn in range(rounds + 2):
        query = next(queries)
        ours.append(timed(lambda q=query: next(layers)(q)))
        best.append(timed(lambda q=query: sdpa_best(q, *next(dense_layers))))
        if turn % DEFAULT_EVERY == 0:
            default.append(timed(lambda q=query: sdpa_default(q, *next(dense_layers))))
        if turn >= 2:
            advance()
    ours, best = ours[2:], best[2:]  # the first rounds warm up code, not data
    bandwidth = max(bandwidth, read_bandwidth(0.5))

    ms = median_ms(ours)
    return {
        **vars(shape),
        "bytes": counted.total,
        "ms": ms,
        "ms_min": min(ours) * 1e3,
        "ms_max": max(ours) * 1e3,
        "gb_per_s": counted.total / ms / 1e6,
        "read_gb_per_s": bandwidth / 1e9,
        "limit_fraction": counted.total / bandwidth * 1e3 / ms,
        "sdpa_best_ms": median_ms(best),
        "sdpa_default_ms": median_ms(default),
        "speedup_sdpa_best": median_ms(best) / ms,
        "speedup_sdpa_default": median_ms(default) / ms,
    }


def timed(step: Callable[[], Any]) -> float:
    start = perf_counter()
    step()
    return perf_counter() - start


def copies(touched: int) -> int:
    """Layers that must take turns until what a step touches has left the last-level cache by its next turn."""
    return max(1, -(-4 * last_level_cache() // touched))


def paged_layers(shape: Shape, config: QuestConfig, count: int) -> list[Callable[[Tensor], Tensor]]:
    """`count` layers as functions of the query; the blocks of every row lie shuffled in the pool."""
    dtype, size = DTYPES[shape.dtype], config.block_size
    blocks = -(-shape.context // size)
    table = torch.randperm(shape.batch * blocks).view(shape.batch, blocks).to(torch.int32)
    seq_lens = torch.full((shape.batch,), shape.context, dtype=torch.int32)
    last = shape.context - 1
    slots = (table[:, last // size].long() * size + last % size)[:, None]
    pool = [shape.batch * blocks, shape.num_kv_heads, size, shape.head_dim]
    summary = [*pool[:2], size // config.page_size, shape.head_dim]
    k, v = torch.randn(pool, dtype=dtype), torch.randn(pool, dtype=dtype)
    low, high = torch.empty(summary, dtype=dtype), torch.empty(summary, dtype=dtype)
    quest.summarise(k, low, high, table, seq_lens, seq_lens)
    key, value = torch.randn(2, shape.batch, 1, shape.num_kv_heads, shape.head_dim).to(dtype)

    def layer(tensors: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
        def step(query: Tensor) -> Tensor:
            tail = (table, seq_lens, slots)
            return quest.decode(query[:, None], key, value, *tensors, *tail, config=config, check=False)[0]

        return step

    first = (k, v, low, high)
    return [layer(first), *(layer([x.clone() for x in first]) for _ in range(count - 1))]


def plain_layers(shape: Shape, count: int) -> list[tuple[Tensor, Tensor]]:
    """K and V [batch, num_kv_heads, context, head_dim] of `count` layers."""
    size = (shape.batch, shape.num_kv_heads, shape.context, shape.head_dim)
    first = torch.randn(size, dtype=DTYPES[shape.dtype]), torch.randn(size, dtype=DTYPES[shape.dtype])
    return [first, *((first[0].clone(), first[1].clone()) for _ in range(count - 1))]


def sdpa_best(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The query heads of a group as rows of one product: K and V are read once per group."""
    batch, num_heads, head_dim = query.shape
    rows = query.view(batch, key.shape[1], num_heads // key.shape[1], head_dim)
    return scaled_dot_product_attention(rows, key, value).view(batch, num_heads, value.shape[-1])


def sdpa_default(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As transformers calls it for one new token without a mask."""
    grouped = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(query[:, :, None], key, value, enable_gqa=grouped)[:, :, 0]


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    """One table per dtype, batch and head shape."""

    def shape(row: dict[str, Any]) -> str:
        heads = f"{row['num_heads']} query and {row['num_kv_heads']} KV heads, d={row['head_dim']}"
        return f"One decode step, one layer: {heads}, {row['dtype']}, batch {row['batch']}"

    for title, group in itertools.groupby(rows, shape):
        table = Table(title=title)
        for name in ("context", "budget", "MB", "ms", "GB/s", "of limit", "SDPA best", "SDPA default"):
            table.add_column(name, justify="right")
        for row in group:
            table.add_row(
                f"{row['context']:,}",
                "dense" if row["budget"] >= row["context"] else f"{row['budget']:,}",
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['ms']:.2f}",
                f"{row['gb_per_s']:.1f}",
                f"{row['limit_fraction']:.0%}",
                f"{row['sdpa_best_ms']:.1f} ms, {row['speedup_sdpa_best']:.1f}x",
                f"{row['sdpa_default_ms']:.0f} ms, {row['speedup_sdpa_default']:.0f}x",
            )
        console.print(table)
    console.print(
        "SDPA best: PyTorch's attention with a group's queries as rows; default: as transformers calls it. "
        "MB: K, V and summaries read, counted. Of limit: against the read bandwidth measured in the same run "
        f"({', '.join(sorted({format(row['read_gb_per_s'], '.0f') for row in rows}))} GB/s).",
        highlight=False,
    )
