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
from quest.bench.decode import tables
from quest.bench.machine import Reader, copies, fma_peak, median_ms, timed
from quest.bench.peers import VllmAttention, vllm_attention
from quest.bench.shapes import Paged, Shape, decode, memory, paged_layers
from quest.bytes import StepBytes
from quest.packing import packing_of

__all__ = ["run", "show"]


def run(shapes: Sequence[Shape], *, rounds: int = 20, console: Console | None = None) -> list[dict[str, Any]]:
    """Measure every shape.

    Returns:
        One dict per shape and verb: the shape's fields, `verb`, `bytes`, `fmas` (counted), `summary_bytes` and
        `kv_bytes` of the whole step, `ms` (median; `ms_min`,
        `ms_max`), `share` (of the fused step's time), and, where a verb reads what grows with the context, `gb_per_s`,
        `limit_fraction` and `fma_fraction` as in `quest.bench.decode`.
    """
    rows: list[dict[str, Any]] = []
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("", total=len(shapes))
        for shape in shapes:
            progress.update(
                bar, description=f"{shape.context:,} tokens, {shape.preset}, budget {shape.budget:,}, {shape.dtype}"
            )
            rows += measure(shape, rounds)
            progress.advance(bar)
    return rows


def measure(shape: Shape, rounds: int) -> list[dict[str, Any]]:
    config, packing = shape.config, packing_of(shape.config)
    setting, read = config.layer(0), shape.bytes(config)
    layers = paged_layers(shape, config, copies(read.total, read.dense))
    new = torch.randn(2, shape.batch, 1, shape.num_kv_heads, shape.head_dim).to(shape.torch_dtype).unbind()
    query = torch.randn(shape.batch, 1, shape.num_heads, shape.head_dim).to(shape.torch_dtype)
    one = torch.ones(shape.batch, dtype=torch.int32)
    filled = layers[0].seq_lens // config.block_size * config.block_size  # its last block is packed
    seen: dict[str, Any] = dict(page_size=config.page_size, check=False)

    def append(x: Paged) -> None:
        quest.append(*new, x.k_cache, x.v_cache, x.slot_mapping, check=False)

    def summarise(x: Paged) -> None:
        if packing is None:
            quest.summarise(x.k_cache, *x.summaries, x.block_table, x.seq_lens, one, check=False)
        else:
            sink = setting.sink_tokens
            rows = x.k_cache, *x.summaries, x.block_table, filled, one
            quest.pack(*rows, packing=packing, sink_tokens=sink, check=False)

    rule: dict[str, Any] = dict(slack=setting.slack, group_rule=setting.group_rule)
    forced: dict[str, Any] = dict(sink_tokens=setting.sink_tokens, recent_tokens=setting.recent_tokens)
    forced["budget"] = setting.budget

    def score(x: Paged) -> Tensor:
        if packing is None:
            return quest.score(query, *x.summaries, x.block_table, x.seq_lens, **rule, **seen)
        levels = dict(coarse_keep=setting.coarse_keep, coarse_limit=setting.coarse_limit)
        levels["coarse_slack"] = setting.coarse_slack
        rows = query, x.k_cache, *x.summaries, x.block_table, x.seq_lens
        return quest.score_packed(*rows, packing=packing, check=False, **rule, **forced, **levels)

    scores = [score(x) for x in layers]

    def select(x: Paged, scored: Tensor) -> Tensor:
        return quest.select(scored, x.seq_lens, **forced, **seen)[0]

    chosen = [select(x, scored) for x, scored in zip(layers, scores, strict=True)]

    def attend(x: Paged, page_idx: Tensor) -> None:
        quest.attend(query, x.k_cache, x.v_cache, x.block_table, x.seq_lens, page_idx, **seen)

    size = shape.torch_dtype.itemsize
    row = 2 * shape.batch * shape.num_kv_heads * shape.head_dim * size  # of K and V
    unit = config.page_size if packing is None else config.block_size  # whose keys are summarised
    score_bytes = sum(x.numel() for x in scores) // len(scores) * 4
    pairs = list(zip(layers, chosen, strict=True))
    fmas, attended = shape.fmas(read, config), shape.fmas(StepBytes(kv=read.kv), config)
    verb, scoring = ("summarise", "score") if packing is None else ("pack", "score_packed")
    verbs: dict[str, tuple[int, int, list[Callable[[], Any]]]] = {  # bytes, multiply-adds, one call per layer
        "append": (row, 0, [lambda x=x: append(x) for x in layers]),
        verb: (row * unit // 2, 0, [lambda x=x: summarise(x) for x in layers]),
        scoring: (read.summaries, fmas - attended, [lambda x=x: score(x) for x in layers]),
        "select": (score_bytes, 0, [lambda x=x, s=s: select(x, s) for x, s in zip(layers, scores, strict=True)]),
        "attend": (read.kv, attended, [lambda x=x, i=i: attend(x, i) for x, i in pairs]),
        "decode": (read.total, fmas, [lambda x=x: decode(query, new, x, config) for x in layers]),
    }
    peers = [vllm_selected(shape, x, page_idx) for x, page_idx in pairs]
    if peers[0] is not None:
        verbs["attend, vLLM"] = (read.kv, attended, [lambda peer=peer: peer(query) for peer in peers])
    cold = memory(layers)
    readers = {name: Reader(verbs[name][0], cold) for name in verbs if name.startswith(("score", "attend", "decode"))}
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
    for name, (count, products, _) in verbs.items():
        ms = median_ms(seconds[name])
        made: dict[str, Any] = {**vars(shape), "verb": name, "bytes": count, "fmas": products, "ms": ms}
        made |= {"summary_bytes": read.summaries, "kv_bytes": read.kv}
        made |= {"ms_min": min(seconds[name]) * 1e3, "ms_max": max(seconds[name]) * 1e3, "share": ms / whole}
        if name in readers:
            made |= {
                "gb_per_s": count / ms / 1e6,
                "limit_fraction": median_ms(reading[name]) / ms,
                "fma_fraction": products / peak * 1e3 / ms,
            }
        rows.append(made)
    return rows


def vllm_selected(shape: Shape, layer: Paged, page_idx: Tensor) -> VllmAttention | None:
    """vLLM's kernel over the pages that were selected, where these are blocks; all of them are full but the newest."""
    config = shape.config
    if config.page_size != config.block_size or config.group_rule == "per_head":
        return None
    page_size, chosen = config.page_size, page_idx[:, 0]
    counts = (chosen >= 0).sum(-1)
    if int(counts.min()) < chosen.shape[-1]:
        raise ValueError("bench steps: every row must select as many pages")
    pages = layer.block_table.long()[:, None].expand(-1, chosen.shape[1], -1).gather(2, chosen.long())
    tokens = (counts - 1) * page_size + (layer.seq_lens.long()[:, None] - 1) % page_size + 1
    return vllm_attention(shape, layer, pages.int(), tokens.int())


def show(rows: Sequence[dict[str, Any]], console: Console) -> None:
    for title, group in tables(rows):
        table = Table(title=f"The verbs of one decode step, one layer: {title}")
        for name in (
            "context",
            "preset",
            "budget",
            "verb",
            "MB",
            "ms",
            "of the step",
            "GB/s",
            "of read limit",
            "of FMA peak",
        ):
            table.add_column(name, justify="left" if name == "verb" else "right")
        for row in group:
            if row["verb"] == "append":
                table.add_section()
            cells = [
                f"{row['context']:,}",
                row["preset"],
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
        "verbs in one op, but for pack, of one full block per row, which a step needs once in as many as a group of "
        "pages has tokens. The limits are those of `quest bench decode`. "
        "vLLM's kernel, where it is installed, attends to the "
        "same pages; what it plans once for all layers of a step is not in its time.",
        highlight=False,
    )
