"""What `PagedKVCache.stats` counts, against the pages that the verbs name, and the attention mass against dense."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import quest
import quest.stats
from quest import PagedKVCache, QuestConfig, packing_of
from quest.bytes import StepBytes
from quest.config import forced_pages
from quest.stats import LayerStats

HEADS, KV_HEADS, DIM, V_DIM = 4, 2, 8, 16
ROW = (DIM + V_DIM) * 4  # bytes of one token's K and V
LENGTHS = [1, 16, 17, 100, 0, 700]

PAGES = QuestConfig(page_size=16, budget=64, group_rule="relative")
CONFIGS = {
    "pages": PAGES,
    "per_head": PAGES.replace(group_rule="per_head"),
    "fraction": PAGES.replace(budget=0.2),
    "large blocks": QuestConfig(page_size=4, block_size=32, budget=70),
    "dense": PAGES.replace(dense_layers=(0,), group_rule="per_head"),
    "covered": PAGES.replace(budget=1024, group_rule="per_head"),
    "two levels": QuestConfig(budget=64, coarse_limit=200),
    "two levels, per_head": QuestConfig(budget=40, coarse_limit=64, coarse_keep=0.1, group_rule="per_head"),
    "two levels, all kept": QuestConfig(budget=64, coarse_keep=1.0),
    "two levels of pages": QuestConfig(page_size=4, summary_bits=8, coarse_size=16, budget=64, coarse_limit=160),
    "one level": QuestConfig(page_size=4, summary_bits=4, budget=0.15),
    "one level of tokens": QuestConfig(page_size=1, summary_bits=2, budget=50),
}


def filled(config: QuestConfig, lengths: list[int], layers: int = 1) -> PagedKVCache:
    generator = torch.Generator().manual_seed(0)
    cache = PagedKVCache(layers, len(lengths), config=config)
    step = cache.extend(lengths)
    for layer in range(layers):
        new = [torch.randn(*step.slot_mapping.shape, KV_HEADS, dim, generator=generator) for dim in (DIM, V_DIM)]
        cache.append(layer, *new, step)
    return cache


def queries(batch: int, q_len: int = 1, seed: int = 1) -> Tensor:
    return torch.randn(batch, q_len, HEADS, DIM, generator=torch.Generator().manual_seed(seed))


def named(cache: PagedKVCache, query: Tensor, window: int | None) -> tuple[Tensor, Tensor]:
    """The scores and the page_idx of the verbs, [batch, q_len, heads, pages]."""
    config = cache.config
    layer, packing = config.layer(0), packing_of(config)
    agree = {"slack": layer.slack, "group_rule": layer.group_rule, "window": window}
    forced = {"budget": layer.budget, "sink_tokens": layer.sink_tokens, "recent_tokens": layer.recent_tokens}
    rows = cache.block_table, cache.seq_lens
    if packing is None:
        scores = quest.score(query, *(x[0] for x in cache.summaries), *rows, page_size=config.page_size, **agree)
    else:
        coarse = {name: getattr(layer, name) for name in ("coarse_keep", "coarse_limit", "coarse_slack")}
        pools = cache.k_cache[0], cache.summaries[0][0]
        scores = quest.score_packed(query, *pools, *rows, packing=packing, **coarse, **agree, **forced)
    return scores, quest.select(scores, rows[1], page_size=config.page_size, window=window, **forced)[0]


def summaries_of(config: QuestConfig, scored: set[int], begin: int, stop: int, pos: int, q_len: int) -> dict[str, int]:
    """Bytes of one KV head's summaries, from the pages that have a score; [begin, stop) might have had one."""
    packing, size = packing_of(config), config.page_size
    if packing is None:
        return {"summaries": len(scored) * 2 * DIM * 4}
    whole = packing.group_size if q_len == 1 else packing.block_size
    open_at, group = (pos + 1) // whole * whole // packing.page_size, packing.group_pages
    packed_anew = pos % packing.block_size + 1 if (pos + 1) % packing.group_size == 0 else 0
    might = {page // group for page in range(begin, min(stop, open_at))}
    kept = {page // group for page in scored if page < open_at}
    blocks = {g * group // packing.pages for g in might}
    read = {
        "cells": len(blocks) * packing.bounds_bytes(DIM),
        "coarse": len(blocks) * packing.coarse_pages * packing.coarse_bytes(DIM) if kept < might else 0,
        "open": (sum(page >= open_at for page in scored) * size + packed_anew) * DIM * 4,
    }
    return {"summaries": len(kept) * group * packing.page_bytes(DIM) + sum(read.values()), **read}


def expected(cache: PagedKVCache, query: Tensor, window: int | None) -> tuple[LayerStats, int]:
    """By looking at every page of every selection; and the rows before a window that count as read."""
    config, size, q_len = cache.config, cache.config.page_size, query.shape[1]
    layer = config.layer(0)
    scores, page_idx = named(cache, query, window)
    sink, recent = forced_pages(layer.sink_tokens, layer.recent_tokens, size)
    total, over = LayerStats(steps=1), 0
    for b, length in enumerate(cache.lengths):
        for t in range(q_len):
            pos = length - q_len + t
            if pos < 0:
                continue
            edge = 0 if window is None else max(0, pos + 1 - window)
            seen = range(edge // size, pos // size + 1)
            budget = math.ceil(layer.budget * (pos + 1)) if isinstance(layer.budget, float) else layer.budget
            new = max(0, length - q_len) // size if q_len > 1 else len(range(seen.stop))
            must = {p for p in seen if p < sink or p >= seen.stop - recent or p >= new}
            free = [p for p in seen if p not in must]
            sparse = not layer.dense and budget < pos + 1 - edge
            selections = [list(seen)] * KV_HEADS if layer.dense else [x[x >= 0].tolist() for x in page_idx[b, t]]
            rows = {p: min((p + 1) * size, pos + 1) - max(p * size, edge) for p in seen}
            read = {"kv": sum(rows[p] for pages in selections for p in pages) * ROW}
            read["dense"] = (pos + 1 - edge) * KV_HEADS * ROW
            if sparse:
                read["forced"] = len(selections) * sum(rows[p] for p in must) * ROW
                chosen = [pages for pages in selections if seen.start in free and len(pages) < len(seen)]
                over += sum(seen.start in pages for pages in chosen) * (edge % size)
                for heads in scores[b, t].chunk(KV_HEADS):
                    scored = set((heads > -math.inf).any(0).nonzero().flatten().tolist())
                    ends = (free[0], free[-1] + 1) if free else (0, 0)
                    for kind, count in summaries_of(config, scored, *ends, pos, q_len).items():
                        read[kind] = read.get(kind, 0) + count
            pages = sum(map(len, selections))
            total += LayerStats(0, 1, StepBytes(**read), pages, len(selections) * len(must) if sparse else 0)
    return total, over


@pytest.mark.parametrize("q_len", [1, 3, 20])
@pytest.mark.parametrize("window", [None, 9, 64, 75, 200])
@pytest.mark.parametrize("name", CONFIGS)
def test_counts_are_those_of_the_pages_that_the_verbs_name(name: str, window: int | None, q_len: int) -> None:
    cache = filled(CONFIGS[name], LENGTHS)
    query = queries(len(LENGTHS), q_len)
    cache.attend(0, query, window=window)
    found = cache.stats.layers[0]
    want, over = expected(cache, query, window)
    assert (found.steps, found.tokens, found.pages, found.forced_pages) == (
        want.steps,
        want.tokens,
        want.pages,
        want.forced_pages,
    )
    kinds = ("summaries", "coarse", "cells", "open", "forced", "dense")
    assert [getattr(found.bytes, kind) for kind in kinds] == [getattr(want.bytes, kind) for kind in kinds]
    assert found.bytes.kv == want.bytes.kv + over * ROW
    assert over == 0 or (window is not None and cache.config.page_size > 1)


def decode(cache: PagedKVCache, layer: int, step: Any, seed: int, **options: Any) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    batch, q_len = step.slot_mapping.shape
    new = [torch.randn(batch, q_len, KV_HEADS, dim, generator=generator) for dim in (DIM, V_DIM)]
    return cache.decode(layer, queries(batch, q_len, seed), *new, step, **options)


def run(cache: PagedKVCache, steps: int = 5, q_len: int = 1, **options: Any) -> list[Tensor]:
    outs = []
    for i in range(steps):
        step = cache.extend(q_len)
        outs += [x for layer in range(cache.num_layers) for x in decode(cache, layer, step, 100 * layer + i, **options)]
    return outs


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"window": 70}, {"backend": "verbs"}, {"sinks": torch.ones(HEADS)}])
def test_every_way_through_decode_is_recorded(options: dict[str, Any]) -> None:
    """The first step with all checks, later ones past them (or not, with these options)."""
    cache = filled(PAGES.replace(dense_layers=(1,)), [200, 30], layers=3)
    run(cache, 5, **options)
    layers = cache.stats.layers
    assert bool(cache._quick) == (not options or "window" in options)
    assert list(layers) == [0, 1, 2]
    assert {(read.steps, read.tokens) for read in layers.values()} == {(5, 10)}
    sizes = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "window": options.get("window")}
    widths = {"head_dim": DIM, "v_head_dim": V_DIM, "itemsize": 4}
    for layer, read in layers.items():
        lengths = [start + i for start in (200, 30) for i in range(1, 6)]
        each = [quest.bytes.step_bytes(n, cache.config, layer, **sizes, **widths) for n in lengths]
        assert read.bytes == sum(each, StepBytes())
    assert layers[1].fraction == 1.0
    assert layers[1].forced_share == 0.0
    assert 0 < layers[0].forced_share <= 1
    total = cache.stats.total
    assert total.bytes == layers[0].bytes + layers[1].bytes + layers[2].bytes
    assert (total.steps, total.tokens) == (15, 30)


