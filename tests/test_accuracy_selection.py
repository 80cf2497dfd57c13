"""Rules that `quest bench accuracy` compares with, against brute force, and the case that min/max bounds get wrong."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from quest import reference
from quest.bench.selection import Evict, Observed, OraclePages, QuestPages, View, Window, mass, page_bounds, recalls
from quest.bench.simulate import logits_of

TOKENS, HEADS, GROUP, WIDTH = 203, 2, 3, 8


def view_of(q_len: int, seed: int = 0, prompt: int = TOKENS, observed: Observed | None = None) -> View:
    generator = torch.Generator().manual_seed(seed)
    query = 2 * torch.randn(1, HEADS * GROUP, q_len, WIDTH, generator=generator)
    key = torch.randn(1, HEADS, TOKENS, WIDTH, generator=generator)
    scale = WIDTH**-0.5
    grouped = query[0].unflatten(0, (HEADS, GROUP))
    return View(0, grouped, key[0], logits_of(query, key, scale), scale, prompt, observed)


def positions_of(read: torch.Tensor) -> list[int]:
    return read.nonzero().flatten().tolist()


def test_logits() -> None:
    view = view_of(5)
    for h in range(HEADS):
        for g in range(GROUP):
            for t in range(5):
                want = [float(view.query[h, g, t] @ k * view.scale) for k in view.key[h][: TOKENS - 4 + t]]
                assert view.logits[h, g, t, : len(want)].tolist() == pytest.approx(want, abs=1e-5)
                assert (view.logits[h, g, t, len(want) :] == -torch.inf).all()


@pytest.mark.parametrize("budget", [16, 40, 203, 300])
def test_window(budget: int) -> None:
    read = Window(budget)(view_of(3))
    assert read.shape == (HEADS, 1, 3, TOKENS)
    for t, position in enumerate((200, 201, 202)):
        newest = range(max(0, position - (budget - 16) + 1), position + 1)
        assert positions_of(read[0, 0, t]) == sorted({*range(16), *newest})


@pytest.mark.parametrize(("page_size", "budget"), [(16, 64), (16, 112), (4, 64), (1, 64), (4, 300)])
def test_oracles(page_size: int, budget: int) -> None:
    view = view_of(4)
    read, weight = OraclePages(budget, page_size)(view), mass(view)
    for h in range(HEADS):
        for t, position in enumerate(range(TOKENS - 4, TOKENS)):
            if budget > position:
                assert positions_of(read[h, 0, t]) == [*range(position + 1)]
                continue
            last = position // page_size
            sums = [float(weight[h, 0, t, p * page_size : (p + 1) * page_size].sum()) for p in range(last + 1)]
            chosen = {p for p in range(last + 1) if p < -(-16 // page_size) or p > last - -(-32 // page_size)}
            rest = sorted((p for p in range(last + 1) if p not in chosen), key=lambda p: -sums[p])
            chosen |= {*rest[: budget // page_size - len(chosen)]}
            want = [i for i in range(position + 1) if i // page_size in chosen]
            assert positions_of(read[h, 0, t]) == want


@pytest.mark.parametrize("forced", [(16, 32), (0, 1)])
def test_quest_selects_as_the_reference(forced: tuple[int, int]) -> None:
    view, (sink, recent) = view_of(1), forced
    read = QuestPages(64, sink_tokens=sink, recent_tokens=recent)(view)
    key = torch.nn.functional.pad(view.key, (0, 0, 0, -TOKENS % 16)).unflatten(1, (-1, 16)).transpose(0, 1)
    low, high = torch.zeros(2, len(key), HEADS, 1, WIDTH)
    table, length = torch.arange(len(key), dtype=torch.int32)[None], torch.tensor([TOKENS], dtype=torch.int32)
    reference.summarise(key, low, high, table, length, length)
    query = view.query.transpose(1, 2).transpose(0, 1).flatten(1, 2)[None]  # [1, 1, heads, width]
    scores = reference.score(query, low, high, table, length, page_size=16, group_rule="per_head")
    options = dict(page_size=16, budget=64, sink_tokens=sink, recent_tokens=recent)
    chosen, _ = reference.select(scores, length, **options)  # type: ignore[arg-type]
    for i in range(HEADS * GROUP):
        pages = {*chosen[0, 0, i].tolist()} - {-1}
        want = [token for token in range(TOKENS) if token // 16 in pages]
        assert positions_of(read[i // GROUP, i % GROUP, 0]) == want


def test_eviction() -> None:
    prompt, budget = 190, 60
    whole = view_of(TOKENS)
    seen = whole.query[:, :, prompt - 32 : prompt]
    weight = whole.logits[:, :, :prompt, :prompt].softmax(-1)
    view = view_of(TOKENS, prompt=prompt, observed=Observed(seen, weight.sum((1, 2))))
    snap, heavy = Evict(budget)(view), Evict(budget, accumulated=True)(view)
    for h in range(HEADS):
        received = weight[h, :, -32:].sum((0, 1)).tolist()
        pooled = [max(received[max(0, i - 3) : i + 4]) for i in range(prompt)]
        best = sorted(range(prompt - 32), key=lambda i: -pooled[i])[: budget - 32]
        kept = {*best, *range(prompt - 32, prompt)}
        # Neighbours of one heavy token are worth the same, so any of them may come last
        got = {*positions_of(snap[h, 0, -1])}
        assert len(got & {*range(prompt)}) == budget
        assert sorted(pooled[i] for i in got if i < prompt - 32) == pytest.approx(sorted(pooled[i] for i in best))
        assert {*range(prompt - 32, TOKENS)} <= got
        assert len(kept) == budget

        total = weight[h].sum((0, 1)).tolist()
        best = sorted(range(prompt - 30), key=lambda i: -total[i])[:30]
        assert positions_of(heavy[h, 0, -1]) == sorted([*best, *range(prompt - 30, TOKENS)])
    assert not (snap & (view.logits[:, :1] == -torch.inf)).any()  # nothing later than the query
    with pytest.raises(ValueError, match="what the prompt's reading leaves behind"):
        Evict(budget)(view_of(1))


def test_one_outlier_widens_a_box() -> None:
    """Page A holds (10, 0) and (0, 10), page B twice (8, 8); the query is (1, 1). The bound of A is 20, above B's 16,
    though its best logit is 10: Quest takes A by design, and the numbers must say what that costs."""
    key = torch.tensor([[[[10.0, 0], [0, 10], [8, 8], [8, 8]]]])
    query = torch.tensor([[[[1.0, 1.0]]]])
    logits = logits_of(query, key, 1.0)
    assert logits.flatten().tolist() == [10, 10, 16, 16]
    bounds = page_bounds(query, key[0], 2)
    assert bounds.flatten().tolist() == [20, 16]
    read = (bounds == bounds.amax(-1, keepdim=True)).repeat_interleave(2, -1)
    assert read.flatten().tolist() == [True, True, False, False]
    kept, hits = recalls(read, logits)
    assert hits.item() == 0
    assert 1 - kept.item() == pytest.approx(0.9975, abs=5e-5)
    best = OraclePages(2, 2, sink_tokens=0, recent_tokens=1)(View(0, query, key[0], logits, 1.0, 4))
    kept, hits = recalls(best, logits)
    assert hits.item() == 1
    assert kept.item() == pytest.approx(0.9975, abs=5e-5)
