"""QuestCache on shared pools: prefixes that are found again, and sequences that come and go between steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import PAGE, SMALL, VOCAB, forward, generate, model, model_config
from torch import Tensor

from quest import Offload, OutOfBlocks, Pools, QuestConfig
from quest.integrations.transformers import QuestCache

LAYERS = 3
PAGES = QuestConfig(page_size=PAGE, sink_tokens=PAGE, recent_tokens=PAGE, budget=SMALL)
PACKED = QuestConfig(block_size=64, budget=24)


def pools(config: QuestConfig = PAGES, **options: Any) -> Pools:
    return Pools(LAYERS, config=config, **options)


every_family = pytest.mark.parametrize("family", ["llama", "gemma3", "mistral-sliding", "qwen3-hybrid"])


def on(shared: Pools, family: str = "llama") -> QuestCache:
    return QuestCache(model_config(family), prefix_cache=shared)


def answer(
    text: Tensor,
    cache: QuestCache | None = None,
    new: int = 12,
    *,
    family: str = "llama",
    config: QuestConfig = PAGES,
    **options: Any,
) -> list[list[int]]:
    """With the prompt; of a cache without a past if none is given."""
    cold = QuestCache(model_config(family), config=config)
    return generate(model(family), text, cold if cache is None else cache, new, **options).tolist()


def ids(length: int, seed: int = 0) -> Tensor:
    return torch.randint(3, VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


@every_family
@pytest.mark.parametrize("config", [PAGES, PACKED], ids=["pages", "packed"])
def test_a_system_prompt_is_computed_once(config: QuestConfig, family: str) -> None:
    """Of prompts that begin alike, a later one computes only its own tokens, and answers as a cache without a past."""
    shared, system = pools(config), ids(150)
    known = 0
    for seed in (1, 2, 3):
        text = torch.cat([system, ids(11, seed)], 1)
        cache = on(shared, family)
        assert cache.begin(text) == known
        got = answer(text, cache, family=family)
        assert got == answer(text, family=family, config=config)
        assert (cache.remember(torch.tensor(got)) > 0) == (config is PAGES or not known)
        known = 150 // config.block_size * config.block_size
    assert shared.usage().hit_rate > 0.5


def test_an_answer_is_found_too() -> None:
    cache, text = on(pools()), ids(21)
    cache.begin(text)
    got = torch.tensor(answer(text, cache, 10))
    cache.remember(got)
    more = torch.cat([got, ids(6, 5)], 1)
    assert cache.begin(more) == 30 // PAGE * PAGE  # of 31 tokens all but the last were stored
    assert answer(more, cache) == answer(more)


def test_what_a_hit_holds_is_what_was_stored() -> None:
    shared, text = pools(PACKED), ids(200)
    first = on(shared)
    first.begin(text)
    answer(text, first, 1)
    first.remember(text)
    kept = [x.clone() for x in first.paged.dense(1)]
    first.reset()
    second = on(shared)
    assert second.begin(text) == 192
    for now, before in zip(second.paged.dense(1), kept):
        assert torch.equal(now, before[:, :, :192])
    assert shared.usage().used == 3


def test_at_least_two_tokens_are_left() -> None:
    """One token alone would be read sparsely, which the last token of a prompt is not."""
    shared = pools()
    for length, found in ((2 * PAGE, 0), (2 * PAGE + 1, PAGE), (2 * PAGE + 2, 2 * PAGE)):
        cache, text = on(shared), ids(length)
        assert cache.begin(text) == found
        assert answer(text, cache) == answer(text)
        cache.remember(text)


@every_family
def test_a_batch_takes_over_what_all_its_rows_find(family: str) -> None:
    shared, system = pools(), ids(4 * PAGE)
    text = torch.cat([system, ids(9, 1)], 1)
    cache = on(shared, family)
    cache.begin(text)
    answer(text, cache, 1, family=family)
    cache.remember(text)
    batch = torch.cat([torch.zeros(2, 3, dtype=torch.long), torch.cat([text, text])], 1)
    batch[1, 3 + 4 * PAGE :] = ids(9, 4)  # the second row differs after the system prompt
    batch[0, :3] = ids(3, 9)  # and the first before: it finds nothing
    mask = torch.ones_like(batch)
    mask[1, :3] = 0
    assert cache.begin(batch, mask) == 0
    batch[0, :3] = mask[0, :3] = 0
    assert cache.begin(batch, mask) == 3 + 4 * PAGE
    options = dict(family=family, attention_mask=mask)
    assert answer(batch, cache, **options) == answer(batch, **options)
    assert {read.steps for read in cache.stats.layers.values()} == {12 - 1}  # of all layers, sliding ones too


def test_a_copy_shares_blocks_until_it_writes() -> None:
    """The idiom of transformers for prompts: keep the cache of a prefix, go on with a deep copy."""
    shared, text = pools(), ids(22)
    cache = on(shared)
    forward(model("llama"), text, cache)
    used = shared.usage().used
    other = copy.deepcopy(cache)
    assert shared.usage().used == used
    more = torch.cat([text, ids(5, 3)], 1)
    got = answer(more, other)
    assert cache.get_seq_length() == 22
    assert got == answer(more, copy.deepcopy(cache)) == answer(more)
    del other
    assert shared.usage().used == used


def test_extra_keys_keep_prefixes_apart() -> None:
    cache, text = on(pools()), ids(30)
    cache.begin(text, extra_keys=["adapter-a"])
    answer(text, cache, 1)
    cache.remember(text, extra_keys=["adapter-a"])
    assert cache.begin(text, extra_keys=["adapter-b"]) == 0
    assert cache.begin(text) == 0
    assert cache.begin(text, extra_keys=["adapter-a"]) == 28


def test_a_cache_that_is_gone_holds_no_blocks() -> None:
    shared = pools()
    cache = on(shared)
    answer(ids(20), cache)
    assert shared.usage().used
    del cache
    assert shared.usage().used == 0


class Loop:
    """A serving loop in small: prompts one by one, then a token of every running sequence at a time."""

    def __init__(self, shared: Pools, family: str = "llama") -> None:
        self.cache, self.family = on(shared, family), family
        self.paged = self.cache.open()
        self.tokens: dict[int, list[int]] = {}

    def forward(self, sequences: list[int], new: Tensor) -> None:
        self.paged.select(sequences)
        self.cache.align()
        position = torch.tensor(self.paged.lengths)[:, None] + torch.arange(new.shape[1])
        logits = forward(model(self.family), new, self.cache, position_ids=position)
        for sequence, token in zip(sequences, logits[:, -1].argmax(-1).tolist()):
            self.tokens[sequence].append(token)

    def start(self, text: Tensor) -> int:
        sequence = self.paged.add()
        self.tokens[sequence] = []
        self.paged.select([sequence])
        found = self.paged.reuse(text[0, :-1])
        self.forward([sequence], text[:, found:])
        self.paged.remember(text[0])
        return sequence

    def step(self, sequences: list[int]) -> None:
        self.forward(sequences, torch.tensor([self.tokens[i][-1:] for i in sequences]))


@every_family
@pytest.mark.parametrize("config", [PAGES, PACKED], ids=["pages", "packed"])
def test_sequences_come_and_go_between_steps(config: QuestConfig, family: str) -> None:
    """Whatever shares a step with it, a sequence's answer is the one it has alone."""
    loop, system = Loop(pools(config), family), ids(140)
    texts = [torch.cat([system, ids(length, length)], 1) for length in (5, 17, 30, 2)]
    a, b = loop.start(texts[0]), loop.start(texts[1])
    for _ in range(3):
        loop.step([b, a])
    c = loop.start(texts[2])
    loop.step([a, c])
    loop.paged.suspend(b)
    loop.step([c, a])
    loop.paged.remove(a)
    d = loop.start(texts[3])
    loop.paged.resume(b)
    for _ in range(6):
        loop.step([d, b, c])
    for sequence, text in zip((a, b, c, d), texts):
        got = loop.tokens[sequence]
        assert [text[0].tolist() + got] == answer(text, new=len(got), family=family, config=config)
    usage = loop.paged.usage()
    assert usage.prefix_hits >= 3 * (140 // config.block_size * config.block_size)
    assert usage.used < usage.num_blocks


def test_out_of_blocks_loses_nothing() -> None:
    loop = Loop(pools(max_blocks=12))
    text = ids(20)
    a, b = loop.start(text), loop.start(ids(19, 1))
    for _ in range(4):
        loop.step([a, b])  # 24 and 23 tokens: all 12 blocks
    with pytest.raises(OutOfBlocks, match=r"extend: 1 more blocks are needed, and 0 of 12 are free"):
        loop.step([a])
    loop.paged.suspend(b)
    loop.cache.align()
    loop.step([a])
    assert [text[0].tolist() + loop.tokens[a]] == answer(text, new=len(loop.tokens[a]))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("config", [PAGES, PACKED], ids=["pages", "packed"])
def test_offload_changes_no_answer(config: QuestConfig, family: str, tier: str, tmp_path: Path) -> None:
    text = torch.cat([ids(150), ids(150, 1)])
    offload = Offload(tmp_path if tier == "files" else None, max_bytes=30_000)
    limited = QuestCache(model_config(family), config=config, offload=offload)
    resident = QuestCache(model_config(family), config=config)
    assert torch.equal(generate(model(family), text, limited, 20), generate(model(family), text, resident, 20))
    stats = limited.paged.offload_stats
    assert stats.resident_bytes <= 30_000 < stats.bytes_out
    assert stats.misses
    for cache in (limited, resident):
        cache.batch_repeat_interleave(2)
        if family == "llama":  # a window that is full can't be cropped
            cache.crop(-30)
    more = torch.cat([text, ids(150, 2)[:, :2].expand(2, 2)], 1)[:, -2:].repeat_interleave(2, 0)
    equal = torch.equal if tier == "files" else torch.allclose  # slots are read in another order
    assert equal(forward(model(family), more, limited), forward(model(family), more, resident))


def test_prefixes_and_sequences_in_offloaded_pools(tier: str, tmp_path: Path) -> None:
    loop = Loop(pools(PACKED, offload=Offload(tmp_path if tier == "files" else None, max_bytes=60_000)))
    texts = [torch.cat([ids(140), ids(length, length)], 1) for length in (5, 17)]
    a, b = loop.start(texts[0]), loop.start(texts[1])
    for _ in range(3):
        loop.step([b, a])
    loop.paged.suspend(a)
    loop.step([b])
    loop.paged.resume(a)
    loop.step([a, b])
    for sequence, text in zip((a, b), texts):
        got = loop.tokens[sequence]
        assert [text[0].tolist() + got] == answer(text, QuestCache(model_config("llama"), config=PACKED), len(got))
    assert loop.paged.usage().prefix_hits == 128
    assert loop.paged.offload_stats.bytes_out > 0


@pytest.mark.parametrize("family", ["gemma3", "mistral-sliding"])
def test_a_window_is_read_as_by_sliding_layers(family: str) -> None:
    """Logits of steps, and what is read of a sliding layer: its window, densely, however small the budget is."""
    text, cache = ids(60), on(pools(), family)
    plain = QuestCache(model_config(family), config=PAGES)
    for part in (text[:, :40], text[:, 40:45], text[:, 45:46], text[:, 46:47], text[:, 47:]):
        torch.testing.assert_close(forward(model(family), part, cache), forward(model(family), part, plain))
    cache.stats.reset()
    forward(model(family), ids(1, 7), cache)
    assert (
        cache.stats.layers[0].bytes.total == 12 * 2 * 2 * 8 * 4
    )  # tokens of the window, K and V, heads, channels, float32
    cache.crop(-30)  # also into a window that was full
    plain = QuestCache(model_config(family), config=PAGES)
    forward(model(family), text[:, :31], plain)
    more = ids(3, 9)
    torch.testing.assert_close(forward(model(family), more, cache), forward(model(family), more, plain))


def test_settings_of_sliding_layers_hold() -> None:
    """Packed summaries leave the sink out, so it must be the pools'."""
    config = PACKED.replace(layers={0: {"sink_tokens": 8}, 1: {"budget": 40}})
    cache = on(pools(config), "gemma3")
    text = ids(150)
    assert answer(text, cache, family="gemma3") == answer(text, family="gemma3", config=config)
    assert [cache.config.layer(i) for i in (1, 2)] == [config.layer(i) for i in (1, 2)]
    assert (cache.config.layer(0).dense, cache.config.layer(0).sink_tokens) == (True, 8)


def test_layers_that_see_chunks_or_have_a_state_are_refused() -> None:
    transformers = pytest.importorskip("transformers")
    chunked = transformers.Llama4TextConfig(
        num_hidden_layers=3, layer_types=["chunked_attention"] * 2 + ["full_attention"]
    )
    with pytest.raises(ValueError, match=r"prefix_cache needs a cache whose layers all keep every token, got Dynamic"):
        QuestCache(chunked, prefix_cache=pools())
    if hasattr(transformers.cache_utils, "LinearAttentionLayer"):
        config = transformers.Lfm2Config(num_hidden_layers=3, layer_types=["conv", "full_attention", "full_attention"])
        with pytest.raises(ValueError, match=r"layers all keep every token, got LinearAttentionLayer$"):
            QuestCache(config, prefix_cache=pools())
    alone = QuestCache(model_config("gemma3"))
    with pytest.raises(ValueError, match=r"got DynamicSlidingWindowLayer: give QuestCache a prefix_cache, and they do"):
        alone.begin(ids(9))


def test_bad_arguments(tmp_path: Path) -> None:
    shared = pools()
    with pytest.raises(TypeError, match=r"QuestCache: prefix_cache must be quest.Pools, got int"):
        QuestCache(model_config("llama"), prefix_cache=3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"QuestCache: config must be that of prefix_cache or None"):
        QuestCache(model_config("llama"), config=PACKED, prefix_cache=shared)
    with pytest.raises(ValueError, match=r"prefix_cache must have the model's 3 layers, got 2"):
        QuestCache(model_config("llama"), prefix_cache=Pools(2))
    with pytest.raises(TypeError, match=r"QuestCache: offload must be an Offload or None, got str"):
        QuestCache(model_config("llama"), offload="/tmp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"QuestCache: offload must be None together with prefix_cache"):
        QuestCache(model_config("llama"), prefix_cache=shared, offload=Offload(tmp_path, max_bytes=0))
    cache = on(shared)
    with pytest.raises(ValueError, match=r"remember: the cache must hold tokens"):
        cache.remember(ids(5))
    with pytest.raises(ValueError, match=r"begin: input_ids must be integers \[batch, columns\]"):
        cache.begin(torch.randn(1, 4))
    with pytest.raises(ValueError, match=r"begin: attention_mask must have its padding on the left"):
        cache.begin(ids(4), torch.tensor([[1, 1, 0, 0]]))
