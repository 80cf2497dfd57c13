"""attend: exact attention over the pages named, reading nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from cases import BF16, DTYPES, F16, INF, NAN, SHAPES, Case, Shape, check_attend, make, memory, same

import quest


def pages_of(case: Case, heads: int, seed: int = 0) -> torch.Tensor:
    """Random pages per row and head, ascending, some beyond the row, -1 at the end."""
    rng = torch.Generator().manual_seed(seed)
    batch, q_len = case.query.shape[:2]
    per_block = case.k_cache.shape[2] // case.page_size
    max_pages = case.block_table.shape[1] * per_block
    page_idx = torch.full((batch, q_len, heads, max_pages), -1, dtype=torch.int32)
    for row in page_idx.flatten(0, 2):
        chosen = torch.rand(max_pages, generator=rng).lt(0.5).nonzero().flatten()
        row[: len(chosen)] = chosen
    return page_idx


def attend(case: Case, page_idx: torch.Tensor | None = None, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
    return quest.attend(case.query, *case.cache, page_idx, page_size=case.page_size, **options)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_dense(kernels, shape):
    case = make(shape)
    check_attend(attend(case), case)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_chosen_pages(kernels, shape):
    case = make(shape)
    page_idx = pages_of(case, shape.num_kv_heads)
    check_attend(attend(case, page_idx), case, page_idx)


@pytest.mark.parametrize("shape", ["group_3", "group_7", "many_tokens", "page_24"])
def test_pages_per_query_head(kernels, shape):
    case = make(shape)
    page_idx = pages_of(case, case.shape.num_heads)
    check_attend(attend(case, page_idx), case, page_idx)


@pytest.mark.parametrize(
    "options",
    [
        {"softmax_scale": 1.0},
        {"softcap": 3.0},
        {"window": 20},
        {"window": 1},
        {"sinks": True},
        {"softmax_scale": 0.5, "softcap": 2.0, "sinks": True, "window": 18},
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", ["ragged", "group_7", "group_6", "many_tokens"])
def test_options(kernels, shape, options):
    case = make(shape)
    if "sinks" in options:
        rng = torch.Generator().manual_seed(1)
        options = options | {"sinks": torch.randn(case.shape.num_heads, generator=rng).to(case.query.dtype)}
    for page_idx in (None, pages_of(case, case.shape.num_kv_heads)):
        check_attend(attend(case, page_idx, **options), case, page_idx, **options)


@pytest.mark.parametrize("heads", [(28, 4), (40, 8), (24, 4), (64, 4), (12, 1), (64, 1)], ids=str)
def test_c01_group_sizes(kernels, heads):
    for dtype in (BF16, torch.float32):
        case = make("group_7", num_heads=heads[0], num_kv_heads=heads[1], seq_lens=(37,), dtype=dtype)
        page_idx = torch.arange(3, dtype=torch.int32).expand(1, 1, heads[1], 3)
        out, lse = attend(case, page_idx)
        check_attend((out, lse), case, page_idx)
        rows = [x[case.block_table[0, :3].long()].transpose(0, 1).flatten(1, 2)[:, :37] for x in case.cache[:2]]
        keys, values = (x.double().repeat_interleave(heads[0] // heads[1], 0) for x in rows)
        dense = torch.nn.functional.scaled_dot_product_attention(case.query[0, 0, :, None].double(), keys, values)
        limit = 2e-2 if dtype == BF16 else 1e-5
        assert (out[0, 0].double() - dense[:, 0]).abs().max() <= limit


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 192, 256])
def test_c02_head_dims(kernels, head_dim):
    """NaN lies directly behind every row of K, V and the query."""
    for dtype in DTYPES:
        case = make("dim_32", head_dim=head_dim, seq_lens=(33,), dtype=dtype, layout="padded")
        check_attend(attend(case), case)


@pytest.mark.parametrize(
    ("page_size", "block_size"), [(1, 1), (1, 5), (8, 64), (16, 16), (24, 24), (64, 64), (512, 512)]
)
def test_c03_page_sizes(kernels, page_size, block_size):
    case = make(Shape("", page_size=page_size, block_size=block_size, head_dim=16, seq_lens=(600, 1), dtype=F16))
    check_attend(attend(case), case)
    page_idx = pages_of(case, 2)
    check_attend(attend(case, page_idx), case, page_idx)


def test_c04_empty_row_among_others(kernels):
    """Out 0 and lse -inf exactly, with sinks and chosen pages too."""
    case = make("ragged", seq_lens=(0, 5))
    for options in ({}, {"sinks": torch.ones(4)}, {"softcap": 1.0}, {"window": 3}):
        for page_idx in (None, pages_of(case, 2)):
            out, lse = attend(case, page_idx, **options)
            assert not out[0].any()
            assert (lse[0] == -INF).all()
            check_attend((out, lse), case, page_idx, **options)


@pytest.mark.parametrize("width", [0, 1, 5])
def test_no_page_named(kernels, width):
    """A selection of nothing reads nothing."""
    case = make("ragged", seq_lens=(37, 5))
    out, lse = attend(case, torch.full((2, 1, 2, width), -1, dtype=torch.int32))
    assert not out.any()
    assert (lse == -INF).all()


def test_c05_every_page_named_is_dense_bit_for_bit(kernels):
    for shape in ("ragged", "many_tokens", "group_7", "page_8", "mla_absorbed"):
        case = make(shape)
        max_pages = case.block_table.shape[1] * case.k_cache.shape[2] // case.page_size
        every = torch.arange(max_pages, dtype=torch.int32).expand(*case.query.shape[:2], case.k_cache.shape[1], -1)
        assert all(map(torch.equal, attend(case, every), attend(case)))


@pytest.mark.parametrize("widths", [(192, 128, 2, 2), (576, 512, 16, 1)], ids=str)
def test_c07_mla(kernels, widths):
    """K and V of different width; absorbed, V is the first 512 of K; the scale is the caller's."""
    head_dim, v_head_dim, heads, kv_heads = widths
    for dtype in (torch.float32, BF16):
        case = make("mla", head_dim=head_dim, num_heads=heads, num_kv_heads=kv_heads, dtype=dtype)
        case = case.replace(v_cache=case.k_cache[..., :v_head_dim])  # the same memory
        out, lse = attend(case, softmax_scale=192**-0.5)
        assert out.shape == (1, 1, heads, v_head_dim)
        check_attend((out, lse), case, softmax_scale=192**-0.5)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_c09_unwritten_slots_do_not_change_a_bit(kernels, dtype):
    for shape in ("ragged", "many_tokens", "page_24"):
        results = [attend(make(shape, poison=poison, dtype=dtype)) for poison in (0.0, NAN, INF, -INF, 1e4)]
        for out, lse in results:
            assert out.isfinite().all()
            assert out.equal(results[0][0])
            assert lse.equal(results[0][1])


