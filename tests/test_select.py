"""select: forced pages and the exact best of the others, ascending, in range, ties to the lower index."""

from __future__ import annotations

import math

import pytest
import torch
from cases import INF, NAN, make

import quest
from quest import reference


def best_pages(scores, length, *, q_len, t, page_size, budget, sink_tokens=0, recent_tokens=1, window=None):
    """What one token reads, from the definition."""
    pos = length - q_len + t
    if pos < 0:
        return []
    seen = range(max(0, pos + 1 - (window or pos + 1)), pos + 1)
    tokens = math.ceil(budget * (pos + 1)) if isinstance(budget, float) else budget
    visible = sorted({token // page_size for token in seen})
    if tokens >= len(seen):
        return visible
    forced = {p for p in visible if p < math.ceil(sink_tokens / page_size)}
    forced |= {p for p in visible if p > pos // page_size - max(1, math.ceil(recent_tokens / page_size))}
    if q_len > 1:
        forced |= {p for p in visible if p >= max(0, length - q_len) // page_size}
    free = sorted(set(visible) - forced, key=lambda p: (math.isnan(scores[p]), -scores[p], p))
    return sorted([*forced, *free[: max(0, tokens // page_size - len(forced))]])


def check(scores, lengths, **options):
    """Kernel and reference against the definition."""
    lens = torch.tensor(lengths, dtype=torch.int32)
    page_idx, counts = quest.select(scores, lens, **options)
    expected = reference.select(scores, lens, **options)
    assert page_idx.equal(expected[0])
    assert counts.equal(expected[1])
    for b, t, h in torch.cartesian_prod(*map(torch.arange, scores.shape[:3])).tolist():
        row, count = page_idx[b, t, h].tolist(), int(counts[b, t, h])
        pages = best_pages(scores[b, t, h].tolist(), lengths[b], q_len=scores.shape[1], t=t, **options)
        assert row == pages + [-1] * (len(row) - count), (b, t, h)
        assert count == len(pages)


def random_scores(*shape, seed=0, values=(-2.0, -1.0, -0.0, 0.0, 1.0, 1.0, 3.0)):
    """Many ties, some NaN and infinities."""
    rng = torch.Generator().manual_seed(seed)
    scores = torch.tensor([*values, NAN, INF, -INF])[torch.randint(len(values) + 3, shape, generator=rng)]
    noise = torch.randn(shape, generator=rng)
    return torch.where(noise > 0.5, noise, scores)


@pytest.mark.parametrize(
    ("lengths", "page_size", "options"),
    [
        ((128, 127, 113, 1, 0), 16, {"budget": 48}),
        ((128, 127, 113, 1, 0), 16, {"budget": 64, "sink_tokens": 17, "recent_tokens": 30}),
        ((128, 127, 113, 33, 16), 16, {"budget": 48, "window": 60}),
        ((128, 64, 113, 33, 16), 16, {"budget": 50, "window": 50, "sink_tokens": 16}),
        ((128, 127, 113, 40, 16), 16, {"budget": 0.3}),
        ((128, 127, 113, 40, 16), 16, {"budget": 0.001, "sink_tokens": 64, "recent_tokens": 64}),
        ((100, 7, 3), 1, {"budget": 9, "sink_tokens": 2, "recent_tokens": 3}),
        ((500, 499, 1), 5, {"budget": 250, "window": 333}),
        ((1025, 1024), 512, {"budget": 1024}),
    ],
    ids=str,
)
@pytest.mark.parametrize("q_len", [1, 2, 20])
def test_exact_best_pages(kernels, lengths, page_size, options, q_len):
    max_pages = -(-max(lengths) // page_size) + 2
    scores = random_scores(len(lengths), q_len, 2, max_pages)
    scores[..., -2:] = INF  # beyond every row: never chosen
    check(scores, lengths, page_size=page_size, **options)


def test_floats_that_differ_in_the_last_bit(kernels):
    """All 32 bits decide."""
    scores = torch.arange(200, dtype=torch.int32).flip(0).add(0x3F800000).view(torch.float32)
    for sign in (1, -1):
        check((scores * sign)[None, None, None], [200], page_size=1, budget=20)
    subnormal = torch.arange(100, dtype=torch.int32).view(torch.float32)
    check(subnormal[None, None, None], [100], page_size=1, budget=20)


@pytest.mark.parametrize("budget", [1, 5, 4097, 20000, 49999])
def test_fifty_thousand_pages(isa, budget):
    """Scores close together and far apart, with and without ties, NaN and infinities."""
    n = 50_000
    rng = torch.Generator().manual_seed(budget)
    noise = torch.randn(n, generator=rng)
    rows = [noise, 1 + noise / 1e3, -(noise * 20).exp(), noise.round(), torch.where(noise > 2, 7.0, random_scores(n))]
    check(torch.stack(rows)[None, None], [n], page_size=1, budget=budget)


def test_c05_budget_above_the_pages(kernels):
    """Every page, -1 behind the count whatever lay in that memory before."""
    for length, pages in ((20, [0, 1]), (1, [0])):
        stale = [torch.full((1, 1, 1, 8), 123456, dtype=torch.int32) for _ in range(100)]
        del stale
        scores, lens = torch.zeros(1, 1, 1, 8), torch.tensor([length], dtype=torch.int32)
        page_idx, counts = quest.select(scores, lens, page_size=16, budget=8 * 16)
        assert page_idx.flatten().tolist() == pages + [-1] * (8 - len(pages))
        assert counts.item() == len(pages)


def test_c13_equal_keys_give_equal_pages_in_every_row(isa, threads):
    """From keys to pages: 8 equal bounds, 3 pages, 4 rows, 100 repeats."""
    torch.set_num_threads(2)
    case = make("ragged", seq_lens=(128,) * 4, head_dim=128)
    for summary in (case.page_min, case.page_max):
        summary.fill_(0.7)
    query = case.query[:1].expand(4, -1, -1, -1)
    for repeat in range(100):
        scores = quest.score(query, *case.summary, page_size=16)
        page_idx, counts = quest.select(scores, case.seq_lens, page_size=16, budget=48)
        assert page_idx.flatten(0, 2).tolist() == [[0, 1, 7]] * 8, repeat
        assert (counts == 3).all()


def test_c18_defaults_keep_first_and_newest_page(kernels):
    """The default configuration, page 0 with the lowest bound."""
    config = quest.QuestConfig(budget=5 * 16)
    scores = torch.arange(12.0)[None, None]
    layer, lens = config.layer(0), torch.tensor([12 * 16], dtype=torch.int32)
    options = {"sink_tokens": layer.sink_tokens, "recent_tokens": layer.recent_tokens, "budget": layer.budget}
    page_idx, _ = quest.select(scores, lens, page_size=16, **options)
    assert page_idx.flatten().tolist() == [0, 8, 9, 10, 11]


@pytest.mark.parametrize("budget", [0, 1, 15, 47])
def test_c18_budget_below_the_forced_pages(budget):
    scores, lens = torch.zeros(1, 1, 8), torch.tensor([128], dtype=torch.int32)
    with pytest.raises(ValueError, match=f"select: budget must hold the forced pages: 1 sink .* got budget {budget}"):
        quest.select(scores, lens, page_size=16, budget=budget, sink_tokens=1, recent_tokens=32)


def test_strided_scores(kernels):
    scores = random_scores(3, 2, 4, 30)
    wide = torch.full((3, 2, 4, 64), INF)
    wide[..., :30] = scores
    lens = torch.tensor([470, 300, 40], dtype=torch.int32)
    got = quest.select(wide[..., :30], lens, page_size=16, budget=96)
    assert all(map(torch.equal, got, quest.select(scores, lens, page_size=16, budget=96)))


def test_repeats_agree(isa, threads):
    torch.set_num_threads(4)
    scores = random_scores(4, 1, 4, 5000)
    lens = torch.full((4,), 5000 * 16, dtype=torch.int32)
    first = quest.select(scores, lens, page_size=16, budget=2048)
    for _ in range(20):
        assert all(map(torch.equal, first, quest.select(scores, lens, page_size=16, budget=2048)))
