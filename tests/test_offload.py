"""A cache with `Offload` against the same one without: all equal, whatever is in memory and whatever fails.

What a GPU's cache does (`quest.slots`) is tested here on the CPU's tensors: "slots".
"""

from __future__ import annotations

import contextlib
import copy
import errno
import math
import os
import random
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import DTYPES
from torch import Tensor

from quest import Offload, PagedKVCache, QuestConfig
from quest.offload import FileTier, HostTier
from quest.slots import SlotResidency

HEADS, QUERY_HEADS = 2, 4

CONFIGS = {  # units of 16 to 64 tokens, and of whole blocks
    "codes": (QuestConfig(budget=48), 64, 64),
    "pages": (QuestConfig(page_size=16, block_size=64, budget=96), 64, 128),
    "blocks": (QuestConfig(page_size=4, block_size=12, sink_tokens=4, recent_tokens=4, budget=48), 24, 40),
    "per head": (QuestConfig.paper(dense_layers=(1,), budget=64), 64, 64),
    "codes of pages": (QuestConfig(page_size=4, summary_bits=4, coarse_size=16, budget=64), 32, 32),
}


@pytest.fixture
def poisoned(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that nobody has written is NaN; that of files is mapped, and zero."""

    def filled(make: Any) -> Any:
        def empty(*args: Any, **options: Any) -> Tensor:
            made = make(*args, **options)
            return made.fill_(math.nan) if made.is_floating_point() else made

        return empty

    if tier == "slots":
        for owner, name in ((torch, "empty"), (Tensor, "new_empty")):
            monkeypatch.setattr(owner, name, filled(getattr(owner, name)))


both_tiers = pytest.mark.usefixtures("poisoned")


class Pair:
    """A cache, the same one with offload, and what is done to both."""

    def __init__(
        self, kind: str, max_bytes: int, *, layers: int = 2, batch: int = 1, dtype: torch.dtype = torch.float32
    ) -> None:
        self.config, *self.dims = CONFIGS[kind]
        self.plain = PagedKVCache(layers, batch, config=self.config)
        self.cache = PagedKVCache(layers, batch, config=self.config, offload=Offload(max_bytes=max_bytes))
        self.max_bytes, self.dtype = max_bytes, dtype
        self.generator = torch.Generator().manual_seed(0)

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def both(self, name: str, *args: Any) -> None:
        for cache in (self.plain, self.cache):
            getattr(cache, name)(*args)

    def new(self, num_new: Any) -> tuple[Any, Any, int, int]:
        steps = self.plain.extend(num_new), self.cache.extend(num_new)
        return *steps, *steps[0].slot_mapping.shape

    def append(self, num_new: Any) -> None:
        plain, step, batch, q_len = self.new(num_new)
        for layer in range(self.cache.num_layers):
            key, value = (self.random(batch, q_len, HEADS, dim) for dim in self.dims)
            self.plain.append(layer, key, value, plain)
            self.cache.append(layer, key, value, step)
            self.within()

    def decode(self, num_new: Any = 1, **options: Any) -> None:
        plain, step, batch, q_len = self.new(num_new)
        for layer in range(self.cache.num_layers):
            key, value = (self.random(batch, q_len, HEADS, dim) for dim in self.dims)
            query = self.random(batch, q_len, QUERY_HEADS, self.dims[0])
            wanted = self.plain.decode(layer, query, key, value, plain, **{"backend": "verbs"} | options)
            self.agree(self.cache.decode(layer, query, key, value, step, **options), wanted)
            self.within()

    def agree(self, got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
        if isinstance(self.cache.pools.residency, SlotResidency):  # another order of sums
            rounding = dict(rtol=2 * torch.finfo(self.dtype).eps, atol=4 * torch.finfo(self.dtype).eps)
            torch.testing.assert_close(got, wanted, **rounding)  # type: ignore[arg-type]
        else:
            assert all(map(torch.equal, got, wanted))

    def within(self) -> None:
        stats = self.cache.offload_stats
        assert stats is not None
        assert stats.resident_bytes <= self.max_bytes

    def check(self) -> None:
        """K, V and summaries of every token are equal."""
        assert self.cache.lengths == self.plain.lengths
        for layer in range(self.cache.num_layers):
            assert all(map(torch.equal, self.cache.dense(layer), self.plain.dense(layer)))
            self.within()
        for kind, wanted in zip(self.cache.summaries, self.plain.summaries):
            for got, want in zip(kind, wanted):
                for blocks, length in zip(self.plain.block_table.tolist(), self.plain.lengths):
                    for i, block in enumerate(blocks):
                        used = min(max(0, length - i * self.config.block_size), self.config.block_size)
                        pages = self.summarised(used)
                        assert torch.equal(got[block, :, :pages], want[block, :, :pages])

    def summarised(self, tokens: int) -> int:
        """Of a block with so many tokens: pages, or bytes of a packed summary, that say something of them."""
        if self.cache.pools.packing is None:
            return -(-tokens // self.config.page_size)
        whole = tokens // self.cache.pools.packing.group_size
        return self.cache.pools.packing.num_bytes(self.dims[0]) if whole else 0

    def size(self) -> int:
        """Bytes of K and V that the rows have."""
        tokens = sum(self.plain.lengths) * self.cache.num_layers * HEADS
        return tokens * sum(self.dims) * self.dtype.itemsize


@both_tiers
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("part", [4, 16])
def test_equal_in_a_part_of_the_memory(kind: str, dtype: torch.dtype, part: int) -> None:
    size = 700 * 2 * HEADS * sum(CONFIGS[kind][1:]) * dtype.itemsize
    pair = Pair(kind, size // part, dtype=dtype)
    pair.append(700)
    for _ in range(20):
        pair.decode()
    pair.check()
    stats = pair.cache.offload_stats
    assert stats is not None
    assert stats.misses
    assert stats.bytes_in
    assert stats.bytes_out >= size - size // part - 4 * 2**20 // part
    assert f"{stats.hit_rate:.1%} of" in str(stats)


@both_tiers
@pytest.mark.parametrize("kind", CONFIGS)
def test_prompts_in_chunks_ragged_rows_and_windows(kind: str) -> None:
    pair = Pair(kind, 100_000, batch=3)
    pair.append([300, 0, 70])
    pair.decode([9, 40, 0])
    pair.decode([1, 1, 1], window=100)
    pair.decode([1, 0, 1], softcap=20.0)
    pair.decode([1, 1, 0], sinks=torch.linspace(-1, 3, QUERY_HEADS))
    pair.decode(torch.tensor([[False, True], [True, True], [False, False]]))
    pair.decode(33)
    pair.check()


@both_tiers
@pytest.mark.parametrize("kind", CONFIGS)
def test_rows_share_copy_crop_and_end(kind: str) -> None:
    pair = Pair(kind, 60_000, batch=2)
    pair.append([310, 145])
    pair.both("fork", [0, 0, 1])
    pair.decode()
    pair.decode()
    pair.both("crop", [303, 150, 140])
    pair.check()
    pair.decode()
    pair.both("free", 1)
    pair.decode([0, 30, 0])
    pair.both("fork", [2, 1])
    pair.append(100)
    pair.check()
    pair.both("reset")
    assert pair.cache.offload_stats.resident_bytes == 0  # type: ignore[union-attr]
    pair.append(200)
    pair.decode()
    pair.check()


@both_tiers
@pytest.mark.parametrize("kind", CONFIGS)
def test_any_order_of_operations(kind: str) -> None:
    for seed in range(4):
        chance = random.Random(seed)
        pair = Pair(kind, chance.choice([0, 20_000, 80_000]), batch=2)
        pair.append([chance.randint(1, 200) for _ in range(2)])
        for _ in range(25):
            batch, lengths = pair.plain.batch_size, pair.plain.lengths
            act = chance.choice(["append", "decode", "decode", "decode", "crop", "fork", "free", "suspend", "copy"])
            if act == "append":
                pair.append([chance.randint(1, 60) for _ in range(batch)])
            elif act == "decode":
                pair.decode(chance.choice([1, 1, 1, 5]))
            elif act == "crop":
                pair.both("crop", [max(0, length - chance.randint(0, 40)) for length in lengths])
            elif act == "fork":
                pair.both("fork", [chance.randrange(batch) for _ in range(chance.randint(1, 3))])
            elif act == "free":
                pair.both("free", chance.randrange(batch))
            elif act == "suspend":
                sequence = chance.choice(pair.plain.ids)
                place = pair.plain.ids
                pair.both("suspend", sequence)
                pair.both("resume", sequence)
                pair.both("select", place)
            else:
                pair.plain, pair.cache = copy.deepcopy(pair.plain), copy.deepcopy(pair.cache)
            pair.within()
        pair.check()


@both_tiers
def test_a_layer_stores_later() -> None:
    pair = Pair("pages", 50_000)
    pair.append(300)
    start = [290]
    for cache in (pair.plain, pair.cache):
        step = cache.extend(10, start=start)
        generator = torch.Generator().manual_seed(1)
        key, value = (torch.randn(1, 10, HEADS, dim, generator=generator) for dim in pair.dims)
        cache.append(1, key, value, step)
    pair.check()


@pytest.mark.parametrize("backend", ["cpu", "reference", "verbs"])
def test_backends_by_name(backend: str) -> None:
    pair = Pair("codes", 50_000)
    pair.append(300)
    pair.decode(backend=backend)
    pair.check()


@both_tiers
def test_attend_and_the_measured_mass() -> None:
    pair = Pair("codes", 50_000)
    pair.append(300)
    query = pair.random(1, 1, QUERY_HEADS, pair.dims[0])
    for cache in (pair.plain, pair.cache):
        cache.stats.measure_mass = True
    wanted, got = (cache.attend(0, query) for cache in (pair.plain, pair.cache))
    assert all(map(torch.allclose, got, wanted))
    pair.within()


@both_tiers
def test_keys_are_checked_before_anything_is_written() -> None:
    pair = Pair("codes", 1 << 20)
    pair.append(100)
    key, value = (pair.random(1, 1, HEADS, dim) for dim in pair.dims)
    query = pair.random(1, 1, QUERY_HEADS, pair.dims[0])
    step = pair.cache.extend(1)
    with pytest.raises(ValueError, match="key must be finite"):
        pair.cache.decode(0, query, key * float("inf"), value, step)


# --- memory ----------------------------------------------------------------------------------------------------------


def in_memory(pools: list[Tensor]) -> int:
    """Bytes of tensors' memory that the process really has."""
    spans = [(pool.data_ptr(), pool.data_ptr() + pool.shape[0] * pool.stride(0) * pool.itemsize) for pool in pools]
    found = counted = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            first, end = (int(number, 16) for number in match.groups())
            counted = any(begin < end and first < last for begin, last in spans)
        elif counted and line.startswith("Rss:"):
            found += int(line.split()[1]) << 10
    return found


@pytest.mark.parametrize("kind", CONFIGS)
def test_memory_is_given_back(kind: str) -> None:
    pair = Pair(kind, 200_000)
    pair.append(1500)
    for _ in range(5):
        pair.decode()
    pools = [pool for pool in (*pair.cache.k_cache, *pair.cache.v_cache) if pool is not None]
    assert 0 < in_memory(pools) <= pair.max_bytes < pair.size() // 4


@both_tiers
def test_what_is_used_often_stays() -> None:
    pair = Pair("pages", 400_000, layers=1)
    pair.append(2000)
    query = pair.random(1, 1, QUERY_HEADS, pair.dims[0])
    for _ in range(4):
        pair.cache.attend(0, query)
    pair.cache.dense(0)  # goes over everything, which makes nothing stay
    before = pair.cache.offload_stats
    pair.cache.attend(0, query)
    after = pair.cache.offload_stats
    assert before is not None
    assert after is not None
    assert after.misses == before.misses
    assert after.hits > before.hits


@both_tiers
def test_freed_blocks_are_not_written() -> None:
    pair = Pair("pages", 10 << 20)
    pair.append(500)
    pair.both("free", 0)
    stats = pair.cache.offload_stats
    assert stats is not None
    assert (stats.resident_bytes, stats.bytes_out) == (0, 0)


# --- what fails ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_up_to(size: int) -> Iterator[None]:
    """No file may grow beyond `size` bytes: for a program this is a disk that is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_full_disk_while_moving_out(kind: str) -> None:
    pair = Pair(kind, 100_000)
    pair.append(40)
    plain, step, batch, q_len = pair.new(500)
    rows = [[pair.random(batch, q_len, HEADS, dim) for dim in pair.dims] for _ in range(2)]
    for layer, (key, value) in enumerate(rows):
        pair.plain.append(layer, key, value, plain)

    def append() -> None:
        for layer, (key, value) in enumerate(rows):
            pair.cache.append(layer, key, value, step)

    with files_up_to(20_000):
        for _ in range(2):  # and again
            with pytest.raises(OSError, match=r"moving K and V out failed, they stay in memory: .*layer \d") as error:
                append()
            assert error.value.errno == errno.EFBIG
    append()
    pair.within()
    pair.decode()
    pair.check()


def test_a_full_disk_while_rows_part() -> None:
    pair = Pair("pages", 100_000)
    pair.append(500)
    pair.both("fork", [0, 0])
    blocks = pair.cache.block_table.tolist()
    with files_up_to(20_000), pytest.raises(OSError, match="failed"):
        pair.cache.extend(500)
    assert pair.cache.lengths == [500, 500]
    assert pair.cache.block_table.tolist() == blocks
    pair.decode()
    with files_up_to(20_000), contextlib.suppress(OSError):
        pair.cache.crop([490, 480])
    pair.cache.crop([490, 480])
    pair.plain.crop([490, 480])
    pair.check()


def test_a_full_disk_where_a_file_is_reserved() -> None:
    pair = Pair("codes", 100_000)
    plain, step, *_ = pair.new(300)
    key, value = (pair.random(1, 300, HEADS, dim) for dim in pair.dims)
    with files_up_to(20_000), pytest.raises(OSError, match=r"reserving [\d,]+ bytes failed"):
        pair.cache.append(0, key, value, step)
    for layer in range(2):
        pair.plain.append(layer, key, value, plain)
        pair.cache.append(layer, key, value, step)
    with files_up_to(20_000), pytest.raises(OSError, match="reserving"):
        pair.cache.extend(1000)
    assert pair.cache.lengths == [300]
    pair.append(1000)
    pair.check()


def test_a_file_that_ends_early() -> None:
    pair = Pair("pages", 50_000)
    pair.append(600)
    file = pair.cache.pools.residency._layers[0].file  # type: ignore[union-attr]
    size = os.fstat(file.fileno()).st_size
    kept = os.pread(file.fileno(), size, 0)
    os.truncate(file.fileno(), 0)
    with pytest.raises(OSError, match=r"reading K and V back failed.*the file ends too early.*layer 0") as error:
        pair.cache.dense(0)
    assert error.value.errno == errno.EIO
    pair.within()
    os.pwrite(file.fileno(), kept, 0)
    pair.check()
    pair.decode()


def test_arguments() -> None:
    with pytest.raises(TypeError, match=r"max_bytes must be an int, got 1\.5"):
        Offload(max_bytes=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_bytes must be at least 0, got -1"):
        Offload(max_bytes=-1)
    with pytest.raises(ValueError, match="directory must be a folder that exists, got '/nowhere'"):
        Offload("/nowhere", max_bytes=1)
    with pytest.raises(TypeError, match="directory must be a path or None, got 3"):
        Offload(3, max_bytes=1)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="offload must be an Offload or None, got str"):
        PagedKVCache(1, offload="/tmp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="offload must be None on meta, it needs a CPU or a CUDA device"):
        PagedKVCache(1, offload=Offload(max_bytes=1), device="meta")


def test_nothing_is_left_in_the_directory(tmp_path: Path) -> None:
    cache = PagedKVCache(1, config=CONFIGS["pages"][0], offload=Offload(tmp_path, max_bytes=10_000))
    cache.append(0, torch.randn(1, 200, 2, 64), torch.randn(1, 200, 2, 64), cache.extend(200))
    assert cache.offload_stats.bytes_out  # type: ignore[union-attr]
    assert list(tmp_path.iterdir()) == []


# --- whole sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tier", [FileTier, HostTier])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tier_gives_back_what_it_got(tier: type[FileTier] | type[HostTier], dtype: torch.dtype) -> None:
    made = tier()
    tensors = [torch.randn(3, 4).to(dtype).T, torch.arange(7, dtype=torch.uint8), torch.zeros(0, 2), torch.randn(())]
    handle, other = made.store(tensors), made.store(tensors[:2])
    assert made.num_bytes == 2 * (12 * dtype.itemsize + 7) + 4
    for _ in range(2):
        got = list(made.load(handle))
        assert [x.dtype for x in got] == [x.dtype for x in tensors]
        assert all(map(torch.equal, got, tensors))
    made.drop(handle)
    assert all(map(torch.equal, made.load(other), tensors))
    made.drop(other)
    assert made.num_bytes == 0


def test_a_file_tier_that_is_full(tmp_path: Path) -> None:
    tier = FileTier(tmp_path)
    handle = tier.store([torch.arange(10)])
    with files_up_to(20_000), pytest.raises(OSError, match="storing a sequence failed, it stays where it is") as error:
        tier.store([torch.randn(1000), torch.randn(10_000)])
    assert (error.value.errno, error.value.filename) == (errno.EFBIG, str(tmp_path))
    assert tier.num_bytes == 80
    os.truncate(handle.file.fileno(), 8)
    with pytest.raises(OSError, match="reading a sequence back failed, it stays in its file: the file ends too early"):
        list(tier.load(handle))


@both_tiers
@pytest.mark.parametrize("max_bytes", [None, 10_000])
@pytest.mark.parametrize("kind", CONFIGS)
def test_c36_suspended_sequences_come_back_elsewhere(kind: str, max_bytes: int | None) -> None:
    config, *dims = CONFIGS[kind]
    offload = None if max_bytes is None else Offload(max_bytes=max_bytes)
    make = torch.Generator().manual_seed(0)

    def new(q_len: int) -> list[Tensor]:
        return [torch.randn(1, q_len, HEADS, dim, generator=make) for dim in dims]

    cache = PagedKVCache(2, config=config, offload=offload)
    (first,) = cache.ids
    length = 4 * config.block_size - 1
    step = cache.extend(length)
    for layer in range(2):
        cache.append(layer, *new(length), step)
    blocks = cache.block_table[0].tolist()
    held = [cache.dense(layer) for layer in range(2)]
    summaries = [pool[blocks].clone() for kind in cache.summaries for pool in kind if pool is not None]
    query = torch.randn(1, 1, QUERY_HEADS, dims[0], generator=make)
    answers = [cache.attend(layer, query) for layer in range(2)]
    for _ in range(3):
        cache.suspend(first)
        other = cache.add()  # takes the blocks, and writes all of them
        step = cache.extend(length - config.block_size)
        for layer in range(2):
            cache.append(layer, *new(length - config.block_size), step)
        cache.resume(first)
        cache.remove(other)
        cache.select([first])
        moved = cache.block_table[0].tolist()
        assert moved != blocks
        for layer in range(2):
            assert all(map(torch.equal, cache.dense(layer), held[layer]))
            assert all(map(torch.equal, cache.attend(layer, query), answers[layer]))
        pools = [pool for kind in cache.summaries for pool in kind if pool is not None]
        if cache.pools.packing is None:
            assert all(torch.equal(pool[moved], wanted) for pool, wanted in zip(pools, summaries))
        else:  # codes, and of the last block those of whole groups
            assert all(torch.equal(pool[moved[:-1]], wanted[:-1]) for pool, wanted in zip(pools, summaries))
        assert offload is None or cache.offload_stats.resident_bytes <= offload.max_bytes  # type: ignore[union-attr]


def test_suspending_fails_and_changes_nothing() -> None:
    pair = Pair("codes", 50_000)
    pair.append(500)
    (sequence,) = pair.cache.ids
    with files_up_to(20_000), pytest.raises(OSError, match="failed"):
        pair.cache.suspend(sequence)
    assert pair.cache.ids == [sequence]
    assert pair.cache.suspended == []
    pair.check()


@both_tiers
def test_fetched_where_it_was_selected() -> None:
    """What is absent is not read as zeros: every page is once the best, after all were moved out."""
    config = QuestConfig(page_size=16, block_size=64, sink_tokens=0, recent_tokens=16, budget=48)
    cache = PagedKVCache(1, config=config, offload=Offload(max_bytes=0))
    keys = torch.zeros(1, 512, 1, 64)
    keys[0, torch.arange(512), 0, torch.arange(512) // 16] = 10.0  # a page, a channel
    values = torch.arange(512.0).view(1, 512, 1, 1).expand(-1, -1, -1, 64).contiguous()
    cache.append(0, keys, values, cache.extend(512))
    assert cache.offload_stats.resident_bytes == 0  # type: ignore[union-attr]
    for page in range(32):
        query = torch.zeros(1, 1, 1, 64)
        query[..., page] = 100.0
        out, _ = cache.attend(0, query, softmax_scale=1.0)
        torch.testing.assert_close(out, torch.full_like(out, page * 16 + 7.5))
        assert cache.offload_stats.resident_bytes == 0  # type: ignore[union-attr]
