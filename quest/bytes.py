"""How many bytes of the KV cache a decode step reads, counted from what the kernels touch.

Summaries count: of every page that is scored; of packed ones the cells of every block, the codes of both levels, and
keys: of pages that have no codes yet, and of a block that is packed anew. So do whole pages, whatever part of a budget
they use up. What a step writes (one row of K and V, the summary of one page) and the query are left out: they don't
grow with the context.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from operator import add
from typing import Any, NamedTuple

from quest.config import LayerConfig, QuestConfig, forced_pages
from quest.packing import kept_pages, packing_of

__all__ = ["StepBytes", "model_bytes", "step_bytes", "step_pages", "summary_overhead"]


@dataclass(frozen=True)
class StepBytes:
    """Bytes read in one decode step: summaries, rows of K and V, and what dense attention would read instead.

    Of `summaries`, `coarse` are those of coarse pages, `cells` of what the codes of a block have in common, and `open`
    keys that are scored or packed; the rest are summaries of pages. `forced` are those of `kv` that are read whatever
    they score.
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
        return StepBytes(*map(add, vars(self).values(), vars(other).values()))


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
    q_len: int = 1,
    window: int | None = None,
) -> StepBytes:
    """The new tokens of one row and layer, the last of which is the `context`-th token of its row.

    Per KV head: the summaries of pages, and the rows of the selected ones. With group rule "per_head" each query
    head reads pages of its own, and a page that several of a group select counts each time. A dense layer, or a budget
    that covers what a token sees, scores nothing and reads every row. Each of `q_len` tokens selects, and counts, by
    itself, in `dense` too: what several of them read counts each time. Pages before a token's window are neither scored
    nor read; of the page in which it starts, rows before the window count where scores decide on it (they are not
    read if it is selected, and whether it is, no formula says).

    Args:
        context: tokens that the last new token may see, itself included: the row's length after the append.
        itemsize: bytes of one number of K, V and summaries in K's dtype (4 for fp32, 2 for bf16 and fp16).
        v_head_dim: width of V, `head_dim` if None.
        q_len: query tokens, the last ones of the row; those before its beginning read nothing.
        window: sliding window in tokens: a token sees itself and the window - 1 before it.

    >>> config = QuestConfig(page_size=16, budget=256)
    >>> read = step_bytes(4096, config, num_heads=1, num_kv_heads=1, head_dim=128, itemsize=2)
    >>> read.summaries, read.kv, read.dense
    (131072, 131072, 2097152)
    """
    layer = config.layer(layer_idx)
    row = (head_dim + (head_dim if v_head_dim is None else v_head_dim)) * itemsize
    selections = num_kv_heads if layer.dense or layer.group_rule != "per_head" else num_heads
    total = StepBytes()
    for token in _tokens(context, layer, config.page_size, q_len, window):
        read = {"kv": token.rows * selections * row, "dense": token.visible * num_kv_heads * row}
        if token.scores:
            read["forced"] = token.forced_rows * selections * row
            for kind, count in _scored(token, config, layer, head_dim, itemsize).items():
                read[kind] = count * num_kv_heads
        total += StepBytes(**read)
    return total


def step_pages(
    context: int,
    config: QuestConfig,
    layer_idx: int = 0,
    *,
    num_heads: int,
    num_kv_heads: int,
    q_len: int = 1,
    window: int | None = None,
) -> tuple[int, int]:
    """Pages that the tokens of `step_bytes` read, and how many of them were forced; 0 where nothing is scored.

    Each token and KV head counts (query head with group rule "per_head") by itself.
    """
    layer = config.layer(layer_idx)
    selections = num_kv_heads if layer.dense or layer.group_rule != "per_head" else num_heads
    tokens = list(_tokens(context, layer, config.page_size, q_len, window))
    forced = sum(token.forced for token in tokens if token.scores)
    return selections * sum(token.selected for token in tokens), selections * forced


class _Token(NamedTuple):
    """What one query token reads of its row. It sees pages [first, end); [begin, stop) compete, others are forced."""

    context: int  # tokens up to itself
    visible: int  # those of them that it sees
    budget: int  # tokens
    page_size: int
    first: int
    begin: int
    stop: int
    end: int
    summarised: int  # pages up to here have a summary without later tokens
    scores: bool
    alone: bool  # no other token comes with it

    @property
    def forced(self) -> int:
        """Pages."""
        return self.end - self.first - max(0, self.stop - self.begin)

    @property
    def selected(self) -> int:
        """Pages."""
        pages = self.end - self.first
        return min(pages, max(self.budget // self.page_size, self.forced)) if self.scores else pages

    @property
    def rows(self) -> int:
        return self._rows(self.selected, self.first_is_forced or self.selected == self.end - self.first)

    @property
    def forced_rows(self) -> int:
        return self._rows(self.forced, self.first_is_forced)

    @property
    def first_is_forced(self) -> bool:
        return not self.begin <= self.first < self.stop

    def _rows(self, pages: int, with_first: bool) -> int:
        """Rows of so many pages, the newest among them; of it, and of the first one, only some are visible."""
        unseen = self.context - self.visible - self.first * self.page_size if with_first else 0
        return pages * self.page_size - (self.end * self.page_size - self.context) - unseen


def _tokens(length: int, layer: LayerConfig, page_size: int, q_len: int, window: int | None) -> Iterator[_Token]:
    """The last q_len tokens of a row, as `select` sees them."""
    sink, recent = forced_pages(layer.sink_tokens, layer.recent_tokens, page_size)
    first_new = max(0, length - q_len) // page_size
    for context in range(max(0, length - q_len) + 1, length + 1):
        visible = context if window is None else min(context, window)
        budget = math.ceil(layer.budget * context) if isinstance(layer.budget, float) else layer.budget
        first, end = (context - visible) // page_size, -(-context // page_size)
        stop = max(0, end - recent if q_len == 1 else min(first_new, end - recent))
        summarised = end if context == length else context // page_size
        scores = not layer.dense and budget < visible
        yield _Token(
            context, visible, budget, page_size, first, max(sink, first), stop, end, summarised, scores, q_len == 1
        )


def _scored(token: _Token, config: QuestConfig, layer: LayerConfig, head_dim: int, itemsize: int) -> dict[str, int]:
    """Bytes of summaries that one KV head's scores need, by kind."""
    packing, page_size = packing_of(config), config.page_size
    if packing is None:
        return {"summaries": max(0, token.summarised - token.first) * 2 * head_dim * itemsize}
    size, whole = packing.group_pages, packing.group_size if token.alone else packing.block_size
    coded = token.context // whole * whole // page_size  # pages that have codes
    first_group = token.begin // size  # forced pages are not scored
    groups = max(0, min(coded // size, -(-token.stop // size)) - first_group)
    kept = groups
    if packing.coarse_pages:
        kept = kept_pages(groups, layer.coarse_keep, layer.coarse_limit, token.budget, packing)
    of_block = packing.pages // size
    blocks = -(-(first_group + groups) // of_block) - first_group // of_block if groups else 0
    coarse = blocks * packing.coarse_pages * packing.coarse_bytes(head_dim) if kept < groups else 0
    cells = blocks * packing.bounds_bytes(head_dim)
    opened = max(0, token.stop - max(coded, token.begin)) * page_size
    if token.context % packing.group_size == 0:  # a group is complete: its block is packed anew
        opened += (token.context - 1) % packing.block_size + 1
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
