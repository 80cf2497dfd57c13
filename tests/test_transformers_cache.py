"""QuestCache as a transformers cache: what can be asked of it and done with it."""

from __future__ import annotations

import copy
import inspect
import weakref
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    SMALL,
    check_summaries,
    dynamic_cache,
    forward,
    model,
    model_config,
    pad_left,
    prompt,
    quest_cache,
    states,
)
from transformers.cache_utils import Cache, DynamicLayer

from quest.integrations.transformers import QuestCache
from quest.integrations.transformers_layer import LazyKeys, QuestLayer


@pytest.mark.parametrize(
    "form", [{}, {"args": (None,)}, {"args": ({},)}, {"args": ({"cache_position": None},)}, {"kwargs": {}}]
)
def test_update_gives_back_what_dynamic_layer_gives(form: dict[str, Any]) -> None:
    """C26: all ways to call update; K and V as from a dense layer, in shape and value."""
    cache, layer = quest_cache("llama"), DynamicLayer()
    args, options = form.get("args", ()), {k: v for k, v in form.items() if k != "args"}
    for seed, q_len in enumerate((5, 1, 1, 4)):
        k, v = states(2, q_len, seed)
        if options and "cache_kwargs" in inspect.signature(Cache.update).parameters:  # its name in early versions
            options = {"cache_kwargs": options.get("kwargs")}
        lazy = cache.update(k, v, 1, *args, **options)
        expected = layer.update(k, v)
        for got, want in zip(lazy, expected):
            assert isinstance(got, torch.Tensor)
            assert (got.shape, got.dtype, got.device) == (want.shape, want.dtype, want.device)
            assert torch.equal(got + 0, want)
        assert cache.get_seq_length(1) == layer.get_seq_length()
    assert torch.equal(cache.layers[1].keys, layer.keys)
    assert torch.equal(cache.layers[1].values, layer.values)


@pytest.mark.parametrize("family", FAMILIES)
def test_duties_of_a_cache(family: str) -> None:
    """C26: what can be asked of a DynamicCache has the same answer."""
    ours, theirs = quest_cache(family, SMALL), dynamic_cache(family)
    ids, mask = pad_left(prompt(2, 20), [0, 6])
    for net, cache in ((model(family), ours), (model(family, "sdpa"), theirs)):
        forward(net, ids, cache, attention_mask=mask)
        forward(net, ids[:, :1], cache, attention_mask=torch.cat([mask, mask[:, :1] * 0 + 1], 1))
    by_position = "cache_position" in inspect.signature(DynamicLayer.get_mask_sizes).parameters  # in early versions
    q_len = torch.arange(3) if by_position else 3
    assert len(ours) == len(theirs)
    assert not ours.is_compileable
    assert ours.is_initialized
    assert ours.is_sliding == theirs.is_sliding
    for layer in range(len(ours)):
        assert ours.get_seq_length(layer) == theirs.get_seq_length(layer)
        assert ours.get_mask_sizes(q_len, layer) == theirs.get_mask_sizes(q_len, layer)
        assert type(ours.layers[layer]) is (
            QuestLayer if type(theirs.layers[layer]) is DynamicLayer else type(theirs.layers[layer])
        )
    for name in ("is_croppable", "get_max_length"):
        if hasattr(theirs, name):
            ask = lambda x, name=name: getattr(x, name)() if callable(getattr(x, name)) else getattr(x, name)  # noqa: E731
            assert ask(ours) == ask(theirs)
    for (k, v, window), (other_k, other_v, other_window) in zip(ours, theirs):
        assert k.shape == other_k.shape
        assert v.shape == other_v.shape
        assert (window is None) == (other_window is None)
    if theirs.is_sliding.count(False):
        ours.reset()
        assert ours.get_seq_length(theirs.is_sliding.index(False)) == 0
        assert ours.paged is None
    assert repr(ours).startswith("QuestCache(layers=[")


def test_dense_layers_have_the_tokens_of_dynamic_cache() -> None:
    ours, theirs = quest_cache("llama"), dynamic_cache("llama")
    ids = prompt(2, 19)
    for net, cache in ((model("llama"), ours), (model("llama", "sdpa"), theirs)):
        forward(net, ids, cache)
        forward(net, ids[:, :1], cache)
    for (k, v, _), (other_k, other_v, _) in zip(ours, theirs):
        assert torch.allclose(k, other_k, atol=1e-5)
        assert torch.allclose(v, other_v, atol=1e-5)


def test_crop_means_what_it_means_for_dynamic_layer() -> None:
    for remove in (-1, -4, -20, -21, -30, 0, 3, 25):
        cache, layer = quest_cache("llama"), DynamicLayer()
        k, v = states(1, 20)
        layer.update(k, v)
        cache.update(k, v, 0)
        outcomes = []
        for crop in (layer.crop, cache.crop):
            try:
                outcomes.append(crop(remove))
            except ValueError as error:
                outcomes.append(str(error))
        assert outcomes[0] == outcomes[1]
        assert cache.get_seq_length() == layer.keys.shape[2]
        if layer.keys.shape[2]:
            assert torch.equal(cache.layers[0].keys, layer.keys)


