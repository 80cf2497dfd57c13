"""One decode step of one layer, packed summaries or not, against PyTorch's attention and two limits of the machine.

Every repetition works on memory that no cache holds: K, V and summaries of several layers take turns, as in a model.
A round runs all layers of a method one after the other, as a model does for one token, and the methods take turns, so
that all of them meet the machine in the same state.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from quest.bench.machine import Reader, copies, fma_peak, median_ms, timed
from quest.bench.peers import vllm_attention
from quest.bench.shapes import Plain, Shape, decode, memory, paged_layers, plain_layers

__all__ = ["SWEEPS", "run", "show", "sweep"]

DEFAULT_EVERY = 8  # SDPA as transformers calls it is slow: it takes part in every 8th round
MOST_SECONDS = 30.0  # for the rounds of one shape

SWEEPS = ("contexts", "budgets", "batches", "groups", "dtypes")


def sweep(names: Sequence[str]) -> list[Shape]:
    """The shapes of a full run: contexts from 4K to 1M, budgets, ragged batches, group sizes, dtypes.

    Pages of 16 tokens; each context with packed summaries too, right after, so that all presets meet the same machine.
    """
    usual: dict[str, Any] = dict(
        context=32768, batch=1, budget=2048, dtype="bfloat16", num_heads=32, num_kv_heads=8, head_dim=128,
        preset="pages16",
    )  # fmt: skip
    packed: list[dict[str, Any]] = [dict(preset=preset, budget=512) for preset in ("default", "long", "page4")]
    varied: dict[str, list[dict[str, Any]]] = {
        "contexts": [dict(context=1 << power) | preset for power in range(12, 21) for preset in ({}, *packed)],
        "budgets": [dict(budget=budget) for budget in (256, 512, 1024, 2048, 4096)],
        "batches": [dict(batch=batch, ragged=batch > 1) for batch in (1, 8, 32)],
        "groups": [dict(num_heads=8 * group) for group in (1, 3, 4, 7, 8)],
        "dtypes": [dict(dtype=dtype) for dtype in ("bfloat16", "float16", "float32")],
    }
    return list(dict.fromkeys(Shape(**(usual | change)) for name in names for change in varied[name]))


def run(
    shapes: Sequence[Shape], *, rounds: int = 20, dense: bool = True, console: Console | None = None
) -> list[dict[str, Any]]:
    """Measure every shape.

    Args:
        rounds: turns of each method, fewer where one shape would take more than half a minute.
        dense: measure quest's own dense step too.

    Returns:
        One dict per shape: the shape's fields; `bytes`, of them `summary_bytes` and `kv_bytes`, and `fmas` (counted);
        `ms` (median; `ms_min`, `ms_max`);
        `gb_per_s`; `read_gb_per_s` and `peak_gfma_per_s` (the limits); `limit_fraction` (time to read that many bytes,
        over `ms`), `fma_fraction` (time of that many multiply-adds, over `ms`); `sdpa_best_ms`, `sdpa_default_ms` and
        `dense_ms` (quest's own) with the speed-ups over them, `dense_limit_fraction` (of the tighter limit), and
        `vllm_dense_ms` where vLLM's kernel is installed.
    """
    rows = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(shapes) * rounds)
        for number, shape in enumerate(shapes):
            progress.update(
                bar, description=f"{shape.context:,} tokens, {shape.preset}, budget {shape.budget:,}, {shape.dtype}"
            )
            rows.append(measure(shape, rounds, dense, lambda: progress.advance(bar)))
            progress.update(bar, completed=(number + 1) * rounds)
    return rows


def measure(
    shape: Shape, rounds: int, dense: bool = True, advance: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    config, all_tokens = shape.config, shape.dense_config
    read, read_dense = shape.bytes(config), shape.bytes(all_tokens)
    paged = paged_layers(shape, config, copies(read.total, read.dense))
    plain = plain_layers(shape, copies(read_dense.total, read_dense.dense))
    paged_turn, plain_turn = itertools.cycle(paged), itertools.cycle(plain)
    new = torch.randn(2, shape.batch, 1, shape.num_kv_heads, shape.head_dim).to(shape.torch_dtype).unbind()
    query = torch.randn(shape.batch, 1, shape.num_heads, shape.head_dim).to(shape.torch_dtype)
    cold = memory(paged)
    reader, reader_dense, peak = Reader(read.total, cold), Reader(read_dense.total, cold), fma_peak()

    methods: dict[str, tuple[int, int, Callable[[], Any]]] = {  # calls a round, every how many rounds, one call
        "quest": (len(paged), 1, lambda: decode(query, new, next(paged_turn), config)),
        "read": (len(paged), 1, reader),
        "sdpa_best": (len(plain), 1, lambda: sdpa_best(query, next(plain_turn))),
        "sdpa_default": (1, DEFAULT_EVERY, lambda: sdpa_default(query, next(plain_turn))),
    }
    if dense:
        methods["dense"] = (1, 1, lambda: decode(query, new, next(paged_turn), all_tokens))
        methods["read_dense"] = (1, 1, reader_dense)
    if dense and (vllm := vllm_attention(shape, paged[0])) is not None:
        methods["vllm_dense"] = (1, 1, lambda: vllm(query))
    seconds: dict[str, list[float]] = {name: [] for name in methods}
    end = perf_counter() + MOST_SECONDS
    for turn in range(-1, rounds):  # the first round warms up code, not data
        for name, (calls, every, call) in methods.items():
            if turn % every == 0 or turn < 0:
                times = [call() if name.startswith("read") else timed(call) for _ in range(calls)]
                seconds[name] = seconds[name] + times if turn >= 0 else []
        advance()
        if turn >= 2 and perf_counter() > end:
            break

    ms = {name: median_ms(times) for name, times in seconds.items()}
    ours, fmas = ms["quest"], shape.fmas(read, config)
    row: dict[str, Any] = {
        **vars(shape),
        "bytes": read.total,
        "summary_bytes": read.summaries,
        "kv_bytes": read.kv,
        "fmas": fmas,
        "ms": ours,
        "ms_min": min(seconds["quest"]) * 1e3,
        "ms_max": max(seconds["quest"]) * 1e3,
        "gb_per_s": read.total / ours / 1e6,
        "read_gb_per_s": read.total / ms["read"] / 1e6,
        "peak_gfma_per_s": peak / 1e9,
        "limit_fraction": ms["read"] / ours,
        "fma_fraction": fmas / peak * 1e3 / ours,
        "sdpa_best_ms": ms["sdpa_best"],
        "sdpa_default_ms": ms["sdpa_default"],
        "speedup_sdpa_best": ms["sdpa_best"] / ours,
        "speedup_sdpa_default": ms["sdpa_default"] / ours,
    }
    if dense:
        tighter = max(ms["read_dense"], shape.fmas(read_dense, all_tokens) / peak * 1e3)
        row |= {
            "dense_ms": ms["dense"],
            "speedup_dense": ms["dense"] / ours,
            "dense_limit_fraction": tighter / ms["dense"],
            "dense_speedup_sdpa_best": ms["sdpa_best"] / ms["dense"],
        }
    if "vllm_dense" in ms:
        row["vllm_dense_ms"] = ms["vllm_dense"]
    return row


def sdpa_best(query: Tensor, layer: Plain) -> Tensor:
    """The query heads of a group as rows of one product: K and V are read once per group."""
    batch, _, num_heads, head_dim = query.shape
    key, value, mask = layer
    rows = query.view(batch, key.shape[1], num_heads // key.shape[1], head_dim)
    out = scaled_dot_product_attention(rows, key, value, attn_mask=mask)
    return out.reshape(batch, 1, num_heads, value.shape[-1])


def sdpa_default(query: Tensor, layer: Plain) -> Tensor:
    """As transformers calls it for one new token."""
    key, value, mask = layer
    grouped = query.shape[2] != key.shape[1]
    return scaled_dot_product_attention(
        query.transpose(1, 2), key, value, attn_mask=mask, enable_gqa=grouped
    ).transpose(1, 2)


def titles(row: dict[str, Any]) -> str:
    """What the rows of one table have in common."""
    heads = f"{row['num_heads']} query and {row['num_kv_heads']} KV heads, d={row['head_dim']}"
    rows = f"batch {row['batch']}" + (" (ragged)" if row["ragged"] else "")
    return f"{heads}, {row['dtype']}, {rows}"


def tables(rows: Sequence[dict[str, Any]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    for title, group in itertools.groupby(rows, titles):
        yield title, list(group)


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    for title, group in tables(rows):
        table = Table(title=f"One decode step, one layer: {title}")
        names = [
            "context",
            "preset",
            "budget",
            "MB",
            "ms",
            "GB/s",
            "of read limit",
            "of FMA peak",
            "SDPA best",
            "SDPA default",
        ]
        with_dense = "dense_ms" in group[0]
        with_vllm = all("vllm_dense_ms" in row for row in group)
        names += ["own dense"] * with_dense + ["vLLM dense"] * with_vllm
        for name in names:
            table.add_column(name, justify="right")
        for row in group:
            cells = [
                f"{row['context']:,}",
                row["preset"],
                "dense" if row["budget"] >= row["context"] else f"{row['budget']:,}",
                f"{row['bytes'] / 1e6:.1f}",
                f"{row['ms']:.2f} ({row['ms_min']:.2f}-{row['ms_max']:.2f})",
                f"{row['gb_per_s']:.1f}",
                f"{row['limit_fraction']:.0%}",
                f"{row['fma_fraction']:.0%}",
                f"{row['sdpa_best_ms']:.1f} ms, {row['speedup_sdpa_best']:.1f}x",
                f"{row['sdpa_default_ms']:.0f} ms, {row['speedup_sdpa_default']:.0f}x",
            ]
            if with_dense:
                cells.append(f"{row['dense_ms']:.1f} ms, {row['speedup_dense']:.1f}x")
            if with_vllm:
                cells.append(f"{row['vllm_dense_ms']:.1f} ms, {row['vllm_dense_ms'] / row['ms']:.1f}x")
            table.add_row(*cells)
        console.print(table)
    console.print(
        "ms: median (least-most). MB: K, V and summaries read, counted. Read limit: the time that reading as many "
        "bytes of cold memory takes in the same run; FMA peak: fp32 multiply-adds as torch's matrix product reaches "
        "them, each code of a packed summary counted as one. Rows with packed summaries end half a group of pages "
        "before the context, between two steps that pack a block. "
        "SDPA best: PyTorch's attention with a group's queries as rows; default: as transformers calls it. "
        "Own dense: this op with a budget of the whole context.",
        highlight=False,
    )
