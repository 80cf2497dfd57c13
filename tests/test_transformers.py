"""The seam to transformers: registration, and which layers of a model are paged."""

from __future__ import annotations

import copy
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import transformers
from tiny_models import (
    PAGE,
    SMALL,
    attend,
    generate,
    model_config,
    prompt,
    quest_cache,
    states,
)
from transformers.cache_utils import DynamicSlidingWindowLayer

from quest import QuestConfig
from quest.integrations.transformers import QuestCache, check_version, quest_attention_forward, register
from quest.integrations.transformers_layer import QuestLayer

MODULE = SimpleNamespace(num_key_value_groups=1, is_causal=True)


def test_registration_is_explicit_and_repeatable() -> None:
    code = """
import sys, quest
assert not any(name.split(".")[0] == "transformers" for name in sys.modules)
import quest.integrations.transformers as integration
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS as masks
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions
assert "quest" not in functions and "quest" not in masks
integration.register(); integration.register()
assert "quest" in functions and "quest" in masks
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_version_is_checked() -> None:
    check_version(transformers.__version__)
    for version in ("4.57.1", "6.0.0"):
        with pytest.raises(ImportError, match=f"supports transformers 5.* installed is {version}"):
            check_version(version)
    with pytest.warns(UserWarning, match="tested with transformers up to"):
        check_version("5.99.0.dev0")


def test_a_window_in_the_config_of_full_layers() -> None:
    """C33a: sliding_window=8, but all layers full: a step sees all 20 tokens."""
    config = transformers.Qwen2Config(
        **{**model_config("qwen2").to_dict(), "sliding_window": 8, "layer_types": ["full_attention"] * 3}
    )
    cache = QuestCache(config, config=QuestConfig(page_size=PAGE, budget=64, sink_tokens=0, recent_tokens=PAGE))
    assert [type(layer) for layer in cache.layers] == [QuestLayer] * 3
    value = torch.arange(20.0).view(1, 1, 20, 1).expand(1, 1, 20, 8)
    zero = torch.zeros(1, 1, 20, 8)
    attend(cache, 0, zero[:, :, :19], zero[:, :, :19], value[:, :, :19], sliding_window=None)
    out = attend(cache, 0, *(x[:, :, 19:] for x in (zero, zero, value)), sliding_window=None)
    assert torch.allclose(out, torch.tensor(9.5))


@pytest.mark.skipif(not hasattr(transformers.cache_utils, "LinearAttentionLayer"), reason="before linear layers")
def test_linear_sliding_and_full_layers() -> None:
    """C33b: only the full layer is paged; lengths are right though layer 0 has no keys."""
    config = transformers.Lfm2Config(num_hidden_layers=3, sliding_window=4)
    config.layer_types = ["conv", "sliding_attention", "full_attention"]
    cache = QuestCache(config, config=QuestConfig(page_size=PAGE, budget=SMALL, sink_tokens=PAGE, recent_tokens=PAGE))
    assert [type(layer) for layer in cache.layers][1:] == [DynamicSlidingWindowLayer, QuestLayer]
    assert cache.get_seq_length() == 0
    for t in range(6):
        k, v = states(1, 1, seed=t)
        sliding, _ = cache.update(k, v, 1)
        assert sliding.shape[2] == min(t + 1, 4)
        attend(cache, 2, k, k, v)
        assert cache.get_seq_length() == t + 1
    assert cache.layers[2].keys.shape[2] == 6


@pytest.mark.skipif(not hasattr(transformers.cache_utils, "LinearAttentionLayer"), reason="before linear layers")
def test_a_hybrid_model() -> None:
    config = transformers.Lfm2Config(
        **{
            k: v
            for k, v in model_config("llama").to_dict().items()
            if k in ("hidden_size", "vocab_size", "bos_token_id")
        },
        num_hidden_layers=3,
        num_attention_heads=6,
        num_key_value_heads=2,
        intermediate_size=64,
        layer_types=["conv", "full_attention", "full_attention"],
        eos_token_id=None,
        pad_token_id=0,
        initializer_range=0.3,
    )
    register()
    torch.manual_seed(0)
    net, other = (
        transformers.Lfm2ForCausalLM._from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for name in ("quest", "sdpa")
    )
    other.load_state_dict(net.state_dict())
    cache = QuestCache(config, config=QuestConfig(page_size=PAGE, budget=1024))
    text = generate(net, prompt(2, 17), cache)
    assert torch.equal(text, generate(other, prompt(2, 17), transformers.DynamicCache(config=config)))
    assert cache.get_seq_length() == 40
    assert cache.paged.lengths == [40, 40]


def test_keys_and_values_that_two_layers_use() -> None:
    """A layer that attends to another layer's K and V gets pages too, and appends nothing."""
    cache, (k, v) = quest_cache("llama", SMALL), states(1, 33)
    q = torch.randn(1, 2, 33, 8)
    attend(cache, 0, *(x[:, :, :32] for x in (q, k, v)))
    lazy = cache.update(k[:, :, 32:], v[:, :, 32:], 0)
    first, second = (quest_attention_forward(MODULE, q[:, :, 32:], *lazy, None)[0] for _ in range(2))
    assert torch.equal(first, second)
    assert cache.paged.lengths == [33]
