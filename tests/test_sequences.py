"""PagedKVCache as an engine uses it: sequences that come, wait and go, a pool that is full, prefixes, shared pools."""

from __future__ import annotations

import copy
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

import quest
import quest.stats
from quest import OutOfBlocks, PagedKVCache, Pools, QuestConfig

LAYERS, HEADS, DIM, V_DIM = 2, 2, 16, 8
CONFIGS = {
    "page": QuestConfig(page_size=4, budget=24, sink_tokens=4, recent_tokens=4),
    "pages": QuestConfig(
        page_size=4, block_size=16, budget=24, sink_tokens=4, recent_tokens=4, layers={1: {"slack": 1.0}}
    ),
    "codes": QuestConfig(block_size=64, budget=32, coarse_keep=0.1),
}


@pytest.fixture(params=[*CONFIGS])
def config(request: pytest.FixtureRequest) -> QuestConfig:
    return CONFIGS[request.param]


@pytest.fixture(autouse=True)
def one_thread_without_grad(threads: None) -> Iterator[None]:
    """Steps like earlier ones take the quick way then; and several threads share out one row's work otherwise than
    many rows', so that results are equal but for rounding."""
    torch.set_num_threads(1)
    with torch.no_grad():
        yield


class Text:
    """Tokens of one sequence: their ids, and K, V and the query [layers, tokens, heads, dim] that a model would make.

    With `parent` the first `shared` tokens are that one's.
    """

    def __init__(self, seed: int, length: int = 400, parent: Text | None = None, shared: int = 0) -> None:
        random = torch.Generator().manual_seed(seed)
        make = lambda heads, dim: torch.randn(LAYERS, length, heads, dim, generator=random)  # noqa: E731
        self.key, self.value, self.query = make(HEADS, DIM), make(HEADS, V_DIM), make(2 * HEADS, DIM)
        self.ids = torch.randint(-(2**40), 2**40, (length,), generator=random)
        if parent is not None:
            for mine, other in zip(vars(self).values(), vars(parent).values()):
                tokens = (Ellipsis, slice(shared), *[slice(None)] * 2 * (mine.dim() > 1))
                mine[tokens] = other[tokens]


