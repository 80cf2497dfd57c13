"""C28: budgets that come to next to nothing, contexts of next to nothing, and layers of different lengths."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from quest import PagedKVCache, Pools, QuestConfig

HEADS, DIM = 2, 16
LONGEST = 128
KINDS: dict[str, dict[str, Any]] = {
    "pages": dict(page_size=4, block_size=8),
    "packed": dict(block_size=64),
    "packed pages": dict(page_size=2, summary_bits=4, coarse_size=8, block_size=32),
}


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> dict[str, Any]:
    return KINDS[request.param]


def tokens(length: int, layers: int = 1, batch: int = 1, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value [layers, batch, length, heads, dim]. Token i's value is 1 in place i: what attention gives
    is the weight of each token, 0 where it was not read."""
    random = torch.Generator().manual_seed(seed)
    query, key = (torch.randn(layers, batch, length, n * HEADS, DIM, generator=random) for n in (2, 1))
    return query, key, torch.eye(length, LONGEST)[:, None].expand(layers, batch, -1, HEADS, -1).contiguous()


def part(of: tuple[Tensor, ...], layer: int, begin: list[int], count: int) -> list[Tensor]:
    """The tokens from each row's `begin` on."""
    return [torch.stack([x[layer, row, at : at + count] for row, at in enumerate(begin)]) for x in of]


def pages_of(weights: Tensor, page_size: int) -> Tensor:
    """Which pages were read, from weights [heads, tokens]: bool [heads, pages]."""
    padded = torch.nn.functional.pad(weights, (0, -weights.shape[1] % page_size))
    return (padded.unflatten(1, (-1, page_size)) > 0).any(-1)


def last_step(config: QuestConfig, length: int) -> tuple[Tensor, Tensor, PagedKVCache]:
    """Out and lse of the newest token, in a cache of one layer."""
    cache, new = PagedKVCache(1, config=config), tokens(length)
    if length > 1:
        cache.append(0, *part(new[1:], 0, [0], length - 1), cache.extend(length - 1))
    out, lse = cache.decode(0, *part(new, 0, [length - 1], 1), cache.extend(1))
    return out[0, 0, :, :length], lse, cache


