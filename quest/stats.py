"""What a run has really read: bytes by kind, pages and the forced share of them per layer, and the attention mass kept.

`PagedKVCache.stats` records every decode call. What it notes is one tuple; sums are made when something is read.
"""

from __future__ import annotations

import copy
import math
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from operator import add
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from quest.bytes import StepBytes, step_bytes, step_pages
from quest.checks import Args
from quest.config import QuestConfig

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["LayerStats", "Mass", "Stats"]

MOST_PENDING = 4096  # calls that are noted before they are summed up


class Call(NamedTuple):
    """What decode calls of a layer have in common."""

    layer: int
    q_len: int
    window: int | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    itemsize: int

    @classmethod
    def of(cls, layer: int, query: Tensor, k_cache: Tensor, v_cache: Tensor, window: int | None) -> Call:
        q_len, num_heads = query.shape[1:3] if query.dim() == 4 else (1, query.shape[1])
        heads = num_heads, k_cache.shape[1], k_cache.shape[3], v_cache.shape[3]
        return cls(layer, q_len, window, *heads, k_cache.element_size())


@dataclass(frozen=True)
class Mass:
    """The share of dense attention's mass that lies in what was read, between 0 and 1, per query head.

    `exp(lse - dense_lse)`, with both log-sum-exps over the same logits, so it is exact; with sinks (logits without a
    value) their weight counts as read on both sides.

    Attributes:
        steps: decode calls that were measured.
        mean, least: per query head, over the tokens of all rows of those calls.
    """

    steps: int
    mean: tuple[float, ...]
    least: tuple[float, ...]


@dataclass(frozen=True)
class LayerStats:
    """What decode calls have read, in one layer or in several.

    Attributes:
        steps: calls.
        tokens: query tokens over all rows, places that pad a row with fewer new ones included: they are read for too.
        bytes: read, by kind, as `quest.bytes.step_bytes` counts them.
        pages: selected, summed over tokens and KV heads (query heads with group rule "per_head"); every visible page
            where nothing is scored.
        forced_pages: those of them that were read whatever they score; none where nothing is scored.
        mass: None if it was not measured; None for several layers.
    """

    steps: int = 0
    tokens: int = 0
    bytes: StepBytes = field(default_factory=StepBytes)
    pages: int = 0
    forced_pages: int = 0
    mass: Mass | None = None

    @property
    def forced_share(self) -> float:
        """Of the pages; 0.0 where there are none."""
        return self.forced_pages / self.pages if self.pages else 0.0

    @property
    def fraction(self) -> float:
        """Of the bytes that dense attention would have read; 1.0 where there are none."""
        return self.bytes.fraction

    def __add__(self, other: LayerStats) -> LayerStats:
        return LayerStats(
            self.steps + other.steps,
            self.tokens + other.tokens,
            self.bytes + other.bytes,
            self.pages + other.pages,
            self.forced_pages + other.forced_pages,
        )


