"""PagedKVCache against a plain model of it: a list of K and V rows per layer and row."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DTYPES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import quest.pools
from quest import PagedKVCache, QuestConfig, reference

HEADS, DIM, V_DIM = 2, 8, 16


def config(page: int = 4, block: int | None = None, budget: int | float = 1024, **options: Any) -> QuestConfig:
    options = {"sink_tokens": page, "recent_tokens": page, **options}
    return QuestConfig(page_size=page, block_size=block, budget=budget, **options)


def new_tokens(batch: int, q_len: int, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> Any:
    make = lambda dim: torch.randn(batch, q_len, HEADS, dim, generator=generator).to(dtype)  # noqa: E731
    return make(DIM), make(V_DIM)


class Plain:
    """What the cache should hold, and every check of it."""

    def __init__(self, layers: int, batch: int, settings: QuestConfig) -> None:
        self.cache = PagedKVCache(layers, batch, config=settings)
        self.rows: list[list[list[tuple[Tensor, Tensor]]]] = [[[] for _ in range(batch)] for _ in range(layers)]
        self.generator = torch.Generator().manual_seed(0)

    def extend(self, num_new: Any, real: Tensor) -> None:
        step = self.cache.extend(num_new)
        assert step.num_new.tolist() == real.sum(1).tolist()
        for layer, rows in enumerate(self.rows):
            key, value = new_tokens(len(rows), real.shape[1], self.generator)
            self.cache.append(layer, key, value, step)
            for b, row in enumerate(rows):
                row += [(key[b, t], value[b, t]) for t in range(real.shape[1]) if real[b, t]]

    def crop(self, lengths: list[int]) -> None:
        self.cache.crop(lengths)
        self.rows = [[row[:n] for row, n in zip(rows, lengths)] for rows in self.rows]

    def fork(self, indices: list[int]) -> None:
        self.cache.fork(indices)
        self.rows = [[list(rows[i]) for i in indices] for rows in self.rows]

    def free(self, row: int) -> None:
        self.cache.free(row)
        for rows in self.rows:
            rows[row] = []

    def reset(self) -> None:
        self.cache.reset()
        self.rows = [[[] for _ in rows] for rows in self.rows]

    def shared(self) -> dict[int, list[Tensor]]:
        """What the blocks hold that several rows refer to."""
        pools = [pool for pools in self.cache.pools.kinds for pool in pools if pool is not None]
        return {block: [pool[block].clone() for pool in pools] for block, n in enumerate(self.refs) if n > 1}

    @property
    def refs(self) -> list[int]:
        blocks = self.cache.pools.blocks
        return [blocks.refs(block) for block in range(blocks.num_blocks)]

    @property
    def tables(self) -> list[list[int]]:
        return [self.cache._sequences.blocks_of(i) for i in self.cache.ids]

    def poison(self) -> None:
        """NaN wherever no row has a token: free blocks, and the rest of the last block of rows that don't share it."""
        cache, refs = self.cache, self.refs
        for pools in cache.pools.kinds:
            for pool in pools:
                if pool is not None:
                    pool[cache.pools.blocks.free] = float("nan")
        for blocks, length in zip(self.tables, cache.lengths):
            used = length % cache.config.block_size
            if used and refs[blocks[-1]] == 1:
                for pool in (*cache.k_cache, *cache.v_cache):
                    if pool is not None:
                        pool[blocks[-1], :, used:] = float("nan")

    def check(self) -> None:
        cache, page, size = self.cache, self.cache.config.page_size, self.cache.config.block_size
        assert cache.lengths == cache.seq_lens.tolist() == [len(row) for row in self.rows[0]]
        table = self.tables
        held = [block for blocks in table for block in blocks]
        assert [held.count(block) for block in range(cache.num_blocks)] == self.refs
        assert sorted(cache.pools.blocks.free) == [block for block, n in enumerate(self.refs) if n == 0]
        assert [[b for b in row if b >= 0] for row in cache.block_table.tolist()] == table
        assert [len(blocks) for blocks in table] == [-(-length // size) for length in cache.lengths]
        for layer, rows in enumerate(self.rows):
            if cache.k_cache[layer] is None:
                continue
            dense_k, dense_v = cache.dense(layer)
            low, high = (kind[layer] for kind in cache.summaries)
            for b, row in enumerate(rows):
                keys = torch.stack([k for k, _ in row], 1) if row else torch.zeros(HEADS, 0, DIM)
                values = torch.stack([v for _, v in row], 1) if row else torch.zeros(HEADS, 0, V_DIM)
                assert torch.equal(dense_k[b, :, : len(row)], keys)
                assert torch.equal(dense_v[b, :, : len(row)], values)
                assert not dense_k[b, :, len(row) :].any()
                assert not dense_v[b, :, len(row) :].any()
                for first in range(0, len(row), page):
                    block, at = table[b][first // size], first % size // page
                    assert torch.equal(low[block, :, at], keys[:, first : first + page].amin(1))
                    assert torch.equal(high[block, :, at], keys[:, first : first + page].amax(1))


KINDS = ["extend"] * 3 + ["crop"] * 3 + ["fork"] * 3 + ["pads", "free", "reset", "copy"]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_any_history(data: st.DataObject) -> None:
    """Random extend, crop, fork, free, reset, deepcopy: K, V, summaries and reference counts are always right, and a
    block that several rows refer to is never written."""
    page, pages = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 1, 2, 3]))
    plain = Plain(2, data.draw(st.integers(1, 3)), config(page, page * pages))
    plain.extend(5, torch.ones(plain.cache.batch_size, 5, dtype=torch.bool))
    for _ in range(data.draw(st.integers(3, 12))):
        batch, shared = plain.cache.batch_size, plain.shared()
        kind = data.draw(st.sampled_from(KINDS))
        if kind == "extend":
            counts = data.draw(st.lists(st.integers(0, 9), min_size=batch, max_size=batch).filter(any))
            real = torch.arange(max(counts)) >= max(counts) - torch.tensor(counts)[:, None]
            plain.extend(counts[0] if len(set(counts)) == 1 else counts, real)
        elif kind == "pads":
            q_len = data.draw(st.integers(1, 7))
            real = torch.tensor(data.draw(st.lists(st.booleans(), min_size=batch * q_len, max_size=batch * q_len)))
            plain.extend(real.view(batch, q_len), real.view(batch, q_len))
        elif kind == "crop":
            plain.crop([data.draw(st.integers(0, n)) for n in plain.cache.lengths])
        elif kind == "fork":
            plain.fork(data.draw(st.lists(st.integers(0, batch - 1), min_size=1, max_size=4)))
        elif kind == "free":
            plain.free(data.draw(st.integers(0, batch - 1)))
        elif kind == "reset":
            plain.reset()
        else:
            before = copy.copy(plain)
            plain.cache = copy.deepcopy(plain.cache)
            before.cache.reset()
            before.cache.extend(3)
        for block, pools in plain.shared().items():
            for old, new in zip(shared.get(block, []), pools):
                assert torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))
        plain.poison()
        plain.check()


