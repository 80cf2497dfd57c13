"""Packed summaries in plain PyTorch: the specification of `pack` and `score_packed`; `quest.reference` has the rest."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from quest import reference
from quest.config import QuestConfig, forced_pages
from quest.packing import Packing, kept_pages, packing_of, padded
from quest.reference import NEG_INF, _agree, _with_q_len


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
    sink = -(-sink_tokens // packing.page_size)
    size = packing.group_size
    for row, (length, new) in enumerate(zip(seq_lens.tolist(), num_new.tolist(), strict=True)):
        before, coded = max(0, length - new) // size * size, length // size * size
        for i in range(before // packing.block_size, -(-coded // packing.block_size)) if coded > before else ():
            block = int(block_table[row, i])
            count = min(packing.pages, coded // packing.page_size - i * packing.pages)
            keys = k_cache[block, :, : count * packing.page_size].float().unflatten(1, (count, packing.page_size))
            low, high = (
                torch.nn.functional.pad(x, (0, 0, 0, packing.pages - count)) for x in (keys.amin(2), keys.amax(2))
            )
            packed[block] = _pack_block(low, high, max(0, sink - i * packing.pages), count, packing)


def _pack_block(low: Tensor, high: Tensor, sink: int, count: int, packing: Packing) -> Tensor:
    """The bytes of one block, from the minima and maxima [heads, pages, dim] of its first `count` pages; the first
    `sink` are left out."""
    heads, pages, head_dim = low.shape
    low, high = (torch.nn.functional.pad(x, (0, padded(head_dim) - head_dim)) for x in (low, high))
    counted = ((torch.arange(pages) >= sink) & (torch.arange(pages) < count))[:, None]
    if sink < count:
        lo = _to_bf16(low[:, sink:count].amin(1), up=False)
        width = high[:, sink:count].amax(1).double() - lo.double()
        step = _to_bf16((width / packing.cells).float().nextafter(torch.tensor(math.inf)) * (width > 0), up=True)
    else:
        lo = step = torch.zeros(heads, low.shape[2])

    a, s = lo[:, None], step[:, None]
    safe = torch.where(s > 0, s, 1.0)
    lower = ((low - a) / safe).floor()
    lower = lower - (a + lower * s > low).float()  # the division rounds: a cell that doesn't hold its key moves
    upper = lower if packing.single else ((high - a) / safe).ceil() - 1
    upper = upper + (a + (upper + 1) * s < high).float()
    lower, upper = (
        torch.where(counted & (s > 0), x.clamp(0, packing.cells - 1), 0).int()
        for x in (upper if packing.single else lower, upper)
    )
    parts = [_bytes(torch.cat([lo, step], 1).bfloat16())]
    if packing.coarse_pages:
        groups = (packing.coarse_pages, packing.group_pages)
        hidden = (~counted).int() * (packing.cells - 1)  # takes no part in a minimum
        known = counted.unflatten(0, groups).any(1)
        coarse_lower = torch.where(known, (lower + hidden).unflatten(1, groups).amin(2), 0)
        parts.append(_words(upper.unflatten(1, groups).amax(2), coarse_lower, packing.coarse_lanes, packing))
    first, second = upper.chunk(2, 2) if packing.single else (upper, lower)
    parts.append(_words(first, second, packing.lanes, packing))
    return torch.cat(parts, 1)


def _words(first: Tensor, second: Tensor, lanes: int, packing: Packing) -> Tensor:
    """Codes [heads, pages, n] of bits 0..15 and of bits 16..31 as bytes [heads, n]."""
    places = 16 // packing.bits
    shifts = torch.arange(places)[:, None] * packing.bits
    parts = [(x.long().unflatten(2, (places, -1)) << shifts).sum(2) for x in (first, second)]  # [heads, pages, words]
    words = parts[0] | parts[1] << 16
    words = torch.where(words >= 1 << 31, words - (1 << 32), words).int()
    return _bytes(words.unflatten(1, (-1, lanes)).transpose(2, 3).flatten(1))


def _bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def unpack(packed: Tensor, head_dim: int, packing: Packing) -> dict[str, Tensor]:
    """What the bytes [..., num_bytes] say: `lo`, `step` [..., dim], and the codes `low`, `high` [..., pages, dim],
    `coarse_low`, `coarse_high` [..., coarse_pages, dim], all float32, dim = head_dim padded."""
    dim = padded(head_dim)
    lo, step = packed[..., : 4 * dim].contiguous().view(torch.bfloat16).float().chunk(2, -1)
    found = {"lo": lo, "step": step}
    at = 4 * dim
    if packing.coarse_pages:
        size = packing.coarse_pages * packing.coarse_bytes(head_dim)
        codes = _codes(packed[..., at : at + size], packing.coarse_pages, packing.coarse_lanes, packing)
        found["coarse_high"], found["coarse_low"] = codes
        at += size
    first, second = _codes(packed[..., at:], packing.pages, packing.lanes, packing)
    if packing.single:
        first = second = torch.cat([first, second], -1)
    found["high"], found["low"] = first, second
    return found


def _codes(codes: Tensor, pages: int, lanes: int, packing: Packing) -> list[Tensor]:
    """The opposite of `_words`."""
    words = codes.contiguous().view(torch.int32).long()
    words = words.unflatten(-1, (pages // lanes, -1, lanes)).transpose(-1, -2).flatten(-3, -2)  # [..., pages, words]
    shifts = torch.arange(16 // packing.bits)[:, None] * packing.bits
    halves = [(words.unsqueeze(-2) >> (shifts + half)) & (packing.cells - 1) for half in (0, 16)]
    return [half.flatten(-2).float() for half in halves]


def _to_bf16(x: Tensor, up: bool) -> Tensor:
    """The next bfloat16 at or above (at or below), as float32."""
    near = x.bfloat16().float()
    off = near < x if up else near > x
    return torch.where(
        off, near.bfloat16().nextafter(torch.tensor(math.inf if up else -math.inf).bfloat16()).float(), near
    )


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
    squeeze, query = query.dim() == 3, _with_q_len(query).float()
    batch, q_len, num_heads, head_dim = query.shape
    num_kv_heads, page_size, block_size = k_cache.shape[1], packing.page_size, packing.block_size
    group, scale = num_heads // num_kv_heads, head_dim**-0.5 if softmax_scale is None else softmax_scale
    sink, recent = forced_pages(sink_tokens, recent_tokens, page_size)
    max_pages = block_table.shape[1] * packing.pages
    heads = num_heads if group_rule == "per_head" else num_kv_heads
    scores = torch.full((batch, q_len, heads, max_pages), NEG_INF)

    for b, length in enumerate(seq_lens.tolist()):
        for t in range(q_len):
            pos = length - q_len + t
            if pos < 0:
                continue
            # Pages whose codes say nothing of a later token: of whole groups, of full blocks if there are later tokens.
            whole = block_size if q_len > 1 else packing.group_size
            coded = (pos + 1) // whole * whole // page_size
            # Pages before and after these are forced, or not visible.
            first = max(sink, 0 if window is None else max(0, pos - window + 1) // page_size)
            pages = max(0, pos // page_size + 1 - recent)
            if q_len > 1:
                pages = min(pages, max(0, length - q_len) // page_size)
            if not pages:
                continue
            may = torch.arange(max(pages, coded)) >= first
            may[pages:] = False
            blocks = block_table[b, : -(-coded // packing.pages)].long()
            tokens = budget if not isinstance(budget, float) else math.ceil(budget * (pos + 1))
            for k in range(num_kv_heads):
                q = query[b, t, k * group : (k + 1) * group]
                codes = unpack(packed[blocks, k], head_dim, packing)
                raw = [_score_codes(q, codes, "", slack, packing)[:, :coded], q.new_empty(group, 0)]
                for page in range(coded, pages):
                    at = torch.arange(page * page_size, (page + 1) * page_size)
                    keys = k_cache[block_table[b, at // block_size].long(), k, at % block_size].float()
                    raw.append(_score_range(q, keys.amin(0), keys.amax(0), slack)[:, None])
                fine = torch.cat(raw, 1)  # [group, pages]
                candidate = may.clone()
                if packing.coarse_pages and coded:
                    size = packing.group_pages
                    open_to = may[:coded].unflatten(0, (-1, size)).any(1)
                    coarse = _score_codes(q, codes, "coarse_", coarse_slack, packing)[:, : len(open_to)]
                    rule = "relative" if group_rule == "per_head" else group_rule
                    best = _agree(coarse, open_to.expand_as(coarse), rule, scale)
                    kept = kept_pages(int(open_to.sum()), coarse_keep, coarse_limit, tokens, packing)
                    value = best.tolist()
                    order = sorted(
                        open_to.nonzero().flatten().tolist(),
                        key=lambda c: (math.isnan(value[c]), -value[c] if value[c] == value[c] else 0, c),
                    )
                    chosen = torch.zeros_like(open_to)
                    chosen[order[:kept]] = True
                    candidate[:coded] &= chosen.repeat_interleave(size)
                if group_rule == "per_head":
                    scores[b, t, k * group : (k + 1) * group, : len(may)] = torch.where(candidate, fine, NEG_INF)
                else:
                    agreed = _agree(fine, candidate.expand_as(fine), group_rule, scale)
                    scores[b, t, k, : len(may)] = torch.where(candidate, agreed, NEG_INF)
    return scores[:, 0] if squeeze else scores


def _score_range(q: Tensor, low: Tensor, high: Tensor, slack: float) -> Tensor:
    return (q + slack * q.abs()) / 2 @ high + (q - slack * q.abs()) / 2 @ low


def _score_codes(q: Tensor, codes: dict[str, Tensor], level: str, slack: float, packing: Packing) -> Tensor:
    """Scores of pages by their codes, in integers: `base + unit * (up . high + down . low)`.

    `up` and `down` are the weights of maximum and minimum times the channel's step in units of the largest there may
    be, rounded up, so that a score is never below the exact one. q [group, head_dim] -> [group, blocks * pages]
    """
    q = torch.nn.functional.pad(q, (0, codes["lo"].shape[-1] - q.shape[-1]))
    toward, against = (1 + torch.tensor(slack)) / 2, (1 - torch.tensor(slack)) / 2
    above, below = torch.where(q > 0, toward, against) * q, torch.where(q > 0, against, toward) * q
    most = torch.tensor(float(packing.max_weight(q.shape[-1])))
    step = codes["step"]  # [blocks, dim]
    largest, top = q.abs().amax(-1, keepdim=True), step.amax(-1, keepdim=True)  # [group, 1], [blocks, 1]
    part = torch.where(top > 0, step * _lift(top) * (1 / (top * _lift(top))), 0.0)  # of the largest step
    # An upper edge is one step above its cell's lower edge.
    base = torch.einsum("gd,bd->gb", q, codes["lo"]) + torch.einsum("gd,bd->gb", above, step)
    lift = _lift(largest)
    up, down = (torch.where(largest > 0, x * lift * (most / (largest * lift)), 0.0) for x in (above, below))
    terms = [(up, level + "high"), (down, level + "low")]
    if packing.single and not level:
        terms = [(up + down, "low")]
    products = torch.zeros(())
    for weight, name in terms:
        weight = (weight[:, None] * part).ceil()  # [group, blocks, dim]
        products = products + torch.einsum("gbd,bpd->gbp", weight.double(), codes[name].double())
    unit = (largest * top.T) * (1 / most)  # [group, blocks]
    return (base[..., None] + products.float() * unit[..., None]).flatten(1)


def _lift(x: Tensor) -> Tensor:
    """What makes reciprocals of very small numbers finite."""
    return torch.where(x < 1e-30, 2.0**100, 1.0)


def decode_packed(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    packed: Tensor,
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
    layer, packing = config.layer(layer_idx), packing_of(config)
    assert packing is not None
    reference.append(key, value, k_cache, v_cache, slot_mapping)
    q_len = 1 if query.dim() == 3 else query.shape[1]
    num_new = (slot_mapping.reshape(len(seq_lens), q_len) >= 0).any(1).int() * q_len
    rows = k_cache, packed, block_table, seq_lens
    pack(*rows, num_new, packing=packing, sink_tokens=layer.sink_tokens)
    page_idx = None
    if not layer.dense:
        scores = score_packed(
            query,
            *rows,
            packing=packing,
            coarse_keep=layer.coarse_keep,
            coarse_limit=layer.coarse_limit,
            budget=layer.budget,
            sink_tokens=layer.sink_tokens,
            recent_tokens=layer.recent_tokens,
            softmax_scale=softmax_scale,
            slack=layer.slack,
            coarse_slack=layer.coarse_slack,
            group_rule=layer.group_rule,
            window=window,
        )
        page_idx, _ = reference.select(
            scores,
            seq_lens,
            page_size=config.page_size,
            budget=layer.budget,
            sink_tokens=layer.sink_tokens,
            recent_tokens=layer.recent_tokens,
            window=window,
        )
    return reference.attend(
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
