"""score: the linear form of a page's summary, and how a group's heads agree."""

from __future__ import annotations

import pytest
import torch
from cases import BF16, DTYPES, F16, INF, NAN, SHAPES, Shape, check_score, make, same

import quest
from quest import reference

RULES = ("softmax", "relative", "per_head")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_adversarial_inputs(kernels, shape):
    case = make(shape)
    for rule, slack in (("softmax", 1.0), ("relative", 0.4), ("per_head", 0.0)):
        options = {"group_rule": rule, "slack": slack}
        check_score(quest.score(case.query, *case.summary, page_size=case.page_size, **options), case, **options)


@pytest.mark.parametrize("heads", [(28, 4), (40, 8), (24, 4), (64, 4), (12, 1), (64, 1)], ids=str)
def test_c01_group_sizes(kernels, heads):
    case = make("group_7", num_heads=heads[0], num_kv_heads=heads[1], seq_lens=(37,))
    for rule in RULES:
        scores = quest.score(case.query, *case.summary, page_size=16, group_rule=rule)
        check_score(scores, case, group_rule=rule)
        assert scores.shape[2] == (heads[0] if rule == "per_head" else heads[1])


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 192, 256])
def test_c02_head_dims(kernels, head_dim):
    """Whole numbers: bounds equal the reference's exactly, lanes beyond head_dim add nothing."""
    for dtype in DTYPES:
        case = make("dim_32", head_dim=head_dim, dtype=dtype, layout="padded")
        whole = case.replace(query=case.query.mul(4).round())
        for summary in (whole.page_min, whole.page_max):
            summary.copy_(summary.mul(4).round())
        args = (whole.query, *whole.summary)
        got, expected = (v.score(*args, page_size=16, group_rule="per_head") for v in (quest, reference))
        assert got.equal(expected)


def test_unscored_pages_are_minus_infinity(kernels):
    """Beyond the token, outside its window, or with a later token in the summary."""
    case = make("page_8", seq_lens=(29,), q_len=3, num_heads=2)  # tokens 26, 27, 28 of pages 0 .. 3
    seen = {None: [[1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]], 12: [[0, 1, 1, 0], [0, 0, 1, 0], [0, 0, 1, 1]]}
    for rule in RULES:
        for window, pages in seen.items():
            scores = quest.score(case.query, *case.summary, page_size=8, group_rule=rule, window=window)
            assert (scores != -INF)[0, :, 0, :4].int().tolist() == pages
            assert (scores[..., 4:] == -INF).all()
            check_score(scores, case, group_rule=rule, window=window)


@pytest.mark.parametrize("window", [1, 5, 16, 17, 33, 1000])
def test_windows(kernels, window):
    for shape in ("ragged", "many_tokens"):
        case = make(shape)
        options = {"window": window, "group_rule": "softmax", "softmax_scale": 0.3}
        check_score(quest.score(case.query, *case.summary, page_size=16, **options), case, **options)


def test_never_looks_at_a_later_token(kernels):
    """Only the last of four new tokens scores their page; what the page's summary says reaches none before it."""
    case = make("many_tokens_bf16", seq_lens=(40,), q_len=4)
    for rule in RULES:
        options = {"page_size": 4, "group_rule": rule}
        expected = quest.score(case.query, *case.summary, **options)
        other = case.copy()
        for summary in (other.page_min, other.page_max):
            summary[case.block_table[0, 4].long(), :, 1] = NAN  # page 9
        scores = quest.score(case.query, *other.summary, **options)
        assert scores[:, :3].equal(expected[:, :3])
        assert scores[:, 3, :, 9].isnan().all()


def test_three_and_four_dimensions_agree(kernels):
    case = make("group_3")
    for rule in RULES:
        options = {"page_size": 16, "group_rule": rule}
        one = quest.score(case.query[:, 0], *case.summary, **options)
        assert one.equal(quest.score(case.query, *case.summary, **options)[:, 0])


@pytest.mark.parametrize("rule", RULES)
def test_infinite_and_nan_summaries(kernels, rule):
    """NaN makes a page's score NaN, for the group too; infinities are best or worst; the rest is untouched."""
    case = make(Shape("", seq_lens=(16 * 12,), num_heads=6, num_kv_heads=2, head_dim=24))
    pages = case.block_table[0].long()
    case.page_max[pages[2], 0, 0, 5] = NAN
    case.page_min[pages[3], 1, 0, 7] = NAN
    case.page_max[pages[5], :, 0, 1], case.page_min[pages[5], :, 0, 1] = INF, INF
    case.page_max[pages[7], :, 0, 2], case.page_min[pages[7], :, 0, 2] = -INF, -INF
    got, expected = (v.score(case.query, *case.summary, page_size=16, group_rule=rule) for v in (quest, reference))
    assert got[0, 0, :, 2].isnan()[0]
    assert got.isnan().equal(expected.isnan())
    assert got.isinf().equal(expected.isinf())
    rest = expected.isfinite()
    assert torch.allclose(got[rest], expected[rest], rtol=1e-4, atol=1e-5)


def test_every_score_nan_or_infinite(kernels):
    for value in (NAN, INF, -INF):
        case = make("group_3")
        for summary in (case.page_min, case.page_max):
            summary.fill_(value)
        for rule in RULES:
            got, expected = (v.score(case.query.abs(), *case.summary, page_size=16, group_rule=rule, slack=0.0)
                             for v in (quest, reference))  # fmt: skip
            assert same(got, expected), rule


def test_c12_fp16_products_beyond_65504(kernels):
    case = make("dim_8", head_dim=128, seq_lens=(80,), dtype=F16, num_heads=2, num_kv_heads=1)
    for summary in (case.page_min, case.page_max):
        summary.fill_(59.0)
        summary[int(case.block_table[0, 3])] = 60.0
    query = torch.full_like(case.query, 60.0)
    for rule in RULES:
        scores = quest.score(query, *case.summary, page_size=16, group_rule=rule)[0, 0, 0, :5]
        assert scores.isfinite().all()
        assert scores.argmax() == 3


def test_extreme_values(kernels):
    """fp32 accumulation holds for bfloat16 summaries near their largest values."""
    case = make("group_7", dtype=BF16, query_dtype=torch.float32)
    for summary in (case.page_min, case.page_max):
        summary.mul_(1e30)
    options = {"group_rule": "per_head"}
    check_score(quest.score(case.query, *case.summary, page_size=16, **options), case, **options)
    case.replace(query=case.query * 1e-30)
    check_score(quest.score(case.query, *case.summary, page_size=16, **options), case, **options)


@pytest.mark.parametrize("heads", [(6, 2), (11, 11), (34, 17)], ids=str)  # one band of KV heads, two, three
def test_more_pages_than_a_task(isa, threads, heads):
    """Rows of many pages and heads are cut into tasks; the parts meet without a seam."""
    torch.set_num_threads(2)
    num_heads, kv_heads = heads
    shape = Shape("", seq_lens=(3001, 1024, 0), page_size=1, block_size=8, head_dim=8)
    case = make(shape, num_heads=num_heads, num_kv_heads=kv_heads)
    for rule in RULES:
        scores = quest.score(case.query, *case.summary, page_size=1, group_rule=rule)
        check_score(scores, case, group_rule=rule)