@pytest.mark.parametrize("budget", [1024, 12, 0.5])
def test_decode_equals_a_cache_that_never_shared(budget: int | float) -> None:
    """After fork, crop and copies, a step reads what a cache of one row reads that saw only that row's tokens."""
    settings, generator = config(budget=budget), torch.Generator().manual_seed(1)
    cache = PagedKVCache(1, 2, config=settings)
    step = cache.extend([30, 19])
    key, value = new_tokens(2, 30, generator)
    cache.append(0, key, value, step)
    cache.fork([0, 1, 0])
    cache.crop([27, 19, 30])
    rows = [(key[0, :27], value[0, :27]), (key[1, 11:], value[1, 11:]), (key[0], value[0])]
    for _ in range(6):
        key, value = new_tokens(3, 1, generator)
        query = torch.randn(3, 1, 4, DIM, generator=generator)
        out, lse = cache.decode(0, query, key, value, cache.extend(1))
        for b, (k, v) in enumerate(rows):
            rows[b] = torch.cat([k, key[b]]), torch.cat([v, value[b]])
            alone = PagedKVCache(1, 1, config=settings)
            alone.append(0, rows[b][0][None, :-1], rows[b][1][None, :-1], alone.extend(len(rows[b][0]) - 1))
            args = query[b, None], key[b, None], value[b, None]
            expected = alone.decode(0, *args, alone.extend(1))
            assert torch.equal(out[b], expected[0][0])
            assert torch.equal(lse[b], expected[1][0])