def test_c12_extreme_logits_stay_finite(kernels):
    """Logits of hundreds of thousands, of both signs, in one row."""
    for dtype in DTYPES:
        case = make("group_7", seq_lens=(80,), dtype=dtype)
        case = case.replace(query=case.query * 1000)
        out, _ = attend(case, softmax_scale=1.0)
        assert out.isfinite().all()
        check_attend(attend(case), case)


def test_values_near_the_largest(kernels):
    case = make("group_6", seq_lens=(50,))
    case.v_cache.clamp_(-1, 1).mul_(60000)  # float16
    check_attend(attend(case), case)


def test_nan_and_infinity_where_they_are_read(kernels):
    """NaN in a key or a value reaches the heads that read it and no others; so does an infinite value."""
    for poison in (NAN, INF):
        for chosen in (None, [[0, 2], [0, 1]]):
            case = make("group_3", num_kv_heads=2, num_heads=6, seq_lens=(45,))
            block = case.block_table[0, 1]
            case.v_cache[block, 0, 3, 0] = poison
            page_idx = None if chosen is None else torch.tensor([[chosen]], dtype=torch.int32)
            out = attend(case, page_idx)[0][0, 0]
            expect = torch.zeros(6, 64, dtype=torch.bool)
            expect[:3, 0] = chosen is None
            assert (~out.isfinite()).equal(expect)
            case.k_cache[block, 1, 2, 1] = NAN
            out, lse = (x[0, 0] for x in attend(case, page_idx))
            assert out[3:].isnan().all()
            assert lse[3:].isnan().all()
            assert lse[:3].isfinite().all()


