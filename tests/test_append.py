"""append: rows go into their slots, and nowhere else."""

from __future__ import annotations

import pytest
import torch
from cases import BY_NAME, DTYPES, NAN, SHAPES, copy_pools, lay_out, make, memory, same

import quest
from quest import reference

LAYOUTS = ("plain", "padded", "token_major", "interleaved")


def random_slots(num_tokens: int, num_slots: int, skip: int = 3) -> torch.Tensor:
    slots = torch.randperm(num_slots)[:num_tokens]
    slots[::skip] = -1
    return slots


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equals_reference(kernels, dtype, layout):
    torch.manual_seed(0)
    pools = lay_out((torch.randn(5, 3, 8, 20, dtype=dtype), torch.randn(5, 3, 8, 33, dtype=dtype)), layout)
    expected = copy_pools(pools)
    qkv = torch.randn(11, 3, 64, dtype=dtype)  # rows of a fused projection: strided key and value
    rows = (qkv[..., :20], qkv[..., 30:63])
    slots = random_slots(11, 40)
    quest.append(*rows, *pools, slots)
    reference.append(*rows, *expected, slots)
    assert memory(*pools) == memory(*expected)  # the memory between rows too


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_fills_the_cache_of_a_step(kernels, shape):
    case = make(shape)
    before = case.before()
    quest.append(case.key, case.value, before.k_cache, before.v_cache, case.slot_mapping)
    assert same(before.k_cache, case.k_cache)
    assert same(before.v_cache, case.v_cache)


def test_token_list_and_rows_agree():
    case = make(BY_NAME["many_tokens"])
    expected, given = case.before(), case.before()
    quest.append(case.key, case.value, expected.k_cache, expected.v_cache, case.slot_mapping)
    flat = (case.key.flatten(0, 1), case.value.flatten(0, 1))
    quest.append(*flat, given.k_cache, given.v_cache, case.slot_mapping.flatten())
    assert same(given.k_cache, expected.k_cache)
    given = case.before()
    quest.append(case.key, case.value, given.k_cache, given.v_cache, case.slot_mapping.flatten())
    assert same(given.k_cache, expected.k_cache)


def test_more_tokens_than_one_thread_takes(kernels, threads):
    torch.set_num_threads(4)
    pools = [torch.full((40, 2, 16, 8), NAN) for _ in range(2)]
    expected = copy_pools(pools)
    rows = torch.randn(2, 500, 2, 8)
    slots = random_slots(500, 640, skip=500)
    quest.append(*rows, *pools, slots)
    reference.append(*rows, *expected, slots)
    assert memory(*pools) == memory(*expected)


def test_no_tokens():
    pools = [torch.full((2, 2, 4, 8), NAN) for _ in range(2)]
    quest.append(torch.zeros(0, 2, 8), torch.zeros(0, 2, 8), *pools, torch.zeros(0, dtype=torch.int64))
    quest.append(torch.zeros(0, 1, 2, 8), torch.zeros(0, 1, 2, 8), *pools, torch.zeros(0, dtype=torch.int64))
    assert all(x.isnan().all() for x in pools)


def test_c44_append_executes_once():
    """A fresh shape runs the op once: no trial runs that would write again."""
    pools = [torch.zeros(1, 1, 4, 4) for _ in range(2)]
    row = torch.ones(1, 1, 4)
    quest.append(row, row, *pools, torch.tensor([2]))
    assert pools[0].sum() == 4


def test_c03_no_page_left():
    pools = [torch.full((2, 1, 4, 8), 7.0) for _ in range(2)]
    before = memory(*pools)
    row = torch.zeros(2, 1, 8)
    with pytest.raises(ValueError, match=r"append: slot_mapping: slot of token 1 must be .* in \[0, 8\), got 8"):
        quest.append(row, row, *pools, torch.tensor([7, 8]))
    assert memory(*pools) == before  # token 0 was not written either
