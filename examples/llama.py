"""A Llama-style decoder in plain PyTorch on quest's cache and ops: RMSNorm, RoPE, grouped-query attention, SwiGLU.

The cache is a few buffers of each layer. A step of any number of tokens is `model(tokens, *places)`; it compiles with
`torch.compile(model, fullgraph=True)`, and nothing of the cache is copied.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import quest
from quest import QuestConfig


def rotate(x: Tensor, positions: Tensor, theta: float = 10000.0) -> Tensor:
    """Rotary position embedding of [batch, q_len, heads, head_dim] at positions [batch, q_len]."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-torch.arange(half, device=x.device) / half)
    angles = positions[..., None, None] * frequencies
    a, b = x.float().split(half, -1)
    turned = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)
    return turned.to(x.dtype)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, kv_heads: int, num_blocks: int, config: QuestConfig, layer_idx: int):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, dim // heads
        self.config, self.layer_idx = config, layer_idx
        self.qkv = nn.Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)
        block, pages = config.block_size, config.block_size // config.page_size
        for name, rows in {"k_cache": block, "v_cache": block, "page_min": pages, "page_max": pages}.items():
            self.register_buffer(name, torch.zeros(num_blocks, kv_heads, rows, self.head_dim), persistent=False)

    def forward(self, x: Tensor, positions: Tensor, *places: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        query, key, value = qkv.split([self.heads, self.kv_heads, self.kv_heads], 2)
        query, key = rotate(query, positions), rotate(key, positions)
        cache = (self.k_cache, self.v_cache, self.page_min, self.page_max)
        out, _ = quest.decode(query, key, value, *cache, *places, config=self.config, layer_idx=self.layer_idx)
        return self.out(out.flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Llama(nn.Module):
    def __init__(
        self, vocab: int, dim: int, layers: int, heads: int, kv_heads: int, num_blocks: int, config: QuestConfig
    ):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.attention = nn.ModuleList(
            Attention(dim, heads, kv_heads, num_blocks, config, layer_idx) for layer_idx in range(layers)
        )
        self.mlp = nn.ModuleList(SwiGLU(dim, 4 * dim) for _ in range(layers))
        self.norms = nn.ModuleList(nn.RMSNorm(dim) for _ in range(2 * layers + 1))

    def forward(self, tokens: Tensor, block_table: Tensor, seq_lens: Tensor, slot_mapping: Tensor) -> Tensor:
        """Logits [batch, q_len, vocab] of the last q_len tokens of rows that are seq_lens long with them."""
        positions = seq_lens[:, None] - tokens.shape[1] + torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens)
        for i, (attention, mlp) in enumerate(zip(self.attention, self.mlp)):
            x = x + attention(self.norms[2 * i](x), positions, block_table, seq_lens, slot_mapping)
            x = x + mlp(self.norms[2 * i + 1](x))
        return self.norms[-1](x) @ self.embed.weight.T


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, new_tokens: int, block_table: Tensor, block_size: int) -> Tensor:
    """Greedy continuation of prompts of one length, [batch, length] -> [batch, new_tokens]."""
    tokens, chosen, length = prompt, [], 0
    for _ in range(new_tokens):
        place = torch.arange(length, length + tokens.shape[1])
        slots = block_table[:, place // block_size].long() * block_size + place % block_size
        length += tokens.shape[1]
        seq_lens = torch.full((len(tokens),), length, dtype=torch.int32)
        tokens = model(tokens, block_table, seq_lens, slots)[:, -1:].argmax(-1)
        chosen.append(tokens)
    return torch.cat(chosen, 1)
