"""The verbs of one decode step one by one: what each reads, how long it takes, how near the limits that is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import quest
from quest import QuestConfig
from quest.bench.decode import tables
from quest.bench.machine import Reader, copies, fma_peak, median_ms, timed
from quest.bench.peers import VllmAttention, vllm_attention
from quest.bench.shapes import Paged, Shape, paged_layers

__all__ = ["run", "show"]


def run(shapes: Sequence[Shape], *, rounds: int = 20, console: Console | None = None) -> list[dict[str, Any]]:
    """Measure every shape.

    Returns:
        One dict per shape and verb: the shape's fields, `verb`, `bytes`, `fmas` (counted), `ms` (median; `ms_min`,
        `ms_max`), `share` (of the fused step's time), and, where a verb reads what grows with the context, `gb_per_s`,
        `limit_fraction` and `fma_fraction` as in `quest.bench.decode`.
    """
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(shapes))
        for shape in shapes:
            progress.update(bar, description=f"{shape.context:,} tokens, budget {shape.budget:,}, {shape.dtype}")
            rows += measure(shape, rounds)
            progress.advance(bar)
    return rows


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    config = QuestConfig(budget=shape.budget)
    setting, read = config.layer(0), shape.bytes(config)
    layers = paged_layers(shape, config, copies(read.total))
    new = torch.randn(2, shape.batch, 1, shape.num_kv_heads, shape.head_dim).to(shape.torch_dtype)
    query = torch.randn(shape.batch, 1, shape.num_heads, shape.head_dim).to(shape.torch_dtype)
    one = torch.ones(shape.batch, dtype=torch.int32)
    seen: dict[str, Any] = dict(page_size=config.page_size, check=False)

    def append(x: Paged) -> None:
        quest.append(*new, x.k_cache, x.v_cache, x.slot_mapping, check=False)

    def summarise(x: Paged) -> None:
        quest.summarise(x.k_cache, x.page_min, x.page_max, x.block_table, x.seq_lens, one, check=False)

    def score(x: Paged) -> Tensor:
        rule: dict[str, Any] = dict(slack=setting.slack, group_rule=setting.group_rule)
        return quest.score(query, x.page_min, x.page_max, x.block_table, x.seq_lens, **rule, **seen)

    scores = [score(x) for x in layers]
    forced: dict[str, Any] = dict(sink_tokens=setting.sink_tokens, recent_tokens=setting.recent_tokens)

    def select(x: Paged, scored: Tensor) -> Tensor:
        return quest.select(scored, x.seq_lens, budget=setting.budget, **forced, **seen)[0]

    chosen = [select(x, scored) for x, scored in zip(layers, scores, strict=True)]

    def attend(x: Paged, page_idx: Tensor) -> None:
        quest.attend(query, x.k_cache, x.v_cache, x.block_table, x.seq_lens, page_idx, **seen)

    def decode(x: Paged) -> None:
        quest.decode(query, *new, *x, config=config, check=False)

    size = shape.torch_dtype.itemsize
    row = 2 * shape.batch * shape.num_kv_heads * shape.head_dim * size  # of K and V, or a page's summary
    score_bytes = sum(x.numel() for x in scores) // len(scores) * 4
    pairs = list(zip(layers, chosen, strict=True))
    verbs: dict[str, tuple[int, int, list[Callable[[], Any]]]] = {  # bytes, multiply-adds, one call per layer
        "append": (row, 0, [lambda x=x: append(x) for x in layers]),
        "summarise": (row * config.page_size // 2, 0, [lambda x=x: summarise(x) for x in layers]),
        "score": (read.summaries, shape.fmas(read.summaries), [lambda x=x: score(x) for x in layers]),
        "select": (score_bytes, 0, [lambda x=x, s=s: select(x, s) for x, s in zip(layers, scores, strict=True)]),
        "attend": (read.kv, shape.fmas(read.kv), [lambda x=x, i=i: attend(x, i) for x, i in pairs]),
        "decode": (read.total, shape.fmas(read.total), [lambda x=x: decode(x) for x in layers]),
    }
    peers = [vllm_selected(shape, x, page_idx, config.page_size) for x, page_idx in pairs]
    if peers[0] is not None:
        verbs["attend, vLLM"] = (read.kv, shape.fmas(read.kv), [lambda peer=peer: peer(query) for peer in peers])
    memory = [pool for x in layers for pool in x[:2]]
    readers = {name: Reader(verbs[name][0], memory) for name in verbs if name.startswith(("score", "attend", "decode"))}
    seconds: dict[str, list[float]] = {name: [] for name in verbs}
    reading: dict[str, list[float]] = {name: [] for name in readers}
    for turn in range(-1, rounds):
        for name, (_, _, calls) in verbs.items():
            times = [timed(call) for call in calls]
            limits = [readers[name]() for _ in calls] if name in readers else []
            if turn >= 0:
                seconds[name] += times
                if name in readers:
                    reading[name] += limits

    peak, whole = fma_peak(), median_ms(seconds["decode"])
    rows = []
    for name, (count, fmas, _) in verbs.items():
        ms = median_ms(seconds[name])
        made: dict[str, Any] = {**vars(shape), "verb": name, "bytes": count, "fmas": fmas, "ms": ms}
        made |= {"ms_min": min(seconds[name]) * 1e3, "ms_max": max(seconds[name]) * 1e3, "share": ms / whole}
        if name in readers:
            made |= {
                "gb_per_s": count / ms / 1e6,
                "limit_fraction": median_ms(reading[name]) / ms,
                "fma_fraction": fmas / peak * 1e3 / ms,
            }
        rows.append(made)
    return rows


def vllm_selected(shape: Shape, layer: Paged, page_idx: Tensor, page_size: int) -> VllmAttention | None:
    """vLLM's kernel over the pages that were selected; full pages are all of them but the newest."""
    chosen = page_idx[:, 0]
    counts = (chosen >= 0).sum(-1)
    if int(counts.min()) < chosen.shape[-1]:
        raise ValueError("bench steps: every row must select as many pages")
    pages = layer.block_table.long()[:, None].expand(-1, chosen.shape[1], -1).gather(2, chosen.long())
    tokens = (counts - 1) * page_size + (layer.seq_lens.long()[:, None] - 1) % page_size + 1
    return vllm_attention(shape, layer, pages.int(), tokens.int())


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    for title, group in tables(rows):
        table = Table(title=f"The verbs of one decode step, one layer: {title}")
        for name in ("context", "budget", "verb", "MB", "ms", "of the step", "GB/s", "of read limit", "of FMA peak"):
            table.add_column(name, justify="left" if name == "verb" else "right")
        for row in group:
            if row["verb"] == "append":
                table.add_section()
            cells = [
                f"{row['context']:,}",
                f"{row['budget']:,}",
                row["verb"],
                f"{row['bytes'] / 1e6:.3f}",
                f"{row['ms']:.3f} ({row['ms_min']:.3f}-{row['ms_max']:.3f})",
                f"{row['share']:.0%}",
            ]
            if "gb_per_s" in row:
                cells += [f"{row['gb_per_s']:.1f}", f"{row['limit_fraction']:.0%}", f"{row['fma_fraction']:.0%}"]
            table.add_row(*cells)
        console.print(table)
    console.print(
        "ms: median (least-most) of a call from Python, its fixed cost of a few microseconds included; decode is all "
        "verbs in one op. The limits are those of `quest bench decode`. vLLM's kernel, where it is installed, attends "
        "to the same pages; what it plans once for all layers of a step is not in its time.",
        highlight=False,
    )
