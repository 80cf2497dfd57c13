"""The attention function: masks in every form, and the arguments that models pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from tiny_models import (
    SMALL,
    attend,
    check_summaries,
    dynamic_cache,
    forward,
    model,
    model_config,
    prompt,
    quest_cache,
    states,
    tokens,
)
from torch import Tensor

from quest.integrations.transformers import QuestCache, quest_attention_forward

MODULE = SimpleNamespace(num_key_value_groups=1, is_causal=True)


def masks_of(visible: Tensor) -> dict[str, Tensor]:
    zero = torch.zeros(visible.shape)
    return {
        "bool": visible,
        "-inf": zero.masked_fill(~visible, float("-inf")),
        "min": zero.masked_fill(~visible, torch.finfo(torch.float32).min),
    }


@pytest.mark.parametrize("form", ["none", "bool", "-inf", "min"])
def test_causality_in_every_form_of_mask(form: str) -> None:
    """C22: the last token changes no earlier logit; every form of mask equals eager attention."""
    ids, net, eager = prompt(1, 6), model("llama"), model("llama", "eager")
    mask = None if form == "none" else masks_of(torch.ones(6, 6).tril().bool()[None, None])[form]
    for cache in (quest_cache("llama"), dynamic_cache("llama"), None):
        logits = forward(net, ids, cache, attention_mask=mask)
        other = torch.cat([ids[:, :5], ids[:, 5:] % 100 + 1], 1)
        cache = (
            None if cache is None else type(cache)(config=model_config("llama")) if cache is dynamic_cache else cache
        )
        if isinstance(cache, QuestCache):
            cache.reset()
        else:
            cache = None
        changed = forward(net, other, cache, attention_mask=mask)
        assert torch.equal(changed[:, :5], logits[:, :5])
        assert not torch.equal(changed[:, 5], logits[:, 5])
        assert torch.allclose(logits, forward(eager, ids, None), atol=1e-4)


def test_unused_static_slots_have_no_effect() -> None:
    """C22: a StaticCache of 32 slots, 6 used."""
    ids = prompt(1, 6)
    cache = transformers.StaticCache(config=model_config("llama"), max_cache_len=32)
    logits = forward(model("llama"), ids, cache)
    assert torch.allclose(logits, forward(model("llama", "eager"), ids, None), atol=1e-4)


@pytest.mark.parametrize(
    ("form", "pads"), [("none", 0), ("bool", 0), ("-inf", 0), ("min", 0), ("bool", 3), ("-inf", 3), ("min", 3)]
)
def test_mask_forms_of_prompt_chunk_and_step(form: str, pads: int) -> None:
    """The same tokens whatever form the mask has; padding by it is never stored."""
    cache, expected_k, expected_v = quest_cache("llama"), *states(2, 18)
    query = torch.randn(2, 2, 18, 8, generator=torch.Generator().manual_seed(1))
    real = torch.arange(18) >= torch.tensor([0, pads])[:, None]
    visible = torch.ones(18, 18).tril().bool() & real[:, None, None, :]
    dense = torch.nn.functional.scaled_dot_product_attention(query, expected_k, expected_v, visible).transpose(1, 2)
    for first, last in ((0, 7), (7, 12), (12, 13), (13, 14), (14, 18)):
        part = slice(first, last)
        mask = None if form == "none" else masks_of(visible[:, :, part, :last])[form]
        out = attend(cache, 0, query[:, :, part], expected_k[:, :, part], expected_v[:, :, part], mask)
        wanted = real[:, part]
        assert torch.allclose(out[wanted], dense[:, part][wanted], atol=1e-5)
    assert cache.paged.lengths == [18, 18 - pads]
    for row, (k, v) in enumerate(tokens(cache, 0)):
        assert torch.equal(k, expected_k[row][:, real[row]])
        assert torch.equal(v, expected_v[row][:, real[row]])
    check_summaries(cache.paged)
    assert torch.equal(cache.layers[0].keys, expected_k * real[:, None, :, None])


def test_masks_that_pages_do_not_know() -> None:
    cache, (k, v) = quest_cache("llama", SMALL), states(1, 20)
    q = torch.randn(1, 2, 20, 8)
    attend(cache, 0, q, k, v)
    one = [x[:, :, :1] for x in (q, k, v)]
    hiding = torch.ones(1, 1, 1, 21, dtype=torch.bool)
    hiding[..., 4] = False
    with pytest.raises(ValueError, match="must not hide stored tokens in a sparse step, but hides 1"):
        attend(cache, 0, *one, hiding)
    cache.reset()
    with pytest.raises(ValueError, match="must be 0 or hidden"):
        attend(cache, 1, *one, torch.full((1, 1, 1, 1), -0.5))
    with pytest.raises(TypeError, match="must be bool or float"):
        attend(cache, 2, *one, torch.ones(1, 1, 1, 1, dtype=torch.int64))
    with pytest.raises(ValueError, match="attention_mask must be"):
        attend(quest_cache("llama"), 0, *one, torch.ones(1, 1, 1, 0, dtype=torch.bool))


def test_a_chunk_may_have_any_mask() -> None:
    """Several new tokens with a mask that is not causal, as for images, are a dense step."""
    cache, (k, v) = quest_cache("llama", SMALL), states(1, 24)
    q = torch.randn(1, 2, 24, 8)
    visible = torch.ones(24, 24).tril().bool()
    visible[16:, 16:] = True
    visible[20:, 3:9] = False
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)
    for recording in (False, True):
        for first, last in ((0, 16), (16, 24)):
            part = slice(first, last)
            out = attend(cache, 0, *(x[:, :, part] for x in (q, k, v)), visible[None, None, part, :last])
            assert torch.allclose(out, expected[:, part], atol=1e-5)
        assert cache.layers[0].record_past == recording
        cache.reset()
        cache.activate_past_recording()


EIGHT = torch.zeros(1, 1, 2, 64)
EIGHT[:, :, 1, :] = 0.125  # logits before scaling 0 and 8 for a query of ones


@pytest.mark.parametrize("where", ["prompt", "step", "plain"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"scaling": 1.0}, 0.999665),
        ({"scaling": 0.125}, 0.731059),
        ({"scaling": 0.5, "softcap": 2.0}, 0.873033),
        ({"scaling": 0.5}, 0.982014),
        ({"scaling": 1e-9, "s_aux": torch.zeros(1)}, 1 / 3),
    ],
)
def test_scale_softcap_and_sinks(where: str, options: dict[str, Any], expected: float) -> None:
    """C16: logits {0, 8} before scaling, V = {0, 1}, in a prompt, a sparse step, and with tensors of another cache."""
    key, value, query = EIGHT, torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(1, 1, 2, 64), torch.ones(1, 1, 2, 64)
    cache = quest_cache("llama")
    if where == "prompt":
        out = attend(cache, 0, query, key, value, **options)[:, -1]
    elif where == "step":
        attend(cache, 0, query[:, :, :1], key[:, :, :1], value[:, :, :1], **options)
        out = attend(cache, 0, query[:, :, 1:], key[:, :, 1:], value[:, :, 1:], **options)
    else:
        out = quest_attention_forward(MODULE, query, key, value, None, **options)[0][:, -1]
    assert torch.allclose(out, torch.tensor(expected), atol=1e-5), out


@pytest.mark.parametrize(
    "options", [{"softcap": 3.0}, {"s_aux": torch.linspace(-1, 1, 4)}, {"softcap": 3.0, "s_aux": torch.ones(4)}]
)
def test_prompt_with_softcap_and_sinks_is_that_of_steps(options: dict[str, Any]) -> None:
    k, v = states(2, 13)
    q = torch.randn(2, 4, 13, 8, generator=torch.Generator().manual_seed(2))
    together, single = quest_cache("llama"), quest_cache("llama")
    mask = torch.arange(13) >= torch.tensor([0, 4])[:, None]
    visible = torch.ones(13, 13).tril().bool() & mask[:, None, None, :]
    out = attend(together, 0, q, k, v, visible, **options)
    assert not out[1, :4].any()  # padding sees nothing
    for t in range(13):
        part = slice(t, t + 1)
        one = attend(single, 0, q[:, :, part], k[:, :, part], v[:, :, part], visible[:, :, part, : t + 1], **options)
        assert torch.allclose(one[mask[:, part]], out[:, part][mask[:, part]], atol=1e-5)


def test_sliding_window_argument_bounds_a_paged_layer() -> None:
    """A module that passes `sliding_window` gets it, in a prompt, a chunk and a step, with a mask or without."""
    k, v = states(1, 30)
    q = torch.randn(1, 2, 30, 8, generator=torch.Generator().manual_seed(3))
    column = torch.arange(30)
    visible = (column <= column[:, None]) & (column > column[:, None] - 7)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, visible).transpose(1, 2)
    for with_mask in (False, True):
        cache = quest_cache("llama")
        for first, last in ((0, 17), (17, 21), (21, 22), (22, 23)):
            part = slice(first, last)
            mask = visible[None, None, part, :last] if with_mask else None
            out = attend(cache, 0, *(x[:, :, part] for x in (q, k, v)), mask, sliding_window=7)
            assert torch.allclose(out, expected[:, part], atol=1e-5)


def test_what_is_refused() -> None:
    ids, cache = prompt(1, 9), quest_cache("llama")
    with pytest.raises(ValueError, match="output_attentions must be False: weights of pages that were not read"):
        forward(model("llama"), ids, cache, output_attentions=True)
    cache = quest_cache("llama")
    with pytest.raises(ValueError, match="must not require grad"):
        model("llama")(ids, use_cache=True, past_key_values=cache)
    cache = quest_cache("llama")
    attend(cache, 0, *[torch.randn(1, 2, 5, 8)] * 3)
    with pytest.raises(ValueError, match="dropout must be 0 and position_bias None"):
        attend(cache, 0, *[torch.randn(1, 2, 1, 8)] * 3, dropout=0.1)