@pytest.mark.parametrize("block", [4, 8])
def test_rolled_back_tokens_leave_no_trace(block: int) -> None:
    """C-cases of roll-back: bit equal to a cache that never saw the rejected tokens, also over a page's edge."""
    settings, generator = config(4, block, budget=12), torch.Generator().manual_seed(2)
    cache, clean = (PagedKVCache(1, 1, config=settings) for _ in range(2))
    first = new_tokens(1, 21, generator)
    for c in (cache, clean):
        c.append(0, *first, c.extend(21))
    for rejected in (1, 2, 3, 7, 12):
        huge = tuple(100 * x for x in new_tokens(1, rejected, generator))
        cache.append(0, *huge, cache.extend(rejected))
        cache.crop(cache.lengths[0] - rejected)
        key, value = new_tokens(1, 1, generator)
        query = torch.randn(1, 1, 4, DIM, generator=generator)
        got, expected = (c.decode(0, query, key, value, c.extend(1)) for c in (cache, clean))
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


def test_draft_tokens_select_each_for_itself() -> None:
    """Several new tokens in one step give what one step per token gives, but for the pages of the draft itself."""
    settings, generator = config(budget=16), torch.Generator().manual_seed(3)
    together, single = (PagedKVCache(1, 1, config=settings) for _ in range(2))
    first, drafts = new_tokens(1, 64, generator), new_tokens(1, 3, generator)
    query = torch.randn(1, 3, 4, DIM, generator=generator)
    for c in (together, single):
        c.append(0, *first, c.extend(64))
    out, _ = together.decode(0, query, *drafts, together.extend(3))
    for t in range(3):
        one, _ = single.decode(0, query[:, t : t + 1], *(x[:, t : t + 1] for x in drafts), single.extend(1))
        assert torch.allclose(out[:, t], one[:, 0], atol=1e-5)


def test_attend_again_reads_what_decode_read() -> None:
    generator = torch.Generator().manual_seed(4)
    cache = PagedKVCache(1, 2, config=config(budget=12))
    cache.append(0, *new_tokens(2, 40, generator), cache.extend(40))
    query = torch.randn(2, 1, 4, DIM, generator=generator)
    out, lse = cache.decode(0, query, *new_tokens(2, 1, generator), cache.extend(1))
    again = cache.attend(0, query)
    assert torch.equal(again[0], out)
    assert torch.equal(again[1], lse)
    assert cache.lengths == [41, 41]


def test_one_page_is_the_newest() -> None:
    """C18: budget of one page, no sink: only the newest page is read."""
    cache = PagedKVCache(1, 1, config=config(4, budget=4, sink_tokens=0, recent_tokens=1))
    key, value = torch.zeros(1, 32, 1, DIM), torch.arange(32.0).view(1, 32, 1, 1).expand(1, 32, 1, DIM).contiguous()
    cache.append(0, key[:, :31], value[:, :31], cache.extend(31))
    out, _ = cache.decode(0, torch.zeros(1, 1, 1, DIM), key[:, 31:], value[:, 31:], cache.extend(1))
    assert out.unique().tolist() == [29.5]


