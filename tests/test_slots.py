"""What sparse residency on a GPU consists of: who has a slot, the copies, and, on a device, their order.

That all of it equals a cache whose K and V are in one place is in test_offload.py and test_random_operations.py.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import gpu_kernels
import numpy as np
import pytest
import torch
import triton_bounds
from cases import DTYPES
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from quest import Offload, PagedKVCache, QuestConfig, slots
from quest._host import Slots

GPU = [pytest.param(name, marks=pytest.mark.gpu) if name == "device" else name for name in gpu_kernels.NAMES]
CONFIGS = [QuestConfig(budget=48, block_size=64), QuestConfig(page_size=16, block_size=32, budget=80)]
HEADS, DIM = 2, 64
on_cpu = pytest.mark.usefixtures("slots_on_cpu")


def offloaded(config: QuestConfig, max_bytes: int, **where: Any) -> PagedKVCache:
    return PagedKVCache(2, config=config, offload=Offload(max_bytes=max_bytes), **where)


def rows(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Query, key and value."""
    return [torch.randn(*shape, heads, DIM).to(device, dtype) for heads in (2 * HEADS, HEADS, HEADS)]


# --- who has a slot --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.data())
def test_slots_against_a_model(data: st.DataObject) -> None:
    """Each unit has the number that was written last, in its slot if it has one, else on the host."""
    capacity, num_units = data.draw(st.integers(0, 6)), 12  # blocks of 2 heads and 2 units
    made = Slots(num_units // 4, num_kv_heads=2, units_per_head=2, unit_tokens=8, capacity=capacity)
    device, host = [-1] * capacity, [-1] * num_units
    latest: dict[int, int] = {}
    number = hits = misses = 0

    def carry_out(moves: Any, load: bool) -> None:
        gone, left, dirty, come, there = (x.tolist() for x in moves)
        assert len({*there}) == len(there)
        for unit, slot, is_dirty in zip(gone, left, dirty):
            if is_dirty:
                host[unit] = device[slot]
            elif unit in latest:
                assert host[unit] == latest[unit]
        for unit, slot in zip(come, there):
            device[slot] = host[unit] if load else -1

    for _ in range(data.draw(st.integers(1, 30))):
        act = data.draw(st.sampled_from(["read", "write", "undo", "forget", "copy"]))
        units = np.array(data.draw(st.lists(st.integers(0, num_units - 1), unique=True, max_size=8)), np.int64)
        before = made.where(np.arange(num_units)).tolist()
        if act == "forget":
            block = data.draw(st.integers(0, num_units // 4 - 1))
            made.forget([block])
            for unit in range(4 * block, 4 * block + 4):
                latest.pop(unit, None)
        elif act == "copy":
            made = Slots(made)
        elif act == "undo":
            (made.read if data.draw(st.booleans()) else made.write)(units)
            made.undo()
            assert made.where(np.arange(num_units)).tolist() == before
        elif act == "read":
            had = sum(before[unit] >= 0 for unit in units)
            hits, misses = hits + had, misses + len(units) - had
            moves = made.read(units)
            assert (moves is None) == (len(units) > capacity)
            if moves is None:
                assert made.where(np.arange(num_units)).tolist() == before
            else:
                carry_out(moves, load=True)
                assert all(device[made.where(np.array([unit]))[0]] == latest[unit] for unit in units if unit in latest)
        else:
            given, moves = made.write(units)
            carry_out(moves, load=False)
            assert given.tolist() == made.where(units).tolist()
            assert np.count_nonzero(given >= 0) == min(len(units), capacity)
            for unit, slot in zip(units.tolist(), given.tolist()):
                number += 1
                latest[unit] = number
                if slot >= 0:
                    device[slot] = number
                else:
                    host[unit] = number
        where = made.where(np.arange(num_units)).tolist()
        taken = [slot for slot in where if slot >= 0]
        assert len({*taken}) == len(taken) == made.counts[2] <= made.counts[3] <= capacity
        for unit, wanted in latest.items():
            assert (device[where[unit]] if where[unit] >= 0 else host[unit]) == wanted
    if act != "undo":
        assert made.counts[0] + made.counts[1] >= hits + misses


def test_what_is_read_again_stays() -> None:
    made = Slots(16, num_kv_heads=1, units_per_head=1, unit_tokens=8, capacity=4)
    often, others = np.array([0, 1]), range(2, 16)
    for other in others:
        for _ in range(2):
            made.read(often)
        made.read(np.array([other]))
    assert (made.where(often) >= 0).all()
    assert made.counts[:2] == (4 * len(others) - 2, len(others) + 2)


def test_units_of_selected_pages() -> None:
    made = Slots(8, num_kv_heads=2, units_per_head=2, unit_tokens=8, capacity=0)
    table = np.array([[3, 5, -1], [0, -1, -1]], np.int32)
    page_idx = np.array([[[0, 1, 6, 9], [4, 7, -1, -1]], [[3, 5, -1, -1], [-1, 0, 0, 0]]], np.int32)[:, None]
    found = made.units((table.ctypes.data, 3, 3), page_idx.ctypes.data, page_idx.shape, 4)
    # block 3 head 0: tokens 0..7; block 5 head 0: tokens 24..27; none at 36; block 5 head 1: tokens 16..19 and 28..31
    assert found.tolist() == [3 * 4, 5 * 4 + 1, 5 * 4 + 2, 5 * 4 + 3, 0 * 4 + 1]


# --- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 128), (3, 17), (1, 1), (64, 576)])
def test_kernel_moves_units(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    pytest.importorskip("triton")
    source, target = torch.randn(9, *shape).to(dtype), torch.randn(7, *shape).to(dtype)
    places = torch.tensor([[8, 0, 3, 3], [6, 2, 0, 1]])
    wanted = target.index_copy(0, places[1], source[places[0]])
    with triton_bounds.checked():
        importlib.import_module("quest.triton_kernels").move(source, target, places)
    assert torch.equal(target, wanted)


@pytest.mark.parametrize("name", GPU)
@pytest.mark.parametrize("config", CONFIGS, ids=["codes", "pages"])
@on_cpu
def test_kernels_of_a_gpu(name: str, config: QuestConfig) -> None:
    """They never look at the K and V that stand in for the pools, which are NaN."""
    torch.manual_seed(0)
    few = offloaded(config, 120_000)
    plain = PagedKVCache(1, config=config)
    for q_len in (110, 1, 2, 1):
        steps, new = (few.extend(q_len), plain.extend(q_len)), rows(1, q_len)
        if q_len == 110:
            few.append(0, *new[1:], steps[0])
            plain.append(0, *new[1:], steps[1])
            continue
        with gpu_kernels.in_place_of_cpu(name):
            got = few.decode(0, *new, steps[0])
        torch.testing.assert_close(got, plain.decode(0, *new, steps[1], backend="verbs"), rtol=1e-4, atol=1e-5)
    assert few.offload_stats.misses > 0  # type: ignore[union-attr]


@pytest.mark.parametrize("config", CONFIGS, ids=["codes", "pages"])
@on_cpu
def test_copies_that_fail_change_nothing(monkeypatch: pytest.MonkeyPatch, config: QuestConfig) -> None:
    torch.manual_seed(0)
    few = offloaded(config, 120_000)
    plain = PagedKVCache(2, config=config)
    new = rows(1, 300)
    for cache in (few, plain):
        step = cache.extend(300)
        for layer in range(2):
            cache.append(layer, *new[1:], step)
    upload, left = slots.SlotResidency._uploaded, 0

    def failing(self: slots.SlotResidency, *arrays: Any) -> list[Tensor]:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("out of memory")
        return upload(self, *arrays)

    monkeypatch.setattr(slots.SlotResidency, "_uploaded", failing)
    for _ in range(12):
        step, other = few.extend(1), plain.extend(1)
        for layer in range(2):
            new, copies, failed = rows(1, 1), 0, True
            while failed:  # at the first copy, at the second, and so on until none is left to fail at
                left = copies
                try:
                    got, failed = few.decode(layer, *new, step), False
                except RuntimeError:
                    copies += 1
            assert copies >= 4
            torch.testing.assert_close(got, plain.decode(layer, *new, other, backend="verbs"))
    left = 1000
    assert all(map(torch.equal, few.dense(0), plain.dense(0)))


@on_cpu
def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="directory must be None on cpu, whose second tier is the host's memory, got"):
        slots.SlotResidency(1, CONFIGS[0], Offload(tmp_path, max_bytes=0), torch.device("cpu"))
    cache = offloaded(CONFIGS[1], 0)
    query, key, value = rows(1, 1)
    step = cache.extend(1)
    with pytest.raises(ValueError, match="backend must be auto or verbs with offload on cpu, got 'reference'"):
        cache.decode(0, query, key, value, step, backend="reference")
    with pytest.raises(ValueError, match=r"decode: k_cache must be .* with head_dim 8 as in query"):
        cache.decode(0, query[..., :8], key, value, step)
    cache.decode(0, query, key, value, step)
    with pytest.raises(ValueError, match="overwritten: K and V must lie in the pools, with offload on cpu they don't"):
        cache.pools.overwritten([0])
    assert not cache.pools.stale
    assert cache.k_cache[0].isnan().all()  # type: ignore[union-attr]
    assert cache.k_cache[0].shape[1:] == (HEADS, 32, DIM)  # type: ignore[union-attr]


# --- on a device -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("config", CONFIGS, ids=["codes", "pages"])
def test_c36_copies_are_ordered(config: QuestConfig, dtype: torch.dtype) -> None:
    """Steps on changing streams, with long kernels in flight before and after each, read and leave what they should."""
    torch.manual_seed(0)
    few = offloaded(config, 200_000, device="cuda")
    plain = PagedKVCache(2, config=config, device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    for turn in range(200):
        q_len = 500 if turn == 0 else 1
        news = [rows(1, q_len, device="cuda", dtype=dtype) for _ in range(2)]
        torch.cuda.synchronize()
        steps = few.extend(q_len), plain.extend(q_len)
        with torch.cuda.stream(streams[turn % 3]):
            torch.cuda._sleep(2_000_000)
            got = [few.decode(layer, *new, steps[0]) for layer, new in enumerate(news)]
            torch.cuda._sleep(2_000_000)
        wanted = [plain.decode(layer, *new, steps[1]) for layer, new in enumerate(news)]
        torch.cuda.synchronize()
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got, wanted, rtol=4 * eps, atol=8 * eps)
    (sequence,) = few.ids
    few.suspend(sequence)
    few.resume(sequence)
    few.select([sequence])
    for layer in range(2):
        assert all(map(torch.equal, few.dense(layer), plain.dense(layer)))
    assert few.offload_stats.bytes_out > 0 < few.offload_stats.misses  # type: ignore[union-attr]
