"""The verbs in plain PyTorch: the specification that every kernel is held to.

Written to be read, not to be fast; no kernel imports it. It computes in fp32 (in fp64 for fp64 input), reads only
what a kernel may read, and has the signatures of `quest.ops`, where shapes and rules are documented.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quest.config import LayerConfig, QuestConfig, forced_pages, max_selected

NEG_INF = float("-inf")


def append(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, check: bool = True
) -> None:
    block_size = k_cache.shape[2]
    key, value = key.flatten(0, -3), value.flatten(0, -3)
    for token, slot in enumerate(slot_mapping.flatten().tolist()):
        if slot >= 0:
            k_cache[slot // block_size, :, slot % block_size] = key[token]
            v_cache[slot // block_size, :, slot % block_size] = value[token]


def summarise(
    k_cache: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_new: Tensor,
    *,
    check: bool = True,
) -> None:
    block_size, pages_per_block = k_cache.shape[2], page_min.shape[2]
    page_size = block_size // pages_per_block
    for row, (length, new) in enumerate(zip(seq_lens.tolist(), num_new.tolist(), strict=True)):
        first = max(0, length - new)
        for page in range(first // page_size, -(-length // page_size)) if new > 0 else ():
            block = int(block_table[row, page // pages_per_block])
            offset = page % pages_per_block
            tokens = min(page_size, length - page * page_size)
            keys = k_cache[block, :, offset * page_size : offset * page_size + tokens]
            page_min[block, :, offset] = keys.amin(1)
            page_max[block, :, offset] = keys.amax(1)


def score(
    query: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    softmax_scale: float | None = None,
    slack: float = 1.0,
    group_rule: str = "softmax",
    window: int | None = None,
    check: bool = True,
) -> Tensor:
    squeeze, query = query.dim() == 3, _accumulate(_with_q_len(query))
    batch, q_len, num_heads, head_dim = query.shape
    num_kv_heads = page_min.shape[1]
    group = num_heads // num_kv_heads
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale

    low, high = (_by_row(x, block_table).to(query.dtype) for x in (page_min, page_max))  # [batch, Hkv, pages, D]
    q = query.unflatten(2, (num_kv_heads, group))
    raw = torch.einsum("btkgd,bkpd->btkgp", (q + slack * q.abs()) / 2, high)
    raw = raw + torch.einsum("btkgd,bkpd->btkgp", (q - slack * q.abs()) / 2, low)

    pos = _positions(seq_lens, q_len)[..., None]  # [batch, q_len, 1]
    page_start = torch.arange(raw.shape[-1]) * page_size
    page_end = torch.minimum(page_start + page_size, seq_lens[:, None, None].long())
    scored = (page_start <= pos) & (page_end <= pos + 1)
    if window is not None:
        scored &= page_start + page_size > pos - window + 1
    scored = scored[:, :, None, None, :]  # over KV heads and group

    if group_rule == "per_head":
        scores = torch.where(scored, raw, NEG_INF).flatten(2, 3)
    else:
        scores = torch.where(scored[..., 0, :], _agree(raw, scored, group_rule, scale), NEG_INF)
    return scores[:, 0] if squeeze else scores


def _agree(raw: Tensor, scored: Tensor, group_rule: str, scale: float) -> Tensor:
    """One score per page for a group's heads; NaN where any head's score is NaN. [..., group, pages] -> [..., pages]"""
    known = torch.where(scored & ~raw.isnan(), raw, NEG_INF)
    best = known.amax(-1, keepdim=True)
    gap = torch.where(known == best, 0.0, known - best)  # equal infinities: no gap, not NaN
    if group_rule == "softmax":
        weight = torch.where(scored & ~raw.isnan(), (gap * scale).exp(), 0.0)
        agreed = (weight / weight.sum(-1, keepdim=True).clamp_min(1e-38)).mean(-2)
    else:
        agreed = gap.amax(-2)
    return torch.where((raw.isnan() & scored).any(-2), math.nan, agreed)


def select(
    scores: Tensor,
    seq_lens: Tensor,
    *,
    page_size: int,
    budget: int | float,
    sink_tokens: int = 0,
    recent_tokens: int = 1,
    window: int | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    squeeze, scores = scores.dim() == 3, scores[:, None] if scores.dim() == 3 else scores
    batch, q_len, heads, max_pages = scores.shape
    sink, recent = forced_pages(sink_tokens, recent_tokens, page_size)
    width = max_selected(max_pages, q_len, page_size, budget, sink, recent, window)
    page_idx = torch.full((batch, q_len, heads, width), -1, dtype=torch.int32)
    counts = torch.zeros((batch, q_len, heads), dtype=torch.int32)

    for b, length in enumerate(seq_lens.tolist()):
        for t in range(q_len):
            pos = length - q_len + t
            if pos < 0:
                continue
            first = 0 if window is None else max(0, pos - window + 1) // page_size
            last = pos // page_size
            first_new = max(0, length - q_len) // page_size
            visible = pos + 1 if window is None else min(window, pos + 1)
            tokens = math.ceil(budget * (pos + 1)) if isinstance(budget, float) else budget
            forced = {
                p for p in range(first, last + 1) if p < sink or p > last - recent or (q_len > 1 and p >= first_new)
            }
            total = last - first + 1
            count = total if tokens >= visible else min(total, max(tokens // page_size, len(forced)))
            count = min(count, width)
            for h in range(heads):
                s = scores[b, t, h].tolist()
                order = sorted(
                    range(first, last + 1),
                    key=lambda p: (p not in forced, math.isnan(s[p]), -s[p] if s[p] == s[p] else 0, p),
                )
                page_idx[b, t, h, :count] = torch.tensor(sorted(order[:count]), dtype=torch.int32)
                counts[b, t, h] = count
    return (page_idx[:, 0], counts[:, 0]) if squeeze else (page_idx, counts)


def attend(
    query: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    page_idx: Tensor | None = None,
    *,
    page_size: int | None = None,
    softmax_scale: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    window: int | None = None,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    squeeze, dtype, query = query.dim() == 3, query.dtype, _accumulate(_with_q_len(query))
    batch, q_len, num_heads, head_dim = query.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    page_size = block_size if page_size is None else page_size
    scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
    if page_idx is not None and page_idx.dim() == 3:
        page_idx = page_idx[:, None]
    sel_heads = num_kv_heads if page_idx is None else page_idx.shape[2]
    group = num_heads // sel_heads

    out = query.new_zeros(batch, q_len, num_heads, v_cache.shape[-1])
    lse = query.new_full((batch, q_len, num_heads), NEG_INF)
    for b, length in enumerate(seq_lens.tolist()):
        for t in range(q_len):
            pos = length - q_len + t
            first = 0 if window is None else max(0, pos - window + 1)
            for s in range(sel_heads):
                tokens = torch.arange(first, max(first, pos + 1))
                if page_idx is not None:
                    tokens = tokens[torch.isin(tokens // page_size, page_idx[b, t, s])]
                if tokens.numel() == 0:
                    continue
                blocks, kv_head = block_table[b, tokens // block_size].long(), s * num_kv_heads // sel_heads
                k = k_cache[blocks, kv_head, tokens % block_size].to(query.dtype)
                v = v_cache[blocks, kv_head, tokens % block_size].to(query.dtype)
                heads = slice(s * group, (s + 1) * group)
                logits = query[b, t, heads] @ k.T * scale  # [group, tokens]
                if softcap is not None:
                    logits = softcap * torch.tanh(logits / softcap)
                nothing = (logits == NEG_INF).all(-1)  # as a row without tokens
                if sinks is not None:
                    logits = torch.cat([logits, sinks[heads, None].to(logits.dtype)], -1)
                    v = torch.cat([v, v.new_zeros(1, v.shape[-1])])
                out[b, t, heads] = torch.where(nothing[:, None], 0.0, logits.softmax(-1) @ v)
                lse[b, t, heads] = torch.where(nothing, NEG_INF, logits.logsumexp(-1))
    out = out.to(dtype)
    return (out[:, 0], lse[:, 0]) if squeeze else (out, lse)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    top = torch.maximum(lse_a, lse_b)
    total, mixed = torch.zeros_like(top), torch.zeros_like(_accumulate(out_a))
    for out, lse in ((out_a, lse_a), (out_b, lse_b)):
        # Weights relative to the larger part, not to the sum: that one may round to the part itself.
        weight = torch.where(lse == NEG_INF, 0.0, torch.where(lse == top, 1.0, (lse - top).exp()))
        total += weight
        mixed += torch.where(weight[..., None] == 0, 0.0, weight[..., None] * _accumulate(out))
    mixed = torch.where(total[..., None] == 0, 0.0, mixed / total[..., None])
    return mixed.to(out_a.dtype), torch.logaddexp(lse_a, lse_b)


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
) -> tuple[Tensor, Tensor]:
    layer: LayerConfig = config.layer(layer_idx)
    q_len = 1 if query.dim() == 3 else query.shape[1]
    append(key, value, k_cache, v_cache, slot_mapping)
    stores = slot_mapping.reshape(len(seq_lens), q_len) >= 0
    num_new = stores.any(1).int() * q_len  # a row that stores nothing is left alone
    summarise(k_cache, page_min, page_max, block_table, seq_lens, num_new)
    page_idx = None
    if not layer.dense:
        scores = score(
            query,
            page_min,
            page_max,
            block_table,
            seq_lens,
            page_size=config.page_size,
            softmax_scale=softmax_scale,
            slack=layer.slack,
            group_rule=layer.group_rule,
            window=window,
        )
        page_idx, _ = select(
            scores,
            seq_lens,
            page_size=config.page_size,
            budget=layer.budget,
            sink_tokens=layer.sink_tokens,
            recent_tokens=layer.recent_tokens,
            window=window,
        )
    return attend(
        query,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        page_idx,
        page_size=config.page_size,
        softmax_scale=softmax_scale,
        softcap=softcap,
        sinks=sinks,
        window=window,
    )


def _with_q_len(query: Tensor) -> Tensor:
    return query[:, None] if query.dim() == 3 else query


def _accumulate(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def _positions(seq_lens: Tensor, q_len: int) -> Tensor:
    """Position of each query token in its row, [batch, q_len]."""
    return seq_lens[:, None].long() - q_len + torch.arange(q_len)


def _by_row(summary: Tensor, block_table: Tensor) -> Tensor:
    """Pool order to row order: [num_blocks, Hkv, pages, D] -> [batch, Hkv, max_blocks * pages, D]."""
    return summary[block_table.clamp(0, len(summary) - 1).long()].transpose(1, 2).flatten(2, 3)
