"""Run a transformers model token by token over transformers' own cache or a `QuestCache`, and time every step.

Used by the demo and the benchmarks: one prompt is read once, by transformers alone, and every cache that is compared
starts from the same keys and values.
"""

from __future__ import annotations

import copy
import inspect
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from quest.config import QuestConfig
from quest.pools import Pools

__all__ = ["Decoder", "cache_argument", "context_limit", "follow", "paged_copy", "prefill"]

# Steps before another decoder's turn. A `DynamicCache` is built anew in every step; with other allocations between any
# two steps the heap has no room for the next one and grows by gigabytes.
TURN = 8


def cache_argument(model: Any) -> str:
    """The name under which this version of transformers takes a cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def context_limit(model: Any) -> int | None:
    """Tokens that the model's positions allow, None if its config doesn't say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


@torch.no_grad()
def prefill(model: Any, tokens: Sequence[int]) -> Any:
    """Read a prompt with transformers' sdpa attention into a `DynamicCache`, in one pass."""
    from transformers import DynamicCache

    _attend_with(model, "sdpa")
    cache = DynamicCache(config=model.config)
    model(torch.tensor([list(tokens)]), use_cache=True, logits_to_keep=1, **{cache_argument(model): cache})
    return cache


@torch.no_grad()
def paged_copy(model: Any, source: Any, config: QuestConfig, pools: Pools | None = None) -> Any:
    """A `QuestCache` of the tokens in `source`, on `pools` if given. Layers that it doesn't page are copied as they
    are."""
    from quest.integrations.transformers import QuestCache, register

    register()
    cache = QuestCache(model.config, config=config, prefix_cache=pools)
    paged = set(map(id, cache.paged_layers))
    for index, layer in enumerate(source.layers):
        if id(cache.layers[index]) in paged:
            cache.update(layer.keys, layer.values, index)
        else:
            cache.layers[index] = copy.deepcopy(layer)
    for layer in cache.paged_layers:
        layer.settle()  # store what `update` only holds
    return cache


class Decoder:
    """A model decoding a single row from a copy of a prompt's cache.

    Args:
        source: the `DynamicCache` of `prefill`; it stays as it is.
        config: how to read; None is transformers' own cache and sdpa attention.
        pools: where K and V are to lie, if not in pools of the cache's own.

    Attributes:
        seconds: wall time of each step's forward pass.
    """

    def __init__(self, model: Any, source: Any, config: QuestConfig | None, pools: Pools | None = None) -> None:
        self.model = model
        self.attention = "sdpa" if config is None else "quest"
        self.cache = copy.deepcopy(source) if config is None else paged_copy(model, source, config, pools)
        self.seconds: list[float] = []
        self._argument = cache_argument(model)

    @torch.no_grad()
    def step(self, token: int) -> Tensor:
        """Append one token; logits [vocabulary] of what follows it."""
        _attend_with(self.model, self.attention)
        ids = torch.tensor([[token]])
        start = time.perf_counter()
        logits = self.model(ids, use_cache=True, **{self._argument: self.cache}).logits[0, -1]
        self.seconds.append(time.perf_counter() - start)
        return logits

    def generate(self, token: int, max_new_tokens: int, stop: Iterable[int] = ()) -> list[int]:
        """Greedy continuation after `token`, up to a stop token, which is left out."""
        stop, tokens = set(stop), list[int]()
        while len(tokens) < max_new_tokens:
            token = int(self.step(token).argmax())
            if token in stop:
                break
            tokens.append(token)
        return tokens

    @property
    def seconds_per_token(self) -> float:
        """Median over the steps so far."""
        return statistics.median(self.seconds)


def follow(decoders: Sequence[Decoder], tokens: Sequence[int], advance: Callable[[], None] | None = None) -> Tensor:
    """Feed the same tokens to every decoder, `TURN` at a time and in turn, so that all meet the machine in one state.

    Returns:
        [len(decoders), len(tokens)]: the token that each would have chosen next.
    """
    chosen = torch.zeros(len(decoders), len(tokens), dtype=torch.long)
    for start in range(0, len(tokens), TURN):
        for turn in range(len(decoders)):
            which = (start // TURN + turn) % len(decoders)
            for place in range(start, min(start + TURN, len(tokens))):
                chosen[which, place] = decoders[which].step(tokens[place]).argmax()
                if advance:
                    advance()
    return chosen


def _attend_with(model: Any, attention: str) -> None:
    if model.config._attn_implementation != attention:
        model.set_attn_implementation(attention)