class Stats:
    """What the decode calls of one cache have read since it was made, or since `reset`.

    Prompts, which are stored by `append` and read by others, do not count; nor do the dense steps that `sample_mass`
    adds. `PagedKVCache.stats` and `QuestCache.stats` are made by the cache; a deep copy of a cache has its own. May be
    read from any thread while the cache works.

    >>> cache.stats.sample_mass(every=16)
    >>> ...  # decode
    >>> print(cache.stats)
    >>> cache.stats.total.fraction, cache.stats.layers[3].forced_share
    """

    def __init__(self, config: QuestConfig) -> None:
        self._config = config
        self._every = 0
        self.due_from = MOST_PENDING
        self.reset()

    def reset(self) -> None:
        """Forget everything but the setting of `sample_mass`."""
        self.pending: deque[tuple[Call, Sequence[int]]] = deque()  # see `due`; others may read meanwhile
        self._settling = threading.Lock()
        self._read: dict[int, list[int]] = {}  # steps, and then as in `_rows`
        self._masses: dict[int, _MassSum] = {}
        self._calls: Counter[int] = Counter()

    def sample_mass(self, every: int) -> None:
        """Measure the attention mass kept, from now on, in every `every`-th decode call of a layer; 0 = never.

        Such a call reads every page once more (as dense attention does, up to the window); nothing is written, results
        stay the same, and those bytes are not counted.

        Raises:
            ValueError, TypeError: `every` is negative, or no int.
        """
        Args("sample_mass").at_least("every", every, 0)
        self._every = every
        self.due_from = 0 if every else MOST_PENDING
        self._calls.clear()

    @property
    def layers(self) -> dict[int, LayerStats]:
        """By index, of every layer that has decoded."""
        self._settle()
        found = {}
        for layer, (steps, tokens, pages, forced, *read) in sorted(self._read.copy().items()):
            mass = self._masses[layer].mass() if layer in self._masses else None
            found[layer] = LayerStats(steps, tokens, StepBytes(*read), pages, forced, mass)
        return found

    @property
    def total(self) -> LayerStats:
        """The sum over layers: a step of the model counts once per layer, and so does each token."""
        return sum(self.layers.values(), LayerStats())

    def table(self) -> Table:
        """For people, by rich: a row per layer, and one for all; bytes are means per query token."""
        from rich.table import Table

        layers = self.layers
        rows = [(str(layer), read) for layer, read in layers.items()] + [("all", self.total)]
        table = Table(title="Read by decode steps")
        for name in ("layer", "steps", "tokens", "KB per token", "summaries", "K and V", "of dense", "pages", "forced"):
            table.add_column(name, justify="right")
        with_mass = any(read.mass for read in layers.values())
        for name in ("mass kept", "least") if with_mass else ():
            table.add_column(name, justify="right")
        for name, read in rows:
            tokens = max(1, read.tokens)
            mass = ("", "")
            if read.mass is not None:
                mass = f"{sum(read.mass.mean) / len(read.mass.mean):.1%}", f"{min(read.mass.least):.1%}"
            table.add_row(
                name,
                f"{read.steps:,}",
                f"{read.tokens:,}",
                *(f"{n / tokens / 1e3:,.1f}" for n in (read.bytes.total, read.bytes.summaries, read.bytes.kv)),
                f"{read.fraction:.1%}",
                f"{read.pages / tokens:,.1f}",
                f"{read.forced_share:.1%}",
                *(mass if with_mass else ()),
            )
        return table

    def __str__(self) -> str:
        """`table`, as text."""
        from rich.console import Console

        console = Console(width=120, no_color=True)
        with console.capture() as text:
            console.print(self.table())
        return text.get().rstrip()

    # --- for caches --------------------------------------------------------------------------------------------------

    def due(self, call: Call) -> bool:
        """What a cache asks after a decode call, if `pending` holds `due_from` calls or more.

        A cache notes each call in `pending`, with its rows' lengths after the append, which must not change any more.
        It adds by itself, and asks only then: that is done in every layer of every step.

        Returns:
            Whether the call's attention mass should be measured: see `record_mass`.
        """
        if len(self.pending) >= MOST_PENDING:
            self._settle()
        if not self._every:
            return False
        self._calls[call.layer] += 1
        return self._calls[call.layer] % self._every == 0

    def record_mass(self, layer: int, lse: Tensor, dense_lse: Tensor) -> None:
        """Note what a decode call gave, and dense attention for the same queries: float32 [..., num_heads] both.

        Tokens that see nothing take no part.
        """
        share = (lse - dense_lse).double().exp().clamp_max(1.0).flatten(0, -2)
        known = dense_lse.flatten(0, -2) > -math.inf
        if not known.any():
            return
        new = _MassSum(
            1,
            known.sum(0).tolist(),
            torch.where(known, share, 0.0).sum(0).tolist(),
            torch.where(known, share, math.inf).amin(0).tolist(),
        )
        old = self._masses.get(layer)
        self._masses[layer] = new if old is None else old + new

    def _settle(self) -> None:
        with self._settling:
            self._sum_up([self.pending.popleft() for _ in range(len(self.pending))])

    def _sum_up(self, pending: list[tuple[Call, Sequence[int]]]) -> None:
        steps: defaultdict[Call, list[Sequence[int]]] = defaultdict(list)
        for call, lengths in pending:
            steps[call].append(lengths)
        # Layers share a model step's list of lengths, and most of them all else too.
        counted: dict[tuple[Any, ...], list[int]] = {}
        for call, rows in steps.items():
            key = call[1:], id(self._config.layer(call.layer)), *map(id, rows)
            if key not in counted:
                counted[key] = [len(rows), *self._rows(call, Counter(chain.from_iterable(rows)))]
            read = self._read.setdefault(call.layer, [0] * len(counted[key]))
            self._read[call.layer] = list(map(add, read, counted[key]))

    def _rows(self, call: Call, lengths: Counter[int]) -> list[int]:
        """Tokens, pages, forced pages and the fields of `StepBytes` of rows of these lengths."""
        rows = [(n * x for x in self._row(call, length)) for length, n in lengths.items()]
        return list(map(sum, zip(*rows)))

    def _row(self, call: Call, length: int) -> list[int]:
        layer, q_len, window, num_heads, num_kv_heads, head_dim, v_head_dim, itemsize = call
        heads: dict[str, Any] = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, q_len=q_len, window=window)
        sizes = dict(head_dim=head_dim, v_head_dim=v_head_dim, itemsize=itemsize)
        read = step_bytes(length, self._config, layer, **heads, **sizes)
        pages = step_pages(length, self._config, layer, **heads)
        return [min(q_len, length), *pages, *vars(read).values()]

    def __deepcopy__(self, memo: dict[int, Any]) -> Stats:
        self._settle()
        clone = copy.copy(self)
        memo[id(self)] = clone
        clone.pending, clone._settling, clone._read = deque(), threading.Lock(), dict(self._read)
        clone._masses, clone._calls = dict(self._masses), self._calls.copy()
        return clone


@dataclass(frozen=True)
class _MassSum:
    """Per query head."""

    steps: int
    tokens: list[int]
    kept: list[float]
    least: list[float]

    def __add__(self, other: _MassSum) -> _MassSum:
        return _MassSum(
            self.steps + other.steps,
            [a + b for a, b in zip_longest(self.tokens, other.tokens, fillvalue=0)],
            [a + b for a, b in zip_longest(self.kept, other.kept, fillvalue=0.0)],
            [min(pair) for pair in zip_longest(self.least, other.least, fillvalue=math.inf)],
        )

    def mass(self) -> Mass:
        mean = (kept / tokens if tokens else math.nan for kept, tokens in zip(self.kept, self.tokens, strict=True))
        return Mass(self.steps, tuple(mean), tuple(self.least))
