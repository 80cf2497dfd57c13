"""The verbs: what each takes and gives, checked, then handed to the op `torch.ops.quest.<verb>`.

Shapes, once for all: `query` is [batch, q_len, num_heads, head_dim], or [batch, num_heads, head_dim] for one token,
and its tokens are the last q_len positions of each row: token t of row b is at `seq_lens[b] - q_len + t` (an inert
token where that is negative). Caches are [num_blocks, num_kv_heads, block_size, head_dim], summaries `page_min` and
`page_max` [num_blocks, num_kv_heads, block_size / page_size, head_dim]; any strides with a contiguous last dimension.
`block_table` is int32 [batch, max_blocks], `seq_lens` int32 [batch]. Caches and summaries are float32, bfloat16 or
float16, all of one dtype; the query's may differ. Lengths are in tokens, `lse` is a natural logarithm.

All functions raise `ValueError` or `TypeError` before any memory is touched. With `check=False` the values of lengths,
block ids, slots and page indices are not looked at (for captured graphs): out-of-range ones are then skipped, never
read or written. Under torch.compile the values are checked inside the op.
"""

from __future__ import annotations

import torch
from torch import Tensor

import quest.fakes  # noqa: F401  # registers the fake kernels
from quest.checks import FLOATS, Args
from quest.config import GROUP_RULES, check_budget, forced_pages, max_selected

INT32, INT64 = (torch.int32,), (torch.int64,)
QUERY = "batch q_len num_heads head_dim"
K_CACHE = "num_blocks num_kv_heads block_size head_dim"
V_CACHE = "num_blocks num_kv_heads block_size v_head_dim"
SUMMARY = "num_blocks num_kv_heads pages_per_block head_dim"


