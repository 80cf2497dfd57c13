"""The verbs of packed summaries, in place of `summarise` and `score`: same shapes and rules as in `quest.ops`.

`packed` is uint8 [num_blocks, num_kv_heads, packing.num_bytes(head_dim)], laid out as `quest.packing` says. Whole
groups of pages have codes; the pages after the last one are scored from K.
"""

from __future__ import annotations

import torch
from torch import Tensor

from quest import ops
from quest.checks import FLOATS, Args
from quest.config import GROUP_RULES, check_budget, forced_pages
from quest.packing import Packing

UINT8 = (torch.uint8,)
PACKED = "num_blocks num_kv_heads num_bytes"


def pack(
    k_cache: Tensor,
    packed: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    num_new: Tensor,
    *,
    packing: Packing,
    sink_tokens: int = 0,
    check: bool = True,
) -> None:
    """Write the codes of every block in which the last `num_new[b]` tokens of row b have completed a group of pages.

    Per channel, the block's keys are divided into `2 ** bits` cells; a page's codes are the cell of its minimum and the
    cell of its maximum, a single one for pages of one token.

    Args:
        k_cache: finite, at most 1e38 in size, in the blocks that are packed.
        packed: written in place.
        num_new: int32 [batch]; `num_new = seq_lens` packs every block.
        sink_tokens: of a row's oldest pages, left out of ranges and codes; `score_packed` must be told the same.
    """
    args = Args("pack")
    args.add("k_cache", k_cache, ops.K_CACHE, FLOATS)
    _packed_arg(args, packed, packing)
    ops._sequence_args(args, block_table, seq_lens)
    args.add("num_new", num_new, "batch", ops.INT32)
    args.at_least("sink_tokens", sink_tokens, 0)
    sink_pages = -(-sink_tokens // packing.page_size)
    torch.ops.quest.pack(k_cache, packed, block_table, seq_lens, num_new, *_settings(packing), sink_pages, check)


def score_packed(
    query: Tensor,
    k_cache: Tensor,
    packed: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    *,
    packing: Packing,
    coarse_keep: float = 1.0,
    coarse_limit: int = 1 << 30,
    budget: int | float = 0,
    sink_tokens: int = 0,
    recent_tokens: int = 1,
    softmax_scale: float | None = None,
    slack: float = 1.0,
    coarse_slack: float = 1.0,
    group_rule: str = "softmax",
    window: int | None = None,
    check: bool = True,
) -> Tensor:
    """Score pages by the query, as `quest.score` does, from codes; with coarse pages, those of the best of them only.

    With coarse pages every one of them is scored first; the heads agree by `group_rule` ("relative" where that is
    "per_head"), and the pages of the best `coarse_keep` of them are scored: of so many as hold `coarse_limit` tokens at
    most, but twice the budget at least. The query's weights are rounded up to 16-bit integers, so that a slack-1 score
    is never below a `q.k` of its page.

    Args:
        budget, recent_tokens: what `select` will be told.
        sink_tokens: what `pack` was told.

    Returns:
        float32 [batch, q_len, num_kv_heads, max_pages] (num_heads instead for "per_head"; no q_len for a 3-D query).
        -inf for pages that aren't scored: those of coarse pages not kept, forced ones, beyond the token or its window.
    """
    args = Args("score_packed")
    squeeze, query = args.tensor("query", query).dim() == 3, ops._with_q_len(query)
    args.add("query", query, ops.QUERY, FLOATS)
    args.add("k_cache", k_cache, ops.K_CACHE, FLOATS)
    args.heads()
    args.head_dim()
    _packed_arg(args, packed, packing)
    args.positive("softmax_scale", softmax_scale)
    args.slack(slack)
    args.slack(coarse_slack, "coarse_slack")
    args.window(window)
    ops._sequence_args(args, block_table, seq_lens)
    if group_rule not in GROUP_RULES:
        args.fail("group_rule", f"must be one of {', '.join(GROUP_RULES)}", repr(group_rule))
    args.number("coarse_keep", coarse_keep)
    if not 0 < coarse_keep <= 1:
        args.fail("coarse_keep", "must be in (0, 1]", coarse_keep)
    args.at_least("coarse_limit", coarse_limit, 1)
    args.at_least("sink_tokens", sink_tokens, 0)
    args.at_least("recent_tokens", recent_tokens, 0)
    if budget != 0:
        check_budget(budget, sink_tokens, recent_tokens, packing.page_size, "score_packed")
    scores = torch.ops.quest.score_packed(
        query,
        k_cache,
        packed,
        block_table,
        seq_lens,
        *_settings(packing),
        float(coarse_keep),
        coarse_limit,
        *ops.split_budget(budget),
        *forced_pages(sink_tokens, recent_tokens, packing.page_size),
        ops._scale(softmax_scale, query),
        slack,
        coarse_slack,
        group_rule,
        window or -1,
        check,
    )
    return scores.squeeze(1) if squeeze else scores


def _settings(packing: Packing) -> tuple[int, int, int]:
    """A packing as the ops take it."""
    return packing.page_size, packing.coarse_size or 0, packing.bits


def _packed_arg(args: Args, packed: Tensor, packing: Packing) -> None:
    """Check `packed` against the packing and k_cache, which has been added."""
    if not isinstance(packing, Packing):
        args.fail("packing", "must be a quest.packing.Packing", type(packing).__name__, TypeError)
    if packing.block_size != args["block_size"]:
        args.fail("packing", f"must have k_cache's block_size, {args['block_size']}", packing.block_size)
    args.add("packed", packed, PACKED, UINT8)
    needed = packing.num_bytes(args["head_dim"])
    if args["num_bytes"] != needed:
        args.fail("packed", f"must have {needed} bytes per block and head (Packing.num_bytes)", args["num_bytes"])
