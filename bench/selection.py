"""What other ways of reading part of a KV cache would read: rules that `quest.bench.simulate` turns into masks.

A rule sees all keys of one layer and the queries of the newest tokens, and says which tokens each query reads. That
costs more than reading everything: these rules are here to be compared with, not to be fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from quest.config import forced_pages

__all__ = ["Evict", "Observed", "OraclePages", "QuestPages", "Rule", "View", "Window", "mass", "page_bounds", "recalls"]

SINK, RECENT = 16, 32  # forced tokens, as `QuestConfig` has them
NEG_INF = float("-inf")


@dataclass
class Observed:
    """What reading a prompt densely leaves behind for eviction.

    Attributes:
        queries: of the prompt's last tokens, [num_kv_heads, group, at most `OBSERVED`, head_dim].
        mass: attention that each token has received from all queries of the prompt, summed over the group,
            [num_kv_heads, tokens]; None where nobody asked for it.
    """

    queries: Tensor
    mass: Tensor | None = None


@dataclass
class View:
    """What a rule may look at: one layer, one row. The queries are those of the newest tokens.

    Attributes:
        query: [num_kv_heads, group, q_len, head_dim].
        key: [num_kv_heads, tokens, head_dim].
        logits: [num_kv_heads, group, q_len, tokens]: `scale * q @ k.T`, soft-capped, -inf for later tokens.
        prompt: tokens that were read densely before; later ones are new.
        observed: what that reading left behind.
    """

    layer: int
    query: Tensor
    key: Tensor
    logits: Tensor
    scale: float
    prompt: int
    observed: Observed | None = None

    @property
    def positions(self) -> Tensor:
        """Of the queries, [q_len]."""
        tokens, q_len = self.logits.shape[-1], self.logits.shape[-2]
        return torch.arange(tokens - q_len, tokens)


class Rule(Protocol):
    """Says what is read: bool [num_kv_heads, group or 1, q_len, tokens]; 1 where a group shares one selection."""

    def __call__(self, view: View) -> Tensor: ...


def mass(view: View) -> Tensor:
    """Attention mass of each token summed over the group, [num_kv_heads, 1, q_len, tokens]."""
    return view.logits.softmax(-1).sum(1, keepdim=True)


@dataclass(frozen=True)
class Window:
    """The sinks and the newest tokens, nothing else, as in StreamingLLM (arXiv 2309.17453), positions as they are."""

    budget: int

    def __call__(self, view: View) -> Tensor:
        token, position = torch.arange(view.logits.shape[-1]), view.positions[:, None]
        read = (token <= position) & ((token < SINK) | (token > position - (self.budget - SINK)))
        return read.expand(len(view.key), 1, -1, -1)


@dataclass(frozen=True)
class OraclePages:
    """The pages of largest true attention mass: no page selection that a group shares can keep more of it. With a page
    size of 1, the tokens."""

    budget: int
    page_size: int
    sink_tokens: int = SINK
    recent_tokens: int = RECENT

    def __call__(self, view: View) -> Tensor:
        scores = _by_page(mass(view), self.page_size, 0.0).sum(-1)
        return best_pages(
            scores, view.positions, self.page_size, self.budget, self.sink_tokens, self.recent_tokens, view.logits
        )


@dataclass(frozen=True)
class QuestPages:
    """Quest's rule as a simulation: the upper bound of a page's logits (arXiv 2406.10774, equation 1), each query head
    its own pages."""

    budget: int
    page_size: int = 16
    sink_tokens: int = SINK
    recent_tokens: int = RECENT

    def __call__(self, view: View) -> Tensor:
        scores = page_bounds(view.query, view.key, self.page_size)
        return best_pages(
            scores, view.positions, self.page_size, self.budget, self.sink_tokens, self.recent_tokens, view.logits
        )


@dataclass
class Evict:
    """Tokens chosen once, at the prompt's end, for each KV head; the others are lost. New tokens are all kept.

    With `accumulated`: half the budget for the tokens that the whole prompt attended to most, half for the newest, as
    in H2O (arXiv 2306.14048), but chosen at once. Otherwise as in SnapKV (arXiv 2404.14469): attention of the last 32
    queries, each token's taken as the largest among its 7 neighbours, and those 32 tokens themselves.
    """

    budget: int
    accumulated: bool = False
    kept: dict[int, Tensor] = field(default_factory=dict)  # by layer, bool [num_kv_heads, prompt]

    def __call__(self, view: View) -> Tensor:
        if view.layer not in self.kept:
            self.kept[view.layer] = self.keep(view)
        token = torch.arange(view.logits.shape[-1])
        read = (token <= view.positions[:, None]).expand(view.key.shape[0], 1, -1, -1).clone()
        read[..., : view.prompt] &= self.kept[view.layer][:, None, None]
        return read

    def keep(self, view: View) -> Tensor:
        observed = view.observed
        received = None if observed is None else observed.mass if self.accumulated else self.windowed(view, observed)
        if observed is None or received is None:
            raise ValueError("eviction needs what the prompt's reading leaves behind, got a prompt read without")
        newest = self.budget // 2 if self.accumulated else observed.queries.shape[2]
        newest = min(newest, view.prompt)
        more = min(max(0, self.budget - newest), view.prompt - newest)
        kept = torch.zeros(len(view.key), view.prompt, dtype=torch.bool)
        kept[:, view.prompt - newest :] = True
        kept.scatter_(1, received[:, : view.prompt - newest].topk(more).indices, True)
        return kept

    def windowed(self, view: View, observed: Observed) -> Tensor:
        """[num_kv_heads, prompt]"""
        queries = observed.queries
        logits = (queries.flatten(1, 2) @ view.key[:, : view.prompt].transpose(1, 2) * view.scale).unflatten(
            1, queries.shape[1:3]
        )
        token = torch.arange(view.prompt)
        later = token > token[view.prompt - queries.shape[2] :, None]
        received = logits.masked_fill(later, NEG_INF).softmax(-1).sum((1, 2))
        return torch.nn.functional.max_pool1d(received[:, None], 7, 1, 3)[:, 0]


def page_bounds(query: Tensor, key: Tensor, page_size: int) -> Tensor:
    """`sum_d max(q_d * min_d, q_d * max_d)` of every page: [num_kv_heads, group, q_len, pages].

    Args:
        query: [num_kv_heads, group, q_len, head_dim]; key: [num_kv_heads, tokens, head_dim].
    """
    keys = key.transpose(1, 2)
    low, high = _by_page(keys, page_size, torch.inf).amin(-1), _by_page(keys, page_size, NEG_INF).amax(-1)
    rows = query.flatten(1, 2)
    return (rows.clamp_min(0) @ high + rows.clamp_max(0) @ low).unflatten(1, query.shape[1:3])


def best_pages(
    scores: Tensor, positions: Tensor, page_size: int, budget: int, sink_tokens: int, recent_tokens: int, logits: Tensor
) -> Tensor:
    """Forced pages and the best others under the budget, as tokens: `quest.reference.select` for many queries at once.

    Args:
        scores: [num_kv_heads, group or 1, q_len, pages].
        logits: [..., tokens], for the number of tokens.

    Returns:
        bool [num_kv_heads, group or 1, q_len, tokens]; everything that a query may see if the budget covers it.
    """
    sink, recent = forced_pages(sink_tokens, recent_tokens, page_size)
    page, last = torch.arange(scores.shape[-1]), positions[:, None] // page_size
    forced = (page < sink) | (page > last - recent)
    ranked = scores.masked_fill(forced, torch.inf).masked_fill(page > last, NEG_INF)
    count = min(max(budget // page_size, sink + recent), len(page))
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ranked.topk(count).indices, True)
    chosen |= budget > positions[:, None]
    token = torch.arange(logits.shape[-1])
    return chosen.repeat_interleave(page_size, -1)[..., : len(token)] & (token <= positions[:, None])


def recalls(read: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """How good a selection is, [num_kv_heads, group, q_len] each: attention mass that it keeps, and the share of its
    tokens that are among the as many heaviest of that query head.

    Args:
        read: bool [num_kv_heads, group or 1, q_len, tokens].
        logits: [num_kv_heads, group, q_len, tokens], -inf for later tokens.
    """
    read = read.expand_as(logits)
    weights = logits.softmax(-1)
    rank = weights.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)
    count = read.sum(-1)
    hits = (read & (rank < count[..., None])).sum(-1) / count
    return (weights * read).sum(-1), hits


def _by_page(x: Tensor, page_size: int, fill: float) -> Tensor:
    """[..., tokens] -> [..., pages, page_size], the last page filled up."""
    return torch.nn.functional.pad(x, (0, -x.shape[-1] % page_size), value=fill).unflatten(-1, (-1, page_size))
