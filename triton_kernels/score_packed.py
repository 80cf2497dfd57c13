"""score_packed: query x packed summaries, and `select_packed`, which goes on to the pages that are read."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .agree import agree_heads
from .candidates import candidates_of, choosable, page_at
from .codes import cache_of, compiled_packings, packing_of
from .primitives import Launch, verb
from .score_candidates import plan_candidates
from .select import forced_and_chosen, offset, put_forced, take_best


@triton.jit
def candidate_at(place, args):
    """As `page_at`, of places that begin at the first candidate which may be chosen."""
    begin, rest = args
    return page_at(begin + place, rest)


@triton.jit(do_not_specialize=["seq", "choice", "kept", "max_candidates", "max_pages", "softmax_scale", "num_kv_heads"])
def scatter_candidates(
    raw,  # [batch, q_len, num_heads, max_candidates]
    scores,  # [batch, q_len, sel_heads, max_pages], -inf everywhere
    seq, choice, kept, max_candidates, max_pages, softmax_scale, num_kv_heads,
    PER_HEAD: tl.constexpr, SOFTMAX: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr,
    GROUP_PAGES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """One score for each candidate page: a program for each token and head of the selection."""
    row = tl.program_id(0).to(tl.int64)
    unit = row // GROUP if PER_HEAD else row
    token = (unit // num_kv_heads).to(tl.int32)
    b, t = token // seq.q_len, token % seq.q_len
    _, first, last, coded = choosable(seq, b, t, choice, PAGE_SIZE, PAGES, GROUP_PAGES)
    args, begin, end = candidates_of(kept, unit, first, last, coded, GROUP_PAGES)
    to = scores + row * max_pages
    if PER_HEAD:
        for start in range(begin, end, CHUNK):
            place = start + tl.arange(0, CHUNK)
            score = tl.load(raw + row * max_candidates + place, mask=place < end)
            tl.store(to + page_at(place, args), score, mask=place < end)
    else:
        agree_heads(raw + unit * GROUP * max_candidates, max_candidates, begin, end, to, page_at, args, softmax_scale,
                    GROUP, HEADS, TILE, SOFTMAX)  # fmt: skip


@triton.jit(do_not_specialize=["seq", "choice", "kept", "max_candidates", "max_selected", "softmax_scale",
                               "num_kv_heads"])  # fmt: skip
def select_candidates(
    raw,  # [batch, q_len, num_heads, max_candidates]
    scores,  # [batch, q_len, num_kv_heads, max_candidates]; unused with PER_HEAD
    page_idx,  # [batch, q_len, sel_heads, max_selected]
    counts,  # [batch, q_len, sel_heads]
    seq, choice, kept, max_candidates, max_selected, softmax_scale, num_kv_heads, fraction: tl.float64,
    PER_HEAD: tl.constexpr, SOFTMAX: tl.constexpr, PAGE_SIZE: tl.constexpr, PAGES: tl.constexpr,
    GROUP_PAGES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """As `select_pages`, of candidates: a program for each token and head of the selection."""
    row = tl.program_id(0).to(tl.int64)
    unit = row // GROUP if PER_HEAD else row
    token = (unit // num_kv_heads).to(tl.int32)
    b, t = token // seq.q_len, token % seq.q_len
    first_page, end_page, head_end, tail, chosen = forced_and_chosen(
        seq, b, t, choice.budget, fraction, choice.sink_pages, choice.recent_pages, max_selected, PAGE_SIZE
    )
    out = page_idx + row * max_selected
    if chosen > 0:
        _, first, last, coded = choosable(seq, b, t, choice, PAGE_SIZE, PAGES, GROUP_PAGES)
        args, begin, end = candidates_of(kept, unit, first, last, coded, GROUP_PAGES)
        chosen = tl.minimum(chosen, end - begin)
        best = (raw if PER_HEAD else scores) + row * max_candidates
        if not PER_HEAD:
            agree_heads(raw + unit * GROUP * max_candidates, max_candidates, begin, end, best, offset, 0,
                        softmax_scale, GROUP, HEADS, TILE, SOFTMAX)  # fmt: skip
            tl.debug_barrier()  # what some threads wrote, others read
        if chosen > 0:
            take_best(best + begin, end - begin, chosen, out + head_end - first_page, candidate_at, (begin, args),
                      CHUNK)  # fmt: skip
    tl.store(counts + row, put_forced(out, first_page, end_page, head_end, tail, chosen, max_selected, CHUNK))


def settings_of(max_candidates: int) -> dict[str, int]:
    """How a unit's candidates are walked through."""
    return dict(CHUNK=1024, num_warps=4) if max_candidates <= 1024 else dict(CHUNK=2048, num_warps=16, maxnreg=128)


