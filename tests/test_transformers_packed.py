"""Packed summaries through transformers: the same answers, and no trace of what was padded, cropped or reordered."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import test_transformers_generate as scenarios
import torch
from tiny_models import FAMILIES, dynamic_cache, forward, model, pad_left, prompt, quest_cache

from quest import packing_of, reference_packed
from quest.integrations.transformers import QuestCache

FORMATS: dict[str, dict[str, Any]] = {
    "tokens": dict(page_size=1, summary_bits=2, coarse_size=16, block_size=64, sink_tokens=2, recent_tokens=4),
    "pages": dict(page_size=2, summary_bits=4, coarse_size=8, block_size=32, sink_tokens=4, recent_tokens=4),
    "one level": dict(page_size=4, summary_bits=8, block_size=16, sink_tokens=4, recent_tokens=4),
}
SMALL = 12


@pytest.fixture(params=FORMATS)
def settings(request: pytest.FixtureRequest) -> dict[str, Any]:
    return FORMATS[request.param]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", ["plain", "left_padded", "chat_turns"])
def test_a_full_budget_gives_the_same_text(family: str, name: str, settings: dict[str, Any]) -> None:
    scenario, net = getattr(scenarios, name), model(family)
    dense = scenario(net, lambda: dynamic_cache(family), family)
    assert torch.equal(scenario(net, lambda: quest_cache(family, 1.0, **settings), family), dense)


def packed_blocks(cache: QuestCache) -> list[torch.Tensor]:
    """The codes of every block that has some, row by row, which must be what the reference packs."""
    paged, found = cache.paged, []
    assert paged is not None
    packing = packing_of(paged.config)
    assert packing is not None
    for layer, k_cache in enumerate(paged.k_cache):
        packed = paged.summaries[0][layer]
        if k_cache is None or packed is None:
            continue
        expected, rows = packed.clone(), (paged.block_table, paged.seq_lens, paged.seq_lens)
        sink = paged.config.layer(layer).sink_tokens
        reference_packed.pack(k_cache, expected, *rows, packing=packing, sink_tokens=sink)
        for row, length in enumerate(paged.lengths):
            coded = length // packing.group_size * packing.group_size
            blocks = paged.block_table[row, : -(-coded // packing.block_size)].long()
            assert packed[blocks].equal(expected[blocks])
            found.append(packed[blocks])
    return found


@pytest.mark.parametrize("family", ["llama", "smollm2", "gemma3"])
def test_a_padded_row_equals_its_own_run(family: str, settings: dict[str, Any]) -> None:
    pads = [0, 9, 17, 60]
    ids, mask = pad_left(prompt(4, 91), pads)
    together, net = quest_cache(family, SMALL, **settings), model(family)
    steps = [ids, *prompt(4, 20, seed=1).split(1, 1)]
    rows = []
    for row, pad in enumerate(pads):
        cache = quest_cache(family, SMALL, **settings)
        rows.append([forward(net, x[row : row + 1, pad if i == 0 else 0 :], cache)[0, -1] for i, x in enumerate(steps)])
    for i, x in enumerate(steps):
        places = (mask.cumsum(1) - 1).clamp_min(0)[:, -x.shape[1] :]
        logits = forward(net, x, together, attention_mask=mask, position_ids=places)
        for row in range(4):
            assert torch.allclose(logits[row, -1], rows[row][i], atol=5e-4), (row, i)
        mask = torch.cat([mask, mask.new_ones(4, 1)], 1)
    assert len(packed_blocks(together)) > 0


@pytest.mark.parametrize("cut", [1, 7, 40])
def test_rejected_tokens_leave_no_trace(cut: int, settings: dict[str, Any]) -> None:
    """Logits bit equal to those of a cache that never saw what was cropped, into packed blocks too."""
    ids, mask = pad_left(prompt(2, 86), [0, 7])
    net, caches = model("llama"), [quest_cache("llama", SMALL, **settings) for _ in range(2)]
    for cache in caches:
        forward(net, ids, cache, attention_mask=mask)
    kept = caches[0]
    for x in prompt(2, cut, seed=1).split(1, 1):
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        forward(net, x, kept, attention_mask=mask)
    kept.crop(-cut)
    mask = mask[:, :86]
    assert all(map(torch.equal, packed_blocks(kept), packed_blocks(caches[1])))
    for x in prompt(2, 30, seed=2).split(1, 1):
        mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        after, never = (forward(net, x, cache, attention_mask=mask) for cache in caches)
        assert torch.equal(after, never)


def test_reordered_and_copied_caches(settings: dict[str, Any]) -> None:
    net, cache = model("llama"), quest_cache("llama", SMALL, **settings)
    forward(net, prompt(2, 70), cache)
    other = copy.deepcopy(cache)
    cache.reorder_cache(torch.tensor([1, 0]))
    x = prompt(2, 1, seed=3)
    swapped, straight = forward(net, x.flip(0), cache), forward(net, x, other)
    assert torch.allclose(swapped.flip(0), straight, atol=1e-5)
    assert len(packed_blocks(cache)) == len(packed_blocks(other)) == 6
