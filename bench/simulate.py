"""Attention that reads what a rule of `quest.bench.selection` says, simulated over a dense cache.

A prompt is read densely once (`read_prompt`), and every run starts from its keys and values. A run of several tokens in
one forward pass is as many decode steps: every token has its own selection, and sees only what precedes it.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import AttentionInterface

from quest.bench.selection import NEG_INF, Observed, Rule, View, recalls
from quest.integrations.transformers import quest_attention_forward
from quest.measure import cache_argument

__all__ = ["Notes", "Prompt", "Simulated", "forward", "logits_of", "read_prompt"]

NAME = "quest_simulated"
OBSERVED = 32  # queries at a prompt's end whose attention decides on eviction
PORTION = 256  # queries at a time where a prompt's attention is summed up


class RoomyLayer(DynamicLayer):
    """K and V in tensors with room for more, so that a step copies nothing and runs share what precedes them."""

    def __init__(self, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.room = tuple(x.new_empty(*x.shape[:2], self.capacity, x.shape[3]) for x in (key_states, value_states))
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, self.length = self.length, self.length + key_states.shape[2]
        for room, new in zip(self.room, (key_states, value_states), strict=True):
            room[:, :, start : self.length] = new
        self.keys, self.values = (room[:, :, : self.length] for room in self.room)
        return self.keys, self.values

    def branch(self) -> RoomyLayer:
        return copy.copy(self)


class Prompt:
    """What reading a prompt leaves: its cache, and what eviction wants to know. Runs start from `branch`, one at a
    time: they all write into the same room behind the prompt.

    Attributes:
        length: tokens.
        layers: the full-attention layers, those that can be read sparsely.
        observed: by layer.
    """

    def __init__(self, cache: DynamicCache, observed: dict[int, Observed]) -> None:
        self.cache = cache
        self.observed = observed
        self.layers = [i for i, layer in enumerate(cache.layers) if isinstance(layer, RoomyLayer)]

    @property
    def length(self) -> int:
        return self.cache.get_seq_length()

    def notes(self) -> Notes:
        return Notes(len(self.cache.layers), self.layers)

    def branch(self) -> DynamicCache:
        cache = copy.copy(self.cache)
        cache.layers = [x.branch() if isinstance(x, RoomyLayer) else copy.deepcopy(x) for x in self.cache.layers]
        return cache

    def more(self, model: Any, tokens: Sequence[int]) -> Prompt:
        """The prompt with further tokens, read densely too."""
        if not tokens:
            return self
        longer = Prompt(self.branch(), {i: copy.copy(seen) for i, seen in self.observed.items()})
        forward(model, longer.cache, tokens, Observing(longer), logits_to_keep=1)
        return longer


def read_prompt(model: Any, tokens: Sequence[int], room: int, *, sum_mass: bool = False) -> Prompt:
    """Read a prompt densely, with room for so many tokens behind it. `sum_mass` is for rules that evict by the
    attention of the whole prompt; summing that up takes about as long as reading."""
    cache = DynamicCache(config=model.config)
    capacity = len(tokens) + room
    cache.layers = [RoomyLayer(capacity) if type(x) is DynamicLayer else x for x in cache.layers]
    prompt = Prompt(cache, {})
    forward(model, cache, tokens, Observing(prompt, sum_mass), logits_to_keep=1)
    return prompt


class Observing:
    """Dense attention that takes notes for eviction."""

    def __init__(self, prompt: Prompt, sum_mass: bool = False) -> None:
        self.prompt = prompt
        self.sum_mass = sum_mass or any(seen.mass is not None for seen in prompt.observed.values())

    def read(self, layer: int, query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor | None:
        if layer not in self.prompt.layers:
            return None
        grouped = _grouped(query, key)
        seen = self.prompt.observed.setdefault(layer, Observed(grouped[:, :, :0]))
        seen.queries = torch.cat([seen.queries, grouped[:, :, -OBSERVED:]], 2)[:, :, -OBSERVED:].clone()
        if self.sum_mass:
            old = key.new_zeros(key.shape[1], 0) if seen.mass is None else seen.mass
            seen.mass = torch.nn.functional.pad(old, (0, key.shape[2] - old.shape[1]))
            start = key.shape[2] - query.shape[2]
            for i in range(0, query.shape[2], PORTION):
                some = query[:, :, i : i + PORTION]
                columns = start + i + some.shape[2]
                received = logits_of(some, key[:, :, :columns], scale, softcap).softmax(-1).sum((1, 2))
                seen.mass[:, :columns] += received
        return None


@dataclass
class Notes:
    """What a run has read, kept when its cache is gone.

    Attributes:
        num_layers: of the model; `layers`: those with full attention.
        recall: by layer, attention mass kept, [num_kv_heads, group, sampled] per entry; `hits` likewise, simulated runs
            only (`recalls`).
        tokens_read: K and V rows read, of all KV heads and sparse layers (of each query head where each has its own
            selection), as one number per token; simulated runs only.
    """

    num_layers: int
    layers: list[int]
    recall: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    hits: defaultdict[int, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    tokens_read: list[float] = field(default_factory=list)


class Simulated:
    """A model that decodes behind a prompt and reads what a rule says; everything with the rule None.

    Args:
        dense: layers that read everything.
        sample: of every so many tokens of a `feed`, one is looked at for the recalls.
    """

    def __init__(
        self, model: Any, prompt: Prompt, rule: Rule | None = None, *, dense: Iterable[int] = (), sample: int = 8
    ) -> None:
        self.model, self.prompt, self.rule, self.sample = model, prompt, rule, sample
        self.cache = prompt.branch()
        self.layers = set() if rule is None else set(prompt.layers) - set(dense)
        self.notes = prompt.notes()

    def feed(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens; logits [tokens, vocabulary] of what follows each."""
        self.notes.tokens_read += [0.0] * len(tokens)
        return forward(self.model, self.cache, tokens, self)

    def read(self, layer: int, query: Tensor, key: Tensor, scale: float, softcap: float | None) -> Tensor | None:
        """Logits as of `logits_of`, -inf for what is not read; None to read everything."""
        if self.rule is None or layer not in self.layers:
            return None
        logits = logits_of(query, key, scale, softcap)
        seen = self.prompt.observed.get(layer)
        view = View(layer, _grouped(query, key), key[0], logits, scale, self.prompt.length, seen)
        read = self.rule(view)
        q_len = query.shape[2]
        for i, count in enumerate(read.sum((0, 1, 3)).tolist()):
            self.notes.tokens_read[i - q_len] += count
        if q_len > 1:
            kept, hits = recalls(read[:, :, :: self.sample], logits[:, :, :: self.sample])
            self.notes.recall[layer].append(kept)
            self.notes.hits[layer].append(hits)
        return logits.masked_fill_(~read, NEG_INF)


