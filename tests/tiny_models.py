"""Small random decoders of every supported family, and what differs between versions of transformers."""

from __future__ import annotations

import functools
import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers")

from transformers import DynamicCache  # noqa: E402

from quest import QuestConfig  # noqa: E402
from quest.integrations.transformers import QuestCache, quest_attention_forward, register  # noqa: E402

PAGE = 4
SMALL = 3 * PAGE  # a budget of three pages
VOCAB = 128
COMMON = {
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "smollm2": (
        "Llama",
        {"hidden_size": 72, "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True},
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral-sliding": ("Mistral", {"sliding_window": 12}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "qwen3-hybrid": (
        "Qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": 12,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
}


def model_config(family: str, **changes: Any) -> Any:
    name, options = FAMILIES[family]
    name = name + ("TextConfig" if name == "Gemma3" else "Config")
    return getattr(transformers, name)(**{**COMMON, **options, **changes})


@functools.cache
def model(family: str, attention: str = "quest", seed: int = 0, dtype: torch.dtype = torch.float32) -> Any:
    """One random model; the same weights for every `attention`."""
    register()
    torch.manual_seed(seed)
    cls = getattr(transformers, FAMILIES[family][0] + "ForCausalLM")
    made = cls._from_config(model_config(family), attn_implementation=attention, dtype=dtype)
    return made.eval()


def prompt(batch: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(1, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def pad_left(ids: Tensor, pads: list[int]) -> tuple[Tensor, Tensor]:
    """Prompts with `pads[b]` places of padding before row b, and their attention mask."""
    mask = torch.arange(ids.shape[1]) >= torch.tensor(pads)[:, None]
    return torch.where(mask, ids, 0), mask.long()


def quest_cache(family: str, budget: int | float = 1024, **settings: Any) -> QuestCache:
    settings = {"page_size": PAGE, "sink_tokens": PAGE, "recent_tokens": PAGE, **settings}
    return QuestCache(model_config(family), config=QuestConfig(budget=budget, **settings))


def dynamic_cache(family: str) -> DynamicCache:
    return DynamicCache(config=model_config(family))


# The name of the cache argument: `past_key_values`, until a version renamed it.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"


def forward(net: Any, ids: Tensor, cache: Any, **options: Any) -> Tensor:
    """Logits [batch, q_len, vocab]."""
    with torch.no_grad():
        return net(ids, **{CACHE: cache}, use_cache=True, **options).logits


def generate(net: Any, ids: Tensor, cache: Any, new: int = 24, **options: Any) -> Tensor:
    options = {"do_sample": False, "max_new_tokens": new, **options}
    options.setdefault("attention_mask", torch.ones_like(ids))
    return net.generate(ids, **{CACHE: cache}, **options)


def tokens(cache: QuestCache, layer: int) -> list[tuple[Tensor, Tensor]]:
    """K and V of each row's stored tokens, [num_kv_heads, length, head_dim]."""
    k, v = cache.paged.dense(layer)
    return [(k[b, :, :n], v[b, :, :n]) for b, n in enumerate(cache.paged.lengths)]


def check_summaries(paged: Any) -> None:
    """Every page's summary is the minimum and maximum of the tokens present, in every layer."""
    page, block = paged.config.page_size, paged.config.block_size
    for layer, k_cache in enumerate(paged.k_cache):
        if k_cache is None:
            continue
        for row, length in enumerate(paged.lengths):
            for first in range(0, length, page):
                block_id = int(paged.block_table[row, first // block])
                keys = k_cache[block_id, :, first % block : first % block + min(page, length - first)]
                at = first % block // page
                assert torch.equal(paged.summaries[0][layer][block_id, :, at], keys.amin(1))
                assert torch.equal(paged.summaries[1][layer][block_id, :, at], keys.amax(1))


def states(batch: int, q_len: int, seed: int = 0, heads: int = 2, dim: int = 8) -> list[Tensor]:
    """K and V of new tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(batch, heads, q_len, dim, generator=generator) for _ in range(2)]


def attend(
    cache: QuestCache, layer: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, **options: Any
) -> Tensor:
    """What a model's attention module does; [batch, q_len, heads, dim]."""
    lazy = cache.update(k, v, layer)
    module = SimpleNamespace(num_key_value_groups=q.shape[1] // k.shape[1], is_causal=True)
    return quest_attention_forward(module, q, *lazy, mask, **options)[0]
