"""How many bytes of the KV cache a decode step reads, counted from what the kernels touch.

Summaries count: of every page that is scored; of packed ones the cells of every block, the codes of both levels, and keys:
of pages that have no codes yet, and of a block that is packed anew. So do whole pages, whatever part of a budget they use up. What a
step writes (one row of K and V, the summary of one page) and the query are left out: they don't grow with the context.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

from quest.config import LayerConfig, QuestConfig, forced_pages
from quest.packing import kept_pages, packing_of

__all__ = ["StepBytes", "model_bytes", "step_bytes", "summary_overhead"]


@dataclass(frozen=True)
class StepBytes:
    """Bytes read in one decode step: summaries, rows of K and V, and what dense attention would read instead.

    Of `summaries`, `coarse` are those of coarse pages, `cells` of what the codes of a block have in common, and `open`
    keys that are scored or packed; the rest are summaries of pages. `forced` are those of `kv` that are read whatever they
    score.
    """

    summaries: int = 0
    kv: int = 0
    dense: int = 0
    coarse: int = 0
    cells: int = 0
    open: int = 0
    forced: int = 0

    @property
    def total(self) -> int:
        return self.summaries + self.kv

    @property
    def fraction(self) -> float:
        """Of the dense bytes; 1.0 where there are none."""
        return self.total / self.dense if self.dense else 1.0

    def __add__(self, other: StepBytes) -> StepBytes:
        return StepBytes(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


def step_bytes(
    context: int,
    config: QuestConfig,
    layer_idx: int = 0,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    v_head_dim: int | None = None,
) -> StepBytes:
    """One new token of one row and layer, the `context`-th token of its row (the length after the append).

    Per KV head: the summaries of pages, and the rows of the selected ones. With group rule "per_head" each query
    head reads pages of its own, and a page that several of a group select counts each time. A dense layer, or a budget
    that covers the context, scores nothing and reads every row.

    Args:
        context: tokens that the new token may see, itself included.
        itemsize: bytes of one number of K, V and summaries in K's dtype (4 for fp32, 2 for bf16 and fp16).
        v_head_dim: width of V, `head_dim` if None.

    >>> config = QuestConfig(page_size=16, budget=256)
    >>> read = step_bytes(4096, config, num_heads=1, num_kv_heads=1, head_dim=128, itemsize=2)
    >>> read.summaries, read.kv, read.dense
    (131072, 131072, 2097152)
    """
    layer, page_size = config.layer(layer_idx), config.page_size
    row = (head_dim + (head_dim if v_head_dim is None else v_head_dim)) * itemsize
    dense = context * num_kv_heads * row
    budget = math.ceil(layer.budget * context) if isinstance(layer.budget, float) else layer.budget
    selections = num_heads if layer.group_rule == "per_head" else num_kv_heads
    if layer.dense:
        return StepBytes(kv=dense, dense=dense)
    if budget >= context:
        return StepBytes(kv=context * selections * row, dense=dense)
    pages = -(-context // page_size)
    sink, recent = forced_pages(layer.sink_tokens, layer.recent_tokens, page_size)
    forced = min(pages, sink + recent)
    selected = min(pages, max(budget // page_size, forced))
    unfilled = pages * page_size - context  # of the newest page, which is always selected
    scored = _scored(context, config, layer, head_dim, itemsize)
    return StepBytes(
        kv=(selected * page_size - unfilled) * selections * row,
        dense=dense,
        forced=(forced * page_size - unfilled) * selections * row,
        **{kind: count * num_kv_heads for kind, count in scored.items()},
    )


def _scored(context: int, config: QuestConfig, layer: LayerConfig, head_dim: int, itemsize: int) -> dict[str, int]:
    """Bytes of summaries that one KV head's scores need, by kind."""
    packing, page_size = packing_of(config), config.page_size
    if packing is None:
        return {"summaries": -(-context // page_size) * 2 * head_dim * itemsize}
    sink, recent = forced_pages(layer.sink_tokens, layer.recent_tokens, page_size)
    size, coded = packing.group_pages, context // packing.group_size * packing.group_pages  # pages that have codes
    first, last = sink, max(0, -(-context // page_size) - recent)  # forced pages are not scored
    first_group = sink // size
    groups = max(0, min(coded // size, -(-last // size)) - first_group)
    budget = math.ceil(layer.budget * context) if isinstance(layer.budget, float) else layer.budget
    kept = groups
    if packing.coarse_pages:
        kept = kept_pages(groups, layer.coarse_keep, layer.coarse_limit, budget, packing)
    of_block = packing.pages // size
    blocks = -(-(first_group + groups) // of_block) - first_group // of_block if groups else 0
    coarse = blocks * packing.coarse_pages * packing.coarse_bytes(head_dim) if kept < groups else 0
    cells = blocks * packing.bounds_bytes(head_dim)
    opened = max(0, last - max(coded, first)) * page_size
    if context % packing.group_size == 0:  # a group is complete: its block is packed anew
        opened += (context - 1) % packing.block_size + 1
    opened *= head_dim * itemsize
    fine = kept * size * packing.page_bytes(head_dim)
    return {"summaries": coarse + cells + opened + fine, "coarse": coarse, "cells": cells, "open": opened}


def summary_overhead(config: QuestConfig, head_dim: int, itemsize: int = 2) -> float:
    """Memory that summaries take, as a fraction of K's and V's.

    >>> summary_overhead(QuestConfig(page_size=16), 128)
    0.0625
    """
    packing = packing_of(config)
    pages = config.block_size // config.page_size
    size = pages * 2 * head_dim * itemsize if packing is None else packing.num_bytes(head_dim)
    return size / (config.block_size * 2 * head_dim * itemsize)


def model_bytes(model_config: Any, config: QuestConfig, context: int, itemsize: int) -> StepBytes:
    """One new token of one row, all layers of a transformers model.

    Full-attention layers are read as `config` says. Sliding (or chunked) ones keep transformers' own cache and read
    their window in either case; other kinds, such as linear attention, hold no K and V.
    """
    text = model_config.get_text_config()
    num_heads = text.num_attention_heads
    num_kv_heads = getattr(text, "num_key_value_heads", None) or num_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // num_heads
    kinds = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    windows = {
        "sliding_attention": getattr(text, "sliding_window", None) or context,
        "chunked_attention": getattr(text, "attention_chunk_size", None) or context,
    }
    total = StepBytes()
    for index, kind in enumerate(kinds):
        if kind == "full_attention":
            total += step_bytes(
                context,
                config,
                index,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                itemsize=itemsize,
            )
        elif kind in windows:
            read = min(context, windows[kind]) * num_kv_heads * 2 * head_dim * itemsize
            total += StepBytes(kv=read, dense=read)
    return total