@torch.no_grad()
def test_lengths_are_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever becomes of the rows before anyone looks, and whether the sums are made early or late."""
    totals = []
    for most in (1, 1000):
        monkeypatch.setattr(quest.stats, "MOST_PENDING", most)
        cache = filled(PAGES, [300, 90, 5])
        run(cache, 2)
        cache.free(0)
        run(cache, 2)
        cache.fork([1, 1])
        cache.crop([20, 94])
        run(cache, 1)
        decode(cache, 0, cache.extend(2, start=[4, 7]), 3)  # a layer that comes late
        totals.append(cache.stats.total)
    lengths = [301, 91, 6, 302, 92, 7, 1, 93, 8, 2, 94, 9, 21, 95, 5, 6, 8, 9]
    assert totals[0] == totals[1]
    assert totals[0].bytes.dense == sum(lengths) * KV_HEADS * ROW
    assert (totals[0].steps, totals[0].tokens) == (6, len(lengths))


def test_what_is_refused_is_not_recorded() -> None:
    cache = filled(PAGES, [40])
    with pytest.raises(ValueError, match="head_dim"):
        cache.attend(0, queries(1)[..., :4])
    assert cache.stats.layers == {}
    assert cache.stats.total == LayerStats()


@torch.no_grad()
def test_a_copy_counts_by_itself() -> None:
    cache = filled(PAGES, [100])
    cache.stats.sample_mass(2)
    run(cache, 3)
    other = copy.deepcopy(cache)
    run(other, 3)
    assert (cache.stats.total.steps, other.stats.total.steps) == (3, 6)
    assert (cache.stats.layers[0].mass.steps, other.stats.layers[0].mass.steps) == (1, 3)
    other.stats.reset()
    assert other.stats.layers == {}
    run(other, 2)
    assert other.stats.layers[0].mass.steps == 1  # the setting stays
    assert cache.stats.total.steps == 3


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"window": 70, "softcap": 3.0}, {"sinks": torch.linspace(-1, 1, HEADS)}])
@pytest.mark.parametrize("config", ["pages", "per_head", "two levels"])
def test_mass_is_what_dense_attention_gives_the_pages_read(config: str, options: dict[str, Any]) -> None:
    """By the weights of dense attention, written out; and measuring changes no result."""
    plain, cache = (filled(CONFIGS[config], [200, 0, 90]) for _ in range(2))
    cache.stats.sample_mass(every=2)
    outs = run(cache, 5, **options)
    assert all(map(torch.equal, outs, run(plain, 5, **options)))
    assert plain.stats.layers[0].mass is None
    assert cache.stats.layers[0].bytes == plain.stats.layers[0].bytes

    measured = cache.stats.layers[0].mass
    assert measured.steps == 2
    shares = []
    again = filled(CONFIGS[config], [200, 0, 90])
    for i in range(5):
        decode(again, 0, again.extend(1), i)
        if i % 2 == 0:
            continue
        query = queries(3, 1, i)
        page_idx = named(again, query, options.get("window"))[1][:, 0]
        for b, length in enumerate(again.lengths):
            keys = again.dense(0)[0][b, :, :length].repeat_interleave(HEADS // KV_HEADS, 0)
            logits = (query[b, 0, :, None] * keys).sum(-1) * DIM**-0.5
            if "softcap" in options:
                logits = 3.0 * torch.tanh(logits / 3.0)
            if "window" in options:
                logits[:, : max(0, length - 70)] = -math.inf
            pages = torch.arange(length) // again.config.page_size
            picks = page_idx[b].repeat_interleave(HEADS // page_idx.shape[1], 0)
            read = torch.stack([torch.isin(pages, x) for x in picks])
            weight = logits.exp()
            sink = options["sinks"].exp() if "sinks" in options else 0.0
            shares.append(((weight * read).sum(1) + sink) / (weight.sum(1) + sink))
    shares = torch.stack(shares)
    torch.testing.assert_close(torch.tensor(measured.mean), shares.mean(0), atol=1e-5, rtol=0)
    torch.testing.assert_close(torch.tensor(measured.least), shares.amin(0), atol=1e-5, rtol=0)
    assert max(measured.mean) < 1


@torch.no_grad()
@pytest.mark.parametrize("name", ["covered", "dense"])
def test_mass_is_one_where_everything_is_read(name: str) -> None:
    cache = filled(CONFIGS[name], [1, 300])
    cache.stats.sample_mass(1)
    run(cache, 3, q_len=2)
    mass = cache.stats.layers[0].mass
    assert mass.steps == 3
    assert mass.mean == pytest.approx([1] * HEADS, abs=1e-5)
    assert mass.least == pytest.approx([1] * HEADS, abs=1e-5)


def test_rows_that_see_nothing_have_no_mass() -> None:
    cache = filled(PAGES, [3, 7])
    cache.reset()
    cache.stats.sample_mass(1)
    cache.attend(0, queries(2))
    assert cache.stats.layers[0] == LayerStats(steps=1)


@torch.no_grad()
def test_a_table_for_people() -> None:
    cache = filled(PAGES, [200], layers=2)
    run(cache)
    text = str(cache.stats)
    assert "KB per token" in text
    assert "mass" not in text
    assert [row.split()[1] for row in text.splitlines()[-4:-1]] == ["0", "1", "all"]
    cache.stats.sample_mass(1)
    run(cache)
    assert "mass kept" in str(cache.stats)
    assert cache.stats.table().row_count == 3
    assert PagedKVCache(1).stats.table().row_count == 1


@pytest.mark.parametrize(
    ("every", "error", "message"),
    [
        (-1, ValueError, "sample_mass: every must be at least 0, got -1"),
        (0.5, TypeError, "sample_mass: every must be an int, got 0.5"),
        (True, TypeError, "sample_mass: every must be an int, got True"),
    ],
)
def test_errors_name_the_argument(every: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error) as raised:
        PagedKVCache(1).stats.sample_mass(every)
    assert message in str(raised.value)


def test_a_model_of_transformers() -> None:
    """Prompts don't count, decode steps and drafts do, in paged layers; the cache's own reset keeps what was read."""
    tiny = pytest.importorskip("tiny_models")
    net, ids = tiny.model("qwen3-hybrid"), tiny.prompt(2, 40)
    cache = tiny.quest_cache("qwen3-hybrid", tiny.SMALL)
    stats = cache.stats
    tiny.forward(net, ids, cache)
    assert stats is cache.paged.stats
    assert stats.layers == {}
    stats.sample_mass(4)
    for t in range(8):
        tiny.forward(net, tiny.prompt(2, 1, seed=t), cache)
    layers = stats.layers
    assert list(layers) == [0, 2]  # the others are sliding
    for read in layers.values():
        assert (read.steps, read.tokens, read.mass.steps) == (8, 16, 2)
        assert read.pages == 8 * 2 * 2 * 3  # steps, rows, KV heads, pages under the budget
        assert 0 < min(read.mass.least) < 1
    other = copy.deepcopy(cache)
    assert other.stats is other.paged.stats
    tiny.forward(net, tiny.prompt(2, 1), other)
    cache.reset()
    tiny.forward(net, ids, cache)
    tiny.forward(net, tiny.prompt(2, 1), cache)
    assert stats is cache.paged.stats
    assert (stats.layers[0].steps, other.stats.layers[0].steps) == (9, 9)
