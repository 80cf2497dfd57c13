"""Sparse steps of a model: what is read, what is stored, and that roll-back and padding leave no trace."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import (
    FAMILIES,
    SMALL,
    check_summaries,
    dynamic_cache,
    forward,
    generate,
    model,
    pad_left,
    prompt,
    quest_cache,
)
from torch import Tensor
from transformers import DynamicCache

from quest import PagedKVCache
from quest.integrations.transformers_layer import LazyStates, QuestLayer

PACKED: dict[str, Any] = dict(page_size=1, summary_bits=2, coarse_size=16, block_size=64)


def test_a_step_reads_pages_and_never_builds_dense_states(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, mask = pad_left(prompt(2, 40), [0, 13])
    steps: list[tuple[int, ...]] = []
    decode = PagedKVCache.decode

    def count(self: PagedKVCache, layer: int, query: Tensor, *args: Any, **options: Any) -> Any:
        steps.append((layer, query.shape[2 if options["heads_first"] else 1]))
        return decode(self, layer, query, *args, **options)

    def refuse(self: LazyStates) -> None:
        raise AssertionError("dense states were built")

    monkeypatch.setattr(PagedKVCache, "decode", count)
    monkeypatch.setattr(LazyStates, "dense", refuse)
    monkeypatch.setattr(QuestLayer, "states", refuse)
    sparse = generate(model("llama"), ids, quest_cache("llama", SMALL), attention_mask=mask)
    assert steps == [(layer, 1) for _ in range(23) for layer in range(3)]
    monkeypatch.undo()
    dense = generate(model("llama"), ids, quest_cache("llama"), attention_mask=mask)
    assert not torch.equal(sparse, dense)  # the budget shows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("budget", [SMALL, 0.5])
def test_a_padded_row_equals_its_own_run(family: str, budget: int | float) -> None:
    """C19: with the same selection, row by row, and no padding in pages, summaries or budget."""
    pads = [0, 9, 17, 30]
    ids, mask = pad_left(prompt(4, 31), pads)
    together, net = quest_cache(family, budget), model(family)
    steps = [ids, *prompt(4, 5, seed=1).split(1, 1)]
    rows = []
    for row, pad in enumerate(pads):
        cache = quest_cache(family, budget)
        rows.append([forward(net, x[row : row + 1, pad if i == 0 else 0 :], cache)[0, -1] for i, x in enumerate(steps)])
    for i, x in enumerate(steps):
        places = (mask.cumsum(1) - 1).clamp_min(0)[:, -x.shape[1] :]
        logits = forward(net, x, together, attention_mask=mask, position_ids=places)
        for row in range(4):
            assert torch.allclose(logits[row, -1], rows[row][i], atol=2e-4), (row, i)
        mask = torch.cat([mask, mask.new_ones(4, 1)], 1)
    if together.paged is not None:
        assert together.paged.lengths == [36 - pad for pad in pads]
        check_summaries(together.paged)


@pytest.mark.parametrize("cut", [1, 3, 6])
def test_rejected_tokens_leave_no_trace(cut: int) -> None:
    """Logits bit equal to those of a cache that never saw what was cropped, padded rows included."""
    ids, mask = pad_left(prompt(2, 26), [0, 7])
    net, caches = model("llama"), [quest_cache("llama", SMALL) for _ in range(2)]
    for cache in caches:
        forward(net, ids, cache, attention_mask=mask)
    more = prompt(2, cut, seed=1)
    forward(net, more, caches[0], attention_mask=torch.cat([mask, torch.ones_like(more)], 1))
    caches[0].crop(-cut)
    check_summaries(caches[0].paged)
    for t in range(6):
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        one = prompt(2, 1, seed=2 + t)
        logits = [forward(net, one, cache, attention_mask=mask) for cache in caches]
        assert torch.equal(*logits)


def test_draft_tokens_are_a_sparse_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Assisted decoding records the past: its drafts read pages, each token its own; a longer prompt does not."""
    cache, net, ids = quest_cache("llama", SMALL), model("llama"), prompt(1, 120)
    forward(net, ids[:, :40], cache)
    cache.activate_past_recording()
    widths: list[int] = []
    decode = PagedKVCache.decode

    def count(self: PagedKVCache, layer: int, query: Tensor, *args: Any, **options: Any) -> Any:
        widths.append(query.shape[2 if options["heads_first"] else 1])
        return decode(self, layer, query, *args, **options)

    monkeypatch.setattr(PagedKVCache, "decode", count)
    drafts = forward(net, ids[:, 40:44], copy.deepcopy(cache))
    assert widths == [4, 4, 4]
    for t in range(4):
        one = forward(net, ids[:, 40 + t : 41 + t], cache)
        if t == 0:
            assert torch.allclose(one[:, 0], drafts[:, 0], atol=1e-4)
    widths.clear()
    forward(net, ids[:, 44:], cache)
    assert widths == []