def test_ragged_rows_are_independent() -> None:
    """C19: each row equals its own batch of one; permuted rows give permuted results; an empty row gives zeros."""
    generator, settings, lengths = torch.Generator().manual_seed(5), config(16, budget=48), [1, 16, 17, 100, 0]
    keys, values = new_tokens(5, 100, generator)
    query = torch.randn(5, 1, 4, DIM, generator=generator)

    def decode(rows: list[int]) -> Tensor:
        cache = PagedKVCache(1, len(rows), config=settings)
        step = cache.extend([lengths[r] for r in rows])
        q_len = step.slot_mapping.shape[1]
        cache.append(0, keys[rows, 100 - q_len :], values[rows, 100 - q_len :], step)
        return cache.attend(0, query[rows])[0]

    together = decode([0, 1, 2, 3, 4])
    assert not together[4].any()
    assert torch.equal(decode([3, 1, 4, 0, 2]), together[[3, 1, 4, 0, 2]])
    for row in range(4):
        assert torch.allclose(decode([row])[0], together[row], atol=1e-6)


def test_lengths_grow_over_a_page_edge_and_rows_are_added() -> None:
    """C39: lengths 15 to 18 with pages of 16, then a second row."""
    generator, settings = torch.Generator().manual_seed(6), config(16, budget=64)
    cache = PagedKVCache(1, 1, config=settings)
    keys, values = new_tokens(1, 20, generator)
    cache.append(0, keys[:, :14], values[:, :14], cache.extend(14))
    for length in range(15, 21):
        query = torch.randn(cache.batch_size, 1, 4, DIM, generator=generator)
        new = [x[:, length - 1 : length].expand(cache.batch_size, -1, -1, -1) for x in (keys, values)]
        out, lse = cache.decode(0, query, *new, cache.extend(1))
        k, v = (x[:, :length].transpose(1, 2).reshape(HEADS, length, -1) for x in (keys, values))
        block = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
        for b in range(cache.batch_size):
            expected = reference.attend(query[b, None], k[None], v[None], *block)
            assert torch.allclose(out[b], expected[0][0], atol=1e-5)
            assert torch.allclose(lse[b], expected[1][0], atol=1e-5)
        if length == 18:
            cache.fork([0, 0])


def test_layers_may_differ() -> None:
    """Heads, widths and dtype are a layer's own; a layer without keys costs nothing."""
    cache = PagedKVCache(3, 1, config=config())
    step = cache.extend(5)
    cache.append(0, torch.randn(1, 5, 2, 8), torch.randn(1, 5, 2, 16), step)
    cache.append(2, torch.randn(1, 5, 1, 24).bfloat16(), torch.randn(1, 5, 1, 24).bfloat16(), step)
    assert cache.k_cache[1] is None
    assert [*cache.dense(0)[1].shape] == [1, 2, 5, 16]
    assert cache.dense(2)[0].dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"dense: layer must have stored keys.*layer 1"):
        cache.dense(1)


def test_a_layer_may_come_late() -> None:
    """`start` reserves slots again for a layer that stores tokens after the others, also when rows share blocks."""
    generator = torch.Generator().manual_seed(7)
    cache = PagedKVCache(2, 1, config=config())
    key, value = new_tokens(1, 11, generator)
    cache.append(0, key, value, cache.extend(11))
    cache.fork([0, 0])
    two = new_tokens(2, 11, generator)
    cache.append(1, *(x[:, :6] for x in two), cache.extend(6, start=[0, 0]))
    cache.append(1, *(x[:, 6:] for x in two), cache.extend(5, start=[6, 6]))
    assert cache.lengths == [11, 11]
    assert torch.equal(cache.dense(1)[0], two[0].transpose(1, 2))
    assert torch.equal(cache.dense(0)[0], key.transpose(1, 2).expand(2, -1, -1, -1))


def test_freed_blocks_are_used_again() -> None:
    generator = torch.Generator().manual_seed(8)
    cache = PagedKVCache(1, 2, config=config(), num_blocks=6)
    for _ in range(5):
        cache.append(0, *new_tokens(2, 12, generator), cache.extend(12))
        assert (cache.num_blocks, cache.num_free_blocks) == (6, 0)
        cache.free(0)
        cache.append(0, *new_tokens(2, 9, generator), cache.extend([9, 0]))
        cache.reset()
        assert cache.num_free_blocks == 6
    cache.extend(13)
    assert cache.num_blocks >= 8  # grown


