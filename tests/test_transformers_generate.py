"""With a budget above the length, what users do with DynamicCache gives the same text with QuestCache."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_models import (
    CACHE,
    FAMILIES,
    VOCAB,
    check_summaries,
    dynamic_cache,
    forward,
    generate,
    model,
    pad_left,
    prompt,
    quest_cache,
)
from transformers import DynamicCache

Scenario = Callable[[Any, Callable[[], Any], str], torch.Tensor]


def plain(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    return generate(net, prompt(1, 37), new_cache())


def one_token_prompt(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    return generate(net, prompt(2, 1), new_cache())


def batch(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    return generate(net, prompt(3, 21), new_cache())


def left_padded(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    ids, mask = pad_left(prompt(4, 23), [0, 7, 22, 16])
    return generate(net, ids, new_cache(), attention_mask=mask)


def chat_turns(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    cache, text = new_cache(), prompt(1, 11)
    for turn in range(3):
        text = generate(net, torch.cat([text, prompt(1, 9, seed=turn)], 1), cache, new=7)
    return text


def padded_chat_turns(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    cache, (text, mask) = new_cache(), pad_left(prompt(2, 11), [0, 5])
    for turn, pads in enumerate(([0, 0], [3, 0], [0, 2])):
        ids, more = pad_left(prompt(2, 6, seed=turn), pads)
        text, mask = torch.cat([text, ids], 1), torch.cat([mask, more], 1)
        text = generate(net, text, cache, new=5, attention_mask=mask)
        mask = torch.cat([mask, mask.new_ones(2, text.shape[1] - mask.shape[1])], 1)
    return text


def prefill_in_chunks(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    return generate(net, prompt(2, 37), new_cache(), prefill_chunk_size=8)


def padded_prefill_in_chunks(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    ids, mask = pad_left(prompt(2, 37), [0, 11])
    return generate(net, ids, new_cache(), attention_mask=mask, prefill_chunk_size=8)


def forward_in_chunks(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    cache, ids = new_cache(), prompt(2, 30)
    for first, last in ((0, 5), (5, 6), (6, 17), (17, 29)):
        forward(net, ids[:, first:last], cache)
    return generate(net, ids, cache)


def beams(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    return generate(net, prompt(2, 13), new_cache(), num_beams=4)


def padded_beams_returned(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    ids, mask = pad_left(prompt(2, 13), [0, 6])
    return generate(net, ids, new_cache(), attention_mask=mask, num_beams=3, num_return_sequences=2)


def beam_sampling(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    torch.manual_seed(3)
    return generate(net, prompt(1, 13), new_cache(), num_beams=3, do_sample=True)


def sampled_sequences(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    torch.manual_seed(3)
    return generate(net, prompt(2, 13), new_cache(), do_sample=True, num_return_sequences=3)


def prompt_lookup(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    lookup = {"prompt_lookup_num_tokens": 4, "eos_token_id": VOCAB}  # an end that never comes: some versions need one
    return generate(net, prompt(1, 6).repeat(1, 5), new_cache(), new=40, **lookup)


def assistant(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    return generate(net, prompt(1, 20), new_cache(), new=40, assistant_model=model(family, "sdpa", seed=0))


def bad_assistant(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    return generate(net, prompt(1, 20), new_cache(), new=30, assistant_model=model(family, "sdpa", seed=1))


def crop(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    cache, ids = new_cache(), prompt(2, 33)
    forward(net, ids, cache)
    cache.crop(-9)
    assert cache.get_seq_length() == 24
    return generate(net, torch.cat([ids[:, :24], prompt(2, 5, seed=1)], 1), cache)


def padded_crop(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    cache, (ids, mask) = new_cache(), pad_left(prompt(2, 33), [0, 14])
    forward(net, ids, cache, attention_mask=mask)
    cache.crop(-9)
    ids, mask = torch.cat([ids[:, :24], prompt(2, 5, seed=1)], 1), torch.cat([mask[:, :24], mask.new_ones(2, 5)], 1)
    return generate(net, ids, cache, attention_mask=mask)


def reset(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    cache = new_cache()
    ids, mask = pad_left(prompt(2, 19), [0, 8])
    generate(net, ids, cache, attention_mask=mask)
    cache.reset()
    if isinstance(cache, DynamicCache) and any(layer.keys is not None for layer in cache.layers):
        if any(cache.is_sliding):
            pytest.skip("sliding layers of this version of transformers are unusable after a reset")
        cache = new_cache()
    assert cache.get_seq_length() == 0
    return generate(net, prompt(2, 30, seed=5), cache)


def prompt_shared_by_deepcopy(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    cache, ids = new_cache(), prompt(1, 26)
    forward(net, ids, cache)
    texts = []
    for question in range(3):
        asked = torch.cat([ids, prompt(1, 4, seed=question)], 1)
        texts.append(generate(net, asked, copy.deepcopy(cache)))
        assert cache.get_seq_length() == 26
    return torch.cat(texts)


def repeat_interleave(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    cache, (ids, mask) = new_cache(), pad_left(prompt(2, 22), [0, 5])
    forward(net, ids, cache, attention_mask=mask)
    cache.batch_repeat_interleave(3)
    ids, mask = (x.repeat_interleave(3, 0) for x in (ids, mask))
    more = prompt(6, 3, seed=1)
    ids, mask = torch.cat([ids, more], 1), torch.cat([mask, torch.ones_like(more)], 1)
    return generate(net, ids, cache, attention_mask=mask)


def select_rows(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    cache, (ids, mask) = new_cache(), pad_left(prompt(4, 22), [0, 5, 9, 1])
    forward(net, ids, cache, attention_mask=mask)
    rows = torch.tensor([2, 0])
    cache.batch_select_indices(rows)
    more = prompt(2, 3, seed=1)
    ids, mask = torch.cat([ids[rows], more], 1), torch.cat([mask[rows], torch.ones_like(more)], 1)
    return generate(net, ids, cache, attention_mask=mask)


def group_beams_by_hand(net: Any, new_cache: Callable[[], Any], family: str) -> torch.Tensor:
    """Reorder, decode, crop in turns, as a search of one's own does."""
    cache, ids = new_cache(), prompt(3, 14)
    nxt = forward(net, ids, cache)[:, -1:].argmax(-1)
    for order in ([2, 0, 0], [1, 1, 0], [0, 2, 1], [2, 2, 2]):
        for _ in range(2):
            ids = torch.cat([ids, nxt], 1)
            nxt = forward(net, nxt, cache)[:, -1:].argmax(-1)
        cache.reorder_cache(torch.tensor(order))
        cache.crop(-1)
        ids = ids[order, :-1]
        nxt = prompt(3, 1, seed=ids.shape[1])
    return generate(net, torch.cat([ids, nxt], 1), cache)