def test_keys_that_get_no_weight(kernels):
    """A key with logit -inf weighs nothing, also where it is first, last or alone on its page."""
    for token in (0, 16, 36):
        case = make("ragged", seq_lens=(37,), num_heads=2)
        other = case.copy()
        block = int(case.block_table[0, token // 16])
        other.k_cache[block, :, token % 16, 0] = -INF
        query = case.query.clone()
        query[..., 0] = 1.0
        check_attend(attend(other.replace(query=query)), other.replace(query=query))


def test_only_keys_without_weight(isa, threads):
    """All logits -inf: as a row without tokens. So it is for one head of two, and for one split of many."""
    torch.set_num_threads(4)
    for length in (20, 2000):
        case = make("ragged", seq_lens=(length,), num_heads=2, num_kv_heads=1)
        case.k_cache[:, :, :, 0] = -INF
        query = case.query.clone()
        query[0, 0, :, 0] = torch.tensor([1.0, 0.0])
        case = case.replace(query=query)
        out, lse = attend(case)
        assert not out[0, 0, 0].any()
        assert lse[0, 0, 0] == -INF
        assert out[0, 0, 1].isnan().all()  # 0 * -inf
        case.k_cache[case.block_table[0, -3].long(), :, :, 0] = 1.0
        case.query[..., 0] = 1.0
        check_attend(attend(case), case)


def read_back(values: torch.Tensor, query_dtype: torch.dtype) -> torch.Tensor:
    """What attention to a single token gives: that token's value, in the query's dtype."""
    rows, dim = values.shape
    table, lens = torch.arange(rows, dtype=torch.int32)[:, None], torch.ones(rows, dtype=torch.int32)
    k_cache = torch.zeros(rows, 1, 1, 8, dtype=values.dtype)
    query = torch.zeros(rows, 1, 8, dtype=query_dtype)
    return quest.attend(query, k_cache, values[:, None, None], table, lens)[0].view(rows, dim)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_every_16_bit_value(isa, dtype):
    """All 65536 bit patterns pass through unchanged: subnormals, infinities and NaN too."""
    values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(64, 1024)
    assert same(read_back(values, dtype), values)
    assert same(read_back(values, torch.float32), values.float())


@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_rounding_to_16_bits(isa, dtype):
    """To nearest, ties to even: at, just below and just above the middle of any two neighbours, and at overflow."""
    low = torch.arange(2**15 - 1, dtype=torch.int32).to(torch.int16).view(dtype)
    low = low[low.isfinite()].double()
    high = torch.cat([low[1:], low[-1:] * 2 - low[-2:-1]])
    middle = ((low + high) / 2).float()
    below, above = (torch.nextafter(middle, torch.tensor(x)) for x in (0.0, INF))
    values = torch.cat([middle, below, above, -middle, -below, -above])
    values = torch.nn.functional.pad(values, (0, -len(values) % 512)).view(-1, 512)
    assert same(read_back(values, dtype), values.to(dtype))


def test_sinks_without_weight_are_none(kernels):
    case = make("group_3")
    assert all(map(torch.equal, attend(case, sinks=torch.full((9,), -INF)), attend(case)))


def test_strided_pages_and_table(kernels):
    """page_idx and block_table are views; lengths and tables wider than needed."""
    case = make("many_tokens")
    page_idx = pages_of(case, 2)
    wide = torch.full((*page_idx.shape[:3], 2 * page_idx.shape[3]), 99, dtype=torch.int32)
    wide[..., : page_idx.shape[3]] = page_idx
    table = torch.full((2 * len(case.block_table), 40), 2**31 - 1, dtype=torch.int32)[::2]
    table[:, : case.block_table.shape[1]] = case.block_table
    other = case.replace(block_table=table)
    got = attend(other, wide[..., : page_idx.shape[3]])
    assert all(map(torch.equal, got, attend(case, page_idx)))


def test_three_dimensions(kernels):
    case = make("group_3")
    page_idx = pages_of(case, 3)
    out, lse = attend(case, page_idx)
    got = quest.attend(case.query[:, 0], *case.cache, page_idx[:, 0], page_size=16)
    assert got[0].equal(out[:, 0])
    assert got[1].equal(lse[:, 0])
    assert got[0].is_contiguous()


def test_cache_is_not_written(kernels):
    case = make("ragged_bf16")
    before = memory(*case.pools, case.query, case.block_table)
    attend(case)
    assert memory(*case.pools, case.query, case.block_table) == before


@pytest.mark.parametrize("shape", ["ragged", "mla_absorbed", "many_tokens_bf16", "group_64"])
def test_threads_and_splits(isa, threads, shape):
    """Long rows are split over threads: the same up to fp32 rounding, and 20 repeats bit for bit."""
    lengths = (2100, 1, 700) if shape != "mla_absorbed" else (2100,)
    case = make(shape, seq_lens=lengths)
    results = []
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        results.append(attend(case))
        for _ in range(20):
            assert all(map(torch.equal, attend(case), results[-1]))
    for out, lse in results[1:]:
        eps = torch.finfo(out.dtype).eps
        assert torch.allclose(out, results[0][0], rtol=2 * eps, atol=max(2 * eps * 0.1, 1e-6))
        assert torch.allclose(lse, results[0][1], rtol=1e-6, atol=1e-5)


def test_threads_and_splits_are_exact(isa, threads):
    """Against the reference too, with soft-cap, sinks and a window that starts inside a split."""
    torch.set_num_threads(4)
    options = {"softcap": 4.0, "window": 1500, "sinks": torch.tensor([1.0, -2.0])}
    case = make(Shape("", seq_lens=(2100,), num_heads=2, num_kv_heads=1, head_dim=16, v_head_dim=24))
    check_attend(attend(case, **options), case, **options)


def test_exponential(isa):
    """exp(x) of a logit has a relative error below 3e-7: two tokens with logits x and 0 give e^x / (1 + e^x)."""
    x = torch.cat([-torch.logspace(-8, 1.93, 6000), torch.linspace(-87.3, 0, 6000)])
    k_cache = torch.stack([x, torch.zeros_like(x)], 1)[:, None, :, None]
    v_cache = torch.tensor([1.0, 0.0])[:, None].expand(len(x), 1, 2, 1).contiguous()
    table, lens = torch.arange(len(x), dtype=torch.int32)[:, None], torch.full((len(x),), 2, dtype=torch.int32)
    query = torch.ones(len(x), 1, 1)
    out, _ = quest.attend(query, k_cache, v_cache, table, lens, page_size=2, softmax_scale=1.0)
    truth = torch.sigmoid(x.double())
    rounding = 3 * 2**-24  # of sum, quotient and product
    assert ((out.flatten().double() - truth).abs() / truth).max() < 3e-7 + rounding
    beyond = torch.tensor([-88.0, -1e4, -INF, NAN])
    k_cache[:4, 0, 0, 0] = beyond
    out, _ = quest.attend(query[:4], k_cache, v_cache, table[:4], lens[:4], page_size=2, softmax_scale=1.0)
    assert out.flatten()[:3].equal(torch.zeros(3))
    assert out.flatten()[3].isnan()


def test_many_rows(isa):
    """C42: more programs than 65535."""
    batch = 8200
    query = torch.zeros(batch, 8, 8)
    k_cache, v_cache = torch.zeros(2, 8, 1, 8), torch.tensor([1.0, 3.0])[:, None, None, None].expand(2, 8, 1, 8)
    table = torch.tensor([[0, 1]], dtype=torch.int32).expand(batch, 2)
    lens = torch.arange(batch, dtype=torch.int32) % 3
    out, lse = quest.attend(query, k_cache, v_cache.contiguous(), table, lens)
    assert out.equal(torch.tensor([0.0, 1.0, 2.0])[lens][:, None, None].expand(batch, 8, 8))
    expected = torch.tensor([-INF, 0.0, math.log(2)])[lens][:, None].expand(batch, 8)
    assert torch.allclose(lse, expected)
