"""Tables computed by hand: the reference and every kernel give these very numbers."""

from __future__ import annotations

import math

import pytest
import torch

INF, NAN = float("inf"), float("nan")


def cache_of(keys, values=None, page_size=16, block_size=None, dtype=torch.float32):
    """A cache of one row and one KV head, blocks in reverse order, NaN in every other slot; summaries from the rows."""
    keys = torch.tensor(keys, dtype=dtype)
    values = torch.zeros(len(keys), 1, dtype=dtype) if values is None else torch.tensor(values, dtype=dtype)
    values = values[:, None] if values.dim() == 1 else values
    block_size = block_size or page_size
    blocks = -(-len(keys) // block_size)
    k_cache = torch.full((blocks, 1, block_size, keys.shape[1]), NAN, dtype=dtype)
    v_cache = torch.full((blocks, 1, block_size, values.shape[1]), NAN, dtype=dtype)
    table = torch.arange(blocks - 1, -1, -1, dtype=torch.int32)[None]
    for token in range(len(keys)):
        at = (table[0, token // block_size], 0, token % block_size)
        k_cache[at], v_cache[at] = keys[token], values[token]
    return k_cache, v_cache, table, torch.tensor([len(keys)], dtype=torch.int32)


def summary_of(verbs, k_cache, table, seq_lens, page_size=16):
    """Summaries by the verb under test, in place of zeros."""
    shape = (*k_cache.shape[:2], k_cache.shape[2] // page_size, k_cache.shape[3])
    page_min, page_max = torch.zeros(shape, dtype=k_cache.dtype), torch.zeros(shape, dtype=k_cache.dtype)
    verbs.summarise(k_cache, page_min, page_max, table, seq_lens, seq_lens)
    return page_min, page_max


def bounds(verbs, query, keys, page_size=16, dtype=torch.float32, **options):
    """Score of each page for one query head at slack 1."""
    k_cache, _, table, seq_lens = cache_of(keys, page_size=page_size, dtype=dtype)
    page_min, page_max = summary_of(verbs, k_cache, table, seq_lens, page_size)
    query = torch.tensor(query, dtype=dtype)[None, None]
    options = {"group_rule": "per_head"} | options
    return verbs.score(query, page_min, page_max, table, seq_lens, page_size=page_size, **options)[0, 0].tolist()


# ---- summarise, score ----


def test_c08_partly_filled_page(verbs):
    keys = [[-1.0] * 4] * 16 + [[-5.0] * 4]
    k_cache, _, table, seq_lens = cache_of(keys)
    page_min, page_max = summary_of(verbs, k_cache, table, seq_lens)
    assert page_min[table[0, 1], 0, 0].tolist() == [-5.0] * 4
    assert page_max[table[0, 1], 0, 0].tolist() == [-5.0] * 4
    assert bounds(verbs, [1.0] * 4, keys) == [-4.0, -20.0]


def test_c08_sign_mix(verbs):
    assert bounds(verbs, [1.0, -1.0], [[2.0, 5.0], [-1.0, -3.0]]) == [5.0]  # the best q.k is 2


def test_slack_by_hand(verbs):
    # max (2, 5), min (-1, -3), q (1, -1): midpoint 0.5 - 1, half range 1.5 + 4
    keys = [[2.0, 5.0], [-1.0, -3.0]]
    for slack in (0.0, 0.25, 0.5, 1.0):
        assert bounds(verbs, [1.0, -1.0], keys, slack=slack) == [-0.5 + slack * 5.5]


def test_group_rules_by_hand(verbs):
    # Page summaries are the keys themselves (page_size 1), so scores are q.k: head 0 (0, 1, 2), head 1 (4, 0, 0).
    k_cache, _, table, seq_lens = cache_of([[0.0, 4.0], [1.0, 0.0], [2.0, 0.0]], page_size=1)
    page_min, page_max = summary_of(verbs, k_cache, table, seq_lens, 1)
    query = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    args = (query, page_min, page_max, table, seq_lens)

    def rule(name):
        return verbs.score(*args, page_size=1, group_rule=name, softmax_scale=0.5)[0].tolist()

    assert rule("per_head") == [[0.0, 1.0, 2.0], [4.0, 0.0, 0.0]]
    assert rule("relative") == [[0.0, -1.0, 0.0]]
    a, b = [1, math.exp(0.5), math.exp(1)], [math.exp(2), 1, 1]
    assert rule("softmax")[0] == pytest.approx([(x / sum(a) + y / sum(b)) / 2 for x, y in zip(a, b)], rel=1e-6)


def test_c11_very_negative_bound_is_still_selectable(verbs):
    scores = torch.tensor([bounds(verbs, [100.0] * 64, [[-100.0] * 64] * 4, dtype=torch.bfloat16)])
    assert scores.tolist() == [[-640000.0]]  # -80000 after the scale of 0.125
    page_idx, counts = verbs.select(scores[:, None], torch.tensor([4], dtype=torch.int32), page_size=16, budget=16)
    assert (page_idx.tolist(), counts.tolist()) == ([[[0]]], [[1]])


def test_c12_bounds_beyond_fp16(verbs):
    keys = [[60.0 if token // 16 == 3 else 59.0] * 128 for token in range(80)]
    got = bounds(verbs, [60.0] * 128, keys, dtype=torch.float16)
    assert got == [453120.0] * 3 + [460800.0] + [453120.0]
    for rule in ("softmax", "relative"):
        agreed = bounds(verbs, [60.0] * 128, keys, dtype=torch.float16, group_rule=rule)
        assert max(range(5), key=agreed.__getitem__) == 3
        assert all(map(math.isfinite, agreed))


def test_c47_outlier_page(verbs):
    """One outlier per channel widens A's box beyond the better page's: at slack 1 A is chosen, by design."""
    keys = [[10.0, 0.0], [0.0, 10.0], [8.0, 8.0], [8.0, 8.0], [0.0, 0.0]]
    assert bounds(verbs, [1.0, 1.0], keys, page_size=2) == [20.0, 16.0, 0.0]
    assert bounds(verbs, [1.0, 1.0], keys, page_size=2, slack=0.4)[:2] == pytest.approx([14.0, 16.0])
    lens = torch.tensor([5], dtype=torch.int32)
    for slack, best in ((1.0, 0), (0.4, 1)):
        scores = torch.tensor([[bounds(verbs, [1.0, 1.0], keys, page_size=2, slack=slack)]])
        assert verbs.select(scores, lens, page_size=2, budget=4)[0].tolist() == [[[best, 2]]]  # 2: the newest
    # Choosing A loses 0.9975 of what A and B hold of the softmax.
    k_cache, v_cache, table, _ = cache_of(keys[:4], page_size=2)
    lens, lse = torch.tensor([4], dtype=torch.int32), []
    for page in (0, 1):
        idx = torch.tensor([[[page]]], dtype=torch.int32)
        args = (torch.ones(1, 1, 2), k_cache, v_cache, table, lens, idx)
        lse.append(verbs.attend(*args, page_size=2, softmax_scale=1.0)[1].item())
    assert 1 / (1 + math.exp(lse[0] - lse[1])) == pytest.approx(0.9975, abs=5e-5)


# ---- select ----


def pick(verbs, scores, length, budget_pages, page_size=16, **options):
    page_idx, counts = verbs.select(
        torch.tensor([[scores]]),
        torch.tensor([length], dtype=torch.int32),
        page_size=page_size,
        budget=budget_pages * page_size,
        **options,
    )
    pages = page_idx[0, 0, : int(counts)].tolist()
    assert (page_idx[0, 0, int(counts) :] == -1).all()
    return pages


def test_c13_ties_go_to_the_lower_page(verbs):
    scores = torch.ones(4, 1, 8)
    lens = torch.full((4,), 128, dtype=torch.int32)
    for _ in range(100 if verbs.__name__ == "quest" else 2):
        page_idx, counts = verbs.select(scores, lens, page_size=16, budget=48)
        assert page_idx.tolist() == [[[0, 1, 7]]] * 4  # 7: the newest, forced
        assert counts.tolist() == [[3]] * 4


def test_c15_infinite_and_nan_scores(verbs):
    bad = [INF, 1.0, INF, NAN, 0.0, -INF]
    assert pick(verbs, [*bad, 0.0], 7 * 16, 3) == [0, 2, 6]  # 6: the newest
    assert pick(verbs, [*bad, 0.0], 7 * 16, 4) == [0, 1, 2, 6]
    assert pick(verbs, [*bad, 0.0], 7 * 16, 5) == [0, 1, 2, 4, 6]
    assert pick(verbs, [*bad, 0.0], 7 * 16, 6) == [0, 1, 2, 4, 5, 6]  # NaN ranks below -inf
    assert pick(verbs, [NAN] * 7, 7 * 16, 3) == [0, 1, 6]
    assert pick(verbs, [0.0, -0.0, 0.0, -1e-45, 1e-45, 5.0], 6 * 16, 4) == [0, 1, 4, 5]  # both zeros are equal


def test_c18_forced_pages_and_tiny_budgets(verbs):
    scores = [-9.0, 1.0, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0]
    assert pick(verbs, scores, 8 * 16, 3, sink_tokens=16) == [0, 2, 7]
    assert pick(verbs, scores, 8 * 16, 1) == [7]
    assert pick(verbs, scores, 8 * 16, 8) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert pick(verbs, scores, 8 * 16, 4, sink_tokens=1, recent_tokens=17) == [0, 2, 6, 7]


def test_budget_counts_whole_pages(verbs):
    scores, lens = torch.zeros(1, 1, 8), torch.tensor([121], dtype=torch.int32)

    def count(budget):
        return verbs.select(scores, lens, page_size=16, budget=budget)[1].item()

    assert [count(b) for b in (16, 31, 32, 120, 121, 128)] == [1, 1, 2, 7, 8, 8]
    assert [count(b) for b in (0.01, 0.256, 0.264, 0.5, 0.99, 1.0)] == [1, 1, 2, 3, 7, 8]  # 31, 32 tokens


def test_selection_inside_a_window(verbs):
    # 64 tokens, window 20: tokens 44 .. 63, so pages 2 (its last four tokens) and 3.
    scores = [9.0, 8.0, 0.0, 0.0]
    assert pick(verbs, scores, 64, 1, window=20) == [3]
    assert pick(verbs, scores, 64, 2, window=20) == [2, 3]  # 32 >= 20 visible tokens
    assert pick(verbs, scores, 64, 2, window=33) == [1, 3]
    assert pick(verbs, scores, 64, 2, window=34, sink_tokens=16) == [1, 3]  # page 0 is out of sight


def test_new_tokens_read_every_page_of_theirs(verbs):
    # 6 tokens, pages of 2, the last 3 are new: pages 1 (token 3) and 2 are forced for them.
    scores, lens = torch.tensor([9.0, 1.0, 0.0]).expand(1, 3, 1, 3), torch.tensor([6], dtype=torch.int32)
    page_idx, counts = verbs.select(scores, lens, page_size=2, budget=4)
    assert counts.tolist() == [[[2], [2], [2]]]
    assert page_idx[0, :, 0].tolist() == [[0, 1], [1, 2], [1, 2]]


# ---- attend, merge ----


def test_c03_page_sizes_give_the_mean(verbs):
    """A zero query makes attention uniform: the mean of V, and the logarithm of the length."""
    for page_size, length in ((1, 3), (8, 11), (24, 37), (512, 513)):
        cache = cache_of([[1.0] * 8] * length, [float(v) for v in range(length)], page_size)
        out, lse = verbs.attend(torch.zeros(1, 1, 8), *cache)
        assert out.item() == pytest.approx((length - 1) / 2, rel=1e-5)
        assert lse.item() == pytest.approx(math.log(length), rel=1e-6)


def test_c04_row_without_tokens(verbs):
    k_cache, v_cache, table, _ = cache_of([[1.0, 0.0]] * 5, [0.0, 1.0, 2.0, 3.0, 4.0])
    lens = torch.tensor([0, 5], dtype=torch.int32)
    table = torch.tensor([[-1], [0]], dtype=torch.int32)
    out, lse = verbs.attend(torch.zeros(2, 1, 2), k_cache, v_cache, table, lens)
    assert out.flatten().tolist() == pytest.approx([0.0, 2.0])
    assert lse.flatten().tolist() == pytest.approx([-INF, math.log(5)])
    page_min, page_max = summary_of(verbs, k_cache, table, lens)
    scores = verbs.score(torch.zeros(2, 1, 2), page_min, page_max, table, lens, page_size=16)
    page_idx, counts = verbs.select(scores, lens, page_size=16, budget=16)
    assert (page_idx[0].tolist(), counts.tolist()) == ([[-1]], [[0], [1]])


def test_c11_very_negative_logits(verbs):
    cache = cache_of([[-100.0] * 64] * 4, [0.0, 1.0, 2.0, 3.0], dtype=torch.bfloat16)
    query = torch.full((1, 1, 64), 100.0, dtype=torch.bfloat16)
    out, lse = verbs.attend(query, *cache, softmax_scale=0.125)
    assert out.item() == 1.5
    assert lse.item() == pytest.approx(-80000 + math.log(4), abs=0.01)


def test_c12_output_is_finite(verbs):
    keys = [[60.0 if token // 16 == 3 else 59.0] * 128 for token in range(64)]
    cache = cache_of(keys, [1.0 if token // 16 == 3 else 0.0 for token in range(64)], dtype=torch.float16)
    out, lse = verbs.attend(torch.full((1, 1, 128), 60.0, dtype=torch.float16), *cache, softmax_scale=128**-0.5)
    assert out.item() == 1.0
    assert lse.item() == pytest.approx(460800 * 128**-0.5 + math.log(16), rel=1e-6)


def test_c16_scale_of_the_model(verbs):
    cache = cache_of([[0.0] * 64, [0.125] * 64], [0.0, 1.0])  # logits 0 and 8
    query = torch.ones(1, 1, 64)
    assert verbs.attend(query, *cache, softmax_scale=1.0)[0].item() == pytest.approx(0.999665, abs=1e-6)
    assert verbs.attend(query, *cache)[0].item() == pytest.approx(0.731059, abs=1e-6)


def test_c16_softcap(verbs):
    cache = cache_of([[0.0] * 64, [0.0625] * 64], [0.0, 1.0])  # logits 0 and 4
    query = torch.ones(1, 1, 64)
    assert verbs.attend(query, *cache, softmax_scale=1.0, softcap=2.0)[0].item() == pytest.approx(0.873033, abs=1e-6)
    assert verbs.attend(query, *cache, softmax_scale=1.0)[0].item() == pytest.approx(0.982014, abs=1e-6)


def test_c16_sink_logit(verbs):
    cache = cache_of([[0.0] * 64], [2.0])
    out, lse = verbs.attend(torch.ones(1, 1, 64), *cache, sinks=torch.zeros(1))
    assert out.item() == pytest.approx(1.0)
    assert lse.item() == pytest.approx(math.log(2))


def test_window_edge_inside_a_page(verbs):
    cache = cache_of([[0.0] * 4] * 40, [float(v) for v in range(40)])
    for window, mean in ((1, 39.0), (3, 38.0), (17, 31.0), (39, 20.0), (40, 19.5), (999, 19.5)):
        assert verbs.attend(torch.zeros(1, 1, 4), *cache, window=window)[0].item() == pytest.approx(mean)


def test_c10_merge(verbs):
    def merge(a, b):
        out, lse = verbs.merge(*(torch.tensor(x) for x in ([[a[0]]], [a[1]], [[b[0]]], [b[1]])))
        return out.item(), lse.item()

    assert merge((0.0, -INF), (0.0, -INF)) == (0.0, -INF)
    assert merge((0.0, -INF), (3.0, 1.5)) == (3.0, 1.5)
    assert merge((3.0, 1.5), (0.0, -INF)) == (3.0, 1.5)
    assert merge((NAN, -INF), (3.0, 1.5)) == (3.0, 1.5)  # a part without tokens takes no part
    out, lse = merge((1.0, math.log(4)), (0.0, 0.0))
    assert out == pytest.approx(0.8, abs=1e-6)  # 0.8808 if the bases were mixed
    assert lse == pytest.approx(math.log(5), abs=1e-6)


def test_merge_of_large_logits(verbs):
    """The weights of the parts add up to one even where the sum's logarithm rounds to theirs."""
    for base in (-80000.0, 3e5, 1e8, -1e30):
        out, _ = verbs.merge(*(torch.tensor(x) for x in ([[1.0]], [base], [[3.0]], [base])))
        assert out.item() == pytest.approx(2.0, rel=1e-6)
