"""How many bytes of the KV cache a decode step reads, counted from what the kernels touch.

Summaries count: of every page that is scored. So do whole pages, whatever part of a budget they use up. What a step
writes (one row of K and V, the summary of one page) and the query are left out: they don't grow with the context.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from quest.config import LayerConfig, QuestConfig, forced_pages

__all__ = ["StepBytes", "model_bytes", "step_bytes"]


@dataclass(frozen=True)
class StepBytes:
    """Bytes read in one decode step: summaries, rows of K and V, and what dense attention would read instead."""

    summaries: int = 0
    kv: int = 0
    dense: int = 0

    @property
    def total(self) -> int:
        return self.summaries + self.kv

    @property
    def fraction(self) -> float:
        """Of the dense bytes; 1.0 where there are none."""
        return self.total / self.dense if self.dense else 1.0

    def __add__(self, other: StepBytes) -> StepBytes:
        return StepBytes(self.summaries + other.summaries, self.kv + other.kv, self.dense + other.dense)


def step_bytes(
    context: int,
    layer: LayerConfig,
    *,
    page_size: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    itemsize: int,
    v_head_dim: int | None = None,
) -> StepBytes:
    """One new token of one row and layer, the `context`-th token of its row (the length after the append).

    Per KV head: the summaries of all pages, and the rows of the selected ones. With group rule "per_head" each query
    head reads pages of its own, and a page that several of a group select counts each time. A dense layer, or a budget
    that covers the context, scores nothing and reads every row.

    Args:
        context: tokens that the new token may see, itself included.
        layer: that layer's settings (`QuestConfig.layer`).
        itemsize: bytes of one number of K, V and the summaries (4 for fp32, 2 for bf16 and fp16).
        v_head_dim: width of V, `head_dim` if None.

    >>> layer = QuestConfig(page_size=16, budget=256).layer(0)
    >>> step_bytes(4096, layer, page_size=16, num_heads=1, num_kv_heads=1, head_dim=128, itemsize=2)
    StepBytes(summaries=131072, kv=131072, dense=2097152)
    """
    row = (head_dim + (head_dim if v_head_dim is None else v_head_dim)) * itemsize
    dense = context * num_kv_heads * row
    budget = math.ceil(layer.budget * context) if isinstance(layer.budget, float) else layer.budget
    selections = num_heads if layer.group_rule == "per_head" else num_kv_heads
    if layer.dense:
        return StepBytes(kv=dense, dense=dense)
    if budget >= context:
        return StepBytes(kv=context * selections * row, dense=dense)
    pages = -(-context // page_size)
    forced = sum(forced_pages(layer.sink_tokens, layer.recent_tokens, page_size))
    selected = min(pages, max(budget // page_size, forced))
    open_page = context - (pages - 1) * page_size  # rows of the newest page, which is always selected
    return StepBytes(
        summaries=pages * num_kv_heads * 2 * head_dim * itemsize,
        kv=((selected - 1) * page_size + open_page) * selections * row,
        dense=dense,
    )


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
                config.layer(index),
                page_size=config.page_size,
                num_heads=num_heads,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                itemsize=itemsize,
            )
        elif kind in windows:
            read = min(context, windows[kind]) * num_kv_heads * 2 * head_dim * itemsize
            total += StepBytes(kv=read, dense=read)
    return total
