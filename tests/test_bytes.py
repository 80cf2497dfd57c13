"""Bytes counted by formula, against tables worked out by hand and against what the verbs select."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import quest
from quest import QuestConfig
from quest.bytes import StepBytes, model_bytes, step_bytes, summary_overhead


def count(context: int, config: QuestConfig, **changes: Any) -> StepBytes:
    sizes = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 128, "itemsize": 2}
    return step_bytes(context, config, **{**sizes, **changes})


def test_summaries_count_as_well() -> None:  # C47
    read = count(4096, QuestConfig(page_size=16, budget=16 * 16))
    assert (read.summaries, read.kv, read.dense) == (131_072, 131_072, 2_097_152)
    assert 1 / read.fraction == 8.0


@pytest.mark.parametrize("config", [QuestConfig(budget=4096), QuestConfig(budget=1.0), QuestConfig(dense_layers=(0,))])
def test_a_dense_step_scores_nothing(config: QuestConfig) -> None:
    read = count(4096, config)
    assert (read.summaries, read.kv, read.fraction) == (0, read.dense, 1.0)


def test_heads_and_widths() -> None:
    shared = QuestConfig(page_size=16, budget=256, group_rule="relative")
    each = shared.replace(group_rule="per_head")
    sizes = {"num_heads": 8, "num_kv_heads": 2, "v_head_dim": 64, "itemsize": 4}
    assert count(4096, shared, **sizes) == StepBytes(
        summaries=256 * 2 * 2 * 128 * 4,
        kv=256 * 2 * (128 + 64) * 4,
        dense=4096 * 2 * (128 + 64) * 4,
        forced=48 * 2 * (128 + 64) * 4,
    )
    assert count(4096, each, **sizes).kv == 4 * count(4096, shared, **sizes).kv
    assert count(4096, each, **sizes).summaries == count(4096, shared, **sizes).summaries


@pytest.mark.parametrize("context", [65, 100, 512, 513])
@pytest.mark.parametrize("budget", [64, 70, 0.2])
@pytest.mark.parametrize("group_rule", ["relative", "per_head"])
def test_rows_are_those_that_select_names(context: int, budget: int | float, group_rule: str) -> None:
    config = QuestConfig(page_size=16, budget=budget, sink_tokens=16, recent_tokens=32, group_rule=group_rule)
    heads, kv_heads = 4, 2
    pages = -(-context // 16)
    scores = torch.randn(1, heads if group_rule == "per_head" else kv_heads, pages)
    page_idx, counts = quest.select(
        scores,
        torch.tensor([context], dtype=torch.int32),
        page_size=16,
        budget=budget,
        sink_tokens=16,
        recent_tokens=32,
    )
    newest = context - (pages - 1) * 16
    rows = int(counts.sum()) * 16 - int((page_idx == pages - 1).sum()) * (16 - newest)
    read = count(context, config, num_heads=heads, num_kv_heads=kv_heads, head_dim=8)
    assert read.kv == rows * 2 * 8 * 2


def test_a_model_is_the_sum_of_its_layers() -> None:
    text = SimpleNamespace(
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=32,
        num_hidden_layers=4,
        layer_types=["full_attention", "sliding_attention", "full_attention", "linear_attention"],
        sliding_window=100,
    )
    model = SimpleNamespace(get_text_config=lambda: text)
    config = QuestConfig(page_size=16, budget=64, dense_layers=(0,))
    dense = 1000 * 2 * 2 * 8 * 4
    window = 100 * 2 * 2 * 8 * 4
    sparse = step_bytes(1000, config, 2, num_heads=4, num_kv_heads=2, head_dim=8, itemsize=4)
    assert model_bytes(model, config, 1000, 4) == sparse + StepBytes(kv=dense + window, dense=dense + window)


def test_packed_summaries_by_kind() -> None:
    """7,000 tokens: 27 blocks of 256 and a part of one; 437 groups of 16 tokens, the last 8 have no codes but are
    recent. All worked out by hand."""
    config = QuestConfig(budget=256, coarse_keep=0.25, coarse_limit=1 << 20)
    read = count(7000, config)
    assert read.cells == 28 * 4 * 128
    assert read.coarse == 28 * 16 * 128 * 2 * 2 // 8
    assert read.open == 0
    assert read.summaries - read.cells - read.coarse == 110 * 16 * 128 * 2 // 8  # a quarter of 437
    assert (read.kv, read.forced) == (256 * 512, 20 * 512)
    few = count(7000, config.replace(coarse_limit=64))
    assert read.summaries - few.summaries == (110 - 34) * 16 * 32  # 34 of 16 tokens: twice the budget, and two more
    assert count(7008, config).open == 96 * 128 * 2  # a group is complete: the keys of its block are read
    assert count(7000, config.replace(recent_tokens=4)).open == 4 * 128 * 2
    one = count(7000, QuestConfig(page_size=4, summary_bits=4, coarse_size=None, budget=256))
    assert one.coarse == 0


def test_overhead_in_memory() -> None:
    assert summary_overhead(QuestConfig(page_size=16), 128) == 1 / 16
    assert summary_overhead(QuestConfig(), 128) == (4 * 128 + 16 * 64 + 256 * 32) / (256 * 512)


def test_an_outlier_draws_the_bound_and_costs_the_mass() -> None:  # C47: by design; reports have to show it
    keys = torch.zeros(1, 4, 8)
    keys[0, :, :2] = torch.tensor([[10.0, 0], [0, 10], [8, 8], [8, 8]])
    k_cache = keys.view(2, 1, 2, 8)
    low, high = k_cache.amin(2, keepdim=True), k_cache.amax(2, keepdim=True)
    query = torch.zeros(1, 1, 8)
    query[..., :2] = 1
    table, lengths = torch.tensor([[0, 1]], dtype=torch.int32), torch.tensor([4], dtype=torch.int32)
    scores = quest.score(
        query, low, high, table, lengths, page_size=2, softmax_scale=1.0, slack=1.0, group_rule="per_head"
    )
    assert scores.flatten().tolist() == [20, 16]
    only = torch.tensor([[[0]]], dtype=torch.int32)
    options = {"page_size": 2, "softmax_scale": 1.0}
    _, chosen = quest.attend(query, k_cache, k_cache, table, lengths, only, **options)
    _, everything = quest.attend(query, k_cache, k_cache, table, lengths, None, **options)
    assert float(1 - (chosen - everything).exp()) == pytest.approx(0.9975, abs=1e-4)