def test_padding_between_drafts_is_no_sparse_step() -> None:
    """Rows whose new tokens do not end together: all layers read densely, and store the tokens only."""
    net, ids = model("llama"), prompt(2, 26)
    mask = torch.ones_like(ids)
    mask[0, 24:] = 0  # padding on the right, in the chunk
    sparse, dense = quest_cache("llama", SMALL), quest_cache("llama")
    sparse.activate_past_recording()
    for cache in (sparse, dense):
        forward(net, ids[:, :20], cache)
    logits = [forward(net, ids[:, 20:], cache, attention_mask=mask) for cache in (sparse, dense)]
    assert torch.allclose(logits[0][0, :4], logits[1][0, :4], atol=1e-4)
    assert torch.allclose(logits[0][1], logits[1][1], atol=1e-4)
    assert sparse.paged.lengths == [24, 26]
    check_summaries(sparse.paged)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_summaries_are_right_after_every_change(family: str) -> None:
    net, cache, ids = model(family), quest_cache(family, SMALL), prompt(2, 9)
    ids, mask = pad_left(ids, [0, 4])
    if family == "llama":
        cache.activate_past_recording()

    def more(n: int, batch: int) -> None:
        nonlocal mask
        mask = torch.cat([mask, mask.new_ones(batch, n)], 1)
        forward(net, prompt(batch, n, seed=n), cache, attention_mask=mask)
        check_summaries(cache.paged)

    forward(net, ids, cache, attention_mask=mask)
    for n in (1, 1, 5, 1):
        more(n, 2)
    if family == "llama":
        cache.crop(-2)
        mask = mask[:, :-2]
        check_summaries(cache.paged)
    cache.reorder_cache(torch.tensor([1, 1]))
    mask = mask[[1, 1]]
    more(1, 2)
    cache.batch_repeat_interleave(2)
    mask = mask.repeat_interleave(2, 0)
    more(3, 4)
    cache.batch_select_indices(torch.tensor([3, 0, 1]))
    mask = mask[[3, 0, 1]]
    more(1, 3)
    cache.batch_select_indices(torch.tensor([True, False, True]))
    mask = mask[[0, 2]]
    more(6, 2)
    assert cache.paged.lengths == mask.sum(1).tolist()


def test_half_precision() -> None:
    """bf16 throughout: dtype kept, dense budget close to sdpa."""
    net, other = model("llama", dtype=torch.bfloat16), model("llama", "sdpa", dtype=torch.bfloat16)
    ids, cache = prompt(2, 23), quest_cache("llama")
    forward(net, ids, cache)
    assert cache.paged.k_cache[0].dtype == torch.bfloat16
    theirs = dynamic_cache("llama")
    forward(other, ids, theirs)
    ours, want = forward(net, ids[:, :1], cache), forward(other, ids[:, :1], theirs)
    assert ours.dtype == torch.bfloat16
    assert (ours - want).abs().max() < 0.05 * want.abs().max()


@pytest.mark.parametrize("family", ["llama", "smollm2", "gemma3"])
@pytest.mark.parametrize("settings", [{}, PACKED], ids=["pages", "packed"])
@pytest.mark.parametrize("budget", [SMALL, 1e-9])
def test_c28_a_prompt_has_the_logits_of_all_its_tokens(
    family: str, settings: dict[str, Any], budget: int | float
) -> None:
    """Prompts are read densely, a later one too, over what sparse steps have stored. One token on its own is a step,
    and sparse, whether it is an answer's or what is left of a prompt."""
    net = model(family)
    for length in (1, 2, 3, 40, 150):
        cache, ids = quest_cache(family, budget, **settings), prompt(2, length)
        assert torch.equal(forward(net, ids, cache), forward(net, ids, dynamic_cache(family)))
        for x in prompt(2, 3, seed=1).split(1, 1):
            forward(net, x, cache)
        same = DynamicCache()
        for layer, (k, v, _) in enumerate(cache):
            same.update(k, v, layer)
        more = prompt(2, 5, seed=2)
        if family == "gemma3":
            continue  # its sliding layer has dropped tokens, which a plain cache would count
        assert torch.allclose(forward(net, more, cache), forward(net, more, same), atol=1e-5)
        one = prompt(2, 1, seed=3)
        sparse, dense = forward(net, one, cache), forward(net, one, same)
        assert torch.allclose(sparse, dense, atol=1e-5) == (budget == SMALL and length < 4)