def test_fork_shares_full_blocks() -> None:
    generator = torch.Generator().manual_seed(9)
    cache = PagedKVCache(1, 1, config=config())
    cache.append(0, *new_tokens(1, 42, generator), cache.extend(42))
    cache.fork([0] * 5)
    used = lambda: cache.num_blocks - cache.num_free_blocks  # noqa: E731
    assert used() == 11
    cache.append(0, *new_tokens(5, 1, generator), cache.extend(1))
    assert used() == 10 + 5


@pytest.mark.parametrize("allocations", [0, 1, 2, 3])
def test_memory_that_runs_out_changes_nothing(allocations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever growing stops, in the middle of a layer or between two, the cache is as before and works on."""
    plain = Plain(2, 2, config())
    plain.extend([7, 5], torch.arange(7) >= torch.tensor([[0], [2]]))
    plain.fork([0, 1, 0])
    made, empty = [0], quest.pools.empty

    def run_out(*args: Any) -> Tensor:
        made[0] += 1
        if made[0] > allocations:
            raise torch.OutOfMemoryError("no memory")
        return empty(*args)

    monkeypatch.setattr(quest.pools, "empty", run_out)
    with pytest.raises(torch.OutOfMemoryError):
        plain.cache.extend(40)
    blocks = plain.cache.pools.blocks
    taken = blocks.allocate(blocks.num_free)
    with pytest.raises(torch.OutOfMemoryError):
        plain.cache.crop([6, 5, 7])
    for block in reversed(taken):
        blocks.release(block)
    monkeypatch.undo()
    plain.check()
    plain.extend(2, torch.ones(3, 2, dtype=torch.bool))
    plain.extend(40, torch.ones(3, 40, dtype=torch.bool))
    plain.crop([6, 45, 7])
    plain.check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_pools_start_on_a_page_of_memory(dtype: torch.dtype) -> None:
    cache = PagedKVCache(1, 1, config=config())
    for length in (3, 300):
        key, value = (x.to(dtype) for x in new_tokens(1, length, torch.Generator()))
        cache.append(0, key, value, cache.extend(length))
        for first in cache.k_cache + cache.summaries[0]:
            assert first.data_ptr() % quest.pools.MEMORY_PAGE == 0


@pytest.mark.parametrize("way", [QuestConfig(page_size=16), QuestConfig()], ids=["pages", "packed"])
def test_what_is_read_together_lies_together(way: QuestConfig) -> None:
    """A token's K and V, and a page's minimum and maximum, also after the pools have grown."""
    cache = PagedKVCache(1, 1, config=way)
    for length in (3, 3000):
        cache.append(0, torch.randn(1, length, 2, 24), torch.randn(1, length, 2, 8), cache.extend(length))
        (k,), (v,) = cache.k_cache, cache.v_cache
        assert v.data_ptr() == k.data_ptr() + 24 * 4
        assert k.stride() == v.stride() == (k.shape[1] * k.shape[2] * 32, k.shape[2] * 32, 32, 1)
        if way.summary_bits is None:
            low, high = (pools[0] for pools in cache.summaries)
            assert high.data_ptr() == low.data_ptr() + 24 * 4
            assert low.stride() == high.stride() == (low.shape[1] * low.shape[2] * 48, low.shape[2] * 48, 48, 1)


def test_large_pools_ask_for_huge_pages() -> None:
    flags = Path("/proc/self/smaps")
    if not flags.exists() or not Path("/sys/kernel/mm/transparent_hugepage").exists():
        pytest.skip("this system has no transparent huge pages")
    tensor = quest.pools.empty((4 * quest.pools.HUGE_PAGE,), torch.uint8)
    assert tensor.data_ptr() % quest.pools.HUGE_PAGE == 0
    within = False
    for line in flags.read_text().splitlines():
        if "-" in (span := line.split()[0]):
            start, end = (int(place, 16) for place in span.split("-"))
            within = start <= tensor.data_ptr() < end
        elif within and line.startswith("VmFlags:"):
            assert "hg" in line.split()
            return
    raise AssertionError("the tensor lies in no mapping")


@torch.no_grad()
def test_steps_like_earlier_ones_are_checked_too() -> None:
    """The way past the checks is for arguments that have passed them, in a step of the cache's last `extend`."""
    generator = torch.Generator().manual_seed(11)
    cache = PagedKVCache(2, 1, config=config())
    query = torch.randn(1, 1, 4, 8, generator=generator)
    key, value = new_tokens(1, 1, generator)
    first = None
    for _ in range(30):  # over several blocks, and a pool that grows
        step = cache.extend(1)
        for layer in range(2):
            out, _ = cache.decode(layer, query, key, value, step)
            assert torch.allclose(out, value.repeat_interleave(2, 2), atol=1e-6)  # all tokens are equal
        first = first or step
    step = cache.extend(1)
    with pytest.raises(ValueError, match="last extend"):
        cache.decode(0, query, key, value, first)
    with pytest.raises(ValueError, match="head_dim"):
        cache.decode(0, query[..., :4], key, value, step)
    with pytest.raises(ValueError, match="num_kv_heads"):
        cache.decode(0, query, key[:, :, :1], value[:, :, :1], step)
    with pytest.raises(TypeError, match="dtype"):
        cache.decode(0, query, key.half(), value.half(), step)
    with torch.enable_grad(), pytest.raises(ValueError, match="require grad"):
        cache.decode(0, query.clone().requires_grad_(), key, value, step)
    with pytest.raises(TypeError, match="step"):
        cache.decode(0, query, key, value, None)
    out, _ = cache.decode(0, query, key, value, step, softcap=5.0)
    assert torch.allclose(out, value.repeat_interleave(2, 2), atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("q_len", [1, 2])  # 2 is the number of KV heads too
def test_heads_first(q_len: int) -> None:
    """The same results, mass and errors as with the tokens first, at strides that the op takes and others."""
    generator = torch.Generator().manual_seed(12)
    caches = [PagedKVCache(1, 1, config=config(budget=12)) for _ in range(3)]
    for i in range(20):
        query = torch.randn(1, q_len, 4, 8, generator=generator)
        tokens = query, *new_tokens(1, q_len, generator)
        heads = [x.transpose(1, 2) for x in tokens]
        forms = tokens, heads, [x.mT.contiguous().mT for x in heads]
        if i == 2:
            for cache in caches:
                cache.stats.sample_mass(2)
        results = []
        for cache, form in zip(caches, forms, strict=True):
            results.append(cache.decode(0, *form, cache.extend(q_len), heads_first=form is not tokens))
        for out, lse in results[1:]:
            assert out.shape == (1, q_len, 4, V_DIM)
            assert torch.equal(out, results[0][0])
            assert torch.equal(lse, results[0][1])
    assert caches[0].stats.layers == caches[1].stats.layers == caches[2].stats.layers
    assert caches[0].stats.layers[0].mass is not None
    step = caches[1].extend(q_len)
    with pytest.raises(ValueError, match="num_kv_heads"):
        caches[1].decode(0, heads[0], heads[1][:, :1], heads[2][:, :1], step, heads_first=True)
    with pytest.raises(ValueError, match="head_dim"):
        caches[1].decode(0, heads[0][..., :4], *heads[1:], step, heads_first=True)


def test_deepcopy_is_independent() -> None:
    generator = torch.Generator().manual_seed(10)
    cache = PagedKVCache(1, 1, config=config())
    key, value = new_tokens(1, 10, generator)
    cache.append(0, key, value, cache.extend(10))
    other = copy.deepcopy(cache)
    assert other.config is cache.config
    other.append(0, *new_tokens(1, 3, generator), other.extend(3))
    other.crop(2)
    other.append(0, *new_tokens(1, 20, generator), other.extend(20))
    assert torch.equal(cache.dense(0)[0], key.transpose(1, 2))
    assert torch.equal(other.dense(0)[0][:, :, :2], key[:, :2].transpose(1, 2))


def cache_of_two() -> PagedKVCache:
    cache = PagedKVCache(2, 2, config=config())
    key, value = torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8)
    step = cache.extend(6)
    for layer in range(2):
        cache.append(layer, key, value, step)
    return cache


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda c: PagedKVCache(0), "Pools: num_layers must be at least 1, got 0"),
        (lambda c: PagedKVCache(1, 1.5), "PagedKVCache: batch_size must be an int, got 1.5"),
        (lambda c: PagedKVCache(1, config={}), "Pools: config must be a QuestConfig, got dict"),
        (lambda c: c.extend(0), "extend: num_new must be at least 1, got 0"),
        (lambda c: c.extend(True), "extend: num_new must be an int, got True"),
        (lambda c: c.extend([1]), "extend: num_new must be one number per row (2), got 1"),
        (lambda c: c.extend([0, 0]), "extend: num_new must be above 0 for at least one row, got only zeros"),
        (lambda c: c.extend([1, -1]), "extend: num_new[1] must be at least 0, got -1"),
        (
            lambda c: c.extend(torch.ones(2, 3)),
            "extend: num_new as a tensor must be bool [2, q_len], got torch.float32",
        ),
        (lambda c: c.extend(1, start=[7, 0]), "extend: start[0] must be in [0, 6], got 7"),
        (lambda c: c.crop(7), "crop: lengths[0] must be in [0, 6], got 7"),
        (lambda c: c.crop([1]), "crop: lengths must be one per row (2), got 1"),
        (lambda c: c.fork([]), "fork: indices must name at least one row, got none"),
        (lambda c: c.fork([0, 2]), "fork: indices[1] must be in [0, 1], got 2"),
        (lambda c: c.fork(torch.tensor([0.5])), "fork: indices[0] must be an int, got 0.5"),
        (lambda c: c.free(2), "free: row must be in [0, 1], got 2"),
        (lambda c: c.dense(2), "dense: layer must be in [0, 1], got 2"),
        (lambda c: c.append(0, *[torch.randn(2, 1, 2, 8)] * 2, None), "append: step must be what extend returned"),
    ],
)
def test_errors_name_what_is_wrong_and_change_nothing(call: Any, message: str) -> None:
    cache = cache_of_two()
    before = copy.deepcopy(cache)
    with pytest.raises((ValueError, TypeError)) as error:
        call(cache)
    assert message in str(error.value)
    assert cache.lengths == before.lengths
    assert cache.usage() == before.usage()
    assert torch.equal(cache.block_table, before.block_table)