@verb
def score_packed(
    query: Tensor, k_cache: Tensor, packed: Tensor, block_table: Tensor, seq_lens: Tensor, page_size: int,
    coarse_size: int, bits: int, coarse_keep: float, coarse_limit: int, budget: int, budget_fraction: float,
    sink_pages: int, recent_pages: int, softmax_scale: float, slack: float, coarse_slack: float, group_rule: str,
    window: int = -1, check: bool = True,
) -> tuple[list[Launch], Tensor]:  # fmt: skip
    packing = packing_of(k_cache, page_size, coarse_size, bits)
    launches, raw, arguments = plan_candidates(
        query, k_cache, packed, block_table, seq_lens, packing, coarse_keep, coarse_limit, budget, budget_fraction,
        sink_pages, recent_pages, softmax_scale, slack, coarse_slack, group_rule, window,
    )  # fmt: skip
    per_head, max_pages = group_rule == "per_head", block_table.shape[1] * packing.pages
    heads = query.shape[2] if per_head else k_cache.shape[1]
    scores = raw.new_full((*query.shape[:2], heads, max_pages), float("-inf"))
    scatter = Launch(scatter_candidates, scores[..., 0].numel(), scores=scores, max_pages=max_pages, PER_HEAD=per_head,
                     **arguments, **settings_of(raw.shape[3]))  # fmt: skip
    return [*launches, scatter], scores


@verb
def select_packed(
    query: Tensor, k_cache: Tensor, packed: Tensor, block_table: Tensor, seq_lens: Tensor, page_size: int,
    coarse_size: int, bits: int, coarse_keep: float, coarse_limit: int, budget: int, budget_fraction: float,
    sink_pages: int, recent_pages: int, softmax_scale: float, slack: float, coarse_slack: float, group_rule: str,
    window: int, max_selected: int,
) -> tuple[list[Launch], tuple[Tensor, Tensor]]:  # fmt: skip
    """(page_idx, counts): what `select` makes of the scores of `score_packed`, straight from the candidates."""
    packing = packing_of(k_cache, page_size, coarse_size, bits)
    launches, raw, arguments = plan_candidates(
        query, k_cache, packed, block_table, seq_lens, packing, coarse_keep, coarse_limit, budget, budget_fraction,
        sink_pages, recent_pages, softmax_scale, slack, coarse_slack, group_rule, window,
    )  # fmt: skip
    per_head = group_rule == "per_head"
    heads = query.shape[2] if per_head else k_cache.shape[1]
    scores = raw if per_head else raw.new_empty(*query.shape[:2], heads, raw.shape[3])
    page_idx = raw.new_empty(*query.shape[:2], heads, max_selected, dtype=torch.int32)
    counts = raw.new_empty(*query.shape[:2], heads, dtype=torch.int32)
    select = Launch(select_candidates, counts.numel(), scores=scores, page_idx=page_idx, counts=counts,
                    max_selected=max_selected, fraction=budget_fraction, PER_HEAD=per_head, **arguments,
                    **settings_of(raw.shape[3]))  # fmt: skip
    return [*launches, select], (page_idx, counts)


def configurations() -> Iterator[Launch]:
    for packing, head_dim in compiled_packings():
        cache = cache_of(packing, head_dim)
        layout = packing.page_size, packing.coarse_size or 0, packing.bits
        for group in (1, 4, 8):
            query = torch.empty(8, 1, 8 * group, head_dim, dtype=torch.bfloat16, device="meta")
            for rule in ("softmax", "relative", "per_head"):
                settings = 0.25, 4096, 1024, 0.0, 4, 16, 0.1, 0.0, 0.2, rule, -1
                yield from select_packed.plan(query, *cache, *layout, *settings, 1024)[0]
        yield score_packed.plan(query, *cache, *layout, *settings)[0][-1]