@torch.no_grad()
def test_c28_a_budget_never_reads_nothing(kind: dict[str, Any]) -> None:
    """quest evicts nothing: what a ratio keeps is here what a fraction lets a step read. The newest token is read
    always and the forced pages are, so that no fraction is too small; 1.0 is dense attention, as is a context that the
    forced pages hold."""
    dense = {length: last_step(QuestConfig(**kind, dense_layers=(0,)), length) for length in (1, 2, 3, 5, 17, 34, 100)}
    fractions, forced, keeps = (1e-300, 0.02, 0.6, 0.999, 1.0), ((0, 0), (1, 1), (4, 8), (64, 64)), (1e-300, 0.25)
    for budget, (sink, recent), keep in itertools.product(fractions, forced, keeps):
        config = QuestConfig(**kind, budget=budget, sink_tokens=sink, recent_tokens=recent, coarse_keep=keep)
        page = config.page_size
        for length, (expected, expected_lse, _) in dense.items():
            out, lse, cache = last_step(config, length)
            read, allowed = pages_of(out, page), math.ceil(budget * length)
            oldest, newest = -(-sink // page), max(1, -(-recent // page))  # the open page counts as one
            count = max(oldest + newest, allowed // page)
            if allowed >= length or count >= read.shape[1]:
                assert out.equal(expected)
                assert lse.equal(expected_lse)
            else:
                assert read[:, :oldest].all()
                assert read[:, -newest:].all()
                assert (read.sum(1) == count).all(), (config, length)
            torch.testing.assert_close(out.sum(1), torch.ones(2 * HEADS))
            assert 0 < cache.stats.total.fraction < math.inf
            assert str(cache.stats)


@torch.no_grad()
def test_c28_a_prompt_at_once_is_read_whole(kind: dict[str, Any]) -> None:
    """A step's own tokens are all read, by those after them, and never by those before."""
    for length in (1, 2, 3, 40, 100):
        results = []
        for options in (dict(budget=1e-9, sink_tokens=0, recent_tokens=0), dict(dense_layers=(0,))):
            cache = PagedKVCache(1, config=QuestConfig(**kind, **options))
            results.append(cache.decode(0, *part(tokens(length), 0, [0], length), cache.extend(length)))
        assert all(map(torch.equal, *results))
        weights = results[0][0][0, :, :, :length].transpose(0, 1)
        assert ((weights > 0) == torch.ones(length, length).tril().bool()).all()


@torch.no_grad()
def test_c28_layers_have_budgets_of_their_own(kind: dict[str, Any]) -> None:
    """No mean of them, and not the first one's."""
    forced = dict(sink_tokens=4, recent_tokens=4)
    settings = [
        dict(budget=0.3),
        dict(budget=1.0),
        dict(budget=0.6, coarse_keep=0.5),
        dict(dense=True),
        dict(budget=4, sink_tokens=0, recent_tokens=0),
    ]
    config = QuestConfig(**kind, **forced, budget=0.5, layers=dict(enumerate(settings)))
    new, cache = tokens(97, len(settings)), PagedKVCache(len(settings), config=config)
    prompt = cache.extend(96)
    for layer in range(len(settings)):
        cache.append(layer, *part(new[1:], layer, [0], 96), prompt)
    step, counts, page = cache.extend(1), [], config.page_size
    for layer in range(len(settings)):
        out, _ = cache.decode(layer, *part(new, layer, [96], 1), step)
        (count,) = {*pages_of(out[0, 0], page).sum(1).tolist()}  # every head reads as many
        counts.append(count)
    assert counts == [30 // page, -(-97 // page), 59 // page, -(-97 // page), 4 // page]


def with_nan(cache: PagedKVCache, layers: int, batch: int) -> None:
    """Pools in which whatever is read before it was stored is seen."""
    step = cache.extend(LONGEST)
    for layer in range(layers):
        cache.append(layer, *part(tokens(LONGEST, layers, batch)[1:], layer, [0] * batch, LONGEST), step)
    cache.reset()
    for pool in (*cache.k_cache, *cache.v_cache):
        assert pool is not None
        pool.fill_(float("nan"))


@torch.no_grad()
@pytest.mark.parametrize("lengths", [(8, 4), (80, 40), (100, 97)], ids=str)
def test_c28_a_layer_that_stores_later_attends_over_its_own_length(
    kind: dict[str, Any], lengths: tuple[int, int]
) -> None:
    """All layers share the lengths of a cache's rows; one that stores later than the others, from `start` on, has its
    own in its steps. Blocks are there for what it lacks, and hold anything."""
    config = QuestConfig(**kind, budget=0.4, sink_tokens=2, recent_tokens=2)
    new, cache = tokens(LONGEST, 2, 2), PagedKVCache(2, 2, config=config)
    with_nan(cache, 2, 2)
    alone = [[PagedKVCache(1, 1, config=config) for _ in range(2)] for _ in range(2)]
    have = [[0, 0], [0, 0]]

    def store(layer: int, count: int) -> None:
        begin = have[layer]
        step = cache.extend(count, start=begin)
        cache.append(layer, *part(new[1:], layer, begin, count), step)
        for row, one in enumerate(alone[layer]):
            one.append(0, *(x[[row]] for x in part(new[1:], layer, begin, count)), one.extend(count))
        have[layer] = [n + count for n in begin]

    def decode(layer: int) -> None:
        begin = have[layer]
        step = cache.extend(1, start=begin)
        args = part(new, layer, begin, 1)
        out, lse = cache.decode(layer, *args, step)
        for row, one in enumerate(alone[layer]):
            expected = one.decode(0, *(x[[row]] for x in args), one.extend(1))
            assert out[[row]].equal(expected[0])
            assert lse[[row]].equal(expected[1])
        assert not out[..., begin[0] + 1 :].any()
        have[layer] = [n + 1 for n in begin]

    store(0, lengths[0])
    store(1, lengths[1])
    for _ in range(3):
        decode(0)
        decode(1)
    assert cache.lengths == [lengths[0] + 3] * 2
    store(1, lengths[0] - lengths[1])
    decode(1)
    decode(0)
    for layer in range(2):
        for got, expected in zip(cache.dense(layer), (x[layer, :, : have[0][0]] for x in new[1:])):
            assert got.equal(expected.transpose(1, 2))


@torch.no_grad()
def test_c28_caches_of_different_lengths_on_the_same_pools(kind: dict[str, Any]) -> None:
    config = QuestConfig(**kind, budget=0.4, sink_tokens=2, recent_tokens=2)
    pools = Pools(2, config=config)
    with_nan(PagedKVCache.on(pools), 2, 1)
    for lengths in ((4, 8), (33, 65), (100, 3)):
        caches = [PagedKVCache.on(pools) for _ in lengths]
        cold = [PagedKVCache(2, config=config) for _ in lengths]
        texts = [tokens(LONGEST, 2, seed=seed) for seed in range(2)]
        for cache, own, text, length in zip(caches, cold, texts, lengths):
            for c in (cache, own):
                step = c.extend(length)
                for layer in range(2):
                    c.append(layer, *part(text[1:], layer, [0], length), step)
        for turn in range(4):
            for cache, own, text, length in zip(caches, cold, texts, lengths):
                steps = cache.extend(1), own.extend(1)
                for layer in range(2):
                    new = part(text, layer, [length + turn], 1)
                    got, expected = (c.decode(layer, *new, step) for c, step in zip((cache, own), steps))
                    assert all(map(torch.equal, got, expected))
                    assert not got[0][..., length + turn + 1 :].any()