def test_a_step_is_valid_until_the_next_change() -> None:
    cache = cache_of_two()
    step, new = cache.extend(1), [torch.randn(2, 1, 2, 8)] * 2
    cache.append(0, *new, step)
    cache.crop(6)
    with pytest.raises(ValueError, match=r"append: step must be from the cache's last extend"):
        cache.append(1, *new, step)


def test_tokens_that_do_not_fit_are_refused() -> None:
    cache = PagedKVCache(1, 2, config=config())
    step = cache.extend(3)
    with pytest.raises(ValueError, match=r"append: key must be \[batch, q_len, num_kv_heads, head_dim\]"):
        cache.append(0, torch.randn(2, 2, 3, 8), torch.randn(2, 2, 3, 8), step)
    with pytest.raises(ValueError, match=r"append: key and value must agree in heads and dtype"):
        cache.append(0, torch.randn(2, 3, 2, 8), torch.randn(2, 3, 1, 8), step)
    with pytest.raises(ValueError, match="must not require grad"):
        cache.append(0, torch.randn(2, 3, 2, 8, requires_grad=True), torch.randn(2, 3, 2, 8), step)
    cache.append(0, torch.randn(2, 3, 2, 8), torch.randn(2, 3, 2, 8), step)
    with pytest.raises(TypeError, match="dtype"):
        cache.append(0, torch.randn(2, 3, 2, 8).half(), torch.randn(2, 3, 2, 8).half(), step)
    with pytest.raises(ValueError, match="num_kv_heads"):
        cache.append(0, torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4, 8), step)
