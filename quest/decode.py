"""One decode step of one layer. Read this first: the verbs in order.

    append     write the new K, V rows into their slots
    summarise  refresh minimum and maximum of the pages they touched
    score      query x summaries: one score per page and KV head
    select     forced pages and the best others under the budget
    attend     exact attention over those pages only

On the CPU the five are one op, `torch.ops.quest.decode`: one dispatch per layer and step, no result in between but the
scores. `backend="verbs"` calls them one by one, and `backend="reference"` the plain PyTorch of `quest.reference`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quest import backends, ops, reference
from quest.checks import FLOATS, Args
from quest.config import QuestConfig, forced_pages
from quest.fakes import max_selected


def decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    config: QuestConfig,
    layer_idx: int = 0,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    check: bool = True,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Append the new tokens of a layer and attend to the pages that the query selects.

    Equivalent to dense attention over everything when the budget is at or above the context length, or when
    `config.layer(layer_idx).dense`.

    Args:
        query: [batch, q_len, num_heads, head_dim], or [batch, num_heads, head_dim] with key and value likewise.
        key, value: [batch, q_len, num_kv_heads, head_dim]: the new tokens, the last q_len of each row.
        k_cache, v_cache, page_min, page_max: written in place.
        seq_lens: int32 [batch], lengths after the append.
        slot_mapping: int64 [batch, q_len], -1 = skip.
        config: page_size must be block_size / summaries per block; budget, forced pages, slack and group rule.
        softmax_scale, softcap, sinks, window: as in `quest.attend`; the window bounds scoring and selection too.
        check: False leaves values of lengths, ids and slots unchecked (see `quest.ops`).
        backend: "auto", or a name that `quest info` lists: it runs, or the error says all reasons why it can't.

    Returns:
        out [batch, q_len, num_heads, v_head_dim] in the query's dtype, lse float32 [batch, q_len, num_heads].
    """
    squeeze = query.dim() == 3
    if squeeze:
        query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
    args = Args("decode")
    args.add("query", query, ops.QUERY, FLOATS)
    key, value, slot_mapping = ops._append_args(args, key, value, k_cache, v_cache, slot_mapping)
    args.heads()
    ops._summary_args(args, page_min, page_max, k_cache)
    ops._sequence_args(args, block_table, seq_lens)
    args.window(window)
    args.softcap(softcap)
    sinks = args.sinks(sinks)
    page_size = args["block_size"] // args["pages_per_block"]
    if config.page_size != page_size:
        args.fail("config", f"must have the page_size of the summaries, {page_size}", config.page_size)

    tensors = (query, key, value, k_cache, v_cache, page_min, page_max, block_table, seq_lens, slot_mapping)
    options = dict(softmax_scale=softmax_scale, softcap=softcap, sinks=sinks, window=window, check=check)
    run = {"cpu": _fused, "verbs": _verbs, "reference": reference.decode}[backends.choose(backend, query.device)]
    out, lse = run(*tensors, config=config, layer_idx=layer_idx, **options)  # type: ignore[operator]
    return (out.squeeze(1), lse.squeeze(1)) if squeeze else (out, lse)


def _verbs(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    config: QuestConfig,
    layer_idx: int,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    check: bool,
) -> tuple[Tensor, Tensor]:
    layer, page_size = config.layer(layer_idx), config.page_size
    ops.append(key, value, k_cache, v_cache, slot_mapping, check=check)
    num_new = torch.full_like(seq_lens, query.shape[1])
    ops.summarise(k_cache, page_min, page_max, block_table, seq_lens, num_new, check=check)
    page_idx = None
    if not layer.dense:
        scores = ops.score(
            query,
            page_min,
            page_max,
            block_table,
            seq_lens,
            page_size=page_size,
            softmax_scale=softmax_scale,
            slack=layer.slack,
            group_rule=layer.group_rule,
            window=window,
            check=check,
        )
        page_idx, _ = ops.select(
            scores,
            seq_lens,
            page_size=page_size,
            budget=layer.budget,
            sink_tokens=layer.sink_tokens,
            recent_tokens=layer.recent_tokens,
            window=window,
            check=check,
        )
    return ops.attend(
        query,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        page_idx,
        page_size=page_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        window=window,
        check=check,
    )


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    slot_mapping: Tensor,
    *,
    config: QuestConfig,
    layer_idx: int,
    softmax_scale: float | None,
    softcap: float | None,
    sinks: Tensor | None,
    window: int | None,
    check: bool,
) -> tuple[Tensor, Tensor]:
    layer, page_size = config.layer(layer_idx), config.page_size
    sink, recent = forced_pages(layer.sink_tokens, layer.recent_tokens, page_size)
    max_pages = block_table.shape[1] * page_min.shape[2]
    return torch.ops.quest.decode(
        query,
        key,
        value,
        k_cache,
        v_cache,
        page_min,
        page_max,
        block_table,
        seq_lens,
        slot_mapping,
        layer.dense,
        ops._scale(softmax_scale, query),
        *ops.split_budget(layer.budget),
        sink,
        recent,
        max_selected(max_pages, query.shape[1], page_size, layer.budget, sink, recent, window),
        layer.slack,
        layer.group_rule,
        softcap or 0.0,
        sinks,
        window or -1,
        check,
    )