def new(texts: list[Text], begin: list[int], count: int, layer: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of the next `count` tokens."""
    kinds = ([getattr(text, kind) for text in texts] for kind in ("query", "key", "value"))
    query, key, value = (
        torch.stack([x[layer, first : first + count] for x, first in zip(tensors, begin)]) for tensors in kinds
    )
    return query, key, value


def store(cache: PagedKVCache, texts: list[Text], count: int) -> None:
    """The next `count` tokens of every row."""
    begin = cache.lengths
    step = cache.extend(count)
    for layer in range(LAYERS):
        cache.append(layer, *new(texts, begin, count, layer)[1:], step)


def decode(cache: PagedKVCache, texts: list[Text]) -> Tensor:
    """One step of every row: what all layers give, lse as one more dimension: [batch, layers, heads, v_dim + 1]."""
    begin = cache.lengths
    step, results = cache.extend(1), []
    for layer in range(LAYERS):
        out, lse = cache.decode(layer, *new(texts, begin, 1, layer), step)
        results.append(torch.cat([out, lse.unsqueeze(-1)], -1)[:, 0])
    return torch.stack(results, 1)


def selection(cache: PagedKVCache, layer: int, query: Tensor) -> list[list[list[int]]]:
    """Pages that a step with `query` [batch, 1, heads, dim] reads, by row and KV head."""
    of, packing = cache.config.layer(layer), cache.pools.packing
    k_cache, _, *summaries = cache.pools.stored(layer)
    agree: dict[str, Any] = dict(slack=of.slack, group_rule=of.group_rule)
    forced: dict[str, Any] = dict(budget=of.budget, sink_tokens=of.sink_tokens, recent_tokens=of.recent_tokens)
    rows = cache.block_table, cache.seq_lens
    if packing is None:
        scores = quest.score(query, *summaries, *rows, page_size=cache.config.page_size, **agree)
    else:
        coarse = {name: getattr(of, name) for name in ("coarse_keep", "coarse_limit", "coarse_slack")}
        scores = quest.score_packed(query, k_cache, *summaries, *rows, packing=packing, **coarse, **agree, **forced)
    page_idx, _ = quest.select(scores, cache.seq_lens, page_size=cache.config.page_size, **forced)
    return [[[page for page in head if page >= 0] for head in row] for row in page_idx[:, 0].tolist()]


def alone(config: QuestConfig, text: Text, length: int) -> PagedKVCache:
    cache = PagedKVCache(LAYERS, 1, config=config)
    store(cache, [text], length)
    return cache


def summaries_of(cache: PagedKVCache, blocks: list[int]) -> list[Tensor]:
    return [pool[blocks].clone() for kind in cache.summaries for pool in kind]


def spoil(cache: PagedKVCache, blocks: list[int]) -> None:
    """Summaries that say anything, as of a block that was written by somebody else."""
    for kind in cache.summaries:
        for pool in kind:
            if pool.dtype == torch.uint8:
                pool[blocks] = torch.randint(0, 256, pool[blocks].shape).byte()
            else:
                pool[blocks] = float("nan")


# ---- sequences and rows ----


def test_sequences_have_ids_and_the_batch_is_a_choice_of_them(config: QuestConfig) -> None:
    cache = PagedKVCache(LAYERS, 0, config=config)
    assert (cache.batch_size, cache.ids, cache.lengths) == (0, [], [])
    texts = [Text(i) for i in range(4)]
    ids = [cache.add() for _ in texts]
    assert cache.ids == ids == [0, 1, 2, 3]
    store(cache, texts, 70)

    cache.select([3, 0])
    assert (cache.ids, cache.waiting, cache.lengths) == ([3, 0], [1, 2], [70, 70])
    store(cache, [texts[3], texts[0]], 5)
    assert [cache.length(i) for i in ids] == [75, 70, 70, 75]

    cache.remove(3)  # the row after it moves up
    assert (cache.ids, cache.lengths) == ([0], [75])
    cache.remove(1)  # it waits, so that rows stay
    assert (cache.ids, cache.waiting) == ([0], [2])
    assert cache.add() == 4  # no id is used twice
    cache.select([2, 4, 0])
    store(cache, [texts[2], texts[1], texts[0]], 3)
    assert cache.lengths == [73, 3, 78]
    key, value = cache.dense(1)
    for row, (text, length) in enumerate(zip((2, 1, 0), cache.lengths)):
        assert key[row, :, :length].equal(texts[text].key[1, :length].transpose(0, 1))
        assert value[row, :, :length].equal(texts[text].value[1, :length].transpose(0, 1))
    for i in (0, 2, 4):
        cache.remove(i)
    assert cache.usage().used == cache.usage().unused_slots == cache.batch_size == 0


def test_a_copy_shares_blocks_until_one_of_the_two_writes(config: QuestConfig) -> None:
    text, other, size = Text(0), Text(1), config.block_size
    length = 2 * size + size // 2
    cache = alone(config, text, length)
    assert cache.copy(0) == 1
    assert (cache.ids, cache.lengths) == ([0, 1], [length, length])
    assert (cache.usage().used, cache.usage().shared) == (3, 3)
    assert cache.block_table[0].equal(cache.block_table[1])
    cache.select([1])
    store(cache, [other], 1)
    assert (cache.usage().used, cache.usage().shared) == (4, 2)
    cache.select([0])
    assert decode(cache, [text]).equal(decode(alone(config, text, length), [text]))
    assert cache.copy(0) == 2
    cache.remove(0)
    cache.select([2])
    assert decode(cache, [text]).equal(decode(alone(config, text, length + 1), [text]))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.select([0, 0]), ValueError, r"select: sequences must differ, got \[0, 0\]"),
        (lambda c: c.select([0, 9]), ValueError, "select: sequence must be the id of one that was added and not"),
        (lambda c: c.select([True]), TypeError, "select: sequence must be an int, got True"),
        (lambda c: c.remove(9), ValueError, "remove: sequence must be the id of one that was added and not removed"),
        (lambda c: c.copy(-1), ValueError, "copy: sequence must be at least 0, got -1"),
        (lambda c: c.length(9), ValueError, "length: sequence must be the id of one that was added"),
        (lambda c: c.admits(-1), ValueError, "admits: num_tokens must be at least 0, got -1"),
        (lambda c: c.reuse([1, 2], row=2), ValueError, r"reuse: row must be in \[0, 1\], got 2"),
        (lambda c: c.reuse([1, 2]), ValueError, "reuse: row must be empty, got row 0 with 6 tokens"),
        (lambda c: c.reuse([1.5], row=1), ValueError, "reuse: tokens must be one-dimensional and of integers"),
        (lambda c: c.reuse([[1]], row=1), ValueError, "reuse: tokens must be one-dimensional and of integers"),
        (lambda c: c.remember([1] * 7), ValueError, "remember: tokens must be at most the row's 6, got 7"),
        (lambda c: c.remember(torch.ones(3)), ValueError, "remember: tokens must be one-dimensional and of integers"),
        (lambda c: c.pools.overwritten([0, 99]), ValueError, r"overwritten: blocks must be in \[0, .*\], got 99"),
    ],
)
def test_errors_name_what_is_wrong_and_change_nothing(call: Any, error: type[Exception], message: str) -> None:
    cache = alone(CONFIGS["page"], Text(0), 6)
    cache.add()
    state = lambda: (cache.usage(), cache.ids, cache.lengths, cache.block_table.tolist(), {*cache.pools.stale})  # noqa: E731
    before = state()
    with pytest.raises(error, match=message):
        call(cache)
    assert state() == before


@dataclass
class Running:
    """A sequence of a batch, and the same one alone in a cache of its own."""

    text: Text
    alone: PagedKVCache


@pytest.mark.parametrize("seed", range(3))
def test_rows_that_come_and_go_give_what_each_sequence_gives_alone(config: QuestConfig, seed: int) -> None:
    """Continuous batching, in any order of arrivals, copies, pauses, roll-backs and ends: bit equal."""
    random, size = Random(seed), config.block_size
    cache, running, steps = PagedKVCache(LAYERS, 0, config=config, num_blocks=2), dict[int, Running](), 0
    for turn in range(60):
        kind = random.choice(["step"] * 6 + ["add", "add", "copy", "remove", "pause", "crop"])
        if kind == "add" and len(running) < 5:
            i, length = cache.add(), random.choice([1, size - 1, size, 3 * size + 2, 250])
            running[i] = Running(Text(100 * seed + turn), PagedKVCache(LAYERS, 1, config=config))
            rows = [i, *cache.ids[:-1]]
            cache.select([i])
            for count in (length // 2, length - length // 2):
                for c in (cache, running[i].alone) if count else ():
                    store(c, [running[i].text], count)
            cache.select(rows)
        elif kind == "copy" and cache.ids and len(running) < 5:
            source = random.choice([*running])
            old = running[source]
            length = cache.length(source)
            running[cache.copy(source)] = Running(Text(turn, 400, old.text, length), copy.deepcopy(old.alone))
        elif kind == "remove" and len(running) > 1:
            i = random.choice([*running])
            cache.remove(i)
            del running[i]
        elif kind == "pause":
            cache.select(random.sample([*running], random.randint(0, len(running))))
        elif kind == "crop" and cache.ids:
            ends = [max(1, length - random.randint(0, 6)) for length in cache.lengths]
            cache.crop(ends)
            for i, end in zip(cache.ids, ends):
                running[i].alone.crop(end)
        elif cache.ids:
            for _ in range(random.randint(1, 4)):
                together = decode(cache, [running[i].text for i in cache.ids])
                for row, i in enumerate(cache.ids):
                    assert together[row].equal(decode(running[i].alone, [running[i].text])[0])
                steps += 1
    assert steps > 30
    assert cache.usage().used >= len(running)


def test_rows_come_and_go_with_the_default_settings() -> None:
    """Contexts beyond the default budget, in blocks of 256 tokens."""
    config, lengths = QuestConfig(), [1500, 300, 1281]
    texts = [Text(i, 1600) for i in range(3)]
    caches = [alone(config, text, length) for text, length in zip(texts, lengths)]
    cache = PagedKVCache(LAYERS, 0, config=config)
    for text, length in zip(texts, lengths):
        i = cache.add()
        cache.select([i])
        store(cache, [text], length)
    for rows in ([0, 1, 2], [2, 0], [1, 2, 0], [2]):
        cache.select(rows)
        for _ in range(2):
            together = decode(cache, [texts[i] for i in rows])
            for row, i in enumerate(rows):
                assert together[row].equal(decode(caches[i], [texts[i]])[0])


def test_ragged_rows_read_the_pages_that_each_would_read_alone(config: QuestConfig) -> None:
    """C19: every row selects and gives what its own batch of one does; permuted rows give permuted results; an empty
    row gives zeros."""
    lengths = [1, 16, 17, 300, 0]
    texts = [Text(i) for i in range(5)]

    def batch(rows: list[int]) -> PagedKVCache:
        cache = PagedKVCache(LAYERS, len(rows), config=config)
        step = cache.extend([lengths[row] for row in rows])
        q_len = step.slot_mapping.shape[1]
        for layer in range(LAYERS):
            key, value = (
                torch.full((len(rows), q_len, HEADS, DIM), 7.0),
                torch.full((len(rows), q_len, HEADS, V_DIM), 7.0),
            )
            for b, row in enumerate(rows):
                key[b, q_len - lengths[row] :] = texts[row].key[layer, : lengths[row]]
                value[b, q_len - lengths[row] :] = texts[row].value[layer, : lengths[row]]
            cache.append(layer, key, value, step)
        return cache

    query = torch.stack([text.query[:, :1] for text in texts], 1)  # [layers, rows, 1, heads, dim]
    for layer in range(LAYERS):
        cache = batch([0, 1, 2, 3, 4])
        together, pages = cache.attend(layer, query[layer]), selection(cache, layer, query[layer])
        assert not together[0][4].any()
        assert together[1][4].eq(float("-inf")).all()
        assert all(0 < len(head) < 300 // config.page_size for head in pages[3])
        order = [3, 1, 4, 0, 2]
        permuted = batch(order)
        assert all(map(torch.equal, permuted.attend(layer, query[layer, order]), (x[order] for x in together)))
        assert selection(permuted, layer, query[layer, order]) == [pages[row] for row in order]
        for row in range(4):
            own = batch([row])
            assert own.attend(layer, query[layer, [row]])[0].allclose(together[0][[row]], atol=1e-6, rtol=0)
            assert selection(own, layer, query[layer, [row]]) == [pages[row]]


def test_rows_are_chosen_and_copied_with_all_that_belongs_to_them(config: QuestConfig) -> None:
    """C26: K, V, summaries and lengths of selected and repeated rows move together; a deep copy is another cache, with
    its own waiting sequences and prefixes."""
    texts, size = [Text(i) for i in range(3)], config.block_size
    cache = PagedKVCache(LAYERS, 3, config=config)
    store(cache, texts, 2 * size + 3)
    cache.remember(texts[1].ids[: 2 * size], row=1)
    cache.fork([2, 0, 2, 2])
    assert cache.lengths == [2 * size + 3] * 4
    cache.select([cache.ids[3], *cache.ids[:2]])
    rows = [texts[2], texts[2], texts[0]]

    before = copy.deepcopy(cache)
    assert (before.ids, before.waiting, before.usage()) == (cache.ids, cache.waiting, cache.usage())
    store(cache, [Text(9)] * 3, 7)
    cache.crop(1)
    cache.select([])
    for i in cache.waiting:
        cache.remove(i)
    cache.pools.blocks.forget_all()

    expected = [decode(alone(config, text, 2 * size + 3), [text]) for text in rows]
    assert decode(before, rows).equal(torch.cat(expected))
    before.select(before.waiting)
    assert decode(before, [texts[2]]).equal(expected[0])
    before.select([before.add()])
    assert before.reuse(texts[1].ids) == 2 * size
    store(before, [texts[1]], 3)
    assert decode(before, [texts[1]]).equal(decode(alone(config, texts[1], 2 * size + 3), [texts[1]]))


# ---- a pool that is full ----


def test_a_pool_that_is_full_refuses_and_everything_in_it_stays_valid(config: QuestConfig) -> None:
    texts, size = [Text(0), Text(1)], config.block_size
    cache = PagedKVCache(LAYERS, 2, config=config, num_blocks=2, max_blocks=5)
    store(cache, texts, 2 * size - 1)  # 4 blocks of the 5, after growing
    assert cache.num_blocks <= 5
    begin = cache.lengths
    step = cache.extend(1)
    state = lambda: (cache.usage(), cache.lengths, cache.seq_lens.tolist(), cache.block_table.tolist())  # noqa: E731
    before = state()
    for call in (lambda: cache.extend(1), lambda: cache.extend([size + 1, 0]), lambda: cache.extend([0, 3 * size])):
        with pytest.raises(OutOfBlocks, match=r"^extend: [23] more blocks are needed, and [01] of [45] are free$"):
            call()
        assert state() == before
    fresh = [decode(alone(config, text, 2 * size - 1), [text])[0] for text in texts]
    for layer in range(LAYERS):  # the step from before
        out, lse = cache.decode(layer, *new(texts, begin, 1, layer), step)
        together = torch.cat([out, lse.unsqueeze(-1)], -1)[:, 0]
        assert together.equal(torch.stack(fresh)[:, layer])
    assert cache.extend([size, 0]).lengths == [3 * size, 2 * size]  # what fits still does
    assert (cache.num_blocks, cache.num_free_blocks) == (5, 0)
    cache.crop(2 * size)
    cache.remove(cache.ids[0])
    assert decode(cache, texts[1:]).equal(decode(alone(config, texts[1], 2 * size), texts[1:]))


def test_a_roll_back_that_needs_a_block_is_refused_and_changes_nothing() -> None:
    """Rows share a block, one is cut in the middle of a page: its summary changes, so that it needs its own."""
    config, text = CONFIGS["page"], Text(0)
    cache = PagedKVCache(LAYERS, 1, config=config, num_blocks=2, max_blocks=2)
    store(cache, [text], 8)
    cache.fork([0, 0])
    before = cache.usage(), cache.block_table.tolist()
    with pytest.raises(OutOfBlocks, match=r"^crop: 1 more blocks are needed, and 0 of 2 are free$"):
        cache.crop([8, 6])
    assert (cache.usage(), cache.block_table.tolist()) == before
    assert cache.lengths == [8, 8]
    cache.crop([8, 4])  # between pages
    assert cache.lengths == [8, 4]


def test_new_sequences_are_admitted_if_they_leave_the_watermark() -> None:
    config = CONFIGS["pages"]
    cache = PagedKVCache(LAYERS, 1, config=config, num_blocks=8, max_blocks=8, watermark=2)
    assert cache.admits(6 * 16)
    assert not cache.admits(6 * 16 + 1)
    store(cache, [Text(0)], 16 * 3 + 1)
    assert cache.admits(16 * 2)
    assert not cache.admits(16 * 2 + 1)
    store(cache, [Text(0)], 16 * 4)  # one that runs may take them
    assert cache.usage().free == 0
    assert not cache.admits(0)


def test_usage_counts_blocks_slots_and_prefixes() -> None:
    config, text = CONFIGS["pages"], Text(0)
    cache = PagedKVCache(LAYERS, 1, config=config, num_blocks=10, max_blocks=10)
    assert cache.usage() == quest.pools.Usage(10, 0, 0, 10, 0, 0, 0, 16, 0, 0, 0)
    assert (cache.usage().waste, cache.usage().hit_rate) == (0.0, 0.0)
    store(cache, [text], 37)
    usage = cache.usage()
    assert (usage.used, usage.free, usage.shared, usage.unused_slots) == (3, 7, 0, 48 - 37)
    assert usage.waste == 11 / 48
    cache.fork([0, 0])
    assert (cache.usage().used, cache.usage().shared, cache.usage().unused_slots) == (3, 3, 11)
    assert cache.remember(text.ids[:37]) == 2
    assert (cache.usage().cached, cache.usage().idle) == (2, 0)
    cache.reset()
    usage = cache.usage()
    assert (usage.used, usage.free, usage.idle, usage.cached, usage.shared, usage.unused_slots) == (0, 10, 2, 2, 0, 0)
    assert cache.reuse(text.ids[:41]) == 32
    assert cache.reuse(text.ids.flip(0)[:40], row=1) == 0
    usage = cache.usage()
    assert (usage.prefix_tokens, usage.prefix_hits, usage.hit_rate) == (40 + 39, 32, 32 / 79)
    assert (usage.used, usage.idle, usage.evicted) == (2, 0, 0)
    cache.free(0)
    store(cache, [Text(1), Text(2)], 16 * 5)
    usage = cache.usage()
    assert (usage.used, usage.free, usage.cached, usage.evicted) == (10, 0, 0, 2)
    assert "10 of 10 blocks of 16 tokens used" in str(usage)
    assert "2 blocks evicted" in str(usage)


# ---- prefixes ----


def served(config: QuestConfig, text: Text, length: int, **pools: Any) -> PagedKVCache:
    """A cache that has served a first request, which is over: its full blocks are remembered."""
    cache = PagedKVCache(LAYERS, 1, config=config, **pools)
    store(cache, [text], length)
    cache.remember(text.ids[:length])
    cache.remove(0)
    cache.add()
    return cache


@pytest.mark.parametrize("case", ["all", "diverging", "part-filled", "nothing new", "other"])
def test_a_prefix_hit_is_like_a_cold_run(config: QuestConfig, case: str) -> None:
    """C35: K, V, summaries, selection and outputs are bit equal to those of a cache that stored everything itself."""
    size, first = config.block_size, Text(0)
    stored = 2 * size + (size // 2 if case == "part-filled" else 0)
    cache = served(config, first, stored)
    shared, length, hit = {
        "all": (2 * size, 2 * size + 3, 2 * size),
        "diverging": (size, 2 * size + 3, size),
        "part-filled": (stored, stored + 3, 2 * size),
        "nothing new": (2 * size, 2 * size, size),  # the last token is to be computed, so its block is
        "other": (0, 2 * size, 0),
    }[case]
    text = Text(1, parent=first, shared=shared)
    blocks = cache.pools.blocks.find(text.ids[: 2 * size].numpy(), "()")[: hit // size]
    for block in cache.pools.blocks.find(text.ids[: 2 * size].numpy(), "()") + blocks:
        cache.pools.blocks.release(block)
    before, used = summaries_of(cache, blocks), cache.usage().used

    assert cache.reuse(text.ids[:length]) == hit
    assert cache.lengths == [hit]
    assert cache.block_table[0, : hit // size].tolist() == blocks
    store(cache, [text], length - hit)
    assert cache.usage().used == used + -(-length // size)  # shared blocks are not there twice

    cold = alone(config, text, length)
    assert all(map(torch.equal, summaries_of(cache, blocks), before))
    assert all(map(torch.equal, before, summaries_of(cold, [*range(hit // size)])))
    full = length // size
    mine = summaries_of(cache, cache.block_table[0, :full].tolist())
    assert all(map(torch.equal, mine, summaries_of(cold, cold.block_table[0, :full].tolist())))
    for layer in range(LAYERS):
        assert all(map(torch.equal, cache.dense(layer), cold.dense(layer)))
        query = text.query[layer, None, :1]
        assert selection(cache, layer, query) == selection(cold, layer, query)
    for _ in range(4):
        assert decode(cache, [text]).equal(decode(cold, [text]))


def test_several_rows_read_one_prefix_at_once_and_go_on_apart(config: QuestConfig) -> None:
    size, first = config.block_size, Text(0)
    cache = served(config, first, 3 * size)
    texts = [Text(i, parent=first, shared=shared) for i, shared in enumerate((3 * size, 2 * size, size + 1), 1)]
    cache.add()
    cache.add()
    hits = [cache.reuse(text.ids[: 3 * size + 1], row=row) for row, text in enumerate(texts)]
    assert hits == [3 * size, 2 * size, size]
    assert (cache.usage().used, cache.usage().shared) == (3, 2)
    for row, text in enumerate(texts):
        ids = cache.ids
        cache.select([ids[row]])
        if 3 * size - hits[row]:
            store(cache, [text], 3 * size - hits[row])
        cache.select(ids)
    for _ in range(2):
        together = decode(cache, texts)
    for row, text in enumerate(texts):
        cold = alone(config, text, 3 * size + 1)
        assert together[row].equal(decode(cold, [text])[0])


def test_a_row_that_goes_back_into_its_prefix_leaves_the_prefix_as_it_is(config: QuestConfig) -> None:
    size, text, other = config.block_size, Text(0), Text(1)
    cache = served(config, text, 3 * size)
    assert cache.reuse(text.ids[: 3 * size + 1]) == 3 * size
    cache.add()
    assert cache.reuse(text.ids[: 3 * size + 1], row=1) == 3 * size
    cache.crop([size + size // 2, 3 * size])  # into a block that both have
    store(cache, [other, text], 2)
    assert decode(cache, [other, text])[1].equal(decode(alone(config, text, 3 * size + 2), [text])[0])
    cache.reset()
    assert cache.reuse(text.ids[: 3 * size + 1]) == 3 * size
    cache.crop([size + size // 2, 0])  # nobody else has it: it is written, and not found any more
    store(cache, [other, Text(2)], 1)
    cache.add()
    assert cache.reuse(text.ids[: 3 * size + 1], row=2) == size


def test_prefixes_that_were_evicted_are_missed() -> None:
    config, text = CONFIGS["pages"], Text(0)
    cache = served(config, text, 48, num_blocks=4, max_blocks=4)
    store(cache, [Text(1)], 32)  # takes the free block, and the prefix's last one
    usage = cache.usage()
    assert (usage.idle, usage.cached, usage.evicted) == (2, 2, 1)
    cache.reset()
    assert cache.reuse(text.ids[:49]) == 32
    cache.reset()
    store(cache, [Text(1)], 64)
    cache.reset()
    assert cache.reuse(text.ids[:49]) == 0
    usage = cache.usage()
    assert (usage.cached, usage.evicted) == (0, 3)
    assert (usage.prefix_tokens, usage.prefix_hits, usage.hit_rate) == (96, 32, 1 / 3)
    store(cache, [text], 49)
    assert decode(cache, [text]).equal(decode(alone(config, text, 49), [text]))


def test_prefixes_that_depend_on_more_than_tokens_are_told_apart(config: QuestConfig) -> None:
    size, text = config.block_size, Text(0)
    cache = PagedKVCache(LAYERS, 1, config=config)
    store(cache, [text], size + 1)
    assert cache.remember(text.ids[: size + 1], extra_keys=("adapter", 3)) == 1
    assert cache.remember(text.ids[: size + 1], extra_keys=("adapter", 3)) == 0
    cache.add()
    for keys in ((), ("adapter",), ("adapter", "3"), (3, "adapter"), ("adapter", 3, None)):
        assert cache.reuse(text.ids, row=1, extra_keys=keys) == 0
    assert cache.reuse(text.ids, row=1, extra_keys=["adapter", 3]) == size


def test_token_ids_may_be_tensors_arrays_and_lists() -> None:
    config, text = CONFIGS["page"], Text(0)
    text.ids[:9] %= 1000
    cache = served(config, text, 8)
    for ids in (text.ids[:9].tolist(), text.ids[:9].numpy(), text.ids[:9].int(), text.ids.expand(2, -1)[1, :9]):
        assert cache.reuse(ids) == 8
        cache.free(0)
    assert cache.reuse([]) == cache.reuse([1]) == 0


def test_a_prefix_is_not_remembered_while_a_layer_lacks_tokens(config: QuestConfig) -> None:
    text, size = Text(0), config.block_size
    cache = PagedKVCache(LAYERS, 1, config=config)
    step = cache.extend(size)
    for layer in range(LAYERS):
        late = [*range(layer, LAYERS)]
        with pytest.raises(ValueError, match=rf"remember: every layer must have stored.*layers \{late} have not"):
            cache.remember(text.ids[:size])
        assert cache.usage().cached == 0
        cache.append(layer, *new([text], [0], size, layer)[1:], step)
    assert cache.remember(text.ids[:size]) == 1


# ---- blocks that others have written ----


def test_summaries_of_blocks_written_by_others_are_made_before_they_are_scored(config: QuestConfig) -> None:
    """C35, and K, V brought in by a transfer: as in a cache that has stored them itself. Whenever it is said."""
    text, old, size = Text(0), Text(1), config.block_size
    length = 4 * size + size // 2
    for when in ("before the step", "within the step", "attend", "crop"):
        cache, cold = alone(config, old, length), alone(config, text, length)
        cache.pools.overwritten([])
        step = cache.extend(1) if when == "within the step" else None
        blocks = cache._sequences.blocks_of(0)
        source = cold._sequences.blocks_of(0)
        for kind, theirs in ((cache.k_cache, cold.k_cache), (cache.v_cache, cold.v_cache)):
            for pool, their in zip(kind, theirs):
                pool[blocks[1:]] = their[source[1:]]
        first = Text(2, parent=old, shared=size)
        for kind in ("key", "value"):
            getattr(first, kind)[:, size:] = getattr(text, kind)[:, size:]
        first.query = text.query
        spoil(cache, blocks[1:])
        cache.pools.overwritten(blocks[1:])
        expected = alone(config, first, length)
        if when == "attend":
            query = text.query[1, None, :1]
            assert all(map(torch.equal, cache.attend(1, query), expected.attend(1, query)))
        if when == "crop":
            for c in (cache, expected):
                c.crop(3 * size + size // 2 + 1)
        if step is not None:
            other = expected.extend(1)
            for layer in range(LAYERS):
                args = new([first], [length], 1, layer)
                assert all(map(torch.equal, cache.decode(layer, *args, step), expected.decode(layer, *args, other)))
        for _ in range(3):
            assert decode(cache, [first]).equal(decode(expected, [first]))
        assert not cache.pools.stale
        full = cache.lengths[0] // size
        assert all(map(torch.equal, summaries_of(cache, blocks[:full]), summaries_of(expected, [*range(full)])))


def test_blocks_written_by_others_are_made_whole_for_everyone_who_holds_them(config: QuestConfig) -> None:
    """Found as a prefix, held by rows that see less of them than others, or by sequences that wait."""
    text, size = Text(0), config.block_size
    cache = served(config, text, 2 * size)
    blocks = cache.pools.blocks.find(text.ids[: 2 * size].numpy(), "()")
    for block in reversed(blocks):
        cache.pools.blocks.release(block)
    spoil(cache, blocks)
    cache.pools.overwritten(blocks)
    assert cache.reuse(text.ids[: 2 * size + 1]) == 2 * size
    assert decode(cache, [text]).equal(decode(alone(config, text, 2 * size), [text]))

    length = 2 * size + size // 2
    part = 2 * size + (config.page_size if config.page_size < size // 2 else 0)
    cache = alone(config, text, length)
    cache.fork([0, 0, 0])
    if cache.pools.packing is None:
        cache.crop([part, length, length])
    least, longest, waits = cache.ids
    cache.select([least, longest])
    blocks = cache._sequences.blocks_of(longest)
    spoil(cache, blocks)
    cache.pools.overwritten(blocks)
    for ids in ([least], [longest], [waits]):
        cache.select(ids)
        assert decode(cache, [text]).equal(decode(alone(config, text, cache.lengths[0] - 1), [text]))
    assert not cache.pools.stale


def test_a_block_that_is_taken_anew_needs_no_summaries_of_what_it_held(config: QuestConfig) -> None:
    text, size = Text(0), config.block_size
    cache = alone(config, text, 2 * size)
    cache.pools.overwritten(range(cache.num_blocks))
    cache.reset()
    store(cache, [text], 2 * size)
    decode(cache, [text])
    assert not {*cache.pools.stale} & {*cache._sequences.blocks_of(0)}


# ---- pools that several caches share ----


def test_caches_on_the_same_pools_keep_to_their_own_rows(config: QuestConfig) -> None:
    pools = Pools(LAYERS, config=config, num_blocks=1)
    one, two = (PagedKVCache.on(pools, 1) for _ in range(2))
    texts = [Text(0), Text(1)]
    cold = [alone(config, text, length) for text, length in zip(texts, (130, 71))]
    store(one, texts[:1], 130)
    store(two, texts[1:], 71)
    for _ in range(10):
        assert decode(one, texts[:1]).equal(decode(cold[0], texts[:1]))
        assert decode(two, texts[1:]).equal(decode(cold[1], texts[1:]))
    assert one.usage().used == two.usage().used == pools.usage().used
    assert (one.usage().unused_slots, two.usage().unused_slots) == (-140 % config.block_size, -81 % config.block_size)
    assert one.num_blocks == two.num_blocks
    two.reset()
    assert decode(one, texts[:1]).equal(decode(cold[0], texts[:1]))
    assert (one.stats.total.steps, two.stats.total.steps) == (22, 20)


@pytest.mark.parametrize("layer_of_growth", range(LAYERS + 1))
def test_growth_for_one_cache_between_the_layers_of_anothers_step(config: QuestConfig, layer_of_growth: int) -> None:
    """The pools become other tensors while a cache is in the middle of a step that is like the ones before."""
    size, texts = config.block_size, [Text(0), Text(1)]
    pools = Pools(LAYERS, config=config, num_blocks=6)
    one, two = (PagedKVCache.on(pools, 1) for _ in range(2))
    cold = alone(config, texts[0], 2 * size)
    store(one, texts[:1], 2 * size)
    for _ in range(3):
        decode(one, texts[:1])
        decode(cold, texts[:1])
    begin = one.lengths
    step, other = one.extend(1), cold.extend(1)
    for layer in range(LAYERS):
        if layer == layer_of_growth:
            before = one.k_cache[layer]
            store(two, texts[1:], 4 * size)
            assert one.k_cache[layer] is not before
        args = new(texts[:1], begin, 1, layer)
        assert all(map(torch.equal, one.decode(layer, *args, step), cold.decode(layer, *args, other)))
    for _ in range(4):
        assert decode(one, texts[:1]).equal(decode(cold, texts[:1]))
    for layer in range(LAYERS):
        assert all(map(torch.equal, one.dense(layer), cold.dense(layer)))


def test_caches_on_the_same_pools_read_each_in_its_way(config: QuestConfig) -> None:
    """One's tokens, found by another that reads more of them."""
    text, pools = Text(0), Pools(LAYERS, config=config)
    one, two = PagedKVCache.on(pools), PagedKVCache.on(pools, config=config.replace(budget=1.0))
    step = one.extend(200)
    for layer in range(LAYERS):
        one.append(layer, text.key[layer, None, :200], text.value[layer, None, :200], step)
    one.remember(text.ids[:200])
    assert two.reuse(text.ids[:193]) == 192
    one.crop(192)
    query = text.query[:, None, 191:192]
    for layer in range(LAYERS):
        dense = quest.attend(query[layer], pools.k_cache[layer], pools.v_cache[layer], two.block_table, two.seq_lens)
        torch.testing.assert_close(two.attend(layer, query[layer])[0], dense[0])
        assert not torch.allclose(one.attend(layer, query[layer])[0], dense[0])
    assert (one.config.budget, two.config.budget) == (config.budget, 1.0)


def test_caches_on_the_same_pools_have_the_same_summaries(config: QuestConfig) -> None:
    pools = Pools(LAYERS, config=config)
    for change in ({"block_size": 512}, {"page_size": 2, "coarse_size": None, "block_size": 512}):
        with pytest.raises(
            ValueError, match=r"PagedKVCache: config must have the (block|page)_size of the pools, \d+, got"
        ):
            PagedKVCache.on(pools, config=config.replace(**change))
    sinks = config.replace(layers={1: {"sink_tokens": 8}})
    if config.summary_bits is None:
        PagedKVCache.on(pools, config=sinks)
    else:
        with pytest.raises(ValueError, match="must have the sink_tokens of the pools, 4 in layer 1, got 8"):
            PagedKVCache.on(pools, config=sinks)


def test_a_prefix_of_one_cache_is_found_by_another(config: QuestConfig) -> None:
    size, text = config.block_size, Text(0)
    pools = Pools(LAYERS, config=config)
    one, two = (PagedKVCache.on(pools, 1) for _ in range(2))
    store(one, [text], 2 * size + 1)
    one.remember(text.ids[: 2 * size + 1])
    assert two.reuse(text.ids) == 2 * size
    assert two.usage().shared == 2
    one.remove(0)
    assert two.usage().shared == 0
    store(two, [text], 1)
    assert decode(two, [text]).equal(decode(alone(config, text, 2 * size + 1), [text]))
    two.crop(2 * size - 1)  # the block is its own now: written, and no longer found
    store(two, [Text(1)], 1)
    one.add()
    assert one.reuse(text.ids) == size
    assert two.usage().prefix_hits == 3 * size


def test_a_cache_that_is_gone_or_copied_leaves_the_pools_to_the_others(config: QuestConfig) -> None:
    size, texts = config.block_size, [Text(0), Text(1)]
    pools = Pools(LAYERS, config=config)
    one, two = (PagedKVCache.on(pools, 1) for _ in range(2))
    store(one, texts[:1], 2 * size + 3)
    store(two, texts[1:], size)
    other = copy.deepcopy(one)
    assert other.pools is pools
    assert (pools.usage().used, pools.usage().shared) == (4, 3)
    cold = alone(config, texts[0], 2 * size + 3)
    assert decode(other, texts[:1]).equal(decode(cold, texts[:1]))
    store(one, texts[1:], 5)
    assert decode(other, texts[:1]).equal(decode(cold, texts[:1]))
    del one
    assert (pools.usage().used, pools.usage().shared) == (1 - -other.lengths[0] // size, 0)
    store(two, texts[1:], 4 * size)  # growth, in which the one that is gone takes no part
    assert decode(other, texts[:1]).equal(decode(cold, texts[:1]))


def test_a_full_pool_is_full_for_all_its_caches() -> None:
    config = CONFIGS["page"]
    pools = Pools(LAYERS, config=config, num_blocks=4, max_blocks=4)
    one, two = (PagedKVCache.on(pools, 1) for _ in range(2))
    store(one, [Text(0)], 12)
    store(two, [Text(1)], 4)
    with pytest.raises(OutOfBlocks, match="extend: 1 more blocks are needed, and 0 of 4 are free"):
        two.extend(1)
    one.reset()
    store(two, [Text(1)], 1)


# ---- threads ----


def in_threads(*calls: Callable[[], Any]) -> list[Any]:
    """All at once, with as many changes between them as can be."""
    num_threads = torch.get_num_threads()
    interval, barrier = sys.getswitchinterval(), threading.Barrier(len(calls))

    def run(call: Callable[[], Any]) -> Any:
        barrier.wait()
        torch.set_num_threads(num_threads)  # each thread has its own, and its own no_grad
        with torch.no_grad():
            return call()

    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(len(calls)) as threads:
            return [done.result() for done in [threads.submit(run, call) for call in calls]]
    finally:
        sys.setswitchinterval(interval)


def busy(config: QuestConfig, seed: int) -> Callable[[], Tensor]:
    def work() -> Tensor:
        texts, results = [Text(seed), Text(seed + 1)], []
        cache = PagedKVCache(LAYERS, 2, config=config)
        store(cache, texts, 130)
        for turn in range(40):
            results.append(decode(cache, texts))
            if turn % 10 == 9:
                cache.remember(texts[0].ids[:120])
                cache.crop(cache.lengths[0] - 3)
                cache.fork([1, 0])
                texts.reverse()
        return torch.cat(results)

    return work


@pytest.mark.parametrize("num_threads", [1, 2])
def test_caches_on_different_pools_work_in_several_threads(config: QuestConfig, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    calls = [busy(config, seed) for seed in (0, 10, 20)]
    expected = [call() for call in calls]
    for got, alone in zip(in_threads(*calls), expected):
        assert got.equal(alone)


def test_usage_is_of_one_moment() -> None:
    """Whatever happens between one look at the blocks and the next."""

    class Restless:
        def __init__(self, blocks: Any) -> None:
            self._blocks = blocks

        def __getattr__(self, name: str) -> Any:
            value = getattr(self._blocks, name)
            self._blocks.grow(self._blocks.num_blocks + 1)
            self._blocks.allocate(2)
            return value

    cache = alone(CONFIGS["page"], Text(0), 40)
    cache.extend(40)
    cache.crop(40)
    cache.pools.blocks = Restless(cache.pools.blocks)
    usage = cache.usage()
    assert (usage.used, usage.used + usage.free) == (10, usage.num_blocks)


def test_usage_and_stats_may_be_read_while_a_cache_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers of one moment each; and no decode call goes uncounted."""
    monkeypatch.setattr(quest.stats, "MOST_PENDING", 3)
    config, text, done = CONFIGS["page"], Text(0, 2000), threading.Event()
    cache = PagedKVCache(LAYERS, 1, config=config)

    def work() -> int:
        try:
            for turn in range(300):
                decode(cache, [text])
                if turn % 50 == 49:
                    cache.remember(text.ids[:20])
                    cache.free(0)
                    cache.reuse(text.ids[:10])
            return 300 * LAYERS
        finally:
            done.set()

    def watch() -> int:
        polls = 0
        while not done.is_set():
            usage, polls = cache.usage(), polls + 1
            assert usage.used + usage.free == usage.num_blocks
            assert usage.used >= 0
            assert 0 <= usage.idle <= usage.free
            assert usage.idle <= usage.cached
            assert 0 <= usage.unused_slots < 4
            assert 0 <= usage.hit_rate <= 1
            assert cache.stats.total.steps <= 300 * LAYERS
        return polls

    steps, polls, _ = in_threads(work, watch, watch)
    assert polls > 10
    assert cache.stats.total.steps == steps


def test_a_layer_that_begins_while_a_sequence_is_suspended() -> None:
    """What comes back are the layers that were stored; the layer before them, which had nothing, has nothing of it."""
    cache = PagedKVCache(2, 2, config=QuestConfig(page_size=4, sink_tokens=4, recent_tokens=4))
    step = cache.extend([5, 0])
    key, value = torch.randn(2, 2, 5, 2, 8)
    cache.append(1, key, value, step)
    before = [x[:1].clone() for x in cache.dense(1)]
    a, b = cache.ids
    cache.suspend(a)
    step = cache.extend(3)
    for layer in range(2):
        cache.append(layer, key[1:, :3], value[1:, :3], step)
    kept = [x.clone() for x in cache.dense(0)]
    cache.resume(a)
    assert all(torch.equal(now, then) for now, then in zip(cache.dense(0), kept))
    cache.select([a, b])
    assert all(torch.equal(now[:1], then) for now, then in zip(cache.dense(1), before))


def test_summaries_that_could_not_be_made_are_made_at_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    cache = PagedKVCache(1, config=QuestConfig(page_size=4, sink_tokens=4, recent_tokens=4))
    key, value = torch.randn(2, 1, 8, 2, 8)
    cache.append(0, key, value, cache.extend(8))
    low = cache.summaries[0][0]
    before = low.clone()
    low.fill_(float("nan"))
    cache.pools.overwritten(cache._sequences.blocks_of(cache.ids[0]))

    def fail(*args: Any) -> None:
        raise OSError("the disk fails")

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_summarise", fail)
        with pytest.raises(OSError, match="the disk fails"):
            cache.attend(0, torch.randn(1, 1, 4, 8))
    cache.attend(0, torch.randn(1, 1, 4, 8))
    assert torch.equal(low, before)