def append(
    key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor, *, check: bool = True
) -> None:
    """Write K and V rows into their slots.

    Equivalent to `k_cache[slot // block_size, :, slot % block_size] = key[token]` for every token whose slot is not -1.

    Args:
        key, value: [num_tokens, num_kv_heads, head_dim] or [batch, q_len, num_kv_heads, head_dim], dtype of the cache.
        k_cache, v_cache: written in place; their head_dim may differ.
        slot_mapping: int64, [num_tokens] or [batch, q_len]: block id * block_size + offset, -1 = skip. No slot may be
            named twice: which of its rows stays is not defined.
    """
    args = Args("append")
    key, value, slot_mapping = _append_args(args, key, value, k_cache, v_cache, slot_mapping)
    torch.ops.quest.append(key, value, k_cache, v_cache, slot_mapping, check)


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
    """Recompute the summary of every page that holds one of the last `num_new[b]` tokens of row b.

    Equivalent to `page_min[block, :, page] = k_cache[block, :, tokens of the page].amin(1)`, likewise the maximum, over
    the tokens present; NaN in a channel stays NaN. `num_new = seq_lens` recomputes everything.

    Args:
        page_min, page_max: written in place.
        num_new: int32 [batch].
    """
    args = Args("summarise")
    args.add("k_cache", k_cache, K_CACHE, FLOATS)
    _summary_args(args, page_min, page_max, k_cache)
    _sequence_args(args, block_table, seq_lens)
    args.add("num_new", num_new, "batch", INT32)
    torch.ops.quest.summarise(k_cache, page_min, page_max, block_table, seq_lens, num_new, check)


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
    """Score every page by the query.

    A query head's score of a page is `sum_d max_d (q_d + slack |q_d|)/2 + min_d (q_d - slack |q_d|)/2`; slack 1 is
    `sum_d max(q_d min_d, q_d max_d)`, Quest's bound (arXiv 2406.10774, equation 1), never below a `q.k` of the page.
    The heads of a group then agree by `group_rule`: "softmax" (mean over heads of the softmax over pages of
    `softmax_scale * score`), "relative" (maximum over heads of the score minus the head's best) or "per_head" (they
    don't: one score per query head).

    Args:
        softmax_scale: head_dim ** -0.5 if None.
        window: sliding window in tokens: a token sees itself and the window - 1 before it.

    Returns:
        float32 [batch, q_len, num_kv_heads, max_pages] (num_heads instead for "per_head"; no q_len for a 3-D query),
        max_pages = max_blocks * block_size / page_size. Pages that a token may not score are -inf: beyond it, outside
        its window, or with a later token in their summary. NaN where a head's score is NaN.
    """
    args = Args("score")
    squeeze, query = args.tensor("query", query).dim() == 3, _with_q_len(query)
    args.add("query", query, QUERY, FLOATS)
    args.add("page_min", page_min, SUMMARY, FLOATS)
    args.add("page_max", page_max, SUMMARY, FLOATS, ("page_min", page_min))
    args.heads()
    args.head_dim()
    args.at_least("page_size", page_size, 1)
    args.positive("softmax_scale", softmax_scale)
    args.slack(slack)
    args.window(window)
    _sequence_args(args, block_table, seq_lens)
    if group_rule not in GROUP_RULES:
        args.fail("group_rule", f"must be one of {', '.join(GROUP_RULES)}", repr(group_rule))
    scale = _scale(softmax_scale, query)
    scores = torch.ops.quest.score(
        query, page_min, page_max, block_table, seq_lens, page_size, scale, slack, group_rule, window or -1, check
    )
    return scores.squeeze(1) if squeeze else scores


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
    """Pick the forced pages and the best others under the budget.

    Equivalent to `scores.topk(budget // page_size).indices.sort()` with the forced pages at +inf: the
    `ceil(sink_tokens / page_size)` oldest pages, the `max(1, ceil(recent_tokens / page_size))` newest up to the token's
    own and, for q_len > 1, every page from the first new token's to the token's own. A budget at or above the visible
    context selects every visible page. Ties go to the lower page index; NaN ranks below -inf.

    Args:
        scores: float32 [batch, q_len, heads, max_pages] or [batch, heads, max_pages], as `score` gives them.
        budget: tokens (int), or a fraction of the context (float in (0, 1]); rounded down to pages.

    Returns:
        page_idx: int32 [batch, q_len, heads, max_selected], ascending, -1 = unused.
        counts: int32 [batch, q_len, heads], how many are used.
    """
    args = Args("select")
    squeeze, scores = args.tensor("scores", scores).dim() == 3, _with_q_len(scores)
    args.add("scores", scores, "batch q_len heads max_pages", (torch.float32,))
    args.add("seq_lens", seq_lens, "batch", INT32)
    args.at_least("page_size", page_size, 1)
    args.at_least("sink_tokens", sink_tokens, 0)
    args.at_least("recent_tokens", recent_tokens, 0)
    args.window(window)
    check_budget(budget, sink_tokens, recent_tokens, page_size, "select")
    sink, recent = forced_pages(sink_tokens, recent_tokens, page_size)
    width = max_selected(scores.shape[-1], scores.shape[1], page_size, budget, sink, recent, window)
    page_idx, counts = torch.ops.quest.select(
        scores.contiguous(), seq_lens, page_size, *split_budget(budget), sink, recent, window or -1, width, check
    )
    return (page_idx.squeeze(1), counts.squeeze(1)) if squeeze else (page_idx, counts)


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
    """Exact attention of each query token over the selected pages, as far as it may see them.

    Equivalent to `softmax(softcap * tanh(softmax_scale * q @ k.T / softcap)) @ v` over the tokens of the pages in
    `page_idx` that are not after the token and not before its window, with K and V repeated for the heads of a group.

    Args:
        page_idx: int32 [batch, q_len, num_kv_heads or num_heads, max_selected] (no q_len for a 3-D query), ascending,
            -1 at the end; None = every page.
        page_size: block_size if None.
        softmax_scale: head_dim ** -0.5 if None.
        softcap: soft cap of the logits, None = none.
        sinks: [num_heads], one more logit per head that takes weight and has no value.
        window: sliding window in tokens: a token sees itself and the window - 1 before it.

    Returns:
        out: [batch, q_len, num_heads, v_head_dim] in the query's dtype; 0 where a token sees nothing.
        lse: float32 [batch, q_len, num_heads], log-sum-exp of the logits, sinks included; -inf where it sees nothing.
    """
    args = Args("attend")
    squeeze, query = args.tensor("query", query).dim() == 3, _with_q_len(query)
    args.add("query", query, QUERY, FLOATS)
    _cache_args(args, k_cache, v_cache)
    args.heads()
    page_size = args["block_size"] if page_size is None else page_size
    args.page_size(page_size)
    _sequence_args(args, block_table, seq_lens)
    args.positive("softmax_scale", softmax_scale)
    args.positive("softcap", softcap)
    args.window(window)
    if page_idx is not None:
        page_idx = _with_q_len(args.tensor("page_idx", page_idx))
        args.add("page_idx", page_idx, "batch q_len sel_heads max_selected", INT32)
        if args["sel_heads"] not in (args["num_kv_heads"], args["num_heads"]):
            args.fail("page_idx", "must have num_kv_heads or num_heads heads", args["sel_heads"])
    out, lse = torch.ops.quest.attend(
        query,
        k_cache,
        v_cache,
        block_table,
        seq_lens,
        page_idx,
        page_size,
        _scale(softmax_scale, query),
        softcap or 0.0,
        args.sinks(sinks),
        window or -1,
        check,
    )
    return (out.squeeze(1), lse.squeeze(1)) if squeeze else (out, lse)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two attention results over disjoint tokens.

    Equivalent to `lse = logaddexp(lse_a, lse_b)`, `out = exp(lse_a - lse) * out_a + exp(lse_b - lse) * out_b`, where a
    part with lse -inf takes no part, whatever its out holds.

    Args:
        out_a, out_b: [..., head_dim], one dtype. lse_a, lse_b: float32 [...], natural logarithms.
    """
    args = Args("merge")
    dims = " ".join(f"dim{i}" for i in range(args.tensor("out_a", out_a).dim() - 1))
    args.add("out_a", out_a, f"{dims} head_dim", FLOATS)
    args.add("out_b", out_b, f"{dims} head_dim", FLOATS, ("out_a", out_a))
    lse_a, lse_b = args.tensor("lse_a", lse_a).contiguous(), args.tensor("lse_b", lse_b).contiguous()
    args.add("lse_a", lse_a, dims, (torch.float32,))
    args.add("lse_b", lse_b, dims, (torch.float32,))
    return torch.ops.quest.merge(out_a.contiguous(), lse_a, out_b.contiguous(), lse_b)


def split_budget(budget: int | float) -> tuple[int, float]:
    """A budget as the ops take it: tokens, and a fraction of the context that replaces them where it is not 0."""
    return (0, budget) if isinstance(budget, float) else (budget, 0.0)


def _with_q_len(x: Tensor) -> Tensor:
    return x.unsqueeze(1) if x.dim() == 3 else x


def _scale(softmax_scale: float | None, query: Tensor) -> float:
    return query.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _append_args(
    args: Args, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Check what `append` takes; token dimensions come back as [batch, q_len]."""
    _cache_args(args, k_cache, v_cache)
    by_row = args.tensor("key", key).dim() != 3
    tokens = "batch q_len" if by_row else "num_tokens"
    args.add("key", key, f"{tokens} num_kv_heads head_dim", FLOATS, ("k_cache", k_cache))
    args.add("value", value, f"{tokens} num_kv_heads v_head_dim", FLOATS, ("k_cache", k_cache))
    if by_row and args.tensor("slot_mapping", slot_mapping).dim() == 1:
        if slot_mapping.shape[0] != args["batch"] * args["q_len"]:
            args.fail("slot_mapping", "must have one slot for each token of key", f"shape {list(slot_mapping.shape)}")
        slot_mapping = slot_mapping.reshape(args["batch"], args["q_len"])
    args.add("slot_mapping", slot_mapping, tokens, INT64)
    if not by_row:
        key, value, slot_mapping = key.unsqueeze(0), value.unsqueeze(0), slot_mapping.unsqueeze(0)
    return key, value, slot_mapping.contiguous()


def _cache_args(args: Args, k_cache: Tensor, v_cache: Tensor) -> None:
    args.add("k_cache", k_cache, K_CACHE, FLOATS)
    args.add("v_cache", v_cache, V_CACHE, FLOATS, ("k_cache", k_cache))
    args.head_dim()
    args.head_dim("v_head_dim")


def _summary_args(args: Args, page_min: Tensor, page_max: Tensor, k_cache: Tensor) -> None:
    args.add("page_min", page_min, SUMMARY, FLOATS, ("k_cache", k_cache))
    args.add("page_max", page_max, SUMMARY, FLOATS, ("k_cache", k_cache))
    pages = args["pages_per_block"]
    if pages < 1 or args["block_size"] % pages:
        args.fail("page_min", f"must have pages per block that divide block_size {args['block_size']}", pages)


def _sequence_args(args: Args, block_table: Tensor, seq_lens: Tensor) -> None:
    args.add("block_table", block_table, "batch max_blocks", INT32)
    args.add("seq_lens", seq_lens, "batch", INT32)
