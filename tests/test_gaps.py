"""A prefix is not remembered if a layer lacks any of it, in whatever step it was left out, and whatever came after."""

from __future__ import annotations

import copy
import re
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from quest import Offload, PagedKVCache, Pools, QuestConfig

LAYERS, HEADS, DIM = 3, 2, 8
STATES = 4093  # a token's K and V follow from the tokens up to it, by a hash of so many values
KEYS = torch.randn(STATES, LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(1))
CONFIGS = {
    "pages": QuestConfig(page_size=2, block_size=4, budget=8, sink_tokens=2, recent_tokens=2),
    "packed": QuestConfig(page_size=1, summary_bits=2, block_size=16, budget=8, sink_tokens=2, recent_tokens=2),
}


@pytest.fixture(params=CONFIGS)
def config(request: pytest.FixtureRequest) -> QuestConfig:
    return CONFIGS[request.param]


class Row:
    """Token ids, the states that K and V follow from, and by layer which tokens it has."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.states: list[int] = []
        self.has: list[list[bool]] = [[] for _ in range(LAYERS)]

    def add(self, tokens: list[int], has: bool) -> None:
        for token in tokens:
            self.states.append(((self.states[-1] if self.states else 1) * 1009 + token + 7) % STATES)
        self.tokens += tokens
        for layer in self.has:
            layer += [has] * len(tokens)

    def crop(self, end: int) -> None:
        for of_tokens in (self.tokens, self.states, *self.has):
            del of_tokens[end:]


class Model:
    """A cache, and what it should know of its sequences."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.rows = {i: Row() for i in cache.ids}

    @property
    def batch(self) -> list[Row]:
        return [self.rows[i] for i in self.cache.ids]

    def extend(self, counts: list[int], random: Random, start: list[int] | None = None) -> tuple[Any, list[range]]:
        """The step, and each row's places in it."""
        step = self.cache.extend(counts, start=start)
        begin = [len(row.tokens) for row in self.batch] if start is None else start
        for row, first, count in zip(self.batch, begin, counts):
            row.add([random.randint(0, 1) for _ in range(first + count - len(row.tokens))], has=False)
        return step, [range(first, first + count) for first, count in zip(begin, counts)]

    def store(self, layer: int, step: Any, places: list[range]) -> None:
        q_len = step.slot_mapping.shape[1]
        states = torch.zeros(len(places), q_len, dtype=torch.long)
        for b, (row, span) in enumerate(zip(self.batch, places)):
            if span:
                states[b, q_len - len(span) :] = torch.tensor(row.states[span.start : span.stop])
            row.has[layer][span.start : span.stop] = [True] * len(span)
        key = KEYS[states, layer]
        if q_len == 1:
            self.cache.decode(layer, torch.randn(len(places), 1, 2 * HEADS, DIM), key, key, step)
        else:
            self.cache.append(layer, key, key, step)

    def step(self, counts: list[int], random: Random, layers: Any = range(LAYERS), **options: Any) -> None:
        step, places = self.extend(counts, random, **options)
        for layer in layers:
            self.store(layer, step, places)

    def late(self, row: int, count: int) -> list[int]:
        full = count // self.cache.config.block_size * self.cache.config.block_size
        return [layer for layer, has in enumerate(self.batch[row].has) if not all(has[:full])]

    def remember(self, row: int, count: int) -> bool:
        """Whether it was accepted, as it should have been."""
        tokens, late = self.batch[row].tokens[:count], self.late(row, count)
        if late:
            message = f"remember: every layer must have stored the tokens, layers {late} have not"
            with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
                self.cache.remember(tokens, row=row)
        else:
            self.cache.remember(tokens, row=row)
        return not late

    def check_all(self) -> None:
        """What is known of each full block of the batch."""
        size = self.cache.config.block_size
        for i, row in zip(self.cache.ids, self.batch):
            for end in range(size, len(row.tokens) + 1, size):
                late = [layer for layer, has in enumerate(row.has) if not all(has[:end])]
                assert self.cache._gaps.late(i, end) == late