def test_layers_may_be_filled_in_other_portions() -> None:
    """A layer that is updated later than another, or by other portions, holds what it was given."""
    cache, (k, v), (k1, v1) = quest_cache("llama"), states(2, 9), states(2, 9, seed=1)
    cache.update(k[:, :, :4], v[:, :, :4], 0)
    cache.update(k[:, :, 4:], v[:, :, 4:], 0)
    cache.update(k1[:, :, :6], v1[:, :, :6], 1)
    cache.update(k1[:, :, 6:7], v1[:, :, 6:7], 1)
    cache.update(k1[:, :, 7:], v1[:, :, 7:], 1)
    cache.update(k, v, 2)
    for layer, want in enumerate((k, k1, k)):
        assert torch.equal(cache.layers[layer].keys, want)
    cache.crop(-2)
    for layer, want in enumerate((k, k1, k)):
        assert torch.equal(cache.layers[layer].keys, want[:, :, :7])
    check_summaries(cache.paged)


def test_lazy_states_are_tensors_to_look_at() -> None:
    cache, (k, v) = quest_cache("llama"), states(2, 6)
    lazy_k, lazy_v = cache.update(k, v, 0)
    assert type(lazy_k) is LazyKeys
    assert "LazyKeys(layer 0" in repr(lazy_k)
    assert torch.equal(lazy_k.transpose(1, 2).reshape(2, 6, -1), k.transpose(1, 2).reshape(2, 6, -1))
    assert torch.equal(torch.cat([lazy_v, lazy_v], 1), torch.cat([v, v], 1))
    assert torch.equal(lazy_v[:, 1, 2:4], v[:, 1, 2:4])
    assert torch.equal(torch.matmul(k, lazy_k.transpose(2, 3)), k @ k.transpose(2, 3))
    for write in (lambda: lazy_k.mul_(2), lambda: lazy_k.copy_(k)):
        with pytest.raises(TypeError, match="can't be written to"):
            write()
    cache.update(k, v, 0)
    assert torch.equal(lazy_k + 0, k)  # as they were
    unseen, _ = cache.update(k, v, 0)
    cache.crop(-1)
    with pytest.raises(RuntimeError, match="cropped, reordered or reset"):
        unseen + 0


def test_layers_share_lazy_states_that_nobody_keeps() -> None:
    cache, (k, v), (k1, v1) = quest_cache("llama"), states(2, 6), states(2, 6, seed=1)
    places = [[id(x) for x in cache.update(k, v, layer)] for layer in (0, 1)]
    assert places[0] == places[1]
    kept = cache.update(k1, v1, 0)
    other, _ = cache.update(k, v, 1)
    assert torch.equal(kept[0] + 0, torch.cat([k, k1], 2))
    assert torch.equal(kept[1] + 0, torch.cat([v, v1], 2))
    assert torch.equal(other + 0, torch.cat([k, k], 2))
    last, _ = cache.update(k, v, 2)
    layers = [weakref.ref(layer) for layer in cache.layers]
    del cache
    assert not any(layer() for layer in layers)  # without the garbage collector
    with pytest.raises(RuntimeError, match="is no more"):
        last + 0


def test_deepcopy_between_update_and_attention() -> None:
    cache, (k, v) = quest_cache("llama"), states(1, 9)
    cache.update(k, v, 0)
    other = copy.deepcopy(cache)
    other.update(*states(1, 3, seed=1), 0)
    assert (cache.get_seq_length(), other.get_seq_length()) == (9, 12)
    assert other.config is cache.config
    cache.update(k, v, 0)
    assert torch.equal(cache.layers[0].keys, torch.cat([k, k], 2))
    assert torch.equal(other.layers[0].keys[:, :, :9], k)


def test_bad_arguments() -> None:
    with pytest.raises(
        TypeError, match=r"model_config must be a model's config \(model.config\), got LlamaForCausalLM"
    ):
        QuestCache(model("llama"))
    with pytest.raises(TypeError, match="config must be a QuestConfig, got dict"):
        QuestCache(model_config("llama"), config={"budget": 3})
    cache = quest_cache("llama")
    cache.update(*states(2, 4), 0)
    cache.update(*states(2, 1), 0)
    with pytest.raises(ValueError, match=r"must be \[2, num_kv_heads, q_len, head_dim\]"):
        cache.update(*states(3, 1), 0)
    for call in (cache.layers[0].reset, lambda: cache.layers[0].crop(-1)):
        with pytest.raises(NotImplementedError, match="call the cache's method"):
            call()


def test_a_cache_outlives_inference_mode() -> None:
    """What a cache holds may be changed in any mode, whichever it was made or copied in."""
    ids, mask = pad_left(prompt(2, 20), [0, 6])
    with torch.inference_mode():
        cache = quest_cache("llama", SMALL)
        forward(model("llama"), ids, cache, attention_mask=mask)
        forward(model("llama"), ids[:, :1], cache, attention_mask=torch.cat([mask, mask[:, :1] * 0 + 1], 1))
        copied = copy.deepcopy(cache)
    for one in (cache, copied):
        one.crop(-3)
        one.reorder_cache(torch.tensor([1, 0]))
        one.batch_repeat_interleave(2)
        longer = torch.cat([mask[[1, 1, 0, 0], :-2], mask[:, :1].new_ones(4, 30)], 1)
        with torch.no_grad():
            forward(model("llama"), ids[:1, :1].expand(4, 30), one, attention_mask=longer)
        check_summaries(one.paged)
