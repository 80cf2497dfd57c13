"""Thousands of random operations on one cache, against a plain model of it: whatever happened, K, V, summaries, lengths
and counts are those of the tokens that each sequence has."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quest import Offload, OutOfBlocks, PagedKVCache, QuestConfig
from quest.slots import SlotResidency

LAYERS, HEADS, DIM, V_DIM = 2, 2, 8, 16
STATES = 4093  # a token's K and V follow from the tokens up to it, by a hash of so many values
KEYS = torch.randn(STATES, LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(1))
VALUES = torch.randn(STATES, LAYERS, HEADS, V_DIM, generator=torch.Generator().manual_seed(2))
PAGES = QuestConfig(page_size=2, block_size=4, budget=8, sink_tokens=2, recent_tokens=2)
PACKED = QuestConfig(block_size=64, budget=24)


class Sequence:
    """Token ids, and the states that K and V follow from."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.states: list[int] = []

    def copy(self) -> Sequence:
        other = Sequence()
        other.tokens, other.states = [*self.tokens], [*self.states]
        return other

    def add(self, tokens: list[int]) -> None:
        for token in tokens:
            before = self.states[-1] if self.states else 1
            self.tokens.append(token)
            self.states.append((before * 1009 + token + 7) % STATES)

    def crop(self, length: int) -> None:
        del self.tokens[length:], self.states[length:]