EVERY: list[Scenario] = [plain, left_padded, beams, chat_turns]
REST: list[Scenario] = [
    one_token_prompt,
    batch,
    padded_chat_turns,
    prefill_in_chunks,
    padded_prefill_in_chunks,
    forward_in_chunks,
    padded_beams_returned,
    beam_sampling,
    sampled_sequences,
    prompt_lookup,
    assistant,
    bad_assistant,
    crop,
    padded_crop,
    reset,
    prompt_shared_by_deepcopy,
    repeat_interleave,
    select_rows,
    group_beams_by_hand,
]
CASES = [(family, scenario) for family in FAMILIES for scenario in EVERY]
CASES += [(family, scenario) for family in ("llama", "gemma3") for scenario in REST]


def run(family: str, scenario: Scenario, attention: str, new_cache: Callable[[], Any]) -> Any:
    try:
        return scenario(model(family, attention), new_cache, family)
    except (RuntimeError, ValueError) as error:  # of transformers: a sliding layer that can't be cropped, for one
        return type(error), str(error)


@pytest.mark.parametrize(("family", "scenario"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_text_is_that_of_dynamic_cache(family: str, scenario: Scenario) -> None:
    caches = []

    def new_cache() -> Any:
        caches.append(quest_cache(family))
        return caches[-1]

    expected = run(family, scenario, "sdpa", lambda: dynamic_cache(family))
    text = run(family, scenario, "quest", new_cache)
    if isinstance(expected, tuple):
        assert text == expected
        assert family == "gemma3"  # transformers' own sliding layers can't do it
        return
    assert torch.equal(text, expected), (text, expected)
    assert text.unique().numel() > 8  # no text that any cache would give
    for cache in caches:
        if cache.paged is not None:
            check_summaries(cache.paged)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("scenario", [plain, left_padded, beams, chat_turns, prompt_lookup, padded_crop])
def test_other_attention_implementations_see_a_dense_cache(scenario: Scenario, attention: str) -> None:
    expected = run("llama", scenario, attention, lambda: dynamic_cache("llama"))
    assert torch.equal(run("llama", scenario, attention, lambda: quest_cache("llama", budget=12)), expected)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_without_a_quest_cache_it_is_sdpa(family: str) -> None:
    ids, mask = pad_left(prompt(2, 23), [0, 7])
    expected = generate(model(family, "sdpa"), ids, dynamic_cache(family), attention_mask=mask)
    assert torch.equal(generate(model(family), ids, dynamic_cache(family), attention_mask=mask), expected)
    assert torch.equal(generate(model(family), ids, None, attention_mask=mask), expected)
    static = {"cache_implementation": "static", "disable_compile": True}
    got = model(family).generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=24, **static)
    assert torch.equal(got, expected)


def test_both_names_of_the_cache_argument() -> None:
    names = {"past_key_values", CACHE}
    texts = []
    for name in sorted(names):
        cache = quest_cache("llama")
        texts.append(
            model("llama").generate(
                prompt(1, 20), attention_mask=torch.ones(1, 20), do_sample=False, max_new_tokens=9, **{name: cache}
            )
        )
        assert cache.get_seq_length() == 28
        with torch.no_grad():
            model("llama")(prompt(1, 3), use_cache=True, **{name: cache})
        assert cache.get_seq_length() == 31
    assert all(torch.equal(text, texts[0]) for text in texts)


def test_full_blocks_are_shared_between_beams() -> None:
    cache = quest_cache("llama")
    generate(model("llama"), prompt(1, 40), cache, new=8, num_beams=4)
    blocks = [set(cache.paged._sequences.blocks_of(i)) for i in cache.paged.ids]
    shared = set.intersection(*blocks)
    assert len(shared) >= 40 // 4  # the prompt's full blocks, once for all beams
    assert cache.paged.num_blocks - cache.paged.num_free_blocks == len(set.union(*blocks))
