"""Fake kernels: what torch.compile needs to know of the ops' outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import quest._C  # noqa: F401  # registers the ops


def _nothing(*args: Any) -> None:
    return None


def _score(
    query: Tensor,
    page_min: Tensor,
    page_max: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    page_size: int,
    softmax_scale: float,
    slack: float,
    group_rule: str,
    *rest: Any,
) -> Tensor:
    batch, q_len, num_heads, _ = query.shape
    heads = num_heads if group_rule == "per_head" else page_min.shape[1]
    max_pages = block_table.shape[1] * page_min.shape[2]
    return query.new_empty((batch, q_len, heads, max_pages), dtype=torch.float32)


def _score_packed(
    query: Tensor,
    k_cache: Tensor,
    packed: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    page_size: int,
    *rest: Any,
    **options: Any,
) -> Tensor:
    batch, q_len, num_heads, _ = query.shape
    group_rule = options.get("group_rule") or rest[11]
    heads = num_heads if group_rule == "per_head" else k_cache.shape[1]
    max_pages = block_table.shape[1] * (k_cache.shape[2] // page_size)
    return query.new_empty((batch, q_len, heads, max_pages), dtype=torch.float32)


def _select(
    scores: Tensor,
    seq_lens: Tensor,
    page_size: int,
    budget: int,
    budget_fraction: float,
    sink_pages: int,
    recent_pages: int,
    window: int,
    max_selected: int,
    check: bool = True,
) -> tuple[Tensor, Tensor]:
    head = scores.shape[:-1]
    return scores.new_empty((*head, max_selected), dtype=torch.int32), scores.new_empty(head, dtype=torch.int32)


def _attend(query: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any, **options: Any) -> tuple[Tensor, Tensor]:
    head = query.shape[:-1]
    return query.new_empty((*head, v_cache.shape[-1])), query.new_empty(head, dtype=torch.float32)


def _merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out_a), torch.empty_like(lse_a)


def _decode(
    query: Tensor, key: Tensor, value: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    return _attend(query.transpose(1, 2) if options.get("heads_first") else query, k_cache, v_cache)


_FAKES: dict[str, Callable[..., Any]] = {
    "append": _nothing,
    "summarise": _nothing,
    "pack": _nothing,
    "score": _score,
    "score_packed": _score_packed,
    "select": _select,
    "attend": _attend,
    "merge": _merge,
    "decode": _decode,
    "decode_packed": _decode,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"quest::{_name}", _fake)