class World:
    def __init__(self, config: QuestConfig, max_blocks: int, offload: Offload | None, seed: int) -> None:
        self.random = random.Random(seed)
        self.cache = PagedKVCache(LAYERS, 1, config=config, max_blocks=max_blocks, watermark=1, offload=offload)
        self.sequences = {self.cache.ids[0]: Sequence()}
        self.counts: Counter[str] = Counter()
        self.longest = config.block_size * 5

    def run(self, steps: int, check_every: int) -> None:
        kinds = dict(extend=8, add=2, copy=1, fork=1, crop=2, free=1, remove=1, select=2)
        kinds |= dict(suspend=1, resume=2, remember=3, overwrite=1)
        for step in range(steps):
            kind = self.random.choices([*kinds], [*kinds.values()])[0]
            try:
                getattr(self, kind)()
                self.counts[kind] += 1
            except OutOfBlocks:
                self.counts["out of blocks"] += 1
                self.check_lengths()
                self.make_way()
            if step % check_every == 0:
                self.check()
        self.check()

    # --- operations --------------------------------------------------------------------------------------------------

    def rows(self) -> list[Sequence]:
        return [self.sequences[i] for i in self.cache.ids]

    def somebody(self, ids: list[int]) -> int | None:
        return self.random.choice(ids) if ids else None

    def extend(self) -> None:
        if not self.cache.batch_size:
            return
        most = self.random.choice([1, 1, 5, 2 * self.cache.config.block_size + 3])
        counts = [self.random.randint(0, most) for _ in self.cache.ids]
        counts = [min(count, self.longest - n) for count, n in zip(counts, self.cache.lengths)]
        if not any(counts):
            return
        step = self.cache.extend(counts)
        rows = self.rows()
        for row, count in zip(rows, counts):
            row.add([self.random.randint(0, 1) for _ in range(count)])
        self.store(step, rows, counts)

    def store(self, step: Any, rows: list[Sequence], counts: list[int]) -> None:
        q_len = max(counts)
        states = torch.zeros(len(rows), q_len, dtype=torch.long)
        for b, (row, count) in enumerate(zip(rows, counts)):
            if count:
                states[b, q_len - count :] = torch.tensor(row.states[-count:])
        sparse = q_len == 1 and self.random.random() < 0.7
        for layer in range(LAYERS):
            key, value = KEYS[states, layer], VALUES[states, layer]
            if sparse:
                self.cache.decode(layer, torch.randn(len(rows), 1, 2 * HEADS, DIM), key, value, step)
            else:
                self.cache.append(layer, key, value, step)

    def add(self) -> None:
        if len(self.sequences) >= 12:
            return self.remove()
        sequence = self.cache.add()
        self.sequences[sequence] = made = Sequence()
        # Half of the new ones begin like another, which the pools may know.
        other = self.somebody([*self.sequences])
        tokens = [*self.sequences[other].tokens] if other is not None else []
        if len(tokens) < 2 or self.random.random() < 0.5:
            return None
        found = self.cache.reuse(tokens, row=self.cache.ids.index(sequence))
        assert found % self.cache.config.block_size == 0
        assert found < len(tokens)
        made.add(tokens[:found])
        self.counts["prefix hit"] += found > 0
        return None

    def copy(self) -> None:
        source = self.somebody([i for i in self.sequences if i not in self.cache.suspended])
        if source is not None and len(self.sequences) < 12:
            self.sequences[self.cache.copy(source)] = self.sequences[source].copy()

    def fork(self) -> None:
        if not self.cache.ids:
            return
        indices = [self.random.randrange(self.cache.batch_size) for _ in range(self.random.randint(1, 4))]
        before, old = self.cache.ids, self.rows()
        copies = [old[i].copy() for i in indices]
        self.cache.fork(indices)
        for sequence in before:
            del self.sequences[sequence]
        self.sequences |= dict(zip(self.cache.ids, copies))

    def crop(self) -> None:
        if self.cache.ids:
            ends = [self.random.randint(0, n) if self.random.random() < 0.5 else n for n in self.cache.lengths]
            self.cache.crop(ends)
            for row, end in zip(self.rows(), ends):
                row.crop(end)

    def free(self) -> None:
        if self.cache.ids:
            row = self.random.randrange(self.cache.batch_size)
            self.rows()[row].crop(0)
            self.cache.free(row)

    def remove(self) -> None:
        sequence = self.somebody([*self.sequences])
        if sequence is not None:
            self.cache.remove(sequence)
            del self.sequences[sequence]

    def select(self) -> None:
        ids = [i for i in self.sequences if i not in self.cache.suspended]
        self.cache.select(self.random.sample(ids, self.random.randint(min(1, len(ids)), min(4, len(ids)))))

    def suspend(self) -> None:
        sequence = self.somebody([i for i in self.sequences if i not in self.cache.suspended])
        if sequence is not None:
            self.cache.suspend(sequence)

    def resume(self) -> None:
        sequence = self.somebody(self.cache.suspended)
        if sequence is not None:
            self.cache.resume(sequence)

    def remember(self) -> None:
        if self.cache.ids:
            row = self.random.randrange(self.cache.batch_size)
            self.cache.remember(self.rows()[row].tokens, row=row)

    def overwrite(self) -> None:
        """A transfer writes a block's K and V, and no summary."""
        sequence = self.somebody([i for i in self.cache.ids if self.sequences[i].tokens])
        if sequence is None or self.cache.k_cache[0] is None or isinstance(self.cache.pools.residency, SlotResidency):
            return
        size = self.cache.config.block_size
        block = self.random.choice(self.cache._sequences.blocks_of(sequence))
        if self.cache.pools.blocks.is_cached(block):
            return  # may hold more than the tokens that somebody has
        for other, holder in self.sequences.items():
            for place, held in enumerate(self.cache._sequences.blocks_of(other)):
                if held == block:
                    states = holder.states[place * size : (place + 1) * size]
                    for layer in range(LAYERS):
                        self.cache.k_cache[layer][block, :, : len(states)] = KEYS[states, layer].transpose(0, 1)
                        self.cache.v_cache[layer][block, :, : len(states)] = VALUES[states, layer].transpose(0, 1)
        for kind in self.cache.summaries:
            for pool in kind:
                pool[block] = 77
        self.cache.pools.overwritten([block])

    def make_way(self) -> None:
        self.random.choice([self.remove, self.suspend, self.free])()

    # --- checks ------------------------------------------------------------------------------------------------------

    def check_lengths(self) -> None:
        cache = self.cache
        assert {*cache.ids} | {*cache.waiting} | {*cache.suspended} == {*self.sequences}
        assert {i: cache.length(i) for i in self.sequences} == {i: len(s.tokens) for i, s in self.sequences.items()}
        assert cache.lengths == cache.seq_lens.tolist() == [len(row.tokens) for row in self.rows()]

    def check(self) -> None:
        self.check_lengths()
        cache, blocks = self.cache, self.cache.pools.blocks
        held = Counter(block for i in self.sequences for block in cache._sequences.blocks_of(i))
        assert {block: blocks.refs(block) for block in held} == dict(held)
        usage = cache.usage()
        assert usage.used == len(held) == usage.num_blocks - usage.free
        assert usage.shared == sum(count > 1 for count in held.values())
        here = [i for i in self.sequences if i not in cache.suspended]
        if cache.k_cache[0] is None or not here:
            return
        rows = cache.ids
        cache.select(here)
        self.check_contents()
        cache.select(rows)

    def check_contents(self) -> None:
        """K and V bit by bit; summaries by what a query selects and reads, beside a cache that has only appended."""
        cache, rows = self.cache, self.rows()
        longest = max(cache.lengths)
        if not longest:
            return
        states = torch.zeros(len(rows), longest, dtype=torch.long)
        real = torch.zeros(len(rows), longest, dtype=torch.bool)
        for b, row in enumerate(rows):
            states[b, : len(row.states)] = torch.tensor(row.states)
            real[b, : len(row.states)] = True
        cold = PagedKVCache(LAYERS, len(rows), config=cache.config)
        step = cold.extend(real)
        query = torch.randn(len(rows), 1, 2 * HEADS, DIM)
        for layer in range(LAYERS):
            cold.append(layer, KEYS[states, layer], VALUES[states, layer], step)
            for ours, theirs in zip(cache.dense(layer), cold.dense(layer)):
                assert torch.equal(ours, theirs)
            for ours, theirs in zip(cache.attend(layer, query), cold.attend(layer, query)):
                assert torch.equal(ours, theirs)
        if len(cache.summaries) == 2:
            self.check_pages(KEYS[states])

    def check_pages(self, keys: Tensor) -> None:
        page, size = self.cache.config.page_size, self.cache.config.block_size
        for b, length in enumerate(self.cache.lengths):
            for first in range(0, length, page):
                block = int(self.cache.block_table[b, first // size])
                expected = keys[b, first : min(first + page, length)]
                for layer in range(LAYERS):
                    low, high = (kind[layer][block, :, first % size // page] for kind in self.cache.summaries)
                    assert torch.equal(low, expected[:, layer].amin(0))
                    assert torch.equal(high, expected[:, layer].amax(0))


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("tier", [None, "files", "slots"], ids=str)
@pytest.mark.parametrize("config", [PAGES, PACKED], ids=["pages", "packed"])
def test_random_operations(
    config: QuestConfig, tier: str | None, seed: int, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    torch.manual_seed(seed)
    offload = None if tier is None else Offload(tmp_path if tier == "files" else None, max_bytes=20_000)
    if tier == "slots":
        request.getfixturevalue("slots_on_cpu")
    world = World(config, 16, offload, seed)
    world.run(3000, 25)
    wanted = {"extend", "copy", "fork", "crop", "free", "remove", "select", "suspend", "resume", "remember"}
    wanted |= {"prefix hit", "overwrite", "out of blocks"}
    assert all(world.counts[kind] >= 5 for kind in wanted), world.counts
    assert world.cache.usage().evicted > 0
    if offload is not None:
        stats = world.cache.offload_stats
        assert stats.misses > 100
        assert stats.bytes_in > 0 < stats.bytes_out
    world.cache.clear()
    assert world.cache.usage().used == 0