class World:
    def __init__(self, config: QuestConfig, seed: int, offload: Offload | None) -> None:
        self.random, self.counts = Random(seed), Counter[str]()
        self.size = config.block_size
        pools = Pools(LAYERS, config=config, offload=offload)
        self.models = [Model(PagedKVCache.on(pools)) for _ in range(2)]
        for model in self.models:
            model.step([3], self.random)

    def run(self, steps: int) -> None:
        kinds = dict(step=9, late=3, start=3, undo=2, crop=2, fork=2, copy=1, add=3, free=1, remove=1, select=2)
        kinds |= dict(suspend=1, resume=2, remember=8, overwrite=1, clone=0.3)
        for _ in range(steps):
            kind = self.random.choices([*kinds], [*kinds.values()])[0]
            self.model = self.random.choice(self.models)
            self.cache = self.model.cache
            if kind in ("resume", "add", "select", "remove") or self.cache.ids:
                self.counts[kind] += getattr(self, kind)() is not False
            self.model.check_all()

    def some(self, most: int) -> list[int]:
        """New tokens of each row."""
        most = self.random.choice([1, 2, most])
        counts = [self.random.randint(0, most) if len(row.tokens) < 6 * self.size else 0 for row in self.model.batch]
        if not any(counts):
            counts[self.random.randrange(len(counts))] = 1
        return counts

    def layers(self) -> list[int]:
        return self.random.sample(range(LAYERS), self.random.randint(0, LAYERS))

    def step(self) -> None:
        self.model.step(self.some(2 * self.size + 1), self.random)

    def late(self) -> None:
        """Some layers store at once, some after something that leaves the step valid, some never."""
        step, places = self.model.extend(self.some(self.size + 1), self.random)
        order, asked = self.layers(), self.random.randint(0, LAYERS)
        for i, layer in enumerate(order):
            if i == asked:
                self.random.choice([self.remember, self.resume, self.attend, self.model.check_all])()
            self.model.store(layer, step, places)

    def start(self) -> None:
        """Again from somewhere, up to the end or beyond."""
        begin = [self.random.randint(0, len(row.tokens)) for row in self.model.batch]
        counts = [
            self.random.randint(0, len(row.tokens) - first + (self.random.random() < 0.3))
            for row, first in zip(self.model.batch, begin)
        ]
        if any(counts):
            self.model.step(counts, self.random, self.layers(), start=begin)

    def attend(self) -> None:
        query = torch.randn(len(self.cache.ids), 1, 2 * HEADS, DIM)
        self.cache.attend(self.random.randrange(LAYERS), query)

    def undo(self) -> None:
        """A step that some layers have stored is taken back."""
        before = self.cache.lengths
        self.model.step(self.some(self.size + 1), self.random, self.layers())
        self.cache.crop(before)
        for row, end in zip(self.model.batch, before):
            row.crop(end)

    def crop(self) -> None:
        ends = [self.random.randint(0, n) if self.random.random() < 0.5 else n for n in self.cache.lengths]
        self.cache.crop(ends)
        for row, end in zip(self.model.batch, ends):
            row.crop(end)

    def fork(self) -> None:
        indices = [self.random.randrange(len(self.cache.ids)) for _ in range(self.random.randint(1, 3))]
        before, old = self.cache.ids, self.model.batch
        self.cache.fork(indices)
        for sequence in before:
            del self.model.rows[sequence]
        self.model.rows |= {i: copy.deepcopy(old[index]) for i, index in zip(self.cache.ids, indices)}

    def copy(self) -> None:
        source = self.random.choice(self.cache.ids)
        self.model.rows[self.cache.copy(source)] = copy.deepcopy(self.model.rows[source])

    def add(self) -> bool:
        """A sequence that begins like one of any cache, which may be found: then all layers have what is found."""
        if len(self.model.rows) >= 6:
            return False
        rows = [row for model in self.models for row in model.rows.values()]
        tokens = [*self.random.choice(rows).tokens] if rows else []
        self.model.rows[self.cache.add()] = made = Row()
        row = len(self.cache.ids) - 1
        found = self.cache.reuse(tokens, row=row)
        made.add(tokens[:found], has=True)
        self.counts["found"] += found > 0
        if found:
            for layer in range(LAYERS):
                key = self.cache.dense(layer)[0][row, :, :found]
                assert torch.equal(key, KEYS[made.states, layer].transpose(0, 1))
        return True

    def free(self) -> None:
        row = self.random.randrange(len(self.cache.ids))
        self.cache.free(row)
        self.model.batch[row].crop(0)

    def remove(self) -> bool:
        if len(self.model.rows) < 2:
            return False
        sequence = self.random.choice([*self.model.rows])
        self.cache.remove(sequence)
        del self.model.rows[sequence]
        return True

    def select(self) -> None:
        ids = [i for i in self.model.rows if i not in self.cache.suspended]
        self.cache.select(self.random.sample(ids, self.random.randint(min(1, len(ids)), min(3, len(ids)))))

    def suspend(self) -> None:
        self.cache.suspend(self.random.choice([*self.cache.ids, *self.cache.waiting]))

    def resume(self) -> bool:
        if not self.cache.suspended:
            return False
        self.cache.resume(self.random.choice(self.cache.suspended))
        return True

    def remember(self) -> None:
        row = self.random.randrange(len(self.cache.ids))
        length = len(self.model.batch[row].tokens)
        count = self.random.choice([length, length // self.size * self.size, self.random.randint(0, length)])
        self.counts["accepted" if self.model.remember(row, count) else "refused"] += count >= self.size

    def overwrite(self) -> bool:
        """A transfer writes a block of its own, for all layers."""
        sequence = self.random.choice(self.cache.ids)
        row, blocks = self.model.rows[sequence], self.cache._sequences.blocks_of(sequence)
        own = [place for place, block in enumerate(blocks) if self.cache.pools.blocks.refs(block) == 1]
        own = [place for place in own if not self.cache.pools.blocks.is_cached(blocks[place])]
        if not own:
            return False
        place = self.random.choice(own)
        span = slice(place * self.size, (place + 1) * self.size)
        states = row.states[span]
        for layer in range(LAYERS):
            for pool in (self.cache.k_cache[layer], self.cache.v_cache[layer]):
                pool[blocks[place], :, : len(states)] = KEYS[states, layer].transpose(0, 1)
            row.has[layer][span] = [True] * len(states)
        self.cache.pools.overwritten([blocks[place]])
        self.cache.crop(self.cache.lengths)
        return True

    def clone(self) -> bool:
        """A deep copy takes the place of the other cache."""
        if self.cache.suspended:
            return False
        other = Model(copy.deepcopy(self.cache))
        other.rows = copy.deepcopy(self.model.rows)
        self.models = [self.model, other]
        return True


@torch.no_grad()
@pytest.mark.parametrize("offloaded", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("seed", range(3))
def test_random_operations(config: QuestConfig, seed: int, offloaded: bool, tmp_path: Path) -> None:
    torch.manual_seed(seed)
    world = World(config, seed, Offload(tmp_path, max_bytes=20_000) if offloaded else None)
    world.run(2500)
    wanted = ("step", "late", "start", "undo", "crop", "fork", "copy", "add", "free", "remove", "select", "suspend")
    wanted += ("resume", "overwrite", "clone", "accepted", "refused", "found")
    assert all(world.counts[kind] >= 5 for kind in wanted), world.counts


def model_of(config: QuestConfig, batch: int = 1) -> tuple[Model, Random]:
    return Model(PagedKVCache(LAYERS, batch, config=config)), Random(0)


def test_a_step_that_a_layer_left_out_is_not_forgotten(config: QuestConfig) -> None:
    """Nor is it found in a copy, or after a pause; until the layer stores it after all."""
    (model, random), size = model_of(config), config.block_size
    model.step([size], random)
    model.step([size], random, [0, 2])
    model.step([size], random)
    assert model.remember(0, 2 * size - 1)
    assert not model.remember(0, 2 * size)
    model.rows[model.cache.copy(0)] = copy.deepcopy(model.rows[0])
    model.cache.suspend(0)
    model.cache.resume(0)
    model.cache.select([1, 0])
    for row in range(2):
        assert not model.remember(row, 3 * size)
    model.step([size, 0], random, [1], start=[size, 0])
    assert model.remember(0, 3 * size)
    assert not model.remember(1, 3 * size)
    model.cache.crop([3 * size, size])
    model.rows[0].crop(size)
    model.step([0, size], random)
    assert model.remember(1, 2 * size)


def test_a_layer_that_begins_later_lacks_what_was_there(config: QuestConfig) -> None:
    (model, random), size = model_of(config), config.block_size
    model.step([size + 1], random, [0, 1])
    assert not model.remember(0, size)
    model.rows[model.cache.add()] = Row()
    model.cache.suspend(0)
    model.step([size], random)
    assert model.remember(0, size)
    model.cache.resume(0)
    model.cache.select([0])
    model.step([size], random)
    assert not model.remember(0, size)
    assert not model.remember(0, 2 * size)
    model.step([size + 1], random, [2], start=[0])
    assert model.remember(0, 2 * size)


def test_a_layer_that_begins_later_has_what_was_found(config: QuestConfig) -> None:
    size, random, pools = config.block_size, Random(0), Pools(LAYERS, config=config)
    first, model = (Model(PagedKVCache.on(pools)) for _ in range(2))
    first.step([2 * size + 1], random)
    assert first.remember(0, 2 * size)
    model.step([size], random, [0, 1])
    model.rows[model.cache.add()] = Row()
    assert model.cache.reuse(first.rows[0].tokens, row=1) == 2 * size
    model.rows[1].add(first.rows[0].tokens[: 2 * size], has=True)
    model.step([1, size], random)
    assert not model.remember(0, size)
    assert model.remember(1, 3 * size)


@torch.no_grad()
def test_to_attend_is_not_to_store(config: QuestConfig) -> None:
    (model, random), size = model_of(config), config.block_size
    model.step([size], random)
    step, places = model.extend([size], random)
    for layer in (0, 1):
        model.store(layer, step, places)
    model.cache.attend(2, torch.randn(1, 1, 2 * HEADS, DIM))
    assert not model.remember(0, 2 * size)
    model.store(2, step, places)
    assert model.remember(0, 2 * size)


def test_tokens_from_a_transfer_are_there(config: QuestConfig) -> None:
    """Whoever wrote them, the layers have them; not those that have no pools."""
    size = config.block_size
    pools = Pools(LAYERS, config=config)
    Model(PagedKVCache.on(pools)).step([1], Random(0), [0, 1])
    other = Model(PagedKVCache.on(pools))
    cache, random = other.cache, Random(0)
    other.extend([size], random)
    for kind in (pools.k_cache, pools.v_cache):
        for pool in kind[:2]:
            pool[cache._sequences.blocks_of(0)] = 1.0
    pools.overwritten(cache._sequences.blocks_of(0))
    for has in other.rows[0].has[:2]:
        has[:] = [True] * size
    assert not other.remember(0, size)
    other.step([1], random, [0, 1])
    other.step([size], random, [2], start=[0])
    assert other.remember(0, size)


def test_nothing_is_noted_while_the_same_layers_store(config: QuestConfig) -> None:
    """Whether or not there are others that never do: a step should cost what it costs without."""
    for layers in (range(LAYERS), [0, 2]):
        model, random = model_of(config, 2)
        for counts in ([5, 3], [1, 1], [40, 0], [1, 1]):
            model.step(counts, random, layers)
            model.cache.fork([1, 0])
            model.rows = {i: model.rows[i] for i in model.cache.ids}
            assert not model.cache._gaps._missing
        silent = [layer for layer in range(LAYERS) if layer not in layers]
        assert model.cache._gaps.late(model.cache.ids[0], config.block_size) == silent
