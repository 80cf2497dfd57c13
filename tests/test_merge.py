"""merge: two results over disjoint tokens are one."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cases import DTYPES, INF, NAN, assert_near, check_attend, make, same

import quest
from quest import reference


def parts(case, cuts):
    """Page indices of each part of the row, cut at random pages."""
    max_pages = case.block_table.shape[1] * case.k_cache.shape[2] // case.page_size
    edges = [0, *cuts, max_pages]
    for begin, end in itertools.pairwise(edges):
        idx = torch.arange(begin, end, dtype=torch.int32)
        yield idx.expand(*case.query.shape[:2], case.k_cache.shape[1], -1)


@pytest.mark.parametrize("shape", ["ragged", "group_7", "many_tokens", "dim_7", "group_6"])
@pytest.mark.parametrize("cuts", [(), (1,), (1, 2, 2, 3, 4, 5)], ids=["1_part", "2_parts", "7_parts"])
def test_c10_any_split_of_the_pages(kernels, shape, cuts):
    case = make(shape, dtype=torch.float32)  # 16-bit results round once per part
    whole = None
    for page_idx in parts(case, cuts):
        part = quest.attend(case.query, *case.cache, page_idx, page_size=case.page_size)
        whole = part if whole is None else quest.merge(*whole, *part)
    check_attend(whole, case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 8), (3, 1), (5, 7, 33), (130, 64)], ids=str)
def test_equals_reference(kernels, dtype, shape):
    rng = torch.Generator().manual_seed(0)
    out_a, out_b = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    lse_a, lse_b = (torch.randn(shape[:-1], generator=rng) * 20 for _ in range(2))
    if lse_a.numel():
        lse_a.view(-1)[0], lse_b.view(-1)[1] = -INF, -INF
        out_a.view(-1, shape[-1])[0] = NAN  # no part of it
    out, lse = quest.merge(out_a, lse_a, out_b, lse_b)
    truth, truth_lse = reference.merge(out_a.double(), lse_a.double(), out_b.double(), lse_b.double())
    plain, plain_lse = reference.merge(out_a, lse_a, out_b, lse_b)
    assert out.dtype == dtype
    assert_near(out, truth, plain, "out", dtype)
    assert_near(lse, truth_lse, plain_lse, "lse")


def test_special_values(kernels):
    values = [-INF, -1e30, -5.0, 0.0, 5.0, 1e30, INF, NAN]
    lse_a, lse_b = (x.flatten() for x in torch.meshgrid(torch.tensor(values), torch.tensor(values), indexing="ij"))
    out_a, out_b = (torch.full((64, 3), x) for x in (1.0, 2.0))
    got, expected = quest.merge(out_a, lse_a, out_b, lse_b), reference.merge(out_a, lse_a, out_b, lse_b)
    assert same(got[0].isnan(), expected[0].isnan())
    assert torch.allclose(got[0], expected[0], equal_nan=True)
    assert torch.allclose(got[1], expected[1], equal_nan=True)
    assert got[0][lse_a == lse_b].nan_to_num(0).max() == 1.5


def test_order_does_not_matter(kernels):
    rng = torch.Generator().manual_seed(0)
    a, b = ((torch.randn(9, 20, generator=rng), torch.randn(9, generator=rng)) for _ in range(2))
    for x, y in zip(quest.merge(*a, *b), quest.merge(*b, *a)):
        assert torch.allclose(x, y, rtol=1e-6, atol=1e-6)


def test_strided_parts(kernels):
    out, lse = torch.randn(4, 6, 8).transpose(0, 1), torch.randn(4, 6).t()
    got = quest.merge(out, lse, out, lse)
    assert torch.allclose(got[0], out, rtol=1e-6)
    assert torch.allclose(got[1], lse + math.log(2), rtol=1e-6)
