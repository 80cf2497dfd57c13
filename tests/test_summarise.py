"""summarise: minimum and maximum of the tokens present, of the pages touched and no others."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME, DTYPES, INF, NAN, SHAPES, Case, copy_pools, make, memory, same

import quest
from quest import reference


def fresh(case: Case) -> list[torch.Tensor]:
    """The case's summaries, overwritten with a value that no key has."""
    summaries = copy_pools((case.page_min, case.page_max))
    for x in summaries:
        x.fill_(-77.0)
    return summaries


def both(case: Case, num_new: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    got, expected = fresh(case), fresh(case)
    quest.summarise(case.k_cache, *got, case.block_table, case.seq_lens, num_new)
    reference.summarise(case.k_cache, *expected, case.block_table, case.seq_lens, num_new)
    return got, expected


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_everything_equals_reference(kernels, shape):
    case = make(shape)
    got, expected = both(case, case.seq_lens)
    assert all(map(same, got, expected))
    present = got[0] != -77
    assert same(got[0][present], case.page_min[present])


@pytest.mark.parametrize("new", [(0, 0, 0), (1, 1, 1), (5, 6, 0), (16, 17, 1), (99, 99, 99), (-1, -(2**31), 2**31 - 1)])
def test_only_pages_of_new_tokens(kernels, new):
    case = make("page_8", seq_lens=(37, 100, 64), num_heads=2)
    got, expected = both(case, torch.tensor(new, dtype=torch.int32))
    assert all(map(same, got, expected))


def test_no_new_tokens_touch_no_page(verbs):
    """A row without new tokens may share its part-filled page with a longer row, whose summary must stay."""
    k_cache = torch.arange(8.0).reshape(1, 1, 8, 1)
    page_min, page_max = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    table, lens = torch.zeros(2, 1, dtype=torch.int32), torch.tensor([8, 3], dtype=torch.int32)
    verbs.summarise(k_cache, page_min, page_max, table, lens, torch.tensor([1, 0], dtype=torch.int32))
    assert page_max.item() == 7


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e4])
def test_c09_slots_never_written(kernels, poison):
    """Summaries equal those from a zero-filled pool, whatever lies in the slots behind the length."""
    zeros, dirty = (make("ragged", poison=p) for p in (0.0, poison))
    got = []
    for case in (zeros, dirty):
        got.append(both(case, case.seq_lens)[0])
    assert all(map(same, *got))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_in_keys(kernels, dtype):
    """NaN stays in its channel; infinities, zeros of both signs and subnormals are numbers as all others."""
    tiny, huge = torch.finfo(dtype).smallest_normal / 4, torch.finfo(dtype).max
    for head_dim in (5, 37):
        keys = torch.randn(1, 2, 16, head_dim).to(dtype)
        keys[0, :, :, 0], keys[0, :, 3, 0] = 1, NAN
        keys[0, :, 5, 1], keys[0, :, 6, 1] = INF, -INF
        keys[0, :, ::2, 2], keys[0, :, 1::2, 2] = 0.0, -0.0
        keys[0, :, :, 3], keys[0, :, 9, 3] = tiny, -tiny
        keys[0, :, :, 4], keys[0, :, 0, 4] = -huge, huge
        page_min, page_max = torch.zeros(1, 2, 4, head_dim, dtype=dtype), torch.zeros(1, 2, 4, head_dim, dtype=dtype)
        lens = torch.tensor([15], dtype=torch.int32)
        quest.summarise(keys, page_min, page_max, torch.zeros(1, 1, dtype=torch.int32), lens, lens)
        pages = keys[:, :, :15].split(4, dim=2)
        assert same(page_min, torch.stack([p.amin(2) for p in pages], 2))
        assert same(page_max, torch.stack([p.amax(2) for p in pages], 2))
        assert page_min[0, 0, :, 0].isnan().tolist() == [True, False, False, False]


def test_c12_large_fp16_keys_stay_apart(kernels):
    keys = torch.tensor([59.0, 60.0, 65504.0, -65504.0], dtype=torch.float16)[:, None, None, None].expand(4, 1, 2, 128)
    page_min, page_max = torch.zeros(4, 1, 1, 128).half(), torch.zeros(4, 1, 1, 128).half()
    table, lens = torch.arange(4, dtype=torch.int32)[None], torch.tensor([8], dtype=torch.int32)
    quest.summarise(keys.contiguous(), page_min, page_max, table, lens, lens)
    assert page_max[:, 0, 0, 7].tolist() == [59, 60, 65504, -65504]
    assert page_min.equal(page_max)


def test_keys_are_not_written(kernels):
    case = make(BY_NAME["ragged_bf16"])
    before = memory(case.k_cache)
    page_min, page_max = torch.zeros(case.page_min.shape).bfloat16(), torch.zeros(case.page_min.shape).bfloat16()
    quest.summarise(case.k_cache, page_min, page_max, case.block_table, case.seq_lens, case.seq_lens)
    assert memory(case.k_cache) == before
