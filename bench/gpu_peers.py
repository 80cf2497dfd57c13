"""Dense attention over the same paged K and V by other libraries, where they are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from quest.bench.shapes import Paged

__all__ = ["PEERS"]

WORKSPACE = 256 << 20  # bytes, what FlashInfer's documentation proposes at least


def flashinfer(query: Tensor, layer: Paged) -> Callable[[], Any] | None:
    """FlashInfer's decode over paged K and V, planned once for these lengths; None where it isn't installed."""
    try:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper
    except ImportError:
        return None
    block_size = layer.k_cache.shape[2]
    blocks = (layer.seq_lens + block_size - 1) // block_size
    starts = torch.nn.functional.pad(blocks.cumsum(0), (1, 0)).int()
    pages = torch.cat([row[:count] for row, count in zip(layer.block_table, blocks.tolist(), strict=True)])
    last = (layer.seq_lens - 1) % block_size + 1
    wrapper = BatchDecodeWithPagedKVCacheWrapper(
        torch.empty(WORKSPACE, dtype=torch.uint8, device=query.device), "HND", use_tensor_cores=True
    )
    heads, kv_heads, head_dim = query.shape[2], layer.k_cache.shape[1], query.shape[3]
    kind = query.dtype
    wrapper.plan(starts, pages, last.int(), heads, kv_heads, head_dim, block_size, q_data_type=kind, kv_data_type=kind)
    return lambda: wrapper.run(query[:, 0], (layer.k_cache, layer.v_cache))


def vllm(query: Tensor, layer: Paged) -> Callable[[], Any] | None:
    """vLLM's FlashAttention over paged K and V; None where it isn't installed."""
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    batch, longest = query.shape[0], int(layer.seq_lens.max())
    starts = torch.arange(batch + 1, dtype=torch.int32, device=query.device)
    k, v = (x.transpose(1, 2) for x in (layer.k_cache, layer.v_cache))  # [num_blocks, block_size, heads, head_dim]
    return lambda: flash_attn_varlen_func(
        q=query[:, 0],
        k=k,
        v=v,
        max_seqlen_q=1,
        cu_seqlens_q=starts,
        max_seqlen_k=longest,
        seqused_k=layer.seq_lens,
        block_table=layer.block_table,
        causal=True,
    )


PEERS: Mapping[str, Callable[[Tensor, Paged], Callable[[], Any] | None]] = {"flashinfer": flashinfer, "vllm": vllm}