@torch.no_grad()
def forward(model: Any, cache: Any, tokens: Sequence[int], simulation: Any, **options: Any) -> Tensor:
    """Logits [tokens, vocabulary] of one forward pass with simulated attention."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
    if model.config._attn_implementation != NAME:
        model.set_attn_implementation(NAME)
    options |= {cache_argument(model): cache, "use_cache": True, "simulation": simulation}
    return model(torch.tensor([list(tokens)]), **options).logits[0]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    simulation: Any,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it, for one row; `simulation` comes from the model's keyword arguments."""
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: int = module.layer_idx  # type: ignore[assignment]
    logits = simulation.read(layer, query, key, scale, softcap)
    if logits is None:  # K and V are plain tensors, so this is dense
        options: dict[str, Any] = dict(scaling=scale, softcap=softcap, s_aux=s_aux, **kwargs)
        return quest_attention_forward(module, query, key, value, attention_mask, **options)
    if s_aux is not None:
        sink = s_aux.float().view(*logits.shape[:2], 1, 1).expand(-1, -1, logits.shape[2], -1)
        logits = torch.cat([logits, sink], -1)
    weights = logits.softmax(-1)[..., : key.shape[2]]
    out = weights.flatten(1, 2) @ value[0]  # a group's queries as rows, so that V is read once
    return out.unflatten(1, weights.shape[1:3]).flatten(0, 1).transpose(0, 1)[None], None


def logits_of(query: Tensor, key: Tensor, scale: float, softcap: float | None = None) -> Tensor:
    """[num_kv_heads, group, q_len, tokens], -inf for what follows a query.

    Args:
        query: [1, num_heads, q_len, head_dim], of the last q_len tokens of key: [1, num_kv_heads, tokens, head_dim].
    """
    grouped = _grouped(query, key)
    rows = grouped.flatten(1, 2) * scale  # a group's queries as rows, so that K is read once
    logits = (rows @ key[0].transpose(1, 2)).unflatten(1, grouped.shape[1:3])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    q_len, tokens = logits.shape[-2:]
    token = torch.arange(tokens)
    return logits.masked_fill_(token > token[tokens - q_len :, None], NEG_INF)


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    return query[0].unflatten(0, (key.shape[1], -1))
