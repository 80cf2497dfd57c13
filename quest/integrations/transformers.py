"""quest for models of the transformers library: prompts are read densely, decode steps sparsely.

    from quest import QuestConfig
    from quest.integrations.transformers import QuestCache, register

    register()
    model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="quest")
    cache = QuestCache(model.config, config=QuestConfig(budget=512))
    model.generate(**inputs, past_key_values=cache)  # cache=cache where transformers calls it that

Works with decoders that use transformers' attention interface (Llama, Mistral, Qwen2, Qwen3, SmolLM2, Gemma 3 and the
like). A plain cache or none with `attn_implementation="quest"` is transformers' own sdpa attention. Supported:
transformers from LOWEST to NEWEST, which the tests run against; a newer 5.x gives a warning.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from quest.integrations.transformers_cache import QuestCache
from quest.integrations.transformers_layer import LazyKeys, LazyValues
from quest.integrations.transformers_masks import as_bool, visible_columns

__all__ = ["LOWEST", "NEWEST", "QuestCache", "quest_attention_forward", "register"]

LOWEST, NEWEST = (5, 0), (5, 24)
NAME = "quest"
LOGITS_AT_ONCE = 1 << 24  # of `masked_attention`, so that a long prompt needs no [heads, tokens, tokens] tensor


def register() -> None:
    """Make `attn_implementation="quest"` known to transformers, with its mask function. Calling it again is harmless.

    Raises:
        ImportError: the installed transformers is not a supported one.
    """
    check_version(transformers.__version__)
    AttentionInterface.register(NAME, quest_attention_forward)
    AttentionMaskInterface.register(NAME, sdpa_mask)


def check_version(version: str) -> None:
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < LOWEST or major > NEWEST[0]:
        raise ImportError(
            f"quest.integrations.transformers supports transformers {LOWEST[0]}.{LOWEST[1]} to {NEWEST[0]}.x "
            f"(tested up to {NEWEST[0]}.{NEWEST[1]}), installed is {version}"
        )
    if (major, minor) > NEWEST:
        warnings.warn(
            f"quest.integrations.transformers is tested with transformers up to {NEWEST[0]}.{NEWEST[1]}, installed is "
            f"{version}",
            stacklevel=3,
        )


def quest_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    position_bias: Tensor | None = None,
    output_attentions: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of a layer, as transformers calls it.

    Args:
        query: [batch, num_heads, q_len, head_dim].
        key, value: what the cache's `update` gave back, or tensors [batch, num_kv_heads, columns, head_dim].
        attention_mask: [batch, heads or 1, q_len, columns] bool or float, or None.
        softcap, s_aux: soft cap of the logits; attention sink logits [num_heads].
        sliding_window: bounds a paged layer; other layers have it in their mask.

    Returns:
        [batch, q_len, num_heads, v_head_dim], None.
    """
    if output_attentions:
        raise ValueError(
            "quest attention: output_attentions must be False: weights of pages that were not read don't exist. "
            "Use attn_implementation='eager' to look at attention weights"
        )
    layer = None
    if type(key) is LazyKeys and type(value) is LazyValues and key.source is value.source:
        layer = key.source.layer()
    if layer is not None:
        # Sparse unless this is a prompt, or needs what pages don't know
        out = None
        if dropout or position_bias is not None:
            if query.shape[2] == 1:
                raise ValueError("quest attention: dropout must be 0 and position_bias None in a sparse step")
        else:
            out = layer.sparse_step(query, attention_mask, sliding_window, scaling, softcap, s_aux)
        if out is not None:
            return out, None

    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if layer is not None:
        key, value, attention_mask = layer.dense_step(query, attention_mask, sliding_window, causal)
    if softcap is not None or s_aux is not None:
        if position_bias is not None:
            raise ValueError("quest attention: position_bias must be None together with softcap or s_aux")
        if attention_mask is None and causal:
            attention_mask = visible_columns(query.shape[2], key.shape[2], key.device)
        return masked_attention(query, key, value, attention_mask, scaling, softcap, s_aux, dropout), None
    if position_bias is not None:
        kwargs["position_bias"] = position_bias
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
    )


def masked_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Dense attention with what sdpa lacks, a soft cap and sink logits; softmax in fp32, 0 where a query sees nothing.

    Equivalent to `softmax(softcap * tanh(scaling * q @ k.T / softcap) + mask) @ v`, the sink as one more logit without
    a value. Arguments as in `quest_attention_forward`.

    Returns:
        [batch, q_len, num_heads, v_head_dim].
    """
    batch, num_heads, q_len, head_dim = query.shape
    num_kv_heads, columns = key.shape[1:3]
    scale = head_dim**-0.5 if scaling is None else scaling
    group = num_heads // num_kv_heads
    portion = max(1, LOGITS_AT_ONCE // (batch * num_heads * columns))
    parts = []
    for start in range(0, q_len, portion):
        q = query[:, :, start : start + portion].unflatten(1, (num_kv_heads, group))
        logits = (q @ key.transpose(2, 3).unsqueeze(2)).float() * scale  # [batch, num_kv_heads, group, q_len, columns]
        logits = logits.flatten(1, 2)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if mask is not None:
            some = mask if mask.shape[2] == 1 else mask[:, :, start : start + portion]
            if some.dtype != torch.bool:
                logits = logits + some
            logits = logits.masked_fill(~as_bool(some), float("-inf"))
        if sinks is not None:
            sink = sinks.float().view(1, -1, 1, 1).expand(batch, -1, logits.shape[2], 1)
            logits = torch.cat([logits, sink], -1)
        blind = logits.amax(-1, keepdim=True) == float("-inf")
        weights = logits.softmax(-1).masked_fill(blind, 0.0)[..., :columns].to(value.dtype)
        weights = torch.nn.functional.dropout(weights, dropout)
        out = weights.unflatten(1, (num_kv_heads, group)) @ value.unsqueeze(2)
        parts.append(out.flatten(1, 2))
    return torch.cat(parts, 2).transpose(1, 2)
